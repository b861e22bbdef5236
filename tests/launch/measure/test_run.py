"""`eval` and `audit` read what they are given once: the recipe of a run, and the ids of a prompt."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import load_tokenizer
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.tuned_file import Tuned
from draftsmith.errors import RequestError
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.requests import Request
from draftsmith.launch import quickstart
from draftsmith.launch.cli import main
from draftsmith.launch.measure import run
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.requests import AuditRequest, EvalRequest
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from rich.console import Console

PROMPTS = [
    Prompt("talk", "chat", ("where", "whence"), chat=True),
    Prompt("long", "chat", ("lazy dogs " * 90,), chat=True),
    Prompt("text", "text", ("quick foxes jump",), chat=False),
    Prompt("other", "text", ("brown bears sleep",), chat=False),
]
SMALL = [("eval.max_new_tokens", "8"), ("eval.prompt_tokens", "100"), ("eval.repeats", "1"), ("eval.sweep", "[]")]


@pytest.fixture
def pair(chat_tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> run.Loaded:
    """Two methods on a random target with a chat template; the commands get it, and these prompts."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(chat_tokenizer_folder))
    sizes = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=2, head_size=16, intermediate=32, max_positions=512)
    target = Backbone(fresh_model(sizes, vocabulary=len(tokenizer), eos=None).eval(), name="talker")
    target.tokenizer = tokenizer
    drafters = {"first": PromptLookup(draft_length=3), "second": PromptLookup(draft_length=4)}
    pair = run.Loaded(load_recipe("distill-tiny", SMALL).recipe, target, drafters, Path(), {})
    monkeypatch.setattr(run, "load_pair", lambda _named: pair)
    monkeypatch.setattr(run, "load_prompts", lambda *_args, **_how: PROMPTS)
    return pair


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[list[int]]]]:
    """Drafter and ids of every audit; the second drafter fails."""
    seen: list[tuple[Any, list[list[int]]]] = []

    def audit(_target: Backbone, drafter: Any, ids: list[list[int]], _config: Any, **_how: Any) -> SimpleNamespace:
        seen.append((drafter, ids))
        failures = ["a planted rule"] if drafter.draft_length == 4 else []
        verdict = "NOT lossless" if failures else "lossless"
        return SimpleNamespace(verdict=verdict, distance=None, failures=failures, text=lambda: "", to_dict=dict)

    monkeypatch.setattr(run, "audit", audit)
    return seen


@pytest.fixture
def tokenised(pair: run.Loaded, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each prompt was tokenised, by the first word of its text."""
    counts: Counter[str] = Counter()
    kind = type(pair.target.tokenizer)
    plain = kind.__call__

    def counting(self: Any, text: Any = None, *args: Any, **how: Any) -> Any:
        counts.update(word for word in ("where", "lazy", "quick", "brown") if word in str(text))
        return plain(self, text, *args, **how)

    monkeypatch.setattr(kind, "__call__", counting)
    return counts


def test_a_prompt_is_tokenised_once_however_many_methods(
    pair: run.Loaded, audited: list[Any], tokenised: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second turn keeps the ids of the first one and its answer. Audit and evaluation take the same ids."""
    measured: list[list[Request]] = []
    plain = run.evaluate

    def evaluate(target: Backbone, arms: list[Arm], requests: list[Request], *args: Any, **how: Any) -> dict[str, Any]:
        measured.append(requests)
        return plain(target, arms, requests, *args, **how)

    monkeypatch.setattr(run, "evaluate", evaluate)
    run.run_eval(
        EvalRequest(target="tiny", out=tmp_path),
        [],
        Console(file=io.StringIO(), width=80),
        named=SimpleNamespace(tuned=Tuned({}), drafter=None),  # type: ignore[arg-type]
    )
    assert tokenised == {"where": 1, "lazy": 1, "quick": 1, "brown": 1}
    (requests,) = measured
    assert [each.prompt.id for each in requests] == ["talk", "talk", "text", "other"]
    assert [ids for _, ids in audited] == [[requests[at].ids for at in (0, 2, 3)]] * 2


def test_the_audit_alone_decodes_no_answers(
    pair: run.Loaded, audited: list[Any], tokenised: Counter[str], tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=80)
    assert not run.run_audit(
        AuditRequest(target="tiny", out=tmp_path), [], console, named=SimpleNamespace(tuned=Tuned({}), drafter=None)
    )  # type: ignore[arg-type]
    assert tokenised == {"where": 1, "lazy": 1, "quick": 1, "brown": 1}
    assert [len(ids) for _, ids in audited] == [3, 3]


def test_each_arm_has_the_verdict_of_its_own_audit(pair: run.Loaded, audited: list[Any], tmp_path: Path) -> None:
    arms = run.audited(pair, run.arms_of(pair), [[5, 6]], tmp_path, Console(file=io.StringIO()))
    assert [drafter for drafter, _ in audited] == list(pair.drafters.values())
    assert [(name, arm.verdict) for name, arm in arms.items()] == [("first", "lossless"), ("second", "NOT lossless")]
    assert [arm.drafter for arm in arms.values()] == list(pair.drafters.values())


@pytest.mark.parametrize("verb", ["eval", "audit"])
def test_the_recipe_of_a_run_is_read_once(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text(load_recipe("distill-tiny").yaml())
    read: list[str] = []

    def counting(name: str, *args: Any) -> Any:
        read.append(name)
        return load_recipe(name, *args)

    def enough(*_args: Any, **_how: Any) -> None:
        raise RequestError("far enough")

    for module in (
        "draftsmith.launch.check.early",
        "draftsmith.launch.measure.loaded",
        "draftsmith.launch.recipe.load",
    ):
        monkeypatch.setattr(f"{module}.load_recipe", counting)
    monkeypatch.setattr("draftsmith.launch.measure.loaded.load_target", enough)
    assert main([verb, str(tmp_path)]) == 2
    assert read == [str(tmp_path / "run.yaml")]


def test_the_untrained_draft_says_whose_audit_its_verdict_is(pair: run.Loaded) -> None:
    requests = [Request(PROMPTS[2], [5, 7, 11], 0)]
    trained = Arm("draft model", pair.drafters["first"], "lossless")
    row = quickstart._control(pair, pair.drafters["second"], requests, trained)
    assert (row["method"], row["verdict"], row["audited"]) == ("untrained draft model", "lossless", "draft model")


@pytest.mark.parametrize("verb", ["eval", "audit", "tune", "tree", "chat"])
@pytest.mark.parametrize("flag", ["block.size", "optimizer.lr", "model.layers", "probe.draft_length"])
def test_what_training_has_settled_is_refused(
    verb: str, flag: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A flag that nothing would follow: the drafter is as it was trained."""
    (tmp_path / "run.yaml").write_text(load_recipe("dflash-tiny").yaml())
    (tmp_path / "drafter").mkdir()
    assert main([verb, str(tmp_path), f"--{flag}", "7", *(["--prompt", "x"] if verb == "chat" else [])]) == 2
    assert f"--{flag} is 7, and only training reads it" in capfd.readouterr().err
