"""Skeleton-of-Thought: what counts as a point, one batch for all of them, and honest figures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import draftsmith.eval.measure.skeleton as module
import pytest
import torch
from draftsmith.data.prompts import Prompt, render
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import load_tokenizer
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.measure.skeleton import (
    SkeletonAnswer,
    answer_by_skeleton,
    answer_plainly,
    evaluate_skeleton,
    parse_skeleton,
    point_request,
    skeleton_request,
    skeleton_table,
)
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from rich.cells import cell_len
from rich.console import Console

QUESTION = "why do dogs {sleep}?"
CHAT = Prompt("q", "chat", (QUESTION, "and cats?"), chat=True, system="be brief")
TEXT = Prompt("t", "text", (QUESTION,), chat=False)
SKELETON = " Quick brown fox\n2. Lazy dog answers\n4. Perhaps"
POINTS = [(1, "Quick brown fox"), (2, "Lazy dog answers"), (4, "Perhaps")]
GREEDY: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 6, "seed": 3}
SAMPLED: dict[str, Any] = {**GREEDY, "warper": Warper(1.0)}


@pytest.fixture(scope="module")
def writer(chat_tokenizer_folder: Path) -> Backbone:
    """A random target with a chat tokenizer; requests in words need more room than other tests'."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(chat_tokenizer_folder))
    sizes = ModelConfig(
        architecture="qwen3", layers=2, hidden=32, heads=4, kv_heads=2, head_size=16, max_positions=4096
    )
    model = fresh_model(sizes, vocabulary=len(tokenizer), eos=tokenizer.eos_token_id).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    target = Backbone(model, name="random")
    target.tokenizer = tokenizer
    return target


class Decoder:
    """The real decoder; what it would have written behind a forced "1." is replaced."""

    def __init__(self, target: Backbone, skeleton: str | None) -> None:
        self.target, self.skeleton = target, skeleton
        self.calls: list[dict[str, Any]] = []

    def __call__(self, target: Backbone, prompts: list[list[int]], **settings: Any) -> Any:
        done = autoregressive(target, prompts, **settings)
        words = [target.tokenizer.decode(row) for row in prompts]
        if self.skeleton is not None and words[0].endswith(("assistant\n1.", "\n\n1.")):
            done.tokens = [target.tokenizer(self.skeleton)["input_ids"]]
        self.calls.append({"prompts": prompts, "words": words, "done": done, **settings})
        return done


@pytest.fixture
def decoder(writer: Backbone, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    result = Decoder(writer, SKELETON)
    monkeypatch.setattr(module, "autoregressive", result)
    return result


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("1. A cause\n2. An effect\n3. A cure", [(1, "A cause"), (2, "An effect"), (3, "A cure")]),
        ("1.No blank\n2.   Many blanks  ", [(1, "No blank"), (2, "Many blanks")]),
        ("1. One\n2. Two\n2. Again\n1. Once more", [(1, "One"), (2, "Two")]),
        ("9. Nine\n10. Ten\n11. Eleven\n", [(9, "Nine"), (10, "Ten"), (11, "Eleven")]),
        ("3. Third\n1. First", [(3, "Third"), (1, "First")]),
        ("1. One\n\n2. Two\n\nThat is the plan.\n\n", [(1, "One"), (2, "Two")]),
        ("Here is it:\n1. One", [(1, "One")]),
        ("**1. Bold**\n**2. Bold too**", [(1, "Bold**"), (2, "Bold too**")]),
        ("1. Uses Python 3.11 or 3.12", [(1, "Uses Python 3.11 or 3.12")]),
        ("1. It was so.\nIt ended in 2023. Nobody knew", [(1, "It was so.")]),
        ("1.\n2. Two", [(2, "Two")]),
        ("1.\n  \n2.\n3.\n", []),
        ("1.\nBelow its number", [(1, "Below its number")]),
        ("1. \u00e9t\u00e9 \u732b", [(1, "\u00e9t\u00e9 \u732b")]),
        ("1" * 6000 + ". a loop", []),
        ("1.", []),
        ("no plan at all", []),
        ("", []),
    ],
)
def test_points(text: str, points: list[tuple[int, str]]) -> None:
    assert parse_skeleton(text) == points


def test_a_long_text_is_parsed_at_once() -> None:
    assert parse_skeleton("1." + "\n" * 3000) == []
    assert len(parse_skeleton("".join(f"{n}. point\n" for n in range(2000)))) == 1000


def test_requests_hold_what_the_target_has_to_know() -> None:
    assert QUESTION in skeleton_request(QUESTION)
    request = point_request(QUESTION, "1. Up\n2. Down {here}", 2, "Down {here}")
    assert QUESTION in request
    assert "1. Up\n2. Down {here}" in request
    assert 'Point 2 ("Down {here}")' in request


