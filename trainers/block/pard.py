"""Train a PARD draft: a small causal LM that drafts a chain in one pass, by mask tokens behind the text.

An et al. 2025 (arXiv 2504.18583). A draft model as `distill` has it, from scratch, given or cut from the target,
whose rows have masks behind some of their tokens (`../student/masked_chains.py`). Order of the file, as in every
trainer: what it requires and what is trained (its loss is `../student/pard.py`), the teacher's side, the run. Read
next: `../distill.py`; `drafters/model/pard.py`, which decodes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...data.rows.prepare import Prepared
from ...decoding.target.backbone import Backbone
from ...decoding.target.recurrence.scan import is_recurrent
from ...drafters.folder import save_draft_model
from ...drafters.model.pard import mark, mask_of
from ...drafters.projection import Projection
from ...errors import RequestError
from ..config import FROM_TARGET, MASKED
from ..labels import check_in_rows
from ..loop.loop import Outcome
from ..loop.objective import Batch
from ..loop.sharding import standalone
from ..losses.terms import check_terms
from ..method_config import LoraConfig
from ..packed.lengths import check_start_context
from ..pruning.sizes import check_cut
from ..sections import MakeProbe, Run, Sections
from ..student.chain_spans import check_spans
from ..student.draft import cut_from_target, make_draft, whose
from ..student.masked_chains import drawn
from ..student.pard import PardStudent, PardTeacher
from ..teacher.features import FeatureSource, OnlineFeatures
from ..teacher.frozen import Save, check_teacher, freeze, run_for_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HELD_OUT_SEED = 0
"""Masks of held-out rows are the same at every measurement."""


def check_recipe(recipe: Sections) -> None:
    """Raise RequestError where nothing would be learnt."""
    check_terms(recipe.objective)
    check_in_rows(recipe, recipe.pard.drafts, "pard.drafts", first=1)


def check_target(recipe: Sections, target: PreTrainedModel) -> None:
    """Raise RequestError for logits that training cannot make, rows beyond the context, or sizes of no cut."""
    check_teacher(recipe, target)
    check_cut(recipe.model, target)


def student(
    recipe: Sections,
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


class PardObjective:
    """Trains `draft` to have the distributions of the frozen `target` behind the text and behind its masks."""

    def __init__(self, recipe: Sections, draft: PreTrainedModel, target: PreTrainedModel, save: Save) -> None:
        mask = mask_of(draft)
        assert mask is not None  # `student` has marked it
        config = recipe.pard
        self.module: nn.Module = PardStudent(
            draft, freeze(target), recipe.objective, drafts=config.drafts, mask_id=mask
        )
        self.features: FeatureSource = OnlineFeatures(target)
        self._draft, self._save, self._config = draft, save, config
        self._projection, self._seed = Projection.of(target), HELD_OUT_SEED

    def begin_step(self, _step: int, seed: int) -> None:
        """Masks of this step stand elsewhere than the last one's."""
        self._seed = seed

    @torch.no_grad()
    def prepare(self, batch: Batch) -> PardTeacher:
        """The target's last hidden states, and where masks stand."""
        (hidden_RSH,) = self.features(batch)
        config, seed = self._config, self._seed if self.module.training else HELD_OUT_SEED
        chains = drawn(batch, config.drafts, seed, keep=config.kept, least=config.kept_least)
        return PardTeacher(hidden_RSH, self._projection, chains)

    def export(self, folder: Path) -> None:
        """Write a drafter folder."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        return self._draft


def run(recipe: Sections, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> Outcome:
    """Train a draft into `out/drafter`."""
    check_recipe(recipe)
    check_start_context(recipe.model, recipe.row_tokens)

    def build(target: Backbone, rows: Prepared) -> PardObjective:
        pruned = None
        if recipe.model.start_from == FROM_TARGET:
            pruned = cut_from_target(
                recipe, recipe.model, target.model, rows.validation, out=out, seed=recipe.loop.seed
            )
        draft = student(recipe, target.model, target.tokenizer, pruned=pruned)
        return PardObjective(recipe, draft, target.model, partial(save_draft_model, target=target, family="pard"))

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
