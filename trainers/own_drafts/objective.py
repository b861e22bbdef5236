"""A drafter that learns along its own drafts: what decoding will meet, where the text's tokens are not drafted.

On-policy distillation (GKD, Agarwal et al. 2024, arXiv 2306.13649) for drafters that read hidden states. Of a share of
the rows the text is context alone: behind some places of each the drafter drafts as in decoding, on its own tokens and
outputs; the frozen target reads these drafts in one pass; and the loss compares both at every drafted position,
weighted by the probability that decoding gets there, W_j = prod_{i < j} min(1, p_i(x_i) / q_i(x_i)). The other rows
are learnt from as ever, by the very code. Read next: `places.py`, where; `drawing.py`, the tokens; `reading.py`, the
target's side; `../student/compared.py` and `../heads.py`, the loss.

Shapes: R rows, X places, J drafts behind one, T = J + 1 tokens of a root and its drafts, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ...decoding.backbone.backbone import Backbone, context_limits
from ...decoding.backbone.hidden_states import decoder_of
from ...decoding.backbone.recurrence.scan import is_recurrent
from ...decoding.on_host import on_host, sent
from ...decoding.sampling import Warper
from ...drafters.projection import Projection
from ...errors import RequestError
from ..loop.objective import Batch, Objective
from ..loop.sharding import is_sharded
from ..loop.sums import COUNT
from ..losses.pace import reached
from ..recipe import TrainingRecipe
from ..student.drafted import Drafted, DraftsBehind
from .drawing import Drawing, counted, judged
from .places import AT, UNIFORM, DraftPlaces, Places, learns_length
from .reading import TextKept

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WithText(NamedTuple):
    """A batch's teacher output, and the text behind which the target reads drafts; None: no row is drafted for."""

    given: Any
    kept: TextKept | None


class OwnDrafts(nn.Module):
    """A student's loss: of rows of text, and along its own drafts."""

    def __init__(self, student: DraftsBehind, target: Any, recipe: TrainingRecipe) -> None:
        """`target`: the causal LM, which is no part of this module."""
        super().__init__()
        self.student = student
        self._warper = Warper(recipe.rollouts.temperature)
        self._drawn_by = Warper() if student.drafts_likeliest else self._warper
        self._target = (target,)
        self._ends = torch.tensor(Backbone(target, name="target").eos_ids, dtype=torch.long)
        self._floor = (recipe.objective.pace_floor or 0.0) if learns_length(recipe) else 0.0
        self._gain = recipe.objective.tv if learns_length(recipe) else 0.0
        """What the accepted length counts in the loss."""

    def forward(self, batch: Batch, teacher_output: WithText) -> tuple[Tensor, dict[str, Tensor]]:
        given, kept = teacher_output
        if kept is None:
            loss, terms = self.student(_text_of(batch), given)
            return loss, terms
        is_drafted_R = (on_host(batch[AT]) >= 0).any(1)
        parts = []
        if not bool(is_drafted_R.all()):
            rows = sent((~is_drafted_R).nonzero()[:, 0], batch[AT].device)
            parts.append(self.student(_text_of(at_rows(batch, rows)), at_rows(given, rows)))
        rows = sent(is_drafted_R.nonzero()[:, 0], batch[AT].device)
        parts.append(self._along_drafts(at_rows(batch, rows), at_rows(given, rows), kept))
        loss = torch.stack([each for each, _ in parts]).sum()
        terms = {name: each for _, named in parts for name, each in named.items()}
        # not where nothing was compared
        return loss, terms | {"loss": loss.detach()} if terms else terms

    def _along_drafts(self, batch: Batch, given: Any, kept: TextKept) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of rows that are drafted for, and how many of their drafts are kept."""
        (target,), places, student = self._target, Places.of(batch), self.student
        root_X = batch["input_ids"][places.row_X, places.at_X + 1]
        uniform_XJ = batch[UNIFORM][places.row_X, places.number_X]
        draw = Drawing(
            student.draft_logits, self._drawn_by, root_X, uniform_XJ, ids_U=student.ids_U, chunk=student.judge.chunk
        )
        embed = target.get_input_embeddings()
        found = student.drafts_behind(batch, given, places, draw, embed)
        states_XTH = kept.states(batch, given.hidden_RSH, places, draw.token_XT)
        drafted = self._judged(batch, places, draw, states_XTH)
        return student.loss_along(found, drafted, given), _reported(drafted)

    def _judged(self, batch: Batch, places: Places, draw: Drawing, states_XTH: Tensor) -> Drafted:
        """The drafts with what the target says of them, and what each counts in the loss."""
        (target,), token_XT, J = self._target, draw.token_XT, draw.q_XJ.shape[1]
        drafted_XJ = token_XT[:, 1:]
        said = judged(
            states_XTH[:, :-1].flatten(0, 1),
            drafted_XJ.flatten(),
            Projection.of(target),
            self._warper,
            self.student.judge.chunk,
        )
        known_XJ = counted(token_XT, self._ends.to(token_XT.device))
        ratio_XJ = said.p_P.view(-1, J) / draw.q_XJ
        kept_XJ = ratio_XJ.clamp_max(1.0) * known_XJ
        # the mean of `kept` is the overlap
        weight_XJ, gain_XJ = reached(kept_XJ, kept_XJ, known_XJ, self._floor)
        # a row's places together count as many first drafts as it has labels
        of_row_R = torch.bincount(places.row_X, minlength=len(places.at_RA)).clamp_min(1)
        scale_X1 = (batch["loss_mask"].sum(1) / of_row_R)[places.row_X, None] * self.student.first_weight
        share_XJ, label_XJ = scale_X1 * weight_XJ, said.best_P.view(-1, J)
        if self._gain:
            # drawn from q, where `label_kept` is the derivative by texts of p
            gain_XJ = self._gain * gain_XJ * ratio_XJ.clamp_min(1.0)
            share_XJ = torch.stack((share_XJ, scale_X1 * gain_XJ), -1)
            label_XJ = drafted_XJ
        return Drafted(token_XT, label_XJ, known_XJ, states_XTH, share_XJ, kept_XJ)


class OwnDraftsObjective(Objective):
    """Another objective, whose student learns along its own drafts too."""

    def __init__(self, inner: Objective, target: PreTrainedModel, recipe: TrainingRecipe) -> None:
        """`inner`: trains on the text alone; its features are computed in this process.

        Raises:
            RequestError: the target has recurrent layers, whose states at a place are not kept.
        """
        student: Any = inner.module
        self._inner = inner
        module = OwnDrafts(student, target, recipe)
        ends = Backbone(target, name="target").eos_ids
        places = DraftPlaces(recipe.rollouts, student.drafts_made, recipe.loop.batch_rows, ends)
        super().__init__(module, features=inner.features, rollouts=places)
        # the pass that is looked ahead to would fill the cache of the one before
        self.features.looks_ahead = False

    @torch.no_grad()
    def prepare(self, batch: Batch) -> WithText:
        """As of the other; of rows that are drafted for, the target's keys and values stay."""
        places_RA = on_host(batch[AT]) if AT in batch else None
        if places_RA is None or not bool((places_RA >= 0).any()):
            return WithText(self._inner.prepare(batch), None)
        if is_sharded(self._inner.module):
            raise RequestError(
                "rollouts.share is above 0, and ZeRO-3 cuts the weights into pieces, which drafting would have to "
                "gather for every token; use ZeRO-2 or less, or rollouts.share 0"
            )
        self.features.kv_cache = DynamicCache()
        try:
            given = self._inner.prepare(batch)
            rows = sent((places_RA >= 0).any(1).nonzero()[:, 0], batch[AT].device)
            return WithText(given, TextKept(self.features, self.features.kv_cache, rows))
        finally:
            self.features.kv_cache = None

    def set_steps(self, steps: int) -> None:
        """As of the other."""
        self._inner.set_steps(steps)

    def begin_step(self, step: int, seed: int) -> None:
        """As of the other."""
        self._inner.begin_step(step, seed)

    def export(self, folder: Path) -> None:
        """As of the other."""
        self._inner.export(folder)

    def draft(self) -> nn.Module | None:
        """The other's drafter."""
        return self._inner.draft()


