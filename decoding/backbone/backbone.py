"""A causal LM as the decoder calls it: tokens of a tree in, logits of every node out.

Any causal LM of `transformers` with full attention, with a sliding window or in chunks, and with recurrent layers
that `recurrence/scan.py` knows; others are refused by name. Read next: `windows.py`; `loading.py`, which loads one;
`engine.py`.

Shapes: B rows, N nodes, F numbers of the features, V rows of the output projection, S prompt
tokens, T slots in view.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import RequestError
from .. import kernels
from ..tree.tree import AnyTree, Nodes, tree_mask
from .attention import TREE_MASKED
from .cut import check_alike, gathers_layers, team_of
from .foreign import end_ids
from .hidden_states import HiddenStates, decoder_of, layer_count
from .hub import load_tokenizer
from .kv_cache import KVCache
from .lean.families import misfit
from .lean.forward import LayerRunner, lean_forward
from .lean.joined import JoinedDecoder, can_join
from .lean.on_cpu import OnCpu
from .lean.on_cuda import OnCuda
from .recurrence.scan import STATELESS, check_recurrent, recurrence
from .stacked import Stack, can_stack
from .temperature import use_positions
from .windows import Masks, Windows, unknown_kinds, unsized_kind

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Seen(NamedTuple):
    """The results of a forward pass; `features_BNF` are the hidden states asked for, side by side."""

    logits_BNV: Tensor
    features_BNF: Tensor | None


class Backbone:
    """A frozen or trained model, ready to fill a KV cache."""

    def __init__(self, model: PreTrainedModel, *, name: str, revision: str | None = None) -> None:
        check_rollback(model)
        use_positions(model)
        self.model, self.name, self.revision = model, name, revision
        self.lean = True
        """Whether the lean forward runs where it computes what the model's own does."""
        self._stacked: Stack | None = None
        self._side_by_side: JoinedDecoder | None = None
        self._recurrence = recurrence(model)

    @property
    def is_recurrent(self) -> bool:
        """Whether layers keep a state of the whole text, which must hold no other text and no padding."""
        return self._recurrence is not None

    @property
    def vocabulary(self) -> int:
        """Rows of the output projection, padding included."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @cached_property
    def _is_lean(self) -> bool:
        # the lean forward runs some calls without a mask, which a layer with a window needs
        reason = misfit(self.model)
        if reason is not None:
            if self.device.type == "cuda":
                _log.warning("%s takes its own forward, of several times as many launches: %s", self.name, reason)
            return False
        return self._windows is None or self.device.type != "cpu"

    def _layer_runner(self, mask: Masks | None) -> LayerRunner | None:
        """The runner of layers with fewer operations; None where the model's own forward runs."""
        if not (self.lean and self._is_lean):
            return None
        if self.device.type == "cpu":
            return None if isinstance(mask, dict) else OnCpu(self.model, self._stack)
        # without a mask a prompt is read, whose many products take all the time
        return (
            None if mask is None else OnCuda(decoder_of(self.model), self._joined, self.model.get_output_embeddings())
        )

    @property
    def _joined(self) -> JoinedDecoder | None:
        """The model's joined projections, joined again if one was moved; None if it has none."""
        if not self._can_join:
            return None
        if self._side_by_side is None or not self._side_by_side.is_current:
            self._side_by_side = JoinedDecoder(decoder_of(self.model))
        return self._side_by_side

    @cached_property
    def _can_join(self) -> bool:
        return can_join(decoder_of(self.model))

    @cached_property
    def _windows(self) -> Windows | None:
        return Windows.of(self.model.config.get_text_config(decoder=True))

    @property
    def _stack(self) -> Stack | None:
        """The model's stacked projections, made again if a weight has changed; None if it has none."""
        if not self._can_stack:
            return None
        if self._stacked is None or not self._stacked.is_current:
            self._stacked = Stack(self.model)
        return self._stacked

    def project(self, hidden: Tensor) -> Tensor:
        """The product [..., V] of last hidden states and the output projection, bias included; no factor, no cap.

        It uses the weight that the last forward read: laid out for few tokens, if stacked.
        """
        head = self.model.get_output_embeddings()
        hidden = hidden.to(head.weight.dtype)  # a drafter in training may be in fp32 where its target is not
        if self._stacked is not None and self._stacked.head_is_current:
            return self._stacked.head(hidden)
        return kernels.linear(hidden, head.weight, getattr(head, "bias", None))

    @cached_property
    def _can_stack(self) -> bool:
        return can_stack(self.model)

    @cached_property
    def _team(self) -> torch.distributed.ProcessGroup | None:
        return team_of(self.model)

    def check_alike(self, written: Sequence[Sequence[int]]) -> None:
        """Compare the tokens of this process with those of its team; errors as for `cut.check_alike`."""
        if self._team is not None:
            check_alike(written, self._team)

    @cached_property
    def _layer_count(self) -> int:
        return layer_count(self.model)

    @property
    def context(self) -> int:
        """Longest sequence in tokens that the decoder computes as the model would."""
        return min(self._limits)[0]

    @property
    def context_reason(self) -> str:
        """The reason for `context`, as the end of a sentence; empty if it is the model's length."""
        return min(self._limits)[1]

    @cached_property
    def _limits(self) -> list[tuple[int, str]]:
        return context_limits(self.model.config.get_text_config(decoder=True))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.name, revision=self.revision)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text, by the model's generation settings.

        Raises:
            RequestError: these name something else than ids.
        """
        eos = self.model.generation_config.eos_token_id
        if eos is None:
            eos = getattr(self.model.config.get_text_config(decoder=True), "eos_token_id", None)
        return end_ids(self.name, eos)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        kv_cache: KVCache,
        *,
        layers: Sequence[int] = (),
        features: list[Tensor] | None = None,
    ) -> Tensor:
        """Write every prompt into its row of the KV cache; logits after the last token, [B, V].

        Rows go one by one, so what a row computes cannot depend on the lengths of the others. With
        `layers`, each row's hidden states [S, F] are appended to `features`.

        Raises:
            RequestError: a prompt has an id that the embedding has no row for, or the layers are cut over processes.
        """
        if gathers_layers(self.model):
            raise RequestError(
                f"{self.name} is cut over processes, each of which would have to make every call of the others: "
                "nothing decodes with it. Decode where it is whole, or with target.tensor_parallel in place of "
                "target.sharding"
            )
        check_token_ids(self, max(map(max, prompts)), "a prompt")
        last = []
        for row, prompt in enumerate(prompts):
            seen = self.prefill_row(row, prompt, kv_cache, layers=layers)
            last.append(seen.logits_BNV[:, -1])
            if features is not None and seen.features_BNF is not None:
                features.append(seen.features_BNF[0])
        return torch.cat(last)

    def prefill_row(self, row: int, prompt: Sequence[int], kv_cache: KVCache, *, layers: Sequence[int] = ()) -> Seen:
        """`prefill` of a single row: the last logits [1, 1, V], and the hidden states of all its tokens."""
        tokens_1S = torch.tensor([list(prompt)], device=self.device)
        slots = kv_cache.aim_at_row(row, len(prompt))
        positions = torch.arange(slots, device=self.device)[None]
        # without a mask and from an empty row, `transformers` attends causally, and through each layer's window
        return self._run(tokens_1S, None, positions, kv_cache, keep=1, layers=layers)

    def forward(
        self, tokens_BN: Tensor, lengths_B: Tensor, tree: AnyTree, kv_cache: KVCache, *, keep: int = 0
    ) -> Tensor:
        """Logits [B, N, V] of the nodes of a tree after `lengths_B`; `keep` > 0: of the last."""
        return self.see(tokens_BN, lengths_B, tree, kv_cache, keep=keep).logits_BNV

    def see(
        self,
        tokens_BN: Tensor,
        lengths_B: Tensor,
        tree: AnyTree,
        kv_cache: KVCache,
        *,
        keep: int = 0,
        layers: Sequence[int] = (),
    ) -> Seen:
        """`forward`, and the hidden states of `layers` (`decoding/backbone/hidden_states.py`) at every node."""
        slots = kv_cache.aim(lengths_B, len(tree))
        nodes = tree.on(lengths_B.device)
        mask = tree_mask(nodes, lengths_B, slots, ragged=kv_cache.ragged)
        positions_BN = lengths_B[:, None] + nodes.depths_BN
        masks: Masks | None = mask
        if self._windows is not None and slots > self._windows.shortest:
            masks = _windowed(self._windows, mask, nodes, lengths_B, slots)
        if self._recurrence is None:
            return self._run(tokens_BN, masks, positions_BN, kv_cache, keep=keep, layers=layers)
        with self._recurrence.by_node(kv_cache, tree, nodes):
            return self._run(tokens_BN, masks, positions_BN, kv_cache, keep=keep, layers=layers)

    def _run(
        self,
        tokens: Tensor,
        mask: Masks | None,
        positions: Tensor,
        kv_cache: KVCache,
        *,
        keep: int,
        layers: Sequence[int] = (),
    ) -> Seen:
        states = HiddenStates(layers, self._layer_count)
        runner = self._layer_runner(mask)
        if runner is not None:
            logits_BNV = lean_forward(self.model, runner, tokens, mask, positions, kv_cache, keep=keep, states=states)
            return Seen(logits_BNV, states.side_by_side)
        with states.taken_from(decoder_of(self.model)):
            out = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=kv_cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        return Seen(out.logits, states.side_by_side)


def _windowed(windows: Windows, mask: Tensor | None, nodes: Nodes, lengths_B: Tensor, slots: int) -> Masks:
    """A tree's mask for layers with windows: a node's position is its depth after the text, not its slot."""
    N = nodes.depths_BN.shape[1]
    if mask is None:
        mask = torch.ones(1, 1, N, slots, dtype=torch.bool, device=lengths_B.device)
    slot_T = torch.arange(slots, device=lengths_B.device)
    offset_BT = slot_T - lengths_B[:, None]
    depths_BN = nodes.depths_BN.expand(len(lengths_B), -1)
    inside_BT = lengths_B[:, None] + depths_BN.gather(1, offset_BT.clamp(0, N - 1))
    key_BT = torch.where(offset_BT < 0, slot_T, inside_BT)
    return windows.masks(mask, lengths_B[:, None] + depths_BN, key_BT)


def context_limits(config: Any) -> list[tuple[int, str]]:
    """Limits on a sequence's length, each with its reason if it is not the model's own length."""
    limits = [(int(getattr(config, "max_position_embeddings", 2**31)), "")]
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(one for one in rope.values() if isinstance(one, dict))):
        if each.get("rope_type") == "longrope":
            # beyond it `transformers` uses other frequencies for all rows of a call
            length = int(each["original_max_position_embeddings"])
            limits.append((length, ", after which its rotary frequencies change"))
    return limits


def check_token_ids(target: Backbone, highest: int, where: str) -> None:
    """Raise RequestError where `where` has an id that the target's embedding has no row for."""
    embedding: Any = target.model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])
    if highest >= rows:
        raise RequestError(
            f"{where} has the token id {highest}, and the embedding of {target.name} has {rows} "
            "rows: its tokenizer was given tokens that the model was not. Resize the model's "
            "embedding, or take the tokenizer that it was trained with"
        )


