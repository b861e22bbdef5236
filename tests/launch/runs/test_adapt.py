"""`draftsmith adapt`: rounds over new rollouts, a drafter that is used where it is better, the same again after a stop."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.errors import RequestError
from draftsmith.eval.measure.environment import drafter_hash
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import Resolved, load_recipe
from draftsmith.launch.requests import AdaptRequest
from draftsmith.launch.train import adapt
from draftsmith.trainers.loop.loop import RunOutcome
from helpers.models.shallow_target import SHALLOW
from helpers.runs.heads_run import write_heads_run
from helpers.runs.small_flags import AUDIT, TRAINING

FEW = ["--steps", "8", "--rows", "12", "--prompts", "6", "--eval.max_new_tokens", "16", *TRAINING, *AUDIT]
FEW += [
    "--data.limit_rows",
    "null",
    "--loop.batch_rows",
    "8",
    "--loop.micro_rows",
    "8",
    "--data.validation_share",
    "0.4",
]


TWO_HEADS = {"medusa__heads": "2", "medusa__shared_head": "true"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads_run(tmp_path_factory.mktemp("runs") / "heads", **TWO_HEADS)


def texts() -> Iterator[str]:
    """Rows of library text; there are 24."""
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    return (json.dumps({"text": source[at : at + 700]}) + "\n" for at in range(0, 24 * 700, 700))


def adapted(run: Path, rollouts: Path, out: Path, *more: str) -> int:
    words = ["adapt", str(run), "--target", SHALLOW, "--rollouts", str(rollouts), "--out", str(out)]
    return main([*words, *FEW, *more])


def state(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "adapted.json").read_text())
    return found


@pytest.mark.slow
def test_rounds_of_what_is_new(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts, out, rows = tmp_path / "rollouts", tmp_path / "adapted", [*texts()]
    rollouts.mkdir()
    # the last row has no end yet: somebody is writing it
    (rollouts / "first.jsonl").write_text("".join(rows[:12]) + rows[12][:50])
    assert adapted(run, rollouts, out, "--optimizer.lr", "3e-2") == 0
    (first,) = state(out)["rounds"]
    assert state(out)["read"] == {"first.jsonl": sum(len(row.encode()) for row in rows[:12])}
    assert (first["verdict"], first["taken"], first["steps"]) == ("lossless", first["tau_gain"][1] > 0, 8)
    assert first["tau_gain"][0] == pytest.approx(first["new"]["tau"][0] - first["old"]["tau"][0])
    used = drafter_hash(out / "drafter")
    assert used == first["new" if first["taken"] else "old"]["sha256"]
    assert first["old"]["sha256"] == drafter_hash(run / "drafter")
    assert "round 1: tau" in capsys.readouterr().out
    # nothing new: nothing is done, and nothing lost
    assert adapted(run, rollouts, out) == 2
    assert "0 rollouts that no round has read" in capsys.readouterr().err
    # the rest of that row, and another file; nothing is learnt, so the drafter stays
    (rollouts / "first.jsonl").write_text("".join(rows[:13]))
    (rollouts / "second.jsonl").write_text("".join(rows[13:]))
    assert adapted(run, rollouts, out, "--optimizer.lr", "1e-12") == 0
    _, second = state(out)["rounds"]
    assert (out / "rounds" / "0002" / "rollouts.jsonl").read_text() == "".join(rows[12:])
    assert (second["taken"], second["old"]["sha256"], drafter_hash(out / "drafter")) == (False, used, used)
    assert load_recipe(str(out / "run.yaml")).recipe.target.path == SHALLOW
    # the folder is a run's: the drafter in use is measured as any other
    assert main(["eval", str(out), "--no-audit", "--eval.limit", "1", "--eval.max_new_tokens", "8"]) == 0


@pytest.mark.slow
def test_a_round_goes_on_where_it_was_stopped(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts, out, rows = tmp_path / "rollouts.jsonl", tmp_path / "adapted", [*texts()]
    rollouts.write_text("".join(rows[:16]))

    def stopped(*_given: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(adapt, "compared", stopped)
        assert adapted(run, rollouts, out) == 130
    assert state(out)["rounds"] == []
    assert drafter_hash(out / "drafter") == drafter_hash(run / "drafter")
    trained = (out / "rounds" / "0001" / "run" / "metrics.jsonl").read_text()
    rollouts.write_text("".join(rows))  # which grows meanwhile
    assert adapted(run, rollouts, out) == 0
    assert (out / "rounds" / "0001" / "run" / "metrics.jsonl").read_text() == trained
    (made,) = state(out)["rounds"]
    assert made["steps"] == 8
    assert state(out)["read"] == {"rollouts.jsonl": sum(len(row.encode()) for row in rows[:16])}


FIGURES = {"tau": [1.5, 1.4, 1.6], "alpha": [0.5, 0.4, 0.6], "speedup": [1.2, 1.1, 1.3]}


@pytest.fixture
def planned() -> list[int]:
    """The steps of every round whose training is given."""
    return []


@pytest.fixture
def given(run: Path, planned: list[int], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Rounds whose training and whose comparison are given."""

    def train(recipe: Resolved, *, out: Path) -> RunOutcome:
        assert recipe.recipe.model.start_from is not None
        planned.append(recipe.recipe.loop.steps)
        shutil.copytree(run / "drafter", out / "drafter", dirs_exist_ok=True)
        config = json.loads((out / "drafter" / "config.json").read_text())
        (out / "drafter" / "config.json").write_text(json.dumps(config, indent=7))
        return RunOutcome(8, 1.0, None)

    def of(gain: list[float | None], verdict: str) -> None:
        def compared(_recipe: Resolved, before: Path, after: Path, request: AdaptRequest) -> dict[str, Any]:
            sides = {
                name: FIGURES | {"sha256": drafter_hash(each)} for name, each in (("old", before), ("new", after))
            }
            shared = {"tau_gain": gain, "verdict": verdict, "prompts": 6, "temperature": request.temperature}
            return sides | shared

        monkeypatch.setattr(adapt, "train", train)
        monkeypatch.setattr(adapt, "compared", compared)

    return of


