"""What servers count, by hand: pages and answers of several engines, and drafts behind the end of an answer."""

from __future__ import annotations

from typing import Any

import pytest
from draftsmith.eval.measure.metrics import acceptance
from draftsmith.eval.server.counters import ServerCounters, counts_of_answer, read_counters
from draftsmith.eval.server.exchange import Exchange
from draftsmith.eval.server.measure import Half
from draftsmith.eval.server.rows import Counted


def answer(tokens: int, *, counted: bool = True, metrics: object = None, timings: object = None) -> Exchange:
    found = counts_of_answer(metrics, timings)
    plain = None if found is None else {k: getattr(v, "tolist", lambda v=v: v)() for k, v in vars(found).items()}
    return Exchange(0, "text", tokens, counted, 0.1, 0.2, [], plain)


def half(counted: ServerCounters | None, *answers: Exchange, **more: Any) -> Half:
    return Half(list(answers), list(range(len(answers))), counted=counted, **more)


def vllm(written: int, requests: int, steps: int, drafted: int, accepted: int, *positions: int) -> ServerCounters:
    return ServerCounters("vLLM", written, requests, steps, drafted, accepted, positions)


def tau(found: Counted) -> float:
    return acceptance(found.counts).tau.value


def test_drafts_behind_the_end_do_not_count() -> None:
    """Two answers of 3 tokens in a step each, whose drafts of 3 were all accepted: 4 tokens in 2 steps."""
    found = Counted([half(vllm(6, 2, 2, 6, 6, 2, 2, 2), answer(3), answer(3))])
    assert tau(found) == 2.0
    (note,) = found.notes
    assert "4 drafts were accepted behind the end of an answer" in note
    assert found.unit == "blocks"
    # by position they are the server's
    assert found.counts[0].passed_D.tolist() == [2, 2, 2]


def test_the_smaller_of_both_is_taken() -> None:
    """Steps without a draft wrote more tokens than those with one: no draft is behind an end."""
    found = Counted([half(vllm(20, 2, 3, 9, 4, 2, 1, 1), answer(10), answer(10))])
    assert tau(found) == pytest.approx(7 / 3)
    assert found.notes == []
    exact = Counted([half(vllm(9, 2, 3, 9, 4, 2, 1, 1), answer(5), answer(4))])
    assert (tau(exact), exact.notes) == (pytest.approx(7 / 3), [])


@pytest.mark.parametrize(
    "served",
    [
        half(vllm(60, 20, 2, 6, 6, 2, 2, 2), answer(3), answer(3)),
        half(vllm(6, 3, 2, 6, 6, 2, 2, 2), answer(3), answer(3)),
        half(vllm(7, 2, 2, 6, 6, 2, 2, 2), answer(3), answer(3)),
        half(vllm(6, 2, 2, 6, 6, 2, 2, 2), answer(3), answer(3), refused=["busy"]),
    ],
)
def test_nobody_elses_tokens_bound_ours(served: Half) -> None:
    assert tau(Counted([served])) == 4.0


def test_each_answer_is_bounded_by_its_own_tokens() -> None:
    own = {"num_spec_tokens": 3, "num_spec_steps": 1, "acceptance_histogram": [0, 0, 0, 1]}
    metrics = {"speculative_decoding": own | {"num_accepted_draft_tokens": 3, "num_draft_tokens": 3}}
    found = Counted([half(None, answer(3, metrics=metrics), answer(9, metrics=metrics))])
    assert found.unit == "requests"
    assert [each.emitted for each in found.counts] == [2, 4]
    assert any("2 drafts were accepted behind the end" in note for note in found.notes)
    # pieces of a stream bound nothing
    pieces = Counted([half(None, answer(2, counted=False, metrics=metrics))])
    assert [each.emitted for each in pieces.counts] == [4]


@pytest.mark.parametrize(
    ("own", "steps", "emitted", "tested", "passed"),
    [
        ({"num_spec_tokens": 3, "acceptance_histogram": [2, 1, 0, 1]}, 4, 8, [4, 2, 1], [2, 1, 1]),
        ({"acceptance_histogram": [2, 1, 0, 1]}, 4, 8, [4, 2, 1], [2, 1, 1]),
        (
            {"num_spec_tokens": 4, "acceptance_histogram": [0, 2], "num_spec_steps": 2},
            2,
            4,
            [2, 2, 0, 0],
            [2, 0, 0, 0],
        ),
        ({"acceptance_histogram_by_draft_length": {"2": [1, 0, 1]}}, 2, 4, [2, 1], [1, 1]),
        (
            {"acceptance_histogram_by_draft_length": None, "acceptance_histogram": [0, 1], "num_spec_steps": None},
            1,
            2,
            [1],
            [1],
        ),
    ],
)
def test_vllms_forms(own: dict[str, Any], steps: int, emitted: int, tested: list[int], passed: list[int]) -> None:
    counts = counts_of_answer({"speculative_decoding": own})
    assert counts is not None
    assert (counts.steps, counts.emitted) == (steps, emitted)
    assert (counts.tested_D.tolist(), counts.passed_D.tolist()) == (tested, passed)


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        [],
        {"speculative_decoding": {}},
        {"speculative_decoding": {"num_spec_tokens": 3, "num_spec_steps": 2}},
        {"speculative_decoding": {"acceptance_histogram": ["a"]}},
        {"speculative_decoding": {"acceptance_histogram": None}},
        {"speculative_decoding": {"acceptance_histogram_by_draft_length": {"3": None}}},
        {"speculative_decoding": {"acceptance_histogram_by_draft_length": {"x": [1]}}},
    ],
)
def test_what_says_nothing_is_no_count(metrics: object) -> None:
    assert counts_of_answer(metrics) is None


