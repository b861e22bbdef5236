"""What is reported of a server, from answers made by hand: waiting, speeds, acceptance, and what is said beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draftsmith.data.prompts import Prompt
from draftsmith.drafters.tuned_file import Promise
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.server.counters import ServerCounters, counts_of_answer, read_counters
from draftsmith.eval.server.exchange import Exchange
from draftsmith.eval.server.measure import Block, BlockPlan, Half, Load, Numbered
from draftsmith.eval.server.rows import Subject, _others, latency_fields, percentiles, server_rows

CONFIG = EvalConfig(max_new_tokens=12, prompts="some.jsonl")
PROMPTS = [Prompt("0", "chats", ("a",), chat=True), Prompt("1", "texts", ("b",), chat=False)]
NONE = [None, None, None]
TWO = Load(concurrency=2)


def answer(prompt: int, tokens: int, first: float, last: float, **more: Any) -> Exchange:
    """Pieces of one token, evenly apart."""
    gap = (last - first) / (tokens - 1) if tokens > 1 else 0.0
    values = {"text": f"text {prompt}", "counted": True, "gaps": [gap] * (tokens - 1)} | more
    return Exchange(prompt=prompt, tokens=tokens, first=first, last=last, **values)


def half(*exchanges: Exchange, seconds: float, numbers: list[int] | None = None, **more: Any) -> Half:
    return Half(list(exchanges), numbers or list(range(len(exchanges))), seconds=seconds, **more)


def block(own: Half, baseline: Half | None = None, *, load: Load = TWO, T: float = 0.0) -> Block:
    numbered = tuple(Numbered(n, n % 2) for n in own.numbers)
    return Block(BlockPlan(0, load, T, numbered), own, baseline)


def row_of(blocks: list[Block], **subject: Any) -> dict[str, Any]:
    (row,) = server_rows(blocks, Subject("small", PROMPTS, **subject), CONFIG)
    return row


def test_what_users_wait() -> None:
    """Two blocks of unlike answers, one of them of one token, two refused."""
    halves = [
        half(answer(0, 11, 0.5, 2.5), answer(1, 5, 0.25, 1.25), seconds=3.0, refused=["full"]),
        half(answer(0, 1, 1.0, 1.0), answer(1, 21, 0.75, 8.75), seconds=9.0, refused=["full"]),
    ]
    made = latency_fields(halves, 0)
    assert (made["requests"], made["refused"], made["tokens"]) == (4, 2, 38)
    assert made["tokens_per_second"][0] == pytest.approx(38 / 12)
    assert made["first"]["p50"][0] == 0.5
    assert made["first"]["p99"][0] == 1.0
    # of 0.2, 0.25 and 0.4 seconds a token behind the first; one token has none
    assert [made["per_token"][name][0] for name in ("p50", "p90", "p99")] == pytest.approx([0.25, 0.4, 0.4])
    # 10 gaps of 0.2, 4 of 0.25 and 20 of 0.4: half of 34 is the 17th
    assert made["gap"]["p50"][0] == pytest.approx(0.4)
    assert made["whole"]["p50"][0] == 1.25
    assert made["whole"]["p90"][0] == 8.75
    assert answer(0, 1, 1.0, 1.0).per_token is None
    assert answer(0, 11, 0.5, 2.5).per_token == pytest.approx(0.2)


def test_a_percentile_is_the_smallest_number_that_so_many_do_not_exceed() -> None:
    ten = percentiles([[float(n)] for n in range(1, 11)], 0)
    assert [ten[name][0] for name in ("p50", "p90", "p99")] == [5.0, 9.0, 10.0]
    uneven = percentiles([[1.0] * 9, [2.0], [], [3.0] * 90], 0)
    assert [uneven[name][0] for name in ("p50", "p90", "p99")] == [3.0, 3.0, 3.0]
    assert percentiles([[1.0] * 50, [2.0] * 49, [9.0]], 0)["p99"][0] == 2.0


def test_intervals_hold_in_95_of_100() -> None:
    """Of 400 requests, each of its own rank, a percentile q moves by 1.96 sqrt(400 q (1 - q)) ranks each way."""
    found = [percentiles([[float(n)] for n in range(400)], seed) for seed in range(6)]
    for name, share in (("p50", 0.5), ("p90", 0.9)):
        assert {each[name][0] for each in found} == {400 * share - 1}
        low, high = np.mean([each[name][1:] for each in found], axis=0)
        assert high - low == pytest.approx(2 * 1.96 * (400 * share * (1 - share)) ** 0.5, rel=0.06)
        assert (low + high) / 2 == pytest.approx(400 * share - 1, abs=1.5)
    assert len({tuple(each["p50"]) for each in found}) > 1, "another seed draws others"


def test_gaps_of_one_request_are_no_evidence_of_their_own() -> None:
    """50 gaps each of 100 requests: as wide as 100 numbers are, not 5,000."""
    _, low, high = percentiles([[float(n)] * 50 for n in range(100)], 0)["p50"]
    assert high - low == pytest.approx(2 * 1.96 * 5, abs=3)  # type: ignore[operator]


def test_speed_is_what_users_wait_for_a_token_and_not_what_a_block_lasts() -> None:
    """Two at a time, and answers of unlike length. Ours: 20 tokens in 4 s of waiting; the other's: 30 in 12 s."""
    blocks = [
        block(
            half(answer(0, 10, 0.1, 1.0), answer(1, 10, 0.1, 3.0), seconds=3.0),
            half(answer(0, 20, 0.1, 9.0), answer(1, 10, 0.1, 3.0), seconds=9.5),
        )
    ] * 3
    row = row_of(blocks)
    assert row["speedup"][0] == pytest.approx((12 / 30) / (4 / 20))
    assert row["tokens_per_second"] == pytest.approx(20 / 3.0)
    assert row["baseline_tokens_per_second"] == pytest.approx(30 / 9.5)
    assert row["server"]["baseline"]["tokens"] == 90
    alone = row_of([block(half(answer(0, 10, 0.1, 1.0), seconds=1.0))])
    assert (alone["speedup"], alone["baseline_tokens_per_second"], alone["differing_rows"]) == (NONE, None, None)


