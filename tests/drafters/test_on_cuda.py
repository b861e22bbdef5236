"""Every proposer beside a target on a pretended GPU: no devices mixed, the text of a CPU, and that of replays the same."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import Generation, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.errors import RequestError
from helpers.models.proposers import ELSEWHERE, ON_THE_HOST, PROMPTS, PROPOSERS, REPLAYED, Make
from pretended_cuda.device import PretendedCuda
from pretended_cuda.graphs import Graph

NEW = 8
GREEDY, SAMPLED = Warper(0.0), Warper(0.8, top_k=20, top_p=0.95)


def test_every_family_is_here() -> None:
    assert {*FAMILIES} - {*PROPOSERS} == ELSEWHERE


def on_cuda(device: str = "cuda") -> Backbone:
    target = make_target("qwen3")
    target.model.to(device)
    return target


def written(make: Make, device: str) -> Generation:
    target = on_cuda(device)
    return generate(target, make(target), PROMPTS, warper=GREEDY, max_new_tokens=NEW, static=True)


def some(names: list[str]) -> list[Any]:
    """Every family each day, and its other ways to draft only with what is slow."""
    return [pytest.param(name, marks=[] if name in FAMILIES else pytest.mark.slow) for name in names]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", some([*PROPOSERS]))
def test_the_text_is_that_of_a_cpu(name: str, cuda: PretendedCuda) -> None:
    here, there = (written(PROPOSERS[name], device) for device in ("cpu", "cuda"))
    assert there.tokens == here.tokens
    assert there.origin == here.origin


def test_a_tensor_left_on_the_host_is_seen(cuda: PretendedCuda) -> None:
    """The planted bug: a proposer that keeps its text where the target is not."""
    with pytest.raises(RuntimeError, match="same device"):
        written(lambda _: PromptLookup(draft_length=3), "cuda")


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graph of every replay."""
    seen: list[Graph] = []
    whole = Graph.replay
    monkeypatch.setattr(Graph, "replay", lambda graph: (seen.append(graph), whole(graph)))
    return seen


def modes() -> list[Any]:
    """Every proposer with draws, greedy ones only with what is slow."""
    greedy = [pytest.param(name, GREEDY, id=f"{name}, greedy", marks=pytest.mark.slow) for name in REPLAYED]
    return [*(pytest.param(name, SAMPLED, id=name) for name in REPLAYED), *greedy]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("name", "warper"), modes())
def test_replays_write_what_single_launches_write(
    name: str, warper: Warper, cuda: PretendedCuda, replays: list[Graph]
) -> None:
    """Whatever Python reads, counts or keeps in a step is in a replay what it was in the recording."""
    target, common = on_cuda(), {"warper": warper, "max_new_tokens": 16, "seed": 3}
    eager = generate(target, PROPOSERS[name](target), PROMPTS, graphs=False, **common)
    assert not replays
    replayed = generate(target, PROPOSERS[name](target), PROMPTS, graphs=True, **common)
    assert replayed.tokens == eager.tokens
    assert replayed.origin == eager.origin
    assert len({*map(id, replays)}) == 2  # drafting and verifying
    assert len(replays) >= 4


@pytest.mark.parametrize("name", sorted(ON_THE_HOST))
def test_what_the_host_drafts_is_not_replayed(name: str, cuda: PretendedCuda) -> None:
    target = on_cuda()
    with pytest.raises(RequestError, match="graphs were asked for, and .* decides on the host"):
        generate(target, PROPOSERS[name](target), PROMPTS, warper=GREEDY, max_new_tokens=4, graphs=True)
