"""The loss of a PARD draft: every kept mask, and every token of the text, against the target's distribution.

An et al. 2025 (arXiv 2504.18583). A mask at depth i in the place of token t is compared with what the target
says behind token t, as the text's own token is: the target's distributions are made once for every place. All
count alike, and those of a row add up to its labels, so a row's loss is a mean times the number of labels that
the loop divides by. With one draft it is the loss of an ordinary draft. Read next: `masked_chains.py`, which
masks there are; `distillation.py`, drafts that go token by token.

Shapes: R rows, S tokens of a row, M masks of a row, P comparisons, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...decoding.on_host import on_host, places, sent
from ...drafters.projection import Projection, Shaping
from ..block.student import BlockLoss
from ..config import ObjectiveConfig
from ..eagle_common import in_text_order, told_by_row, with_counts
from ..labels import labelled
from ..loop.objective import Batch
from ..losses.chunked import ChunkedLoss, SharedTeacher
from ..losses.mix import Mix
from .draft import rows_of
from .masked_chains import Chains, chain_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PardTeacher(NamedTuple):
    """What the frozen target provides for a batch, and the masks of the step."""

    hidden_RSH: Tensor
    """The last hidden states, which its output projection reads."""
    projection: Projection
    chains: Chains


class PardStudent(nn.Module):
    """The draft over text and masks, and its loss, in chunks over positions."""

    def __init__(
        self, draft: PreTrainedModel, target: PreTrainedModel, objective: ObjectiveConfig, *, drafts: int, mask_id: int
    ) -> None:
        """`drafts`: K, the most that it drafts; `mask_id`: the id that stands for tokens not chosen yet."""
        super().__init__()
        self.draft, self._mask_id, self._drafts = draft, mask_id, drafts
        rows = min(rows_of(draft), rows_of(target))
        head: Any = draft.get_output_embeddings()
        loss = BlockLoss(Mix.of(objective), drafts)
        self.head = ChunkedLoss(head, loss, chunk=objective.chunk, rows=rows, shaping=Shaping.of(draft))
        self.train()  # a loaded draft comes without dropout

    def forward(self, batch: Batch, teacher: PardTeacher) -> tuple[Tensor, dict[str, Tensor]]:
        chains = teacher.chains
        text_RSH, masks_RMH = chain_states(self.draft, batch, chains, self._mask_id)
        at_P, label_P2, row_P = compared(batch, chains)
        masks_PH = masks_RMH[places(on_host(chains.depth_RM) > 0, masks_RMH.device)]
        guess_PH = torch.cat((labelled(text_RSH, batch).hidden_PH, masks_PH))
        share_P = None if self._drafts == 1 else row_means(row_P, batch)
        at_P, guess_PH, label_P2, share_P = in_text_order(at_P, guess_PH, label_P2, share_P)
        states_NH = teacher.hidden_RSH.flatten(0, 1)
        given = SharedTeacher.of(states_NH, teacher.projection, at_P) if len(at_P) else None
        told_P = told_by_row(at_P, label_P2[:, 1], batch)
        loss, terms = self.head(guess_PH, label_P2, given, share_P, told_P=told_P)
        if not terms:
            return loss, {}
        return loss, with_counts(terms | {"loss": loss.detach()}, told_P, label_P2[:, 1], self._drafts)


def compared(batch: Batch, chains: Chains) -> tuple[Tensor, Tensor, Tensor]:
    """Of every comparison: the target's state that speaks of it, label and depth, and its row.

    Returns:
        int64 [P], numbers of states counted through rows; int64 [P, 2]; int64 [P]. The text's tokens come first.
    """
    ids_RS, known = on_host(batch["input_ids"]), Chains(on_host(chains.anchor_RM), on_host(chains.depth_RM))
    row_X, before_X = on_host(batch["loss_mask"])[:, 1:].nonzero(as_tuple=True)
    real = known.real_RM.nonzero(as_tuple=True)
    row_P = torch.cat((row_X, real[0]))
    place_P = torch.cat((before_X, known.place_RM[real]))
    depth_P = torch.cat((torch.zeros_like(row_X), known.depth_RM[real]))
    label_P2 = torch.stack((ids_RS[row_P, place_P + 1], depth_P), 1)
    device = batch["input_ids"].device
    return sent(row_P * ids_RS.shape[1] + place_P, device), sent(label_P2, device), sent(row_P, device)


def row_means(row_P: Tensor, batch: Batch) -> Tensor:
    """What each comparison counts, fp32 [P]: alike in a row, and together as much as it has labels."""
    labels_R = batch["loss_mask"][:, 1:].sum(1)
    count_R = torch.bincount(on_host(row_P), minlength=len(labels_R))  # of a device's it would be waited for
    return (labels_R / sent(count_R.clamp_min(1), labels_R.device))[row_P]
