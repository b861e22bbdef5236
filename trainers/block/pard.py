"""Train a PARD draft: a small causal LM that drafts a chain in one pass, by mask tokens behind the text.

An et al. 2025 (arXiv 2504.18583). A draft model as `distill` has it, from scratch, given or cut from the target,
whose rows have masks behind some of their tokens (`masked_chains.py`). Every kept mask, and every token of the text,
is held to the target's distribution: a mask at depth i in the place of token t is compared with what the target says
behind token t, as the text's own token is. All comparisons of a row count alike, and together as much as it has
labels. With one draft it is the loss of an ordinary draft.

Order of the file, as in every trainer: what it requires and what is trained, the loss, the teacher's side, how a run
begins. Read next: `../distill.py`, drafts that go token by token; `drafters/model/pard.py`, which decodes.

Shapes: R rows, S tokens of a row, M masks of a row, P comparisons, H hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.recurrence.scan import is_recurrent
from ...decoding.on_host import on_host, places, sent
from ...drafters.folder import save_draft_model
from ...drafters.model.pard import mark, mask_of
from ...drafters.projection import Projection, Shaping
from ...errors import RequestError
from ..config import MASKED, ObjectiveConfig
from ..labels import check_in_rows, labelled
from ..loop.objective import Batch
from ..losses.chunked import ChunkedLoss, SharedTeacher, Teacher
from ..losses.mix import Mix
from ..losses.terms import check_terms
from ..method_config import LoraConfig
from ..packed.lengths import check_start_context
from ..pruning.sizes import check_cut
from ..recipe import Run, TrainingRecipe
from ..spine import DrafterObjective
from ..student.compared import Drafts, Student
from ..student.draft import cut_from_target, make_draft, rows_of, whose
from ..teacher.frozen import Save
from .anchors import HELD_OUT_SEED
from .chain_spans import check_spans
from .masked_chains import Chains, chain_states, drawn
from .student import BlockLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt."""
    check_terms(recipe.objective)
    check_in_rows(recipe, recipe.pard.drafts, "pard.drafts", first=1)


def check_target(recipe: TrainingRecipe, target: PreTrainedModel) -> None:
    """Raise RequestError for sizes of no cut."""
    check_cut(recipe.model, target)


def check_start(recipe: TrainingRecipe) -> None:
    """Raise RequestError for rows that are too long for the model of `start_from`; reads no weights."""
    check_start_context(recipe.model, recipe.row_tokens)