def counted(steps: int, drafted: int, accepted: tuple[int, ...], written: int = 0) -> ServerCounters:
    return ServerCounters("vLLM", written, 2, steps, drafted, sum(accepted), accepted)


def test_acceptance_of_blocks_is_of_their_sums() -> None:
    blocks = [
        block(half(answer(0, 9, 0.1, 1.0), seconds=1.0, counted=counted(4, 12, (3, 2, 0), written=9))),
        block(half(answer(1, 5, 0.1, 1.0), seconds=1.0, counted=counted(2, 6, (1, 0, 0), written=5))),
    ]
    row = row_of(blocks)
    assert row["tau"][0] == pytest.approx(1 + 6 / 6)
    assert row["steps"] == 6
    assert [each[0] for each in row["n_alpha"]] == [pytest.approx(4 / 6), pytest.approx(2 / 4), pytest.approx(0.0)]
    assert row["n_alpha_counts"] == [6, 4, 2]
    assert (row["draft_length"], row["nodes"], row["mean_nodes"]) == (3, 4, 1 + 18 / 6)
    assert (row["tau_macro"], row["alpha_hat"]) == (NONE, NONE), "blocks have none of their own"
    assert row["server"]["counted_by"] == "blocks"
    assert not any("served others" in note for note in row["server"]["notes"])


def own_counts(steps: int, accepted: list[int]) -> dict[str, Any]:
    return {
        "steps": steps,
        "emitted": steps + sum(accepted),
        "truncated": 0,
        "tested_D": [float(steps), *map(float, accepted[:-1])],
        "passed_D": list(map(float, accepted)),
        "alpha_hat_D": [0.0] * len(accepted),
    }


def test_acceptance_of_answers_is_resampled_by_answer_and_told_by_category() -> None:
    blocks = [
        block(
            half(
                answer(0, 10, 0.1, 1.0, counts=own_counts(4, [3, 2])),
                answer(1, 5, 0.1, 1.0, counts=own_counts(3, [1, 0])),
                seconds=1.0,
                counted=counted(400, 800, (300, 200)),
            )
        )
    ] * 2
    row = row_of(blocks, verdict="lossless")
    assert row["tau"][0] == pytest.approx(13 / 7)
    assert row["tau_macro"][0] == pytest.approx((9 / 4 + 4 / 3) / 2)
    assert (row["steps"], row["draft_length"], row["mean_nodes"]) == (14, 2, None)
    assert (row["server"]["counted_by"], row["verdict"], row["audited"]) == (
        "requests",
        "lossless",
        "small, 2 at a time",
    )
    chats, texts = row["categories"]
    assert (chats["category"], chats["requests"], chats["tau"][0]) == ("chats", 2, pytest.approx(9 / 4))
    assert (texts["category"], texts["requests"], texts["tau"][0]) == ("texts", 2, pytest.approx(4 / 3))
    # one answer without counts, and the server's own are taken
    mixed = [
        block(half(answer(0, 9, 0.1, 1.0), *blocks[0].own.exchanges, seconds=1.0, counted=counted(8, 16, (4, 2))))
    ]
    assert row_of(mixed)["steps"] == 8


