"""Every proposer beside a target on a pretended GPU: no devices mixed, the text of a CPU, and that of replays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import VOCABULARY, make_drafter, make_target
from draftsmith.decoding.engine import Generation, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.drafters.block.trees import TreeShape
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.lookup.function import CallableDrafter
from draftsmith.drafters.lookup.llma import Llma
from draftsmith.drafters.lookup.lookahead import Lookahead
from draftsmith.drafters.lookup.ngram import Ngram, NgramTable
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.lookup.rest import Rest
from draftsmith.drafters.model.adaptive import AdaptiveDraft
from draftsmith.drafters.model.early_exit import EarlyExit, first_layers
from draftsmith.drafters.model.ensemble import join
from draftsmith.drafters.model.pard import Pard
from draftsmith.drafters.suffix.hybrid import beside
from draftsmith.drafters.suffix.proposer import SuffixDecoding
from draftsmith.errors import RequestError
from draftsmith.eval.audit.toy_models.documents import MemoryStore
from pretended_cuda.device import PretendedCuda
from pretended_cuda.graphs import Graph
from small_heads import make_on_target

PROMPTS = [[5, 9, 2, 33, 7, 9, 2], [11, 4]]
NEW = 8
GREEDY, SAMPLED = Warper(0.0), Warper(0.8, top_k=20, top_p=0.95)
Make = Callable[[Backbone], Any]
DYNAMIC = {"tree": "dynamic", "top_k": 3, "nodes": 6, "draft_length": 2}


def _on_target(family: str, **settings: Any) -> Make:
    return lambda target: make_on_target(family, target, **settings)


def _early_exit(target: Backbone) -> EarlyExit:
    return EarlyExit(first_layers(target, 1), target.vocabulary)


def _adaptive(target: Backbone) -> AdaptiveDraft:
    return AdaptiveDraft(make_drafter(target).backbone, target.vocabulary, longest=4)


def _suffix(target: Backbone, **settings: Any) -> SuffixDecoding:
    return SuffixDecoding(draft_length=3, device=target.device, **settings)


def _ngram(target: Backbone) -> Ngram:
    table = NgramTable.count([PROMPTS[0] * 4], order=3, vocabulary=VOCABULARY)
    return Ngram(table, device=target.device)


PROPOSERS: dict[str, Make] = {
    **{name: _on_target(name) for name, family in FAMILIES.items() if family.build},
    "eagle chain": _on_target("eagle", tree="chain"),
    "eagle dynamic": _on_target("eagle", **DYNAMIC),
    "eagle3 dynamic": _on_target("eagle3", **DYNAMIC),
    "mtp dynamic": _on_target("mtp", **DYNAMIC),
    **{f"{name} tree": _on_target(name, tree=TreeShape(6, 2)) for name in ("dflash", "dflash2", "dspark")},
    **{f"{name} cut": _on_target(name, least=0.3) for name in ("dflash", "dflash2", "dspark")},
    "draft_model": make_drafter,
    "pard": lambda target: Pard(make_drafter(target).backbone, target.vocabulary, mask=VOCABULARY - 1),
    "ensemble": lambda target: join([make_drafter(target, noise=noise) for noise in (0.02, 0.05)]),
    "early_exit": _early_exit,
    "adaptive-draft": _adaptive,
    "prompt-lookup": lambda target: PromptLookup(draft_length=3, device=target.device),
    "ngram": _ngram,
    "llma": lambda target: Llma([PROMPTS[0]], draft_length=3, device=target.device),
    "rest": lambda target: Rest(MemoryStore(), nodes=6, longest=2, shortest=1, draft_length=2, device=target.device),
    "suffix": _suffix,
    "suffix tree": lambda target: _suffix(target, nodes=5, factor=2.0),
    "suffix-hybrid": lambda target: beside(make_drafter(target), _suffix(target)),
    "suffix-hybrid static": lambda target: beside(make_on_target("eagle", target), _suffix(target)),
    "lookahead": lambda target: Lookahead(window=2, ngram=3, guesses=2, pool=4, device=target.device),
    "function": lambda target: CallableDrafter(lambda text: [text[-1], text[0]], draft_length=2, device=target.device),
}
ELSEWHERE = {"quantised", "intersection", "retokenised"}
"""A copy in fewer bits is torchao's own kind of tensor; the others draft among the audit's toys."""


ON_THE_HOST = {"adaptive-draft", "rest", "suffix", "suffix tree", "suffix-hybrid", "suffix-hybrid static", "function"}
"""Proposers of which Python decides in every step what they draft; all others are replayed."""
REPLAYED = [name for name in PROPOSERS if name not in ON_THE_HOST]


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
    """Every proposer with draws each day, one in three; greedy ones only with what is slow."""
    greedy = [pytest.param(name, GREEDY, id=f"{name}, greedy", marks=pytest.mark.slow) for name in REPLAYED]
    return [*(pytest.param(name, SAMPLED, id=name) for name in REPLAYED), *greedy]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "warper"), modes())
def test_replays_write_what_single_launches_write(
    name: str, warper: Warper, cuda: PretendedCuda, replays: list[Graph]
) -> None:
    """Whatever Python reads, counts or keeps in a step is in a replay what it was in the recording."""
    target, common = on_cuda(), {"warper": warper, "max_new_tokens": 24, "seed": 3}
    eager = generate(target, PROPOSERS[name](target), PROMPTS, graphs=False, **common)
    assert not replays
    replayed = generate(target, PROPOSERS[name](target), PROMPTS, graphs=True, **common)
    assert replayed.tokens == eager.tokens
    assert replayed.origin == eager.origin
    assert len({*map(id, replays)}) == 2  # drafting and verifying
    assert len(replays) > 3


@pytest.mark.parametrize("name", sorted(ON_THE_HOST))
def test_what_the_host_drafts_is_not_replayed(name: str, cuda: PretendedCuda) -> None:
    target = on_cuda()
    with pytest.raises(RequestError, match="graphs were asked for, and .* decides on the host"):
        generate(target, PROPOSERS[name](target), PROMPTS, warper=GREEDY, max_new_tokens=4, graphs=True)
