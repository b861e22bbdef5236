"""The loss of a PARD draft: an ordinary draft's where it drafts one token, and a mean over kept rows else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.data.config import DataConfig
from draftsmith.drafters.model.pard import mark
from draftsmith.drafters.projection import Projection
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.block.masked_chains import chain_states, drawn
from draftsmith.trainers.block.pard import PardObjective, PardStudent, PardTeacher
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.method_config import PardConfig
from draftsmith.trainers.packed.passes import hidden_states
from draftsmith.trainers.student.distillation import DraftStudent, teacher_of
from helpers.models.method_objectives import nothing
from helpers.models.packed_rows import MASK, packed

BATCH = packed([7, 12])


def losses(objective: ObjectiveConfig, drafts: int) -> tuple[Any, Any, PardTeacher]:
    """The draft's model, its student's loss and terms, and the teacher output."""
    target = make_target("qwen3").model
    draft: Any = make_drafter(make_target("qwen3"), noise=0.1).module
    with torch.no_grad():
        hidden_RSH = hidden_states(target, BATCH)
        teacher = PardTeacher(hidden_RSH, Projection.of(target), drawn(BATCH, drafts, 1, keep=0.9, least=0.2))
        made = PardStudent(draft, target, objective, drafts=drafts, mask_id=MASK)(BATCH, teacher)
    return draft, made, teacher


def test_with_one_draft_it_is_the_loss_of_an_ordinary_draft() -> None:
    objective = ObjectiveConfig(kl=1.0, ce=0.1)
    draft, (loss, _), teacher = losses(objective, 1)
    target = make_target("qwen3").model
    with torch.no_grad():
        plain, _ = DraftStudent(draft, target, objective)(BATCH, teacher_of(target, teacher.hidden_RSH, BATCH))
    assert torch.equal(loss, plain)


def test_cross_entropy_is_the_mean_over_text_and_masks() -> None:
    draft, (loss, terms), teacher = losses(ObjectiveConfig(kl=0.0, ce=1.0), 4)
    chains = teacher.chains
    with torch.no_grad():
        text, masks = chain_states(draft, BATCH, chains, MASK)
        log_q = [draft.lm_head(each)[0].log_softmax(-1) for each in (text, masks)]
    ids, labels = BATCH["input_ids"][0], BATCH["loss_mask"][0]
    each = [-log_q[0][t, ids[t + 1]] for t in range(len(ids) - 1) if labels[t + 1]]
    for m in chains.real_RM[0].nonzero()[:, 0].tolist():
        each.append(-log_q[1][m, ids[int(chains.place_RM[0, m]) + 1]])
    assert len(each) > int(labels.sum())
    torch.testing.assert_close(loss, torch.stack(each).mean() * labels.sum(), rtol=1e-5, atol=1e-5)
    assert {"loss", "alpha", "alpha_2", "alpha_3", "alpha_4"} <= set(terms)


def rows_of(*batches: Any) -> Any:
    """Rows of one length, side by side."""
    return {name: torch.cat([each[name] for each in batches]) for name in batches[0]}


def test_a_row_counts_by_its_labels_whatever_its_neighbours() -> None:
    """A row without gaps, which has many masks, beside one with few labels: the loss is the sum of theirs alone."""
    objective = ObjectiveConfig(kl=0.0, ce=1.0)
    target = make_target("qwen3").model
    draft: Any = make_drafter(make_target("qwen3"), noise=0.1).module
    student = PardStudent(draft, target, objective, drafts=4, mask_id=MASK)
    batches = [packed([16], unlabelled=0.0), packed([7, 9], seed=3, unlabelled=0.7)]

    def loss(batch: Any) -> tuple[float, int]:
        chains = drawn(batch, 4, 1, keep=0.9, least=0.2)
        with torch.no_grad():
            teacher = PardTeacher(hidden_states(target, batch), Projection.of(target), chains)
            return float(student(batch, teacher)[0]), int(chains.real_RM.sum())

    (one, many), (two, few) = map(loss, batches)
    both, _ = loss(rows_of(*batches))
    assert many > 4 * few
    assert both == pytest.approx(one + two, rel=1e-5)
    again, _ = loss(rows_of(batches[1], batches[0], batches[1]))
    assert again == pytest.approx(one + 2 * two, rel=1e-5)


def test_every_step_has_masks_of_its_own_and_held_out_rows_always_the_same() -> None:
    target = make_target("qwen3")
    target.model.requires_grad_(False)
    draft = make_target("qwen3", seed=1).model
    mark(draft, MASK)
    recipe = Recipe(method="pard", data=DataConfig(sequence_length=64), pard=PardConfig(drafts=4))
    goal = PardObjective(recipe, draft, target.model, nothing)
    batch = packed([60], unlabelled=0.0)

    def masks() -> list[list[int]]:
        chains = goal.prepare(batch).chains
        return [chains.anchor_RM.tolist(), chains.depth_RM.tolist()]

    goal.module.eval()
    held_out = masks()
    goal.module.train()
    seen = []
    for step in range(6):
        goal.begin_step(step, 1000 + step)
        seen.append(masks())
        assert masks() == seen[-1], "the same in every micro-batch and process"
        goal.module.eval()
        assert masks() == held_out
        goal.module.train()
    assert len({str(each) for each in (*seen, held_out)}) == 7


def test_rows_have_masks_of_their_own() -> None:
    """Neighbours of other content do not share their draws; a row alone has those that it has in a batch."""
    one, two = packed([60], unlabelled=0.0), packed([60], seed=1, unlabelled=0.0)
    together = drawn(rows_of(one, two), 4, 7, keep=0.7, least=0.2)
    alone = [drawn(each, 4, 7, keep=0.7, least=0.2) for each in (one, two)]
    kept = [
        {(int(a), int(d)) for a, d in zip(chains.anchor_RM[row], chains.depth_RM[row], strict=True) if d}
        for chains, row in ((together, 0), (together, 1), (alone[0], 0), (alone[1], 0))
    ]
    assert kept[0] == kept[2]
    assert kept[1] == kept[3]
    assert kept[0] != kept[1]