def student(
    recipe: TrainingRecipe,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    pruned: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """The draft, with a mask; on the meta device its shapes alone.

    Raises:
        RequestError: as for `make_draft`; the mask has no embedding; layers fold the text into a state, or
            attend by what cannot go without a mask in long rows.
    """
    draft = make_draft(recipe, recipe.model, LoraConfig(), target, tokenizer, pruned=pruned)
    if is_recurrent(draft):
        raise RequestError(
            f"{whose(recipe.model)} has recurrent layers, whose state would keep the masks of a PARD draft; take a "
            "draft whose layers all attend, or method distill"
        )
    if recipe.pard.drafts > 1 and recipe.row_tokens > MASKED:
        check_spans(draft)
    mark(draft, _mask(draft, recipe.pard.mask_token, tokenizer))
    return draft


def _mask(draft: Any, asked: int | None, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The mask's id: as asked for, the draft's own, a row that is no token's, padding, or one more row."""
    rows = int(draft.get_input_embeddings().weight.shape[0])
    if asked is not None:
        if asked >= rows:
            raise RequestError(
                f"pard.mask_token is {asked}; the draft has embeddings of ids 0 to {rows - 1}: name one that its "
                "texts never use, or leave it out"
            )
        return asked
    own = mask_of(draft)
    if own is not None:
        return own
    if tokenizer is not None:
        known = set(tokenizer.get_vocab().values())
        free = next((row for row in range(rows) if row not in known), None)  # ids may have gaps
        if free is not None:
            return free
        pad: Any = tokenizer.pad_token_id
        if pad not in (None, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id):
            return int(pad)  # no text has it
    draft.resize_token_embeddings(rows + 1, mean_resizing=False)
    return rows


class PardTeacher(NamedTuple):
    """What the frozen target provides for a batch, and the masks of the step."""

    hidden_RSH: Tensor
    """The last hidden states, which its output projection reads."""
    projection: Projection
    chains: Chains


class PardStudent(Student):
    """The draft over text and masks, and its loss, in chunks over positions."""

    compiles = False

    def __init__(
        self, draft: PreTrainedModel, target: PreTrainedModel, objective: ObjectiveConfig, *, drafts: int, mask_id: int
    ) -> None:
        """`drafts`: K, the most that it drafts; `mask_id`: the id that stands for tokens not chosen yet."""
        rows = min(rows_of(draft), rows_of(target))
        head: Any = draft.get_output_embeddings()
        loss = BlockLoss(Mix.of(objective), drafts)
        judge = ChunkedLoss(head, loss, chunk=objective.chunk, rows=rows, shaping=Shaping.of(draft))
        super().__init__(draft, judge, objective, drafts=drafts, frozen=False)
        self._mask_id = mask_id
        self.train()  # a loaded draft comes without dropout

    def forward(self, batch: Batch, teacher_output: PardTeacher) -> tuple[Tensor, dict[str, Tensor]]:
        chains = teacher_output.chains
        text_RSH, masks_RMH = chain_states(self.draft, batch, chains, self._mask_id)
        masks_PH = masks_RMH[places(on_host(chains.depth_RM) > 0, masks_RMH.device)]
        hidden_PH = torch.cat((labelled(text_RSH, batch).hidden_PH, masks_PH))
        return self.compare(Drafts(hidden_PH, *compared(batch, chains)), batch, teacher_output)

    def weights(self, drafts: Drafts, batch: Batch, _given: PardTeacher) -> Tensor | None:
        """All comparisons of a row alike."""
        return None if self._drafts == 1 else row_means(drafts.at_P, batch)

    def teacher(self, given: PardTeacher, at_P: Tensor) -> Teacher:
        """The target's distributions, by its own projection."""
        return SharedTeacher.of(given.hidden_RSH.flatten(0, 1), given.projection, at_P)


def compared(batch: Batch, chains: Chains) -> tuple[Tensor, Tensor]:
    """Of every comparison: the target's state that speaks of it, and label and depth.

    Returns:
        int64 [P], numbers of states counted through rows; int64 [P, 2]. The text's tokens come first.
    """
    ids_RS, known = on_host(batch["input_ids"]), Chains(on_host(chains.anchor_RM), on_host(chains.depth_RM))
    row_X, before_X = on_host(batch["loss_mask"])[:, 1:].nonzero(as_tuple=True)
    real = known.real_RM.nonzero(as_tuple=True)
    row_P = torch.cat((row_X, real[0]))
    place_P = torch.cat((before_X, known.place_RM[real]))
    depth_P = torch.cat((torch.zeros_like(row_X), known.depth_RM[real]))
    label_P2 = torch.stack((ids_RS[row_P, place_P + 1], depth_P), 1)
    device = batch["input_ids"].device
    return sent(row_P * ids_RS.shape[1] + place_P, device), sent(label_P2, device)


def row_means(at_P: Tensor, batch: Batch) -> Tensor:
    """What each comparison counts, fp32 [P]: alike in a row, and together as much as it has labels."""
    labels_R, row_P = batch["loss_mask"][:, 1:].sum(1), at_P // batch["input_ids"].shape[1]
    row = on_host(at_P) // batch["input_ids"].shape[1]
    count_R = torch.bincount(row, minlength=len(labels_R))  # of a device's it would be waited for
    return (labels_R / sent(count_R.clamp_min(1), labels_R.device))[row_P]


class PardObjective(DrafterObjective):
    """Trains `draft` to have the distributions of the frozen `target` behind the text and behind its masks."""

    def __init__(self, recipe: TrainingRecipe, draft: PreTrainedModel, target: PreTrainedModel, save: Save) -> None:
        mask, config = mask_of(draft), recipe.pard
        assert mask is not None  # `student` has marked it
        goal = PardStudent(draft, target, recipe.objective, drafts=config.drafts, mask_id=mask)
        super().__init__(goal, draft, target, save)
        self._config, self._projection, self._seed = config, Projection.of(target), HELD_OUT_SEED

    def begin_step(self, _step: int, seed: int) -> None:
        """Masks of this step stand elsewhere than the last one's."""
        self._seed = seed

    def prepare(self, batch: Batch) -> PardTeacher:
        """The target's last hidden states, and where masks stand."""
        config, seed = self._config, self._seed if self.module.training else HELD_OUT_SEED
        chains = drawn(batch, config.drafts, seed, keep=config.kept, least=config.kept_least)
        return PardTeacher(super().prepare(batch).hidden_RSH, self._projection, chains)


def build(run: Run, target: Backbone, rows: Prepared) -> PardObjective:
    """What a run trains: a draft from scratch, given, or cut from the target."""
    recipe = run.recipe
    pruned = cut_from_target(recipe, recipe.model, target.model, rows.validation, out=run.out, seed=recipe.loop.seed)
    draft = student(recipe, target.model, target.tokenizer, pruned=pruned)
    return PardObjective(recipe, draft, target.model, partial(save_draft_model, target=target, family="pard"))
