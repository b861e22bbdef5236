"""An independent draft model: a small causal LM with a KV cache of its own, drafting a chain.

Leviathan et al. 2023, Chen et al. 2023. The module that `trainers/distill.py` trains is the very
module that drafts here.

Behind a draft's own context nothing is drafted, while the target goes on. A draft that was made for shorter texts than
its target has no positions behind them (learnt ones), or positions that it never saw (rotary ones). So a row drafts up
to its draft's context and not behind it, whatever runs in its batch. Rows that are there are computed at the last
positions that the draft has, and what comes of it is absent from the proposal.

Read next: `history.py`, the text so far; `ensemble.py` and `adapters.py`,
several drafts at once.

Shapes: B rows, K drafted tokens, V target vocabulary, U tokens of it that can be drafted, W tokens fed at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.proposal import Committed, Proposal
from ...decoding.random import Uniforms
from ...decoding.rows import cached_range
from ...decoding.rules.acceptance import row_of
from ...decoding.sampling import Warper, draw
from ...decoding.tree.tree import chain
from ...errors import RequestError
from ..history import History
from ..layers.draft_vocabulary import among_all, ids_of
from ..temperatures import Policy, at_depth, samples
from .adapters import RowBackbone, active_adapter, adapter_names, use
from .chains import chain_of


class DraftModel:
    """Drafts `draft_length` tokens one after another.

    `policy` matters at temperature > 0: `sample` draws from the draft's warped distribution (`IID`),
    `argmax` takes the likeliest token (`POINT_MASS`).
    """

    family = "draft_model"
    keeps_length = True
    """Whether it drafts as many tokens as it is told."""
    skips = False
    """Whether steps may be left to another drafter, by `skip`."""
    steps_of_one = True
    """Whether a draft step is a call of one token, whose cost a forward pass on its own tells."""

    def __init__(
        self,
        backbone: Backbone,
        vocabulary: int,
        *,
        draft_length: int = 4,
        policy: Policy = "sample",
        factors: Sequence[float] = (),
    ) -> None:
        """`vocabulary`: rows of the target's output projection, the width of q; `factors` as of `at_depth`."""
        self.backbone, self.vocabulary = backbone, vocabulary
        self.draft_length, self.policy, self.factors = draft_length, policy, tuple(factors)
        table: Any = backbone.model.get_input_embeddings()
        self._rows = len(table.weight)

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.backbone.model

    @property
    def replayable(self) -> bool:
        """Whether `propose` can be recorded: not where peft picks the rows of an adapter."""
        return not isinstance(self.backbone, RowBackbone)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters on its base, sorted."""
        return adapter_names(self.module)

    @property
    def adapter(self) -> str | None:
        """The adapter that it drafts with; None for the base alone."""
        return active_adapter(self.module)

    def use(self, name: str | None) -> None:
        """Draft with that adapter from the next rows on, or with the base alone.

        Whoever shares the backbone drafts with it too. An unknown name is a RequestError.
        """
        use(self.module, name)

    @property
    def nodes(self) -> int:
        """Most nodes of a proposal, the root included."""
        return self.draft_length + 1

    @property
    def draft_steps(self) -> int:
        """Forward passes per target call."""
        return self.draft_length

    @property
    def _longest_gap(self) -> int:
        """Most tokens that the KV cache lacks: a full acceptance's last one and the extra one, or a step's."""
        return max(2, self.draft_length + 1) if self.skips else 2

    @property
    def _behind_room(self) -> int:
        """Of the room in the KV cache, what no text takes."""
        return 0

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        least = self._longest_gap + self.draft_length
        self.limit = Limit(self.backbone, prompts, room - self._behind_room, least=least)
        room += self.draft_length + 2
        capacity = max(map(len, prompts)) + room
        # from the end of a draft back to the first token that is fed again
        rollback = self.draft_length + self._longest_gap
        self._kv_cache = KVCache(len(prompts), capacity, static=static, rollback=rollback)
        self.backbone.prefill(self.limit.read(prompts), self._kv_cache)
        self._history = History(prompts, room, self.backbone.device)
        self._known_B = self._history.lengths_B.clone()
        self._shortest = min(map(len, prompts))

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """A chain after `last_B`: argmax at temperature 0, else by `policy`."""
        return self.draft(last_B, warper, uniforms, length=self.draft_length)

    def draft(
        self, last_B: Tensor, warper: Warper, uniforms: Uniforms, *, length: int, wanted_B: Tensor | None = None
    ) -> Proposal:
        """A chain of `length` tokens, of which row b has only the first `wanted_B[b]`."""
        self._history.write_last(last_B)
        # always as many numbers: a row's stream must not depend on how far the others draft
        random = uniforms.take(self.draft_length).unbind(1) if samples(warper, self.policy) else None
        tokens, q = [last_B], []
        logits_BV = self._catch_up()
        for k in range(length):
            if k:
                logits_BV = self._logits(tokens[-1][:, None], self._history.lengths_B + k)
            if random is None:
                tokens.append(logits_BV.argmax(-1))
                continue
            probs_BV = at_depth(warper, self.factors, k)(logits_BV)
            q.append(self.declare(logits_BV, probs_BV))
            tokens.append(self.choose(probs_BV, random[k]))
        self._drafted = length
        wanted_B = self.limit.fewer(wanted_B, self._history.lengths_B)
        present_BN = None
        if wanted_B is not None:
            present_BN = cached_range(length + 1, last_B.device) <= wanted_B[:, None]
        return chain_of(tokens, q, present_BN=present_BN, coins=self.nodes)

    def room(self) -> Tensor | None:
        """Tokens [B] that every row may draft behind its last; None where no text comes near the draft's context."""
        return self.limit.fewer(None, self._history.lengths_B)

    def skip(self, last_B: Tensor) -> None:
        """In place of `propose`: read what is new up to `last_B`, and draft nothing."""
        self._history.write_last(last_B)
        self._catch_up()
        self._drafted = 1  # the KV cache ends with the root, as behind a draft of one token

    def choose(self, probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """One token per row from its distribution."""
        return draw(probs_BV, uniform_B)

    def declare(self, _logits_BV: Tensor, probs_BV: Tensor) -> Tensor:
        """q of the proposal: the distribution that the token is drawn from."""
        return probs_BV

    def observe(self, committed: Committed) -> None:
        """Continue after what was committed, keeping its part of the KV cache.

        Before the step the KV cache held everything up to the root, and the root; drafting added all
        drafted tokens but the last. So after a full acceptance one token is missing.
        """
        written_B = self._history.lengths_B + self._drafted
        self._history.append(committed)
        self._known_B.copy_(torch.minimum(written_B, self._history.lengths_B))

    def _catch_up(self) -> Tensor:
        """Feed what the KV cache lacks, the last emitted token included; logits after it."""
        lengths_B = self._history.lengths_B
        static = self._kv_cache.static
        width = self._longest_gap if static else 1 + max((lengths_B - self._known_B).tolist())
        # rows that lack fewer tokens feed some again, which writes the same values; a row too short for
        # that begins at its start, and what it computes after its last token is not used
        start_B = (lengths_B - (width - 1)).clamp_min(0)
        slots_BW = start_B[:, None] + cached_range(width, start_B.device)
        tokens_BW = self._known(self._history.tokens_BL.gather(1, slots_BW))
        at_B = lengths_B - start_B if width > self._shortest + 1 else None
        return self._logits(tokens_BW, start_B, at_B)

    def _known(self, tokens_BW: Tensor) -> Tensor:
        """Emitted tokens as the draft may read them: one that it has no row for, a wider target's padding, as id 0."""
        return tokens_BW if self._rows >= self.vocabulary else torch.where(tokens_BW < self._rows, tokens_BW, 0)

    def _logits(self, tokens_BW: Tensor, start_B: Tensor, at_B: Tensor | None = None) -> Tensor:
        """Logits [B, V] after token `at_B` of W, the last by default, as wide as the target's."""
        tree, keep = chain(tokens_BW.shape[1] - 1), 1 if at_B is None else 0
        start_B = self.limit.inside(start_B, tokens_BW.shape[1])
        logits_BWV = self.backbone.forward(tokens_BW, start_B, tree, self._kv_cache, keep=keep)
        logits_BV = logits_BWV[:, -1] if at_B is None else row_of(logits_BWV, at_B)
        return self._over_all(logits_BV)

    def _over_all(self, logits_BV: Tensor) -> Tensor:
        """Logits as wide as the target's, of whatever rows the model has."""
        if self._ids_U is None:
            return fit_vocabulary(logits_BV, self.vocabulary)
        return among_all(logits_BV, self._ids_U, self.vocabulary)

    @cached_property
    def _ids_U(self) -> Tensor | None:
        """The tokens that can be drafted; None: all that the model has a row for."""
        return ids_of(self.module)


def fit_vocabulary(logits_BV: Tensor, vocabulary: int) -> Tensor:
    """Cut or pad the padding rows of a head: a token that one side lacks is never drafted."""
    own = logits_BV.shape[-1]
    if own > vocabulary:
        return logits_BV[:, :vocabulary]
    if own < vocabulary:
        return nn.functional.pad(logits_BV, (0, vocabulary - own), value=-torch.inf)
    return logits_BV


_log = logging.getLogger(__name__)
_SAID: set[tuple[str, int]] = set()


class Limit:
    """How far a draft may read texts that begin with `prompts` and have room for `room` tokens more."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], room: int, *, least: int) -> None:
        """`room`: as of `Proposer.reset`; `least`: positions that a single draft takes.

        Raises:
            RequestError: the draft has not even those.
        """
        self.context, most = backbone.context, max(map(len, prompts)) + room - 1
        self.reached = most > self.context
        """Whether a text may come near enough that a draft of it would end behind the context."""
        # recurrent layers know no positions, and their states follow the text alone
        self._positions = self.reached and not backbone.is_recurrent
        if self.reached and self.context < least:
            raise RequestError(
                f"the draft {backbone.name} reads texts of {self.context} tokens{backbone.context_reason}, and a "
                f"single draft takes {least} positions; take a draft with a longer context, or draft fewer tokens"
            )
        if self.reached:
            say_limit(backbone.name, self.context, f"a prompt with its answer and drafts may take {most}")

    def read(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The prompts as far as the draft reads them."""
        return [prompt[: self.context] for prompt in prompts] if self._positions else prompts

    def inside(self, start_B: Tensor, count: int) -> Tensor:
        """Where `count` tokens of every row begin; of rows behind the context, so that they end with it."""
        return start_B.clamp(max=self.context - count).clamp_min(0) if self._positions else start_B

    def fewer(self, wanted_B: Tensor | None, lengths_B: Tensor) -> Tensor | None:
        """How many tokens every row may draft behind its last one, of those wanted; None: all.

        Args:
            lengths_B: tokens in front of the last one.
        """
        if not self.reached:
            return wanted_B
        room_B = (self.context - lengths_B).clamp_min(0)
        return room_B if wanted_B is None else wanted_B.minimum(room_B)


def say_limit(name: str, context: int, longer: str) -> None:
    """Say that texts are longer than the draft reads, once for a draft."""
    if (name, context) in _SAID:
        return
    _SAID.add((name, context))
    _log.warning(
        "the draft %s reads texts of up to %d tokens, and %s: behind its %d nothing is drafted, and such steps count "
        "as steps without drafts",
        name,
        context,
        longer,
        context,
    )
