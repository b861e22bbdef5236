"""A decoder that is handed over as a function: judged by what it writes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import draftsmith
import numpy as np
import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith import AuditConfig, DecodeRequest
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.errors import RequestError

PROMPTS = [[n + 1, n + 2, n + 3] for n in range(8)]
FEW = AuditConfig(tokens=4000, max_new_tokens=32, prompts=4)


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def sampling(target: Backbone, *, hotter: float = 1.0, seeds: Callable[[int], int] = lambda seed: seed) -> Any:
    """A decoder with nothing of ours: whole texts through the model for each token."""

    def decode(prompts: list[list[int]], request: DecodeRequest) -> list[list[int]]:
        generators = [torch.Generator().manual_seed(seeds(seed)) for seed in request.seeds]
        ids_BS = torch.tensor(prompts)
        with torch.inference_mode():
            for _ in range(request.max_new_tokens):
                logits_BV = target.model(ids_BS).logits[:, -1].float()
                if request.temperature == 0:
                    new_B = logits_BV.argmax(-1)
                else:
                    p_BV = (logits_BV / (hotter * request.temperature)).softmax(-1)
                    rows = zip(p_BV, generators, strict=True)
                    new_B = torch.cat([torch.multinomial(p_V, 1, generator=each) for p_V, each in rows])
                ids_BS = torch.cat([ids_BS, new_B[:, None]], 1)
        return ids_BS[:, len(prompts[0]) :].tolist()

    return decode


def test_a_right_one_is_lossless_and_the_report_says_what_was_left_out(target: Backbone) -> None:
    report = draftsmith.audit(target, None, PROMPTS, FEW, decode=sampling(target))
    assert report.verdict == "lossless", report.text()
    assert report.decoder == "function"
    assert report.enumeration is None
    assert "enumeration: left out, as tables are decoded by our own engine alone" in report.text()
    assert report.rosenblatt.order == "p"
    assert report.to_dict()["decoder"] == "function"


def test_answers_may_end_where_the_text_does(target: Backbone) -> None:
    """Behind an end of text nothing has to be written, and numpy's integers are integers."""
    whole = sampling(target)

    def decode(prompts: list[list[int]], request: DecodeRequest) -> Sequence[Any]:
        answers = whole(prompts, request)
        return [np.array(answer[: answer.index(7) + 1] if 7 in answer else answer) for answer in answers]

    assert draftsmith.audit(target, None, PROMPTS, FEW, decode=decode).verdict == "lossless"


@pytest.mark.parametrize(
    ("wrong", "seen"), [({"hotter": 1.25}, "the real pair"), ({"seeds": lambda seed: seed % 3}, "the real pair")]
)
def test_a_wrong_one_is_not(wrong: dict[str, Any], seen: str, target: Backbone) -> None:
    report = draftsmith.audit(target, None, PROMPTS, FEW, decode=sampling(target, **wrong))
    assert report.verdict == "NOT lossless"
    assert any(seen in failure for failure in report.failures)
    assert report.replay.bugs == 0


def test_a_greedy_token_that_is_none_is_found(target: Backbone) -> None:
    right = sampling(target)

    def decode(prompts: list[list[int]], request: DecodeRequest) -> list[list[int]]:
        answers: list[list[int]] = right(prompts, request)
        if request.temperature == 0:
            answers[0][5] = (answers[0][5] + 1) % target.vocabulary
        return answers

    report = draftsmith.audit(target, None, PROMPTS, FEW, decode=decode)
    assert report.verdict == "NOT lossless"
    assert report.replay.first_bug is not None
    assert "request 0, token 5" in report.replay.first_bug


def test_with_the_draft_at_hand_the_order_is_by_p_minus_q(target: Backbone) -> None:
    draft = make_drafter(target, noise=0.03)
    assert (
        draftsmith.audit(target, draft, PROMPTS, FEW, decode=sampling(target), tokens=500).rosenblatt.order == "p - q"
    )


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (
            lambda n: [[1]] * (n - 1),
            "decode returned 31 answers; expected 32 lists of 1 to 32 new token ids from 0 to 60",
        ),
        (lambda n: [[1]] * (n - 1) + [[]], "decode's answer 31 has 0 tokens"),
        (lambda n: [[1] * 33] * n, "decode's answer 0 has 33 tokens; .* without the prompts"),
        (lambda n: [[61]] * n, "decode's answer 0 has the token id 61"),
        (lambda n: ["text"] * n, "decode returned list .*str.* cannot be interpreted as an integer"),
        (lambda _n: None, "decode returned NoneType"),
    ],
)
def test_what_cannot_be_judged_is_refused(answers: Any, said: str, target: Backbone) -> None:
    with pytest.raises(RequestError, match=said):
        draftsmith.audit(target, None, PROMPTS, FEW, decode=lambda prompts, _request: answers(len(prompts)))


def test_what_does_not_go_with_a_function_is_refused(target: Backbone) -> None:
    decode = sampling(target)
    with pytest.raises(RequestError, match="the drafter is None; expected one that is made"):
        draftsmith.audit(target, None, PROMPTS, FEW)
    with pytest.raises(RequestError, match="decides by itself what it accepts: leave the others out"):
        draftsmith.audit(target, None, PROMPTS, FEW, decode=decode, decoder="hf")
    with pytest.raises(RequestError, match="--plant goes into our own decoder; leave out decode"):
        draftsmith.audit(target, None, PROMPTS, FEW, decode=decode, plant="fresh-draw")
    with pytest.raises(RequestError, match="decode is 'engine'"):
        draftsmith.audit(target, None, PROMPTS, FEW, decode="engine")  # type: ignore[arg-type]
