"""The loss of a PARD draft: an ordinary draft's where it drafts one token, and a mean over kept rows else."""

from __future__ import annotations

from typing import Any

import torch
from conftest import make_drafter, make_target
from draftsmith.drafters.projection import Projection
from draftsmith.trainers.block.masked_chains import chain_states, drawn
from draftsmith.trainers.block.pard import PardStudent, PardTeacher
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.packed.passes import hidden_states
from draftsmith.trainers.student.distillation import DraftStudent, teacher_of
from masked_rows import MASK, packed

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
