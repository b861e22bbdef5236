"""Near-ties are excused by rounding, and not more of them than rounding makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import chain
from draftsmith.eval.audit import replay as replaying
from draftsmith.eval.audit.audit import FALSE_ALARM, SHARES
from draftsmith.eval.audit.replay import explained_near_ties, one_by_one, replay, token_by_token
from scipy import stats

PROMPTS = [[n, n + 1, 2 * n % 61] for n in range(1, 9)]
TOKENS = 24
LEVEL = FALSE_ALARM * SHARES["near-ties of the greedy replay"]


@pytest.fixture(scope="module")
def half() -> Backbone:
    """In bf16, and every token has a neighbour that is nearly as likely."""
    target = make_target("qwen3")
    weight_VH = target.model.get_output_embeddings().weight
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        shift_VH = 0.03 * torch.randn(30, weight_VH.shape[1], generator=g)
        weight_VH[30:60] = weight_VH[:30] * (1 + shift_VH)
    target.model.to(torch.bfloat16)
    return target


def test_answers_side_by_side_are_each_by_itself(target: Backbone) -> None:
    """Uneven prompts and answers; whoever ends first changes nothing for the others."""
    prompts, answers = [[3, 4, 5, 6, 7], [8], [9, 10]], [[1, 2], [3, 4, 5, 6, 7, 8], [9]]
    together = token_by_token(target, prompts, answers)
    for prompt, answer, found_MV in zip(prompts, answers, together, strict=True):
        # the model's own forward over the whole text
        own_SV = target.model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
        torch.testing.assert_close(found_MV, own_SV[len(prompt) - 1 : -1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found_MV, one_by_one(target, prompt, answer), rtol=1e-4, atol=1e-4)


def second_best(target: Backbone, prompt: list[int], close: float) -> list[int]:
    """Greedy, but for the second best wherever the two largest logits are that close."""
    kv_cache = KVCache(1, len(prompt) + TOKENS + 1)
    logits_V = target.prefill([prompt], kv_cache)[0]
    answer: list[int] = []
    for at in range(TOKENS):
        best = logits_V.float().topk(2)
        answer.append(int(best.indices[int(best.values[0] - best.values[1] <= close)]))
        length = torch.tensor([len(prompt) + at])
        logits_V = target.forward(torch.tensor([[answer[-1]]]), length, chain(0), kv_cache)[0, 0]
    return answer


def test_a_decoder_that_emits_the_second_best_at_small_margins_fails_in_bf16(half: Backbone) -> None:
    noise = replay(
        half, PROMPTS, autoregressive(half, PROMPTS, warper=Warper(0.0), max_new_tokens=TOKENS).tokens
    ).noise
    found = replay(half, PROMPTS, [second_best(half, prompt, 2 * noise) for prompt in PROMPTS])
    # every single one of them is excused
    assert found.bugs == 0
    assert found.near_ties > 50
    # all of them are not
    assert found.near_tie_p < LEVEL


@pytest.mark.parametrize("batch", [1, 4])
def test_near_ties_of_a_right_decoder_in_bf16_are_explained(half: Backbone, batch: int) -> None:
    answers = [
        answer
        for at in range(0, len(PROMPTS), batch)
        for answer in autoregressive(
            half, PROMPTS[at : at + batch], warper=Warper(0.0), max_new_tokens=TOKENS, pad_to=5
        ).tokens
    ]
    found = replay(half, PROMPTS, answers)
    assert found.bugs == 0
    assert found.near_ties <= 2 * found.explained
    assert found.near_tie_p > 0.01


def test_the_estimate_holds_where_rounding_is_simulated() -> None:
    """Margins from 0 on, shifts as large as those that exchange tokens, and up to twice as large."""
    rng = np.random.default_rng(0)
    for scale in (1.0, 1.5, 2.0):
        margins, shifts = rng.exponential(1.0, 3000), rng.normal(0, 0.02, 3000)
        exchanged = int((rng.normal(0, 0.02 * scale, 3000) < -margins).sum())
        noise = float(np.abs(shifts).max())
        explained = explained_near_ties(margins.tolist(), shifts.tolist(), noise)
        assert stats.poisson.sf(exchanged - 1, explained) > 0.01


def test_one_near_tie_of_rounding_is_no_failure_in_fp32() -> None:
    explained = explained_near_ties([5e-6, *[0.5] * 2000], [1e-6] * 2001, 4e-6)
    assert explained == pytest.approx(1 / 2003)
    assert explained > LEVEL
    assert explained_near_ties([], [], 0.0) == 0


class TwoWords:
    """A target of two words: the first is the likelier by a gap that is planned for each token of the answer."""

    device = torch.device("cpu")

    def __init__(self, gaps: list[float]) -> None:
        self.gaps = gaps

    def model(self, ids: torch.Tensor, *, use_cache: bool) -> Any:
        behind = [[0.0, 0.0]] * (ids.shape[1] - len(self.gaps) - 1) + [[gap, 0.0] for gap in self.gaps] + [[0.0, 0.0]]
        return SimpleNamespace(logits=torch.tensor([behind]))


@pytest.mark.parametrize(
    ("gap", "rounding", "kind"),
    [
        (0.0199, [0.01], "near"),
        (0.0201, [0.01], "bug"),
        (0.1, [0.01], "bug"),
        (0.0199, [-0.01], "near"),
        (0.0199, [0.001, 0.01], "near"),
        (0.0001, [], "bug"),
        (0.0199, [0.009], "bug"),
    ],
)
def test_a_near_tie_is_within_twice_the_noise(
    gap: float, rounding: list[float], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either logit may be off by it, in opposite directions; the right token is neither, however close."""
    target: Any = TwoWords([5.0, gap, gap])
    monkeypatch.setattr(
        replaying, "token_by_token", lambda target, *_: [torch.tensor([[each, 0.0] for each in target.gaps])]
    )
    found = replay(target, [[0, 0]], [[0, 1, 0]], rounding=rounding)
    assert (found.tokens, found.argmax) == (3, 2)
    assert (found.near_ties, found.bugs) == ((1, 0) if kind == "near" else (0, 1))
    assert found.noise == pytest.approx(max(map(abs, rounding), default=0.0))
    assert found.smallest_margin == pytest.approx(gap, rel=1e-3)
    assert (found.first_bug is None) is (kind == "near")
    assert kind == "near" or found.first_bug.startswith("request 0, token 1: emitted 1, argmax 0")  # type: ignore[union-attr]