def on_own_drafts(inner: Any, target: PreTrainedModel, recipe: TrainingRecipe) -> Any:
    """`inner`, which learns along its own drafts too where the recipe has it so."""
    return OwnDraftsObjective(inner, target, recipe) if recipe.rollouts.share else inner


def check_reads_drafts(recipe: TrainingRecipe, target: PreTrainedModel) -> None:
    """Raise RequestError for a target that cannot read drafts behind a text whose keys and values it has, or whose
    context rows fill."""
    if not recipe.rollouts.share:
        return
    asked = f"rollouts.share is {recipe.rollouts.share:g}"
    if is_recurrent(decoder_of(target)):
        raise RequestError(
            f"{asked}, and {type(target).__name__} has recurrent layers, which keep no state for every place of a "
            "text; set rollouts.share to 0"
        )
    drafts, rows = recipe.record.drafts_trained(recipe), recipe.data.sequence_length
    context, reason = min(context_limits(target.config.get_text_config(decoder=True)))
    if rows + drafts - 1 > context:
        raise RequestError(
            f"{asked}: {drafts} drafts behind rows of {rows} tokens do not fit the target's context of {context} "
            f"tokens{reason}; lower data.sequence_length to {context - drafts + 1}, or set rollouts.share to 0"
        )


def at_rows(given: Any, rows: Tensor) -> Any:
    """Some rows of a batch or of a teacher output: of every tensor in it."""
    if isinstance(given, Tensor):
        return given[rows]
    if isinstance(given, dict):
        return {name: at_rows(each, rows) for name, each in given.items()}
    if isinstance(given, tuple):
        parts = [at_rows(each, rows) for each in given]
        return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
    return given


def _text_of(batch: Batch) -> Batch:
    return {name: each for name, each in batch.items() if name not in (AT, UNIFORM)}


def _reported(drafted: Drafted) -> dict[str, Tensor]:
    """`own_kept_j`, how often the first j own drafts behind a place are all kept; and `own_length`, how many are."""
    kept_J = drafted.kept_XJ.cumprod(1).sum(0)
    terms = {f"own_kept_{j}": each for j, each in enumerate(kept_J.unbind(), 1)} | {"own_length": kept_J.sum()}
    count = kept_J.new_tensor(float(len(drafted.token_XT)))
    return terms | {f"{COUNT}{name}": count for name in terms}
