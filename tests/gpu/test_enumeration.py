"""The audit's enumeration on the device: every drafter's class, its trees and the device's own rules and kernels."""

from __future__ import annotations

import pytest
import torch
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.audit.enumeration import enumerate_decoding
from draftsmith.eval.audit.plants import PLANTS
from draftsmith.eval.audit.toys import TOYS, Toy

SEQUENCES = 10_000
LEAST = 1e-5
"""About one run of all toys in a thousand would fall below it by chance alone; the seed is fixed."""


@pytest.mark.parametrize("name", TOYS)
def test_sequences_are_as_often_as_the_target_says(name: str, device: torch.device) -> None:
    toy = Toy.of(name, seed=1, device=device)
    assert toy.target.device.type == device.type
    found = enumerate_decoding(
        toy.target,
        toy.proposer,
        rule=None,
        sequences=SEQUENCES,
        warper=Warper(0.7),
        seed=1,
        level=2.5e-4,
        length=toy.kind.length,
        prompt=toy.kind.prompt,
    )
    assert found.p_value > LEAST


@pytest.mark.parametrize("name", PLANTS)
def test_planted_bugs_are_seen_there(name: str, device: torch.device) -> None:
    plant, toy = PLANTS[name], Toy.of("draft-model", seed=2, device=device)
    found = enumerate_decoding(
        toy.target,
        lambda: plant.toy(toy.drafts),
        rule=plant.make_rule(),
        sequences=5 * SEQUENCES,
        warper=Warper(0.7),
        seed=2,
        level=2.5e-4,
    )
    assert found.p_value < LEAST