def check_rollback(model: nn.Module) -> None:
    """Raise RequestError naming the part of a model whose state cannot be rolled back to a smaller length."""
    config: Any = model.config
    name = f"{type(model).__name__} ({config.model_type})"
    encodes = getattr(config, "is_encoder_decoder", False)
    config = config.get_text_config(decoder=True)
    odd = set(unknown_kinds(config)) - STATELESS
    if odd:
        check_recurrent(model, name, odd)
    if encodes or (getattr(model, "_is_stateful", False) and not odd):
        raise RequestError(f"{name} keeps a recurrent or encoder state; expected a causal LM")
    unsized = unsized_kind(config)
    if unsized is not None:
        raise RequestError(f"{name} has {unsized}")
    if any(_sees_ahead(module) for module in model.modules()):
        raise RequestError(f"{name} attends to what comes later; expected a causal LM")
    if config._attn_implementation not in TREE_MASKED:
        raise RequestError(
            f"{name} attends by {config._attn_implementation!r}, which does not read the mask of a "
            f"tree; expected one of {', '.join(TREE_MASKED)}, which `load_target` sets where it can"
        )


def _sees_ahead(module: nn.Module) -> bool:
    """Whether a module is an attention layer of an encoder, such as BERT's without `is_decoder`."""
    # vision towers see ahead as well, but have no place in the cache
    return not getattr(module, "is_causal", True) and hasattr(module, "layer_idx")