@pytest.mark.parametrize(("written", "others"), [(100, False), (102, False), (103, True)])
def test_others_at_the_server_are_told_from_two_per_cent_on(written: int, *, others: bool) -> None:
    own = half(answer(0, 60, 0.1, 1.0), answer(1, 40, 0.1, 1.0), seconds=1.0, counted=counted(9, 18, (4, 2), written))
    assert any("it served others too" in note for note in row_of([block(own)])["server"]["notes"]) is others


def test_answers_that_differ_are_counted_by_their_request() -> None:
    """In whatever order they came, and only those that both servers have answered."""
    mine, theirs = (
        half(*(answer(0, 5, 0.1, 1.0, text=text) for _, text in each), seconds=1.0, numbers=[n for n, _ in each])
        for each in ([(2, "c"), (0, "a"), (1, "b")], [(1, "other"), (2, "c")])
    )
    assert row_of([block(mine, theirs)] * 2)["differing_rows"] == 2
    assert row_of([block(mine, theirs, T=0.5)])["differing_rows"] is None


def test_rows_are_of_their_load_and_temperature() -> None:
    loads = [Load(concurrency=1), Load(rate=2.5)]
    blocks = [
        block(half(answer(0, n + 2, 0.1, 1.0), seconds=1.0), load=load, T=T)
        for n, (T, load) in enumerate([(0.0, loads[0]), (0.0, loads[1]), (1.0, loads[0]), (0.0, loads[0])])
    ]
    rows = server_rows(blocks, Subject("small", PROMPTS), CONFIG)
    assert [(row["method"], row["temperature"], row["server"]["own"]["tokens"]) for row in rows] == [
        ("small, 1 at a time", 0.0, 2 + 5),
        ("small, 2.5 a second", 0.0, 3),
        ("small, 1 at a time", 1.0, 4),
    ]
    assert rows[1]["server"]["load"] == {"concurrency": None, "rate": 2.5}
    assert [row["server"]["blocks"] for row in rows] == [2, 1, 1]


@pytest.mark.parametrize(
    ("load", "temperature", "predicted"),
    [
        (Load(concurrency=2), 0.0, 1.7),
        (Load(concurrency=1), 0.0, None),
        (Load(concurrency=2), 0.5, None),
        (Load(rate=2.0), 0.0, None),
    ],
)
def test_a_prediction_is_of_its_load(load: Load, temperature: float, predicted: float | None) -> None:
    promise = Promise(0.0, 2, 1.7, 1.6, "here")
    row = row_of([block(half(answer(0, 9, 0.1, 1.0), seconds=1.0), load=load, T=temperature)], promise=promise)
    assert row["predicted_speedup"] == predicted
    said = any("no prediction: the drafter was tuned for T = 0 and 2 at a time" in n for n in row["server"]["notes"])
    assert said is (predicted is None)


def test_what_is_not_known_is_said() -> None:
    uncounted = row_of([block(half(answer(0, 9, 0.1, 1.0, counted=False), seconds=1.0, refused=["full"]))])
    said = " | ".join(uncounted["server"]["notes"])
    assert "pieces of its stream are counted" in said
    assert "1 requests were refused, the last one with: full" in said
    assert "no counters at /metrics" in said
    assert "every answer came in one piece" not in said
    whole = row_of([block(half(answer(0, 9, 1.0, 1.0, gaps=[]), seconds=1.0))])
    assert any("every answer came in one piece" in note for note in whole["server"]["notes"])
    some = row_of([block(half(answer(0, 1, 1.0, 1.0), answer(1, 9, 0.1, 1.0), seconds=1.0))])
    assert not any("every answer came in one piece" in note for note in some["server"]["notes"])
    silent = row_of([block(half(answer(0, 9, 0.1, 1.0), seconds=1.0, counted=ServerCounters("vLLM", 9, 1)))])
    assert any("the server counts no drafts" in note for note in silent["server"]["notes"])
    restarted = [block(half(answer(0, 9, 0.1, 1.0), seconds=1.0, counted=c)) for c in (counted(4, 8, (2, 1), 9), None)]
    unknown = row_of(restarted)
    assert unknown["tau"] == NONE
    assert any("acceptance is not known" in note for note in unknown["server"]["notes"])


