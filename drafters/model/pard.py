"""PARD: a small causal LM that drafts a chain in one pass, by mask tokens behind the text.

An et al. 2025 (arXiv 2504.18583). The model reads the new true tokens and K - 1 times a mask token; the
last K outputs are the drafts. Masks stand for tokens that nobody has chosen yet, so a draft does not see
the others: the k-th token comes from a distribution that is fixed before any is drawn, a chain with `IID`.
The KV cache keeps true tokens alone. It reads no states of the target: one draft serves every target of its
tokenizer. Read next: `draft_model.py`, which drafts token by token; `trainers/block/masked_chains.py`, the
same passes over a known text.

Shapes: B rows, K drafted tokens, V target vocabulary, W tokens fed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...decoding.backbone.backbone import Backbone, check_token_ids
from ...decoding.proposal import Proposal
from ...decoding.random import Uniforms
from ...decoding.rows import cached_range
from ...decoding.sampling import Warper
from ...decoding.tree.tree import chain
from ...errors import RequestError
from ..folder import REMEDY
from ..temperatures import Policy, samples
from .chains import off_slots
from .draft_model import DraftModel

SERVED_AS = "pard"


class Pard(DraftModel):
    """Drafts `draft_length` tokens in one pass."""

    family = "pard"
    steps_of_one = False  # its one pass is over new tokens and masks

    def __init__(
        self,
        backbone: Backbone,
        vocabulary: int,
        *,
        mask: int,
        draft_length: int = 4,
        policy: Policy = "sample",
        factors: Sequence[float] = (),
    ) -> None:
        """`mask`: the id that stands for tokens not chosen yet; the others as of `DraftModel`.

        Raises:
            RequestError: the model has no embedding for `mask`, or layers that fold the text into a state.
        """
        super().__init__(backbone, vocabulary, draft_length=draft_length, policy=policy, factors=factors)
        check_token_ids(backbone, mask, "the mask of a PARD draft")
        if backbone.is_recurrent:
            raise RequestError(
                f"{backbone.name} has recurrent layers, whose state would keep the masks of a PARD draft; "
                "take a draft model whose layers all attend"
            )
        self.mask = mask

    @property
    def draft_steps(self) -> int:
        """Forward passes per target call."""
        return 1

    @property
    def _longest_gap(self) -> int:
        """Most tokens that the KV cache lacks: all that a step emits, as masks stood in their places."""
        return self.draft_length + 1

    @property
    def _behind_room(self) -> int:
        return self.draft_length

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        # in a row shorter than a gap, masks run on to the width of the pass
        super().reset(prompts, room + self._behind_room, static=static)

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """A chain after `last_B`: argmax at temperature 0, else by `policy`."""
        self._history.write_last(last_B)
        logits_BKV = self._slots(self.draft_length)
        self._drafted = 1  # of what the pass has written, the tokens up to the root are true
        source = uniforms if samples(warper, self.policy) else None
        proposal = off_slots(logits_BKV, last_B, warper, self.factors, source, coins=self.nodes)
        room_B = self.room()
        if room_B is None:
            return proposal
        # all or none: its slots are those of one pass, which ends behind the last
        there_B1 = room_B[:, None] >= self.draft_length
        root_N = cached_range(len(proposal.tree), last_B.device) == 0
        return replace(proposal, present_BN=there_B1 | root_N)

    def _slots(self, length: int) -> Tensor:
        """Logits [B, K, V] of the drafts: one pass over what the KV cache lacks, then masks."""
        lengths_B = self._history.lengths_B
        gap = self._longest_gap if self._kv_cache.static else 1 + int((lengths_B - self._known_B).max())
        # rows that lack fewer tokens feed some again, which writes the same values; a row too short for
        # that begins at its start, with more masks behind its drafts, which these do not see
        start_B = self.limit.inside((lengths_B + 1 - gap).clamp_min(0), gap + length - 1)
        slots_BW = start_B[:, None] + torch.arange(gap + length - 1, device=start_B.device)
        last_slot = self._history.tokens_BL.shape[1] - 1
        tokens_BW = self._history.tokens_BL.gather(1, slots_BW.clamp_max(last_slot))
        tokens_BW = torch.where(slots_BW <= lengths_B[:, None], self._known(tokens_BW), self.mask)
        # by a clamped start drafts stand earlier than in the last places
        keep = length if gap <= self._shortest + 1 else 0
        logits_BXV = self.backbone.forward(tokens_BW, start_B, chain(gap + length - 2), self._kv_cache, keep=keep)
        if not keep:
            at_BK = (lengths_B - start_B).clamp_max(gap - 1)[:, None] + torch.arange(length, device=start_B.device)
            logits_BXV = logits_BXV.gather(1, at_BK[..., None].expand(-1, -1, logits_BXV.shape[-1]))
        logits_BKV = self._over_all(logits_BXV.flatten(0, 1)).unflatten(0, logits_BXV.shape[:2])
        return without_mask(logits_BKV, self.mask)


def mark(model: Any, mask: int) -> None:
    """Write the mask's id into a model's config, by the names that serving engines read."""
    model.config.pard_token, model.config.spd_type = mask, SERVED_AS


def mask_of(model: Any) -> int | None:
    """The mask's id that `mark` has written; None for an ordinary model."""
    return _mask_in(model.config)


def masked(model: Any) -> bool:
    """Whether a model's config says that it was trained to draft behind masks, whatever it says of them."""
    return getattr(model.config, "pard_token", None) is not None or getattr(model.config, "spd_type", "") == SERVED_AS


def _mask_in(config: Any) -> int | None:
    mask = getattr(config, "pard_token", None)
    return mask if type(mask) is int and mask >= 0 else None


def need_mask(config: Any, folder: Path) -> int:
    """The mask's id in the model config of a drafter folder; RequestError where it names none with an embedding."""
    mask, rows = _mask_in(config), config.get_text_config(decoder=True).vocab_size
    if mask is None or mask >= rows:
        found = "no pard_token" if mask is None else f"pard_token {mask}, and its embedding has {rows} rows"
        raise RequestError(
            f"{folder / 'config.json'} has {found}; expected the id of the mask that a PARD draft is trained with: "
            f"{REMEDY}"
        )
    return mask


def without_mask(logits: Tensor, mask: int) -> Tensor:
    """Logits [..., V] under which the mask is never drafted: what is made of them is renormalised over the others."""
    if mask >= logits.shape[-1]:
        return logits  # a row of its own behind the target's tokens, cut already
    is_mask_V = torch.arange(logits.shape[-1], device=logits.device) == mask  # a list of one id would be copied there
    return logits.masked_fill(is_mask_V, -torch.inf)
