"""Every toy of the audit, and every planted bug, on a pretended GPU: no devices mixed, and a CPU's sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from draftsmith.decoding.engine import generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.random import SharedStream
from draftsmith.decoding.rules.acceptance import Rule
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.families import FAMILIES
from draftsmith.eval.audit.plants import PLANTS
from draftsmith.eval.audit.toys import TOYS, Toy
from pretended_cuda.device import PretendedCuda

ROWS = 8
THEIR_OWN = [name for family in FAMILIES.values() for name in family.toys]


def written(toy: Toy, proposer: Callable[[], Proposer], rule: Rule | None = None) -> list[list[int]]:
    """A few sequences, drawn by the same numbers on every device."""
    device = toy.target.device
    done = generate(
        toy.target.as_backbone(),
        proposer(),
        [list(toy.kind.prompt)] * ROWS,
        warper=Warper(0.7),
        max_new_tokens=toy.kind.length,
        rule=rule,
        static=True,
        uniforms=SharedStream(5, ROWS, device),
    )
    return done.tokens


def some(names: list[str]) -> list[Any]:
    """Tokens that are drawn or declared in another way by the same drafter go with what is slow."""
    others = (" argmax", " tempered")
    return [pytest.param(name, marks=pytest.mark.slow if name.endswith(others) else []) for name in names]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", some([*TOYS, *THEIR_OWN]))
def test_a_toy_writes_what_it_writes_on_a_cpu(name: str, cuda: PretendedCuda) -> None:
    here, there = (Toy.of(name, seed=1, device=device) for device in ("cpu", "cuda"))
    assert there.target.device.type == "cuda"
    assert written(there, there.proposer) == written(here, here.proposer)


@pytest.mark.parametrize("name", PLANTS)
def test_so_does_a_planted_bug(name: str, cuda: PretendedCuda) -> None:
    plant = PLANTS[name]
    here, there = (Toy.of("draft-model", seed=2, device=device) for device in ("cpu", "cuda"))
    texts = [written(toy, lambda toy=toy: plant.toy(toy.drafts), plant.make_rule()) for toy in (there, here)]
    assert texts[0] == texts[1]
