"""Steps replayed as CUDA graphs write what the same steps write when they are launched one by one, token for token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.graphs import Replayed
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.drafters.block.trees import TreeShape
from draftsmith.drafters.lookup.lookahead import Lookahead
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from small_heads import make_on_target

PROMPTS = [[5, 9, 2, 33, 7, 9, 2], [11, 4], [1, 2, 3]]
WARPERS = [Warper(0.0), Warper(0.8, top_k=20, top_p=0.95)]
NEW = 64
ON_TARGET: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "hydra++": ("hydra++", {}),
    "eagle, chain": ("eagle", {"tree": "chain"}),
    "eagle, static": ("eagle", {}),
    "eagle3, dynamic": ("eagle3", {"tree": "dynamic", "top_k": 4, "nodes": 12}),
    "mtp, chain": ("mtp", {"tree": "chain"}),
    "dflash": ("dflash", {}),
    "dflash, tree": ("dflash", {"tree": TreeShape(6, 2)}),
    "peagle": ("peagle", {}),
}
ALONE = ("draft model", "prompt lookup", "lookahead")


@pytest.fixture
def target(device: torch.device) -> Backbone:
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    made = make_target("qwen3")
    made.model.to(device)
    return made


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a step was recorded, and how often called."""
    counted: Counter[str] = Counter()
    for name in ("_record", "__call__"):
        whole = getattr(Replayed, name)

        def noted(self: Replayed, *rest: Any, name: str = name, whole: Any = whole) -> Any:
            counted[name] += 1
            return whole(self, *rest)

        monkeypatch.setattr(Replayed, name, noted)
    return counted


def drafter_of(name: str, target: Backbone) -> Proposer:
    if name in ON_TARGET:
        family, settings = ON_TARGET[name]
        return make_on_target(family, target, **settings)
    if name == "prompt lookup":
        return PromptLookup(draft_length=3, device=target.device)
    if name == "lookahead":
        return Lookahead(window=2, ngram=3, guesses=2, pool=4, device=target.device)
    return make_drafter(target)


@pytest.mark.parametrize("warper", WARPERS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*ON_TARGET, *ALONE])
def test_replayed_text_is_the_eager_one(name: str, warper: Warper, target: Backbone, replays: Counter[str]) -> None:
    eager = generate(target, drafter_of(name, target), PROMPTS, warper=warper, max_new_tokens=NEW, seed=3)
    assert not replays
    drafter = drafter_of(name, target)
    replayed = generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=NEW, seed=3, graphs=True)
    assert replayed.tokens == eager.tokens
    assert replayed.origin == eager.origin
    assert drafter.replayable
    assert replays["_record"] == 2  # drafting and verifying
    assert replays["__call__"] > 8


@pytest.mark.parametrize("warper", WARPERS, ids=["greedy", "sampled"])
def test_the_baseline_replayed_is_the_eager_one(warper: Warper, target: Backbone, replays: Counter[str]) -> None:
    eager = autoregressive(target, PROMPTS, warper=warper, max_new_tokens=NEW, seed=3)
    replayed = autoregressive(target, PROMPTS, warper=warper, max_new_tokens=NEW, seed=3, graphs=True)
    assert replayed.tokens == eager.tokens
    assert replays["_record"] == 1
    assert replays["__call__"] >= NEW - 1


def test_numbers_are_fresh_in_every_replay(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a step that replays the numbers that it was recorded with writes another text."""
    warper = WARPERS[1]
    drafter = drafter_of("draft model", target)
    right = generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=NEW, graphs=True)
    monkeypatch.setattr("draftsmith.decoding.graphs.Held.restart", lambda self: setattr(self, "_taken", 0))
    wrong = generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=NEW, graphs=True)
    assert wrong.tokens != right.tokens