@pytest.mark.parametrize(
    ("gain", "verdict", "code"),
    [
        ([0.3, 0.01, 0.5], "lossless", 0),
        ([0.3, 0.01, 0.5], "not audited", 0),
        ([0.3, 0.0, 0.5], "lossless", 0),
        ([0.3, None, None], "lossless", 0),
        ([0.3, 0.1, 0.5], "NOT lossless", 5),
    ],
)
def test_the_better_one_is_used(
    gain: list[float | None],
    verdict: str,
    code: int,
    run: Path,
    tmp_path: Path,
    given: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the interval's lower end, of tau on the same prompts; a failed audit is an error, and the old one stays."""
    rollouts, out, taken = tmp_path / "rollouts.jsonl", tmp_path / "adapted", gain[1] == 0.01
    rollouts.write_text("".join(texts()))
    given(gain, verdict)
    assert adapted(run, rollouts, out) == code
    (made,) = state(out)["rounds"]
    assert (made["taken"], made["tau_gain"], made["verdict"]) == (taken, gain, verdict)
    assert made["new"]["sha256"] != made["old"]["sha256"] == drafter_hash(run / "drafter")
    assert drafter_hash(out / "drafter") == made["new" if taken else "old"]["sha256"]
    said = capsys.readouterr()
    assert f"{verdict}: the {'new drafter is in use' if taken else 'old drafter stays'}" in said.out
    assert ("the audit of round 1 failed" in said.err) == (code == 5)


def test_only_whole_rows_that_are_new(
    run: Path, tmp_path: Path, given: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts, out, rows = tmp_path / "rollouts", tmp_path / "adapted", [*texts()]
    rollouts.mkdir()
    # the last row has no end yet: somebody is writing it
    (rollouts / "first.jsonl").write_text("".join(rows[:12]) + rows[12][:50])
    given([0.1, 0.05, 0.2], "lossless")
    assert adapted(run, rollouts, out) == 0
    assert state(out)["read"] == {"first.jsonl": sum(len(row.encode()) for row in rows[:12])}
    assert adapted(run, rollouts, out) == 2
    # the rest of that row, and another file
    (rollouts / "first.jsonl").write_text("".join(rows[:13]))
    (rollouts / "second.jsonl").write_text("".join(rows[13:]))
    assert adapted(run, rollouts, out) == 0
    assert (out / "rounds" / "0002" / "rollouts.jsonl").read_text() == "".join(rows[12:])
    assert [each["round"] for each in state(out)["rounds"]] == [1, 2]
    # written anew from its beginning: what was read of it says nothing of this
    (rollouts / "first.jsonl").write_text("".join(rows[:3]))
    assert adapted(run, rollouts, out) == 2
    assert "first.jsonl is shorter than the" in capsys.readouterr().err


def write_log(run: Path, *paces: float) -> None:
    lines = [{"kind": "train", "tokens_per_second": pace} for pace in paces]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"kind": "validation"}]))


def test_a_round_of_so_many_minutes(run: Path, tmp_path: Path, given: Callable[..., None], planned: list[int]) -> None:
    """At the pace that the training before ended with: at first the run's, then the last round's."""
    rollouts, out, rows, own = tmp_path / "rollouts.jsonl", tmp_path / "adapted", [*texts()], tmp_path / "run"
    shutil.copytree(run, own)
    data, loop = (getattr(load_recipe(str(own / "run.yaml")).recipe, part) for part in ("data", "loop"))
    tokens = data.sequence_length * loop.batch_rows
    write_log(own, 100 * tokens, tokens / 2)
    given([0.1, 0.05, 0.2], "lossless")
    rollouts.write_text("".join(rows[:12]))
    assert adapted(own, rollouts, out, "--minutes", "0.4") == 0
    round_run = out / "rounds" / "0001" / "run"
    shutil.copy(own / "run.yaml", round_run)
    write_log(round_run, tokens)
    rollouts.write_text("".join(rows))
    assert adapted(own, rollouts, out, "--minutes", "0.4") == 0
    assert planned == [12, 24]