def test_llama_cpps_timings() -> None:
    """24 tokens, of which 15 were accepted drafts: behind the first one 8 calls wrote 23."""
    counts = counts_of_answer(None, {"predicted_n": 24, "predicted_ms": 9.0, "draft_n": 20, "draft_n_accepted": 15})
    assert counts is not None
    assert (counts.steps, counts.emitted, counts.tested_D.tolist()) == (8, 23, [])
    for broken in ({"draft_n": 3}, {"predicted_n": 4, "draft_n": 3, "draft_n_accepted": 3}, {"predicted_n": 4}):
        assert counts_of_answer(None, broken) is None


LLAMA = """\
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.
llamacpp:tokens_predicted_total {written}
llamacpp:requests_processing 0
llamacpp:spec_decode_num_draft_tokens_total {drafted}
llamacpp:spec_decode_num_accepted_tokens_total {accepted}
llamacpp:spec_decode_num_drafts_total {steps}
"""


def test_llama_cpps_page() -> None:
    """Positions appear with the first accepted one, and it does not count its answers."""
    before = read_counters(LLAMA.format(written=0, drafted=0, accepted=0, steps=0))
    page = LLAMA.format(written=24, drafted=12, accepted=6, steps=4)
    page += "".join(
        f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{at}"}} {n}\n'
        for at, n in enumerate((4, 2))
    )
    after = read_counters(page)
    assert after == ServerCounters("llama.cpp", 24, None, 4, 12, 6, (4, 2))
    assert before is not None and after is not None  # noqa: PT018
    assert after.since(before) == after
    assert before.since(after) is None
    assert read_counters("llamacpp:tokens_predicted_total 24") == ServerCounters("llama.cpp", 24, None)
    served = half(after.since(before), answer(12), answer(12))
    found = Counted([served])
    assert (tau(found), found.unit, found.draft_length, found.mean_nodes) == (2.5, "blocks", 2, 4.0)
    assert found.notes == []


def test_a_page_by_position_says_more_than_timings() -> None:
    timings = {"predicted_n": 12, "draft_n": 6, "draft_n_accepted": 3}
    answers = [answer(12, timings=timings), answer(12, timings=timings)]
    by_page = Counted([half(ServerCounters("llama.cpp", 24, None, 4, 12, 6, (4, 2)), *answers)])
    assert (tau(by_page), by_page.unit, by_page.notes) == (2.5, "blocks", [])
    for counted in (
        None,
        ServerCounters("llama.cpp", 99, None, 4, 12, 6, (4, 2)),
        ServerCounters("llama.cpp", 24, None),
    ):
        by_answer = Counted([half(counted, *answers)])
        assert (tau(by_answer), by_answer.unit) == (pytest.approx(11 / 8), "requests")
        assert any("all calls of the target behind the first token" in note for note in by_answer.notes)


def test_positions_that_appear_late() -> None:
    first, second = vllm(10, 1, 3, 9, 1, 1), vllm(30, 3, 9, 27, 9, 5, 3, 1)
    later = second.since(first)
    assert later == vllm(20, 2, 6, 18, 8, 4, 3, 1)
    found = Counted([half(first, answer(10)), half(later, answer(10), answer(10))])
    assert found.draft_length == 3
    assert [each.tested_D.tolist() for each in found.counts] == [[3, 0, 0], [6, 4, 3]]


@pytest.mark.parametrize(
    ("counted", "answers", "words"),
    [
        (vllm(100, 2, 9, 9, 9, 9), [answer(10), answer(10)], "wrote 100 tokens while 20 came here"),
        (vllm(20, 2, 9, 9, 9, 9), [answer(10), answer(10)], None),
        # no usage: 5 pieces of 20 tokens are nobody else's tokens
        (vllm(20, 2, 9, 9, 9, 9), [answer(5, counted=False), answer(5, counted=False)], None),
        (vllm(90, 9, 9, 9, 9, 9), [answer(5, counted=False)], "answered 9 requests while 1 were asked here"),
        (ServerCounters("llama.cpp", 90, None, 9, 9, 9, (9,)), [answer(5, counted=False)], None),
    ],
)
def test_others_are_told_from_answers_that_are_not_counted(
    counted: ServerCounters, answers: list[Exchange], words: str | None
) -> None:
    notes = [note for note in Counted([half(counted, *answers)]).notes if "served others" in note]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]
