"""Suffix decoding beside a trained drafter: the output is the target's own, and the drafter knows the whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.block.trees import TreeShape
from draftsmith.drafters.eagle.proposer import Eagle
from draftsmith.drafters.model.ensemble import join
from draftsmith.drafters.model.pard import Pard
from draftsmith.drafters.suffix.hybrid import SuffixHybrid, beside
from draftsmith.drafters.suffix.index import OwnText
from draftsmith.drafters.suffix.proposer import Draft, SuffixDecoding
from draftsmith.errors import RequestError
from draftsmith.eval.audit.enumeration import enumerate_decoding
from draftsmith.eval.audit.toys import Toy
from helpers.models.small_drafters import make_on_target

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6, 7, 8, 9, 10], [11]]
GREEDY = Warper(0.0)
KINDS = [
    "draft model",
    "eagle chain",
    "eagle static",
    "hydra++",
    "medusa",
    "dflash",
    "dflash2",
    "dspark",
    "dspark sure",
    "dspark tree",
    "peagle",
    "pard",
    "mtp chain",
]

BY_CHANCE = ("dflash", "dflash2", "dspark", "dspark sure", "dspark tree", "peagle", "pard")
"""Kinds whose untrained drafts, or those behind the first, are right by chance alone."""


def some(*daily: str) -> Any:
    """All kinds, those of every day and the others."""
    return pytest.mark.parametrize(
        "kind", [kind if kind in daily else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
    )


TOKENS = 40


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


@pytest.fixture(scope="module")
def texts(target: Backbone) -> list[list[int]]:
    done = autoregressive(target, PROMPTS, warper=GREEDY, max_new_tokens=TOKENS)
    return [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, done.tokens)]


def make(kind: str, target: Backbone) -> Any:
    if kind == "draft model":
        return make_drafter(target, noise=0.03)
    if kind == "pard":
        return Pard(make_drafter(target, noise=0.03).backbone, target.vocabulary, mask=60)
    if kind in ("dspark sure", "dspark tree"):
        how: dict[str, Any] = {"least": 0.5} if kind == "dspark sure" else {"tree": TreeShape(7, 3)}
        return make_on_target("dspark", target, noise=0.02, **how)
    family, _, tree = kind.partition(" ")
    return make_on_target(family, target, noise=0.02, **({"tree": tree} if tree else {}))


class Scheduled(SuffixDecoding):
    """Promises much or nothing by the sum of the text; what it drafts is often right, and up to 11 tokens long."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(draft_length=12)
        self._texts = texts

    def _draft(self, row: OwnText) -> Draft:
        text = row.tokens
        if sum(text) % 3 == 0:
            return Draft([], [], 0.0)
        known = [full[len(text) :] for full in self._texts if full[: len(text)] == text]
        tokens = (known[0] if known else text)[: 1 + sum(text) % 11]
        return Draft(tokens, list(range(-1, len(tokens) - 1)), 99.0 if tokens else 0.0)


@some("eagle static", "hydra++")
@pytest.mark.parametrize("static", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_greedy_output_is_the_targets_own(kind: str, static: bool, target: Backbone, texts: list[list[int]]) -> None:
    hybrid = beside(make(kind, target), Scheduled(texts))
    done = generate(target, hybrid, PROMPTS, warper=GREEDY, max_new_tokens=TOKENS, static=static)
    assert [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, done.tokens)] == texts
    assert any(record.steps > 1 for record in hybrid._records)
    assert done.target_calls < (TOKENS if kind in BY_CHANCE else TOKENS / 2)


@some("draft model", "eagle static")
def test_a_row_alone_writes_what_it_writes_in_a_batch(kind: str, target: Backbone, texts: list[list[int]]) -> None:
    hybrid = beside(make(kind, target), Scheduled(texts))
    common = {"warper": Warper(0.7, top_k=9), "max_new_tokens": 24, "seed": 4}
    together = generate(target, hybrid, PROMPTS, **common)
    for row, prompt in enumerate(PROMPTS[:2]):
        alone = generate(target, hybrid, [prompt], requests=[row], **common)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.origin[0] == together.origin[row]


def proposals_of(hybrid: SuffixHybrid) -> list[tuple[list[list[int]], torch.Tensor]]:
    """Notes what the trained drafter proposes behind which texts."""
    noted: list[tuple[list[list[int]], torch.Tensor]] = []
    propose = hybrid.draft.propose

    def noting(*args: Any) -> Any:
        proposal = propose(*args)
        noted.append(([list(row.tokens) for row in hybrid.suffix._rows], proposal.tokens_BN.clone()))
        return proposal

    hybrid.draft.propose = noting  # type: ignore[method-assign]
    return noted


