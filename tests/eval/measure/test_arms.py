"""Arms by hand: what has room in a context, how deep they draft, what a proposal reads; and what a drafter is known by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import make_drafter
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.model.pard import Pard
from draftsmith.errors import RequestError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure import environment as module
from draftsmith.eval.measure.arms import Arm, check_answer_length, check_context, check_longest
from draftsmith.eval.measure.environment import drafter_hash, environment


def test_a_prompt_has_room_with_its_answer_and_a_draft() -> None:
    """Of 100 tokens an answer of 20 and a draft of 5 leave 75."""
    target: Any = SimpleNamespace(context=100, context_reason="")
    arms = [Arm("short", PromptLookup(draft_length=2)), Arm("long", PromptLookup(draft_length=5))]
    answer = ("eval.max_new_tokens", 20)
    check_context(target, arms, EvalConfig(), 75, answer=answer)
    said = r"a draft of 5 \(long\) it does not fit .*set --eval.prompt_tokens 75 or less"
    with pytest.raises(RequestError, match=said):
        check_context(target, arms, EvalConfig(), 76, answer=answer)


def test_the_longest_draft_of_a_sweep_counts_wherever_it_stands(target: Backbone) -> None:
    """Drafts of 9 tokens take answers of 11: the prefill's token, and one step of 10."""
    arms = [Arm("draft", make_drafter(target))]
    config = EvalConfig(sweep=[2, 9, 4], draft_length=3, max_new_tokens=11)
    check_answer_length(arms, config)
    with pytest.raises(RequestError, match="eval.sweep drafts up to 9 tokens .* --eval.max_new_tokens 11 or more"):
        check_answer_length(arms, config.model_copy(update={"max_new_tokens": 10}))
    check_longest("a", 3, 5)
    with pytest.raises(RequestError, match="a drafts up to 3 tokens"):
        check_longest("a", 3, 4)


def test_a_proposal_reads_the_draft_once_a_step(target: Backbone) -> None:
    """A draft model takes a step a token; one that drafts in parallel one step in all."""
    drafter = make_drafter(target)
    drafter.draft_length = 3
    serial = Arm("serial", drafter)
    assert serial.proposal_bytes == 3 * serial.draft_bytes > 0
    parallel = Arm("parallel", Pard(drafter.backbone, target.vocabulary, mask=0, draft_length=3))
    assert parallel.proposal_bytes == parallel.draft_bytes == serial.draft_bytes
    assert Arm("none", PromptLookup(draft_length=3)).proposal_bytes == 0


def test_members_that_change_places_are_another_drafter(tmp_path: Path) -> None:
    """The same files in each other's folders: an ensemble asks its members in order."""
    for name, members in (("one", ("a", "b")), ("other", ("b", "a"))):
        for folder, weights in zip(members, (b"1", b"2"), strict=True):
            (tmp_path / name / folder).mkdir(parents=True)
            (tmp_path / name / folder / "model.safetensors").write_bytes(weights)
    assert drafter_hash(tmp_path / "one") != drafter_hash(tmp_path / "other")
    moved = (tmp_path / "one").rename(tmp_path / "elsewhere")
    found = drafter_hash(moved)
    (moved / "notes.txt").write_text("neither config nor weights")
    assert drafter_hash(moved) == found
    (moved / "a" / "adapter_config.json").write_text("{}")
    assert drafter_hash(moved) != found
    (tmp_path / "own").mkdir()
    (tmp_path / "member" / "a").mkdir(parents=True)
    for place in (tmp_path / "own", tmp_path / "member" / "a"):
        (place / "model.safetensors").write_bytes(b"1")
    assert drafter_hash(tmp_path / "own") != drafter_hash(tmp_path / "member"), "weights of its own, and a member's"


def test_memory_is_in_gigabytes_of_ten_to_the_ninth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * 2**30))
    monkeypatch.setattr(module, "_PACKAGES", ())
    assert environment()["memory_gb"] == 68.7
