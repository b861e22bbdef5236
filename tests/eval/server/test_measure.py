"""A server measured: what it counts, what its users wait, side by side with one that does not speculate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import make_drafter
from draftsmith.data.generate.server_request import ServerRequest
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.report.results import schema
from draftsmith.eval.server.counters import ServerCounters, counts_of_answer, read_counters
from draftsmith.eval.server.measure import Block, Load, measure_blocks, plan
from draftsmith.eval.server.rows import Subject, server_rows
from helpers.servers.served_target import ALL, Engine, ServedTarget, serving, without

CONFIG = EvalConfig(temperatures=[0.0], max_new_tokens=12)
LENGTH = 3


def asked(server: ServedTarget, **changes: Any) -> ServerRequest:
    values: dict[str, Any] = {"concurrency": 8, "retries": 0, "timeout": 60.0} | changes
    return ServerRequest(server.url, "small", 0.0, 0, 1.0, CONFIG.max_new_tokens, 0, **values)


def measured(
    servers: list[ServedTarget], prompts: list[Prompt], out: Path, *loads: Load, requests: int = 6, **subject: Any
) -> tuple[list[Block], list[dict[str, Any]]]:
    plans = plan(len(prompts), loads or (Load(concurrency=1),), CONFIG.temperatures, requests=requests)
    blocks = measure_blocks(prompts, plans, [asked(each) for each in servers], CONFIG, out)
    rows = server_rows(blocks, Subject("small", prompts, **subject), CONFIG)
    row_schema = {**schema(), "$ref": "#/$defs/row"}
    for name in ("type", "properties", "required", "additionalProperties"):
        del row_schema[name]
    for row in rows:
        json.dumps(row, allow_nan=False)
        jsonschema.validate(row, row_schema)
    return blocks, rows


def spoken(served: Backbone, **settings: Any) -> Engine:
    return Engine(served, make_drafter(served, noise=0.05, draft_length=LENGTH), **settings)


def test_acceptance_is_the_servers_own_and_its_text_the_baselines(
    served: Backbone, prompts: list[Prompt], tmp_path: Path
) -> None:
    with serving(spoken(served)) as own, serving(Engine(served)) as base:
        blocks, (row,) = measured([own, base], prompts, tmp_path)
        counts = own.engine.counts
    # one request warms up, and so does what the server counts in the meantime
    assert len(own.asked) == len(base.asked) == 1 + 6
    steps = sum(block.own.counted.steps for block in blocks if block.own.counted is not None)
    accepted = sum(block.own.counted.accepted for block in blocks if block.own.counted is not None)
    assert 0 < steps < counts["drafts"]
    assert row["steps"] == steps
    # of the 12 tokens of each answer the first is the prefill's; drafts behind the last one do not count
    assert steps + accepted > 12 * 6 - 6
    assert row["tau"][0] == pytest.approx((12 * 6 - 6) / steps)
    assert row["tau"][1] < row["tau"][0] < row["tau"][2]
    assert row["n_alpha_counts"][0] == steps
    assert len(row["n_alpha"]) == row["draft_length"] == LENGTH
    assert row["mean_nodes"] == 1 + LENGTH
    assert row["server"]["counted_by"] == "blocks"
    assert (row["alpha_hat"], row["tau_macro"]) == ([None] * 3, [None] * 3)
    assert row["differing_rows"] == 0
    assert row["speedup"][0] > 0
    assert (row["verdict"], row["audited"]) == ("not audited", None)
    own_wait = row["server"]["own"]
    assert (own_wait["requests"], own_wait["tokens"], own_wait["refused"]) == (6, 6 * 12, 0)
    assert 0 < own_wait["first"]["p50"][0] <= own_wait["whole"]["p50"][0]


def test_each_answers_own_counts_are_taken_where_there_are_some(
    served: Backbone, prompts: list[Prompt], tmp_path: Path
) -> None:
    with serving(spoken(served), [*ALL, "per request"]) as own:
        blocks, (row,) = measured([own], prompts, tmp_path)
    assert row["server"]["counted_by"] == "requests"
    assert row["tau_macro"][0] is not None
    # two accounts of the same steps
    assert row["steps"] == sum(block.own.counted.steps for block in blocks if block.own.counted is not None)
    assert sum(each["steps"] for each in row["categories"]) == row["steps"]
    assert [each["category"] for each in row["categories"]] == ["chats", "texts"]
    assert (row["speedup"], row["baseline_tokens_per_second"]) == ([None] * 3, None)


@pytest.mark.parametrize(
    ("hands_out", "drafted", "words"),
    [(without("metrics"), True, "no counters at /metrics"), (sorted(ALL), False, "counts no drafts")],
)
def test_where_nothing_counts_it_is_said(
    served: Backbone, prompts: list[Prompt], tmp_path: Path, hands_out: list[str], *, drafted: bool, words: str
) -> None:
    with serving(spoken(served) if drafted else Engine(served), hands_out) as own:
        _, (row,) = measured([own], prompts, tmp_path)
    assert (row["tau"], row["n_alpha"], row["draft_length"]) == ([None] * 3, [], None)
    assert any(words in note for note in row["server"]["notes"])


def test_loads_are_what_they_say(served: Backbone, prompts: list[Prompt], tmp_path: Path) -> None:
    """Each has its rows and blocks; who is under way when, and who waits for whom: `test_loads.py`."""
    with serving(Engine(served)) as own:
        blocks, rows = measured([own], prompts, tmp_path, Load(concurrency=4), Load(rate=200.0), requests=24)
    assert [row["method"] for row in rows] == ["small, 4 at a time", "small, 200 a second"]
    assert [row["server"]["load"] for row in rows] == [
        {"concurrency": 4, "rate": None},
        {"concurrency": None, "rate": 200.0},
    ]
    assert [row["requests"] for row in rows] == [24, 24]
    assert all(len(block.own.exchanges) == 4 for block in blocks)


def test_others_at_the_server_are_noticed(served: Backbone, prompts: list[Prompt], tmp_path: Path) -> None:
    with serving(spoken(served)) as own:
        page = own.engine.page
        seen = []

        def busy() -> str:
            own.engine.counts["generation_tokens"] += 40
            seen.append(1)
            return page()

        own.engine.page = busy  # type: ignore[method-assign]
        _, (row,) = measured([own], prompts, tmp_path)
    assert len(seen) == 2 * (6 + 1)
    assert any("it served others too" in note for note in row["server"]["notes"])


def test_a_stopped_measurement_goes_on(served: Backbone, prompts: list[Prompt], tmp_path: Path) -> None:
    with serving(spoken(served)) as own:
        own.fail_after = 4
        with pytest.raises(RequestError, match="status 401"):
            measured([own], prompts, tmp_path)
        done = (tmp_path / "server-blocks" / ".journal.jsonl").read_bytes().count(b"\n")
        before, own.fail_after = len(own.asked), None
        blocks, _ = measured([own], prompts, tmp_path)
        assert done == 3
        assert len(own.asked) - before == 1 + 3  # warm-up, and what was not done
        assert [number for block in blocks for number in block.own.numbers] == list(range(6))
        with pytest.raises(RequestError, match="made for something else"):
            measured([own], prompts[:1], tmp_path)


def test_the_key_is_sent_and_written_nowhere(
    served: Backbone, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with serving(Engine(served)) as own:
        measured([own], prompts, tmp_path)
    assert set(own.keys) == {"Bearer sk-secret"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 2
    assert not any(b"sk-secret" in path.read_bytes() for path in files)


def test_a_server_that_is_gone(served: Backbone, prompts: list[Prompt], tmp_path: Path) -> None:
    with serving(Engine(served)) as own:
        pass
    with pytest.raises(EnvironmentFailure, match="was tried once: no connection"):
        measured([own], prompts, tmp_path)


VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a \\"b\\" {c}"} 588.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 1e+02
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 2352.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 432.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 100.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 249.0
vllm:generation_tokens_total{engine="0",model_name="a"} 1024.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="a"} 13.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} NaN
"""
SGLANG = """\
sglang:spec_accept_length{model_name="a",tp_rank="0"} 2.5
sglang:spec_verify_calls_total{model_name="a"} 40.0
sglang:generation_tokens_total{model_name="a"} 110.0
sglang:num_requests_total{model_name="a"} 10.0
"""