def test_a_run_without_a_pace(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that was converted, say, has no log."""
    with pytest.raises(RequestError, match=r"needs the pace of the training before.*bound the round by --steps"):
        adapt.steps_within(60, tmp_path)
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text("".join(texts()))
    assert adapted(run, rollouts, tmp_path / "out", "--minutes", "0") == 2
    assert "--minutes is 0" in capsys.readouterr().err


def test_requests_that_make_no_sense(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text("".join([*texts()][:3]))
    assert adapted(tmp_path, rollouts, tmp_path / "out") == 2
    assert "is no finished run of a drafter" in capsys.readouterr().err
    assert adapted(run, tmp_path / "none", tmp_path / "out") == 2
    assert "is not there" in capsys.readouterr().err
    assert adapted(run, rollouts, tmp_path / "out", "--steps", "0") == 2
    assert "--steps is 0" in capsys.readouterr().err
    assert adapted(run, rollouts, tmp_path / "out") == 2
    assert "has 3 rollouts that no round has read; --rows asks for 12" in capsys.readouterr().err


def test_the_rollouts_are_waited_for(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come between sleeps, and a signal's interruption ends it."""
    rollouts, rows, slept = tmp_path / "rollouts.jsonl", [*texts()], list[float]()
    rollouts.write_text(rows[0])
    made: list[int] = []
    monkeypatch.setattr(adapt.Adapted, "round", lambda self, *_given: made.append(self.new_rows(rollouts)))

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            rollouts.write_text("".join(rows))
        if made:
            raise KeyboardInterrupt

    def once(self: adapt.Adapted, request: AdaptRequest) -> bool | None:
        return False if made else waiting(self, request)

    waiting = adapt.Adapted.waiting
    monkeypatch.setattr(adapt.Adapted, "waiting", once)
    monkeypatch.setattr(adapt.time, "sleep", sleep)
    assert adapted(run, rollouts, tmp_path / "out", "--watch", "--poll", "0.5") == 130
    assert (made, slept) == ([24], [0.5] * 4)


@pytest.mark.parametrize(("of_the_run", "held_out"), [("0.02", 0.1), ("0.3", 0.3)])
def test_a_tenth_of_the_rollouts_or_more_is_held_out(
    run: Path, tmp_path: Path, of_the_run: str, held_out: float
) -> None:
    """As the run's recipe has it, where that is more."""
    saved = load_recipe(str(run / "run.yaml"), [("data.validation_share", of_the_run)])
    (tmp_path / "run.yaml").write_text(saved.yaml())
    request = AdaptRequest(tmp_path, SHALLOW, tmp_path / "rollouts.jsonl")
    place = adapt.Adapted(tmp_path, [], {})
    recipe = place._recipe(request, [], run / "drafter", tmp_path / "rows.jsonl", 40).recipe
    assert recipe.data.validation_share == held_out
    assert (recipe.loop.steps, recipe.optimizer.warmup_steps) == (40, 4)
    asked = place._recipe(request, [("data.validation_share", "0.01")], run / "drafter", tmp_path / "rows.jsonl", 40)
    assert asked.recipe.data.validation_share == 0.01


def test_every_held_out_prompt_draws_numbers_of_its_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both drafters in one decoding, so each prompt's are the same for both."""

    class Decoded(Exception):
        """What was asked for is known."""

    seen: list[Any] = []

    def decode(_target: Any, arms: list[Any], requests: list[Any], config: Any, temperature: float) -> Any:
        seen.append(
            ([arm.name for arm, _ in arms], [(each.ids, each.number) for each in requests], config, temperature)
        )
        raise Decoded

    monkeypatch.setattr(adapt, "load_named_target", lambda _held: SimpleNamespace(tokenizer=None))
    monkeypatch.setattr(adapt, "held_out_prompts", lambda *_asked: [[5, 6], [7], [5, 6]])
    monkeypatch.setattr(adapt, "load_trained", lambda *_named: None)
    monkeypatch.setattr(adapt, "check_answer_length", lambda *_asked: None)
    monkeypatch.setattr(adapt, "decode", decode)
    request = AdaptRequest(run, SHALLOW, tmp_path, audit=False, temperature=0.7)
    with pytest.raises(Decoded):
        adapt.compared(load_recipe(str(run / "run.yaml")), run / "drafter", run / "drafter", request)
    ((names, requests, config, temperature),) = seen
    assert (names, requests) == (["old", "new"], [([5, 6], 0), ([7], 1), ([5, 6], 2)])
    assert (config.repeats, config.temperatures, temperature) == (1, [0.7], 0.7)
