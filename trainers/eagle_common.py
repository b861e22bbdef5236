"""What the trainers of EAGLE drafters share: which outputs are compared with what, and how much each counts.

Read next: `eagle.py` and `eagle3.py`; `drafters/eagle/net.py`, `PairNet.unroll`; `losses/pace.py`;
`drafters/layers/row_split.py`, rows that several processes share.

Shapes: R rows, S tokens of a row, L of them in this process's part, X anchors, P positions that count over all passes,
C positions of a chunk, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..decoding.on_host import on_host, sent
from ..drafters.layers.row_split import WHOLE, RowSplit
from .config import ObjectiveConfig
from .labels import has_label, label_places
from .loop.objective import Batch
from .loop.sums import COMPARED, COUNT
from .losses.chunked import ChunkedLoss
from .losses.pace import geometric, joined, paced
from .method_config import Eagle3Config, EagleConfig, MtpConfig


class Compared(NamedTuple):
    """A network's outputs where they count, over all passes, and what each is compared with."""

    guess_PH: Tensor
    at_P: Tensor
    """int64: the number of the target's state, counted through the states that are held of rows."""
    label_P2: Tensor
    """int64: the label, x_{t+2+j}, and the pass j, from 0."""


def compared(outputs: Sequence[Tensor], batch: Batch, split: RowSplit = WHOLE) -> Compared:
    """Pair the outputs of `PairNet.unroll` with the target's states that they stand for.

    Pass j at t has seen x_{t+1+j}: it stands for the target's state there, and counts where the
    token behind is a label. All passes go through the head together, for one gradient of it.

    Args:
        outputs: [R, L, H] each.
        batch: of whole rows.
        split: the part that the outputs are of; the target's states are held for it and for as many
            positions behind it as there are passes.
    """
    guess, at, label = [], [], []
    device = batch["input_ids"].device
    S = batch["input_ids"].shape[1]
    own, held = split.own(S), split.held(S, len(outputs))
    for j, out_RLH in enumerate(outputs):
        place = label_places(batch, 2 + j, own)
        guess.append(out_RLH[place])
        at.append(joined((on_host(place[0]), on_host(place[1])), held.stop - held.start) + 1 + j)
        label_P = batch["input_ids"][:, 2 + j :][:, own][place]
        label.append(torch.stack([label_P, torch.full_like(label_P, j)], 1))
    return Compared(torch.cat(guess), sent(torch.cat(at), device), torch.cat(label))


def told_by_row(at_P: Tensor, place_P: Tensor, batch: Batch) -> Tensor:
    """How much every comparison counts in what is reported of its place, fp32 [P].

    Those of a place in a row add up to the row's labels, and what is reported is divided by the labels of the rows
    that have the place (`reported`): so it does not depend on which rows share a micro-batch.

    Args:
        at_P: the target's state that each is made with, counted through rows.
        place_P: which draft of its block or pass it is, from 0; less than S.
    """
    R, S = batch["input_ids"].shape
    row_P = at_P // S
    cell_P = place_P * R + row_P
    # counted by adding: a `bincount` waits for the device to know how long it gets
    counts = at_P.new_zeros(R * S).index_add_(0, cell_P, torch.ones_like(cell_P))
    return batch["loss_mask"].sum(1)[row_P] / counts[cell_P]


def told_by_pass(at_P: Tensor, pass_P: Tensor, batch: Batch, passes: int, split: RowSplit = WHOLE) -> Tensor:
    """The same of `compared`, where those of a row may be a part: what is counted is of whole rows.

    Args:
        at_P: as `compared` has it, counted through the states that are held of rows.
        pass_P: from 0.
    """
    held = split.held(batch["input_ids"].shape[1], passes)
    row_P = at_P // (held.stop - held.start)
    counts_JR = torch.stack([has_label(batch, 2 + j).sum(1) for j in range(passes)])
    return batch["loss_mask"].sum(1)[row_P] / counts_JR[pass_P, row_P]


def reported(
    loss: Tensor, terms: dict[str, Tensor], told_P: Tensor, place_P: Tensor, places: int
) -> dict[str, Tensor]:
    """The loss, the sums of terms, and of each term the labels that it is over: those of rows that have its place.

    A row that is too short for the last drafts says nothing of them, and would count as one that rejects them all.
    Nothing is reported where nothing was compared.

    Args:
        loss: what is minimised, which every label counts for.
        terms: `alpha_j` of the j-th draft, everything else of the first.
        told_P: as of `told_by_row`.
        place_P: which draft of its block or pass each comparison is, from 0.
        places: how many there are.
    """
    if not terms:
        return {}
    own = [name for name in terms if name != "loss" and not name.startswith(COMPARED)]
    counts_J = told_P.new_zeros(places).index_add_(0, place_P, told_P)
    of_term = {name: int(name[len("alpha_") :]) - 1 if name.startswith("alpha_") else 0 for name in own}
    counts = {f"{COUNT}{name}": counts_J[place] for name, place in of_term.items()}
    return terms | {"loss": loss.detach()} | counts


def in_text_order(
    at_P: Tensor, hidden_PH: Tensor, label_P2: Tensor, share_P: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same sorted by the target's state: passes at one position come together."""
    known_P = on_host(at_P)  # what the teacher groups by is asked of the host
    order = known_P.argsort(stable=True)
    at_P, order_P = sent(known_P[order], at_P.device), sent(order, at_P.device)
    share_P = None if share_P is None else share_P[order_P]
    return at_P, hidden_PH[order_P], label_P2[order_P], share_P


def shares(
    label_P2: Tensor,
    hidden_PH: Tensor,
    head: ChunkedLoss,
    batch: Batch,
    config: EagleConfig | Eagle3Config | MtpConfig,
    objective: ObjectiveConfig,
    split: RowSplit = WHOLE,
) -> Tensor | None:
    """How much every position of `compared` counts, fp32 [P]; None where all count alike.

    D-PACE asks first how likely each label is under the draft, a chunk of logits at a time.
    """
    label_P, pass_P = label_P2.unbind(-1)
    if objective.positions == "geometric":
        return geometric(pass_P, config.decay)
    R, S = batch["input_ids"].shape
    own = split.own(S)
    L = own.stop - own.start
    anchors = [joined(label_places(batch, 2 + j, own), L) for j in range(config.passes)]
    q_P, _ = head(hidden_PH, label_P, only_label_q=True)
    q = q_P.split([len(anchor_P) for anchor_P in anchors])
    return torch.cat(paced(q, anchors, R * L, objective.pace_floor))