@torch.inference_mode()
def fresh(drafter: Any, target: Backbone, text: list[int]) -> list[int]:
    """What a drafter proposes that has read the text in one go."""
    features: list[torch.Tensor] = []
    target.prefill([text[:-1]], KVCache(1, len(text)), layers=getattr(drafter, "layers", ()), features=features)
    drafter.reset([text[:-1]], 20)
    if features:
        drafter.begin(features)
    return drafter.propose(torch.tensor(text[-1:]), GREEDY, Uniforms(0, [0], "cpu")).tokens_BN[0].tolist()


def wrong_proposals(kind: str, target: Backbone, texts: list[list[int]]) -> tuple[int, int]:
    """How many proposals are not those of a drafter that has read the text in one go, and of how many."""
    drafter: Proposer = make(kind, target)
    hybrid = beside(drafter, Scheduled(texts))
    noted = proposals_of(hybrid)
    generate(target, hybrid, PROMPTS, warper=GREEDY, max_new_tokens=TOKENS)
    again = make(kind, target)
    pairs = [(text, row) for rows, tokens in noted[1:] for text, row in zip(rows, tokens.tolist())]
    pairs = [(text, row) for text, row in pairs if text not in texts]  # rows that have not ended
    # alone a draft may end where that of a longer one beside it does not
    return sum((own := fresh(again, target, text)) != row[: len(own)] for text, row in pairs), len(pairs)


@some("draft model", "eagle chain")
def test_a_drafter_that_left_steps_out_drafts_as_if_it_had_read_the_text(
    kind: str, target: Backbone, texts: list[list[int]]
) -> None:
    wrong, count = wrong_proposals(kind, target, texts)
    assert count > 10
    assert wrong == 0


def test_a_drafter_that_reads_nothing_while_it_is_left_out_is_seen(
    target: Backbone, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Eagle, "skip", lambda _self, _last_B: None)
    wrong, _ = wrong_proposals("eagle chain", target, texts)
    assert wrong > 0


def test_the_suffix_drafts_where_it_promises_more(target: Backbone) -> None:
    """A text that repeats, and a drafter that is never right."""
    common = {"warper": GREEDY, "max_new_tokens": 120}
    base = autoregressive(target, [[3, 3, 3, 3]], **common)
    bad = beside(make_drafter(target, noise=3.0), SuffixDecoding())
    done = generate(target, bad, [[3, 3, 3, 3]], **common)
    alone = generate(target, SuffixDecoding(), [[3, 3, 3, 3]], **common)
    assert done.tokens == base.tokens
    assert done.target_calls <= alone.target_calls + 10
    assert bad._records[0].mean < 0.5


class Peeking(SuffixHybrid):
    """A bug: takes the suffix draft where the trained drafter drew an unlikely token."""

    def _merged(self, last_B, own, chains, chosen_B):  # noqa: ANN001, ANN202
        if own is not None:
            drawn_B = own.q_BNV[:, 0].gather(1, own.tokens_BN[:, 1:2])[:, 0]
            for row, (draft, q) in enumerate(zip(self.suffix._drafts, drawn_B.tolist())):
                if draft.tokens and q < 0.4:
                    chains[row], chosen_B[row] = draft.tokens, True
            self._longest = max(map(len, chains))
            self._first_B = torch.where(chosen_B, 1, self._first_B)
        return super()._merged(last_B, own, chains, chosen_B)


@pytest.mark.slow
def test_a_choice_by_what_was_drawn_is_caught() -> None:
    small = Toy.of("suffix-hybrid tempered", seed=1)

    def peeking() -> SuffixHybrid:
        honest = small.proposer()
        return Peeking(honest.draft, honest.suffix)

    common = {"rule": None, "warper": Warper(0.7), "seed": 2, "level": 1e-4, "sequences": 30_000}
    assert enumerate_decoding(small.target, peeking, **common).p_value < 1e-9
    assert enumerate_decoding(small.target, small.proposer, **common).p_value > 1e-4


def test_what_cannot_stand_beside_it_is_refused(target: Backbone) -> None:
    ensemble = join([make_drafter(target, seed=1), make_drafter(target, seed=2)])
    with pytest.raises(RequestError, match="family 'ensemble' has no way for that"):
        beside(ensemble, SuffixDecoding())
    with pytest.raises(RequestError, match="leave drafter.suffix.nodes out"):
        beside(make_drafter(target), SuffixDecoding(nodes=5))