def test_all_points_are_one_batch(decoder: Decoder, writer: Backbone) -> None:
    answer = answer_by_skeleton(writer, CHAT, **GREEDY)
    skeleton, expansion = decoder.calls
    assert [len(call["prompts"]) for call in decoder.calls] == [1, len(POINTS)]
    assert answer.points == len(POINTS)
    assert not answer.fallback
    assert answer.calls == sum(call["done"].target_calls for call in decoder.calls)
    assert answer.calls <= 2 * (GREEDY["max_new_tokens"] - 1)
    assert answer.tokens == sum(len(row) for call in decoder.calls for row in call["done"].tokens)
    assert answer.seconds == sum(call["done"].prefill_seconds + call["done"].decode_seconds for call in decoder.calls)
    assert all(call["eos_ids"] == writer.eos_ids != () for call in decoder.calls)
    # no two texts from the same random numbers, the plain answer's stream 0 included
    streams = [0, *skeleton["requests"], *expansion["requests"]]
    assert len(set(streams)) == len(streams) == 2 + len(POINTS)


def test_the_answer_is_joined_in_order(decoder: Decoder, writer: Backbone) -> None:
    answer = answer_by_skeleton(writer, CHAT, **GREEDY)
    rows = decoder.calls[1]["done"].tokens
    texts = [
        f"{number}. {outline}{writer.tokenizer.decode(row, skip_special_tokens=True)}".strip()
        for (number, outline), row in zip(POINTS, rows, strict=True)
    ]
    assert answer.text == "\n".join(texts)
    written = writer.tokenizer.decode(answer.ids, skip_special_tokens=True)
    assert written.replace("\n", "") == answer.text.replace("\n", "")


def test_a_point_does_not_depend_on_its_neighbours(decoder: Decoder, writer: Backbone) -> None:
    """The batch is worth one row after the other."""
    answer_by_skeleton(writer, CHAT, **SAMPLED)
    call = decoder.calls[1]
    for prompt, request, row in zip(call["prompts"], call["requests"], call["done"].tokens):
        alone = autoregressive(writer, [prompt], requests=[request], eos_ids=writer.eos_ids, **SAMPLED)
        assert alone.tokens == [row]


def test_chats_go_through_the_template(decoder: Decoder, writer: Backbone) -> None:
    """The system's words stay, the beginning stands inside the assistant's turn, one turn counts."""
    answer_by_skeleton(writer, CHAT, **GREEDY)
    (skeleton,), points = (call["words"] for call in decoder.calls)
    for words in (skeleton, *points):
        assert words.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")
        assert words.count("<|im_start|>user") == 1
        assert QUESTION in words
    assert skeleton.endswith("<|im_end|>\n<|im_start|>assistant\n1.")
    for words, (number, outline) in zip(points, POINTS, strict=True):
        assert words.endswith(f"<|im_end|>\n<|im_start|>assistant\n{number}. {outline}")
        assert f"\n1.{SKELETON}\n" in words


def test_plain_text_without_a_template(decoder: Decoder, writer: Backbone) -> None:
    answer = answer_by_skeleton(writer, TEXT, **GREEDY)
    (skeleton,), points = (call["words"] for call in decoder.calls)
    assert skeleton == f"{skeleton_request(QUESTION)}\n\n1."
    assert points[2] == f"{point_request(QUESTION, '1.' + SKELETON, 4, 'Perhaps')}\n\n4. Perhaps"
    assert answer.points == len(POINTS)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_without_a_skeleton_the_plain_answer_is_used(
    settings: dict[str, Any], decoder: Decoder, writer: Backbone
) -> None:
    decoder.skeleton = "\n2.\n"
    answer = answer_by_skeleton(writer, CHAT, **settings)
    plain = answer_plainly(writer, CHAT, **settings)
    skeleton = decoder.calls[0]["done"]
    assert [len(call["prompts"]) for call in decoder.calls] == [1, 1, 1]
    assert decoder.calls[1]["prompts"] == [render(CHAT, writer.tokenizer)]
    assert answer.fallback
    assert answer.points == 0
    assert (answer.text, answer.ids) == (plain.text, plain.ids)
    # and the skeleton was not for free
    assert answer.calls == plain.calls + skeleton.target_calls
    assert answer.tokens == plain.tokens + len(skeleton.tokens[0])
    assert answer.seconds > skeleton.prefill_seconds + skeleton.decode_seconds


def test_the_plain_answer_is_plain_decoding(writer: Backbone) -> None:
    ids = render(CHAT, writer.tokenizer)
    result = answer_plainly(writer, CHAT, **SAMPLED)
    done = autoregressive(writer, [ids], eos_ids=writer.eos_ids, **SAMPLED)
    assert list(result.ids) == done.tokens[0]
    assert result.tokens == len(done.tokens[0])
    assert result.calls == done.target_calls


