"""A causal LM as the decoder sees it: tokens of a tree in, logits of every node out.

Any causal LM of `transformers` with full attention; others are refused by name, because their
state cannot be rolled back. Read next: `loading.py`, `engine.py`.

Shapes: B rows, N nodes, V rows of the output projection, S prompt tokens, T slots in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import RequestError
from .arena import KVArena
from .tree import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Backbone:
    """A frozen or trained model, ready to fill an arena."""

    def __init__(self, model: PreTrainedModel, *, name: str, revision: str | None = None) -> None:
        refuse_state_without_rollback(model)
        self.model, self.name, self.revision = model, name, revision

    @property
    def vocabulary(self) -> int:
        """Rows of the output projection, padding included."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def context(self) -> int:
        """Longest sequence in tokens."""
        return int(getattr(self.model.config, "max_position_embeddings", 2**31))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        from .loading import load_tokenizer

        return load_tokenizer(self.name, revision=self.revision)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text, by the model's generation settings."""
        found = self.model.generation_config.eos_token_id
        if found is None:
            found = self.model.config.eos_token_id
        if found is None:
            return ()
        return (found,) if isinstance(found, int) else tuple(found)

    def prefill(self, prompts: Sequence[Sequence[int]], arena: KVArena) -> Tensor:
        """Write every prompt into its row of the arena; logits behind the last token, [B, V].

        Rows go one by one: what a row computes cannot depend on the lengths of the others.
        """
        last = []
        for row, prompt in enumerate(prompts):
            tokens_1S = torch.tensor([list(prompt)], device=self.device)
            slots = arena.aim(torch.zeros(1, dtype=torch.long), len(prompt), row=row)
            positions = torch.arange(slots, device=self.device)[None]
            # without a mask and from an empty row, `transformers` attends causally
            last.append(self._run(tokens_1S, None, positions, arena, keep=1)[:, -1])
        return torch.cat(last)

    def forward(
        self, tokens_BN: Tensor, lengths_B: Tensor, tree: Tree, arena: KVArena, *, keep: int = 0
    ) -> Tensor:
        """Logits [B, N, V] of the nodes of a tree behind `lengths_B`; `keep` > 0: of the last."""
        slots = arena.aim(lengths_B, len(tree))
        mask = tree_mask(tree, lengths_B, slots, ragged=arena.ragged)
        positions_BN = lengths_B[:, None] + tree.depths_on(lengths_B.device)
        return self._run(tokens_BN, mask, positions_BN, arena, keep=keep)

    def _run(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor, arena: KVArena, *, keep: int
    ) -> Tensor:
        return self.model(
            input_ids=tokens, attention_mask=mask, position_ids=positions,
            past_key_values=arena, use_cache=True, logits_to_keep=keep,
        ).logits  # fmt: skip


def tree_mask(tree: Tree, lengths_B: Tensor, slots: int, *, ragged: bool) -> Tensor | None:
    """bool [B, 1, N, T] (or [1, 1, N, T] where rows are equally long): what a node may look at.

    That is its row's past, its ancestors and itself. None for one node of one row, which sees
    every slot: without a mask `transformers` need not copy the key-value heads that are shared.
    """
    N = len(tree)
    if len(lengths_B) == 1 and N == 1:
        return None
    ancestors_NN = tree.ancestors_on(lengths_B.device)
    if not ragged:
        return nn.functional.pad(ancestors_NN, (slots - N, 0), value=True)[None, None]
    behind_BT = torch.arange(slots, device=lengths_B.device) - lengths_B[:, None]
    inside_BT = (behind_BT >= 0) & (behind_BT < N)
    seen_NBT = ancestors_NN[:, behind_BT.clamp(0, N - 1)]
    seen_BNT = seen_NBT.transpose(0, 1) & inside_BT[:, None]
    return (seen_BNT | (behind_BT < 0)[:, None])[:, None]


def refuse_state_without_rollback(model: nn.Module) -> None:
    """Raise RequestError naming the layers whose state cannot go back to a smaller length."""
    config: Any = model.config
    name = f"{type(model).__name__} ({config.model_type})"
    odd = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"})
    if odd:
        raise RequestError(
            f"{name} has layers of type {', '.join(odd)}, whose state cannot be rolled back after "
            "a rejection; expected full attention in every layer"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise RequestError(
            f"{name} attends through a sliding window of {window} tokens, which the decoder does "
            "not support; expected full attention in every layer"
        )
    if getattr(model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
        raise RequestError(f"{name} keeps a recurrent or encoder state; expected a causal LM")