def test_pages_of_both_engines() -> None:
    read = read_counters(VLLM)
    assert read == ServerCounters("vLLM", 1024, 16, 688, 2352, 432, (249, 100))
    assert read is not None
    assert ServerCounters.from_dict(json.loads(json.dumps(read.to_dict()))) == read
    later = ServerCounters("vLLM", 1034, 17, 691, 2361, 436, (251, 101))
    difference = later.since(read)
    assert difference == ServerCounters("vLLM", 10, 1, 3, 9, 4, (2, 1))
    assert difference is not None
    counts = difference.counts()
    assert counts is not None
    assert (counts.steps, counts.emitted) == (3, 7)
    assert (counts.tested_D.tolist(), counts.passed_D.tolist()) == ([3, 2], [2, 1])
    assert read.since(later) is None, "a server that began anew"
    counts = read_counters(SGLANG).counts()  # type: ignore[union-attr]
    assert counts is not None
    # of each answer's tokens the first is the prefill's
    assert (counts.steps, counts.emitted, len(counts.tested_D)) == (40, 100, 0)
    assert read_counters("python_info 1.0\n<html>") is None


def test_counts_of_one_answer() -> None:
    """Two lengths of drafts: position 2 is tested only where it was drafted."""
    own = {
        "num_spec_tokens": 3,
        "num_spec_steps": 6,
        "num_accepted_draft_tokens": 7,
        "acceptance_histogram_by_draft_length": {"3": [1, 1, 0, 2], "1": [2, 0]},
    }
    counts = counts_of_answer({"speculative_decoding": own})
    assert counts is not None
    assert (counts.steps, counts.emitted) == (6, 13)
    assert counts.tested_D.tolist() == [6, 3, 2]
    assert counts.passed_D.tolist() == [3, 2, 2]
    assert counts_of_answer({"speculative_decoding": None}) is None