def test_the_same_seed_gives_the_same_answer(decoder: Decoder, writer: Backbone) -> None:
    answers = [answer_by_skeleton(writer, CHAT, **{**SAMPLED, "seed": seed}).text for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_a_random_model_is_taken_as_it_is(writer: Backbone) -> None:
    """Nothing forced: whatever it writes, the answer holds together."""
    for seed in range(3):
        answer = answer_by_skeleton(writer, CHAT, **{**SAMPLED, "seed": seed})
        assert isinstance(answer, SkeletonAnswer)
        assert answer.fallback == (answer.points == 0)


def names(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(name for each in value.values() for name in names(each))}
    return {name for each in value for name in names(each)} if isinstance(value, list) else set()


@pytest.fixture
def results(decoder: Decoder, writer: Backbone) -> dict[str, Any]:
    """Four prompts, the last of which gets no skeleton."""
    prompts = [Prompt(str(n), "chat", (f"{QUESTION} {n}",), chat=True) for n in range(4)]
    real = module.answer_by_skeleton

    def forced(target: Backbone, prompt: Prompt, **settings: Any) -> SkeletonAnswer:
        decoder.skeleton = "\n" if prompt.id == "3" else SKELETON
        return real(target, prompt, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "answer_by_skeleton", forced)
        return evaluate_skeleton(writer, prompts, **SAMPLED)


def test_the_figures_of_an_evaluation(results: dict[str, Any]) -> None:
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert results["method"] == "skeleton-of-thought"
    assert results["lossless"] is False
    assert results["temperature"] == 1
    assert results["prompts"] == len(results["answers"]) == 4
    assert (results["fallbacks"], results["fallback_share"]) == (1, 0.25)
    assert results["mean_points"] == 3
    own, plain = results["skeleton"], results["plain"]
    for field, name in (("seconds", "latency"), ("length", "length")):
        middle, low, high = results[f"{name}_ratio"]
        assert middle == pytest.approx(own[field] / plain[field])
        assert low <= middle <= high
    assert own["tokens"] > plain["tokens"] == plain["length"]
    for side in (own, plain):
        assert 0 <= side["loop_share"] <= 1
        assert 0 < side["distinct_2"] <= 1
        assert isinstance(side["flagged"], bool)
    last = results["answers"][3]
    assert last["fallback"]
    assert last["text"] == last["plain_text"]
    assert [each["fallback"] for each in results["answers"][:3]] == [False] * 3


def test_no_field_speaks_of_acceptance(results: dict[str, Any]) -> None:
    words = {word for name in names(results) for word in name.split("_")}
    assert words & {"tau", "alpha", "acceptance", "accepted", "speedup", "verdict"} == set()


def test_both_ways_take_turns(results: dict[str, Any], decoder: Decoder, writer: Backbone) -> None:
    del results  # decoded by now
    warm, calls = decoder.calls[:2], decoder.calls[2:]
    assert [len(call["prompts"]) for call in warm] == [1, 3]
    assert [len(call["prompts"]) for call in calls] == [1, 1, 3] * 3 + [1, 1, 1]
    # every prompt draws numbers of its own, the same for its plain answer and its fallback
    assert [call["seed"] for call in calls] == [3] * 3 + [4] * 3 + [5] * 3 + [6] * 3
    assert [list(calls[at]["requests"]) for at in (9, 10, 11)] == [[0], [1], [0]]


def test_nothing_but_fallbacks(decoder: Decoder, writer: Backbone) -> None:
    """One prompt has no interval, and no skeleton has no points; both are shown, not hidden."""
    decoder.skeleton = "\n"
    results = evaluate_skeleton(writer, [CHAT], **GREEDY)
    assert results["fallback_share"] == 1
    assert results["mean_points"] is None
    assert results["length_ratio"] == [1.0, None, None]
    assert results["latency_ratio"][0] > 0  # by the clock, which is not looked at
    assert "1 of 1" in printed(results)


def printed(results: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(skeleton_table(results), crop=False)
    return out.getvalue()


def test_the_table(results: dict[str, Any]) -> None:
    text = printed(results)
    assert max(map(cell_len, text.splitlines())) <= 80
    title, heads = text.splitlines()[:2]
    assert "not lossless" in title
    assert all(word in heads for word in ("plain", "skeleton", "skeleton / plain [95 %]"))
    assert "1 of 4" in text
    for word in ("tau", "alpha", "accept", "speed-up"):
        assert word not in text.lower()


def test_the_widest_numbers_stay_whole(results: dict[str, Any]) -> None:
    wide = [12.34, 11.11, 13.45]
    results |= {"latency_ratio": wide, "length_ratio": wide}
    for side in ("plain", "skeleton"):
        results[side] |= {
            "seconds": 12_345.678,
            "calls": 12_345.6,
            "length": 12_345.6,
            "tokens": 123_456.7,
            "loop_share": 1.0,
            "flagged": True,
        }
    results |= {"fallbacks": 12_345, "prompts": 12_345, "temperature": 0.75, "mean_points": 10.5}
    lines = printed(results).splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert sum(line.count("12.34 [11.11, 13.45]") for line in lines) == 2
    for whole, times in (("12,345.68", 2), ("12,345.6 ", 4), ("123,456.7", 2), ("! 100", 2)):
        assert sum(f"{line} ".count(whole) for line in lines) == times, whole
    assert "12345 of 12345" in "".join(lines)