def test_the_text_is_the_one_without_speculation() -> None:
    """Each prompt's first answer; a text that loops is flagged."""
    loop, other = "x" * 60, "abcdefghijklmnopqrstuvwxyz"
    own = half(answer(0, 9, 0.1, 1.0, text=loop), seconds=1.0)
    base = half(answer(0, 9, 0.1, 1.0, text=other), seconds=1.0)
    encode = {"encode": lambda text: [ord(each) for each in text]}
    assert row_of([block(own, base)], **encode)["flagged"] is False
    assert row_of([block(own)], **encode)["flagged"] is True
    assert row_of([block(own)], **encode)["loop_share"] == pytest.approx(1.0)
    assert row_of([block(own)])["loop_share"] is None


def test_counters_of_every_engine_are_added_up_and_subtracted() -> None:
    page = "\n".join(
        f'vllm:{name}_total{{engine="{engine}"{more}}} {value}'
        for engine, factor in ((0, 1), (1, 10))
        for name, more, value in (
            ("generation_tokens", "", 7 * factor),
            ("request_success", "", factor),
            ("spec_decode_num_drafts", "", 5 * factor),
            ("spec_decode_num_draft_tokens", "", 15 * factor),
            ("spec_decode_num_accepted_tokens", "", 6 * factor),
            ("spec_decode_num_accepted_tokens_per_pos", ',position="0"', 4 * factor),
            ("spec_decode_num_accepted_tokens_per_pos", ',position="1"', 2 * factor),
        )
    )
    read = read_counters(page)
    assert read == ServerCounters("vLLM", 77, 11, 55, 165, 66, (44, 22))
    # a server that had drafted nothing yet
    assert read.since(ServerCounters("vLLM", 7, 1)) == ServerCounters("vLLM", 70, 10, 55, 165, 66, (44, 22))  # type: ignore[union-attr]
    later = read.since(ServerCounters("vLLM", 7, 1, 5, 15, 6, (4, 2)))  # type: ignore[union-attr]
    assert later == ServerCounters("vLLM", 70, 10, 50, 150, 60, (40, 20))
    counts = read.counts()  # type: ignore[union-attr]
    assert counts is not None
    assert (counts.steps, counts.emitted, counts.truncated) == (55, 121, 0)
    assert (counts.tested_D.tolist(), counts.passed_D.tolist()) == ([55, 44], [44, 22])
    assert ServerCounters("vLLM", 7, 1, 0, 0, 0, (0, 0)).counts() is None
    assert ServerCounters("vLLM", 7, 1, 4).since(ServerCounters("vLLM", 9, 1, 2)) is None
    assert ServerCounters("vLLM", 9, 1, 2).since(ServerCounters("vLLM", 7, 1, 4)) is None


def test_counts_of_an_answer_by_the_length_of_its_drafts() -> None:
    """Three drafted: one step took none, one took two, one all; one drafted: three took it."""
    own = {
        "num_spec_tokens": 3,
        "num_spec_steps": 6,
        "num_accepted_draft_tokens": 8,
        "acceptance_histogram_by_draft_length": {"3": [1, 0, 1, 1], "1": [0, 3]},
    }
    counts = counts_of_answer({"speculative_decoding": own})
    assert counts is not None
    assert (counts.steps, counts.emitted) == (6, 14)
    assert counts.tested_D.tolist() == [6, 2, 2]
    assert counts.passed_D.tolist() == [5, 2, 1]
    np.testing.assert_array_equal(counts.alpha_hat_D, np.zeros(3))


@pytest.mark.parametrize(
    ("answered", "note"), [(4, None), (5, "the server answered 5 requests while 4 were asked here")]
)
def test_a_request_that_was_refused_was_asked(answered: int, note: str | None) -> None:
    exchanges: Any = [SimpleNamespace(counted=None, tokens=3)] * 3
    half = Half(exchanges=exchanges, refused=["too long"])
    assert _others([ServerCounters("vLLM", 9, answered)], [half]) == note
