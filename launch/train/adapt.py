"""`draftsmith adapt`: a drafter that follows its target while that is being tuned.

A round takes the rollouts that are new, trains on from the drafter in use on the target as it is now, and lets both
draft for held-out prompts of those rollouts. The new one takes the old one's place where its tau is higher beyond the
interval of the difference and its audit passes. The folder is a run's: `eval`, `export` and `load_drafter` take the
drafter that is in use. Every round is kept as it is made, so the same command goes on where it was stopped. Read
next: `run.py`, which trains; `eval/measure/rounds.py`, which decodes; the package's own `adapt.py`, the same from
within a trainer.
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.prompts import Prompt
from ...drafters.identity import shown_name
from ...errors import DraftsmithError, RequestError
from ...eval.audit.audit import audit
from ...eval.measure.arms import NOT_AUDITED, Arm, check_answer_length
from ...eval.measure.environment import drafter_hash, target_hash
from ...eval.measure.metrics import acceptance, tau_gain
from ...eval.measure.requests import Request
from ...eval.measure.rounds import AllRounds, decode, speed_fields
from ...eval.report.tables import interval
from ...storage import check_identity_file, hold, json_lines, replace_folder, writable_folder, write_text
from ...storage.formats import ADAPTED
from ...trainers.loop.interruptions import interrupt_on_signal
from ..check.early import NamedFolders
from ..drafted import load_trained
from ..measure.loaded import load_named_target
from ..measure.tune import held_out_prompts
from ..methods import TRAINED
from ..recipe.load import Resolved, load_recipe
from .run import train

if TYPE_CHECKING:
    from ..requests import AdaptRequest

Values = Sequence[tuple[str, str]]
Say = Callable[[str], None]
_STATE, _ROWS = "adapted.json", "rollouts.jsonl"
_HELD_OUT = 0.1
"""Share of the rollouts that the two drafters are compared on."""


def run_adapt(request: AdaptRequest, overrides: Values, say: Say) -> Path:
    """Rounds until there is nothing new, or until a signal where the rollouts are watched; the drafter in use then.

    Raises:
        RequestError: there is no run or no rollout, or the folder is of another run. DraftsmithError: an audit failed.
        Stopped: a signal ended it.
    """
    out = request.out or request.run_folder / "adapted"
    writable_folder(out).mkdir(parents=True, exist_ok=True)
    with interrupt_on_signal(), hold(out):
        place = Adapted.begun(out, request, overrides)
        before = len(place.rounds)
        while (waiting := place.waiting(request)) is not None:
            if waiting:
                place.round(request, overrides, say)
            else:
                time.sleep(request.poll)
        if len(place.rounds) == before:
            raise RequestError(
                f"{request.rollouts} has {place.new_rows(request.rollouts)} rollouts that no round has read; "
                f"--rows asks for {request.rows}: bring more, lower --rows, or wait for them with --watch"
            )
        return place.drafter


@dataclass
class Adapted:
    """The folder of an adapted run: its rounds, and how far every file of rollouts has been read."""

    folder: Path
    rounds: list[dict[str, Any]]
    read: dict[str, int]
    """Bytes, by the file's name."""

    @classmethod
    def begun(cls, folder: Path, request: AdaptRequest, overrides: Values) -> Adapted:
        """The folder as it was left, or a new one with the run's own drafter in use."""
        first = request.run_folder / "drafter"
        made_for = {"run": str(request.run_folder), "drafter": drafter_hash(first)}
        there = check_identity_file(folder / "began.json", made_for, remedy="name another --out")
        if (folder / _STATE).is_file():
            kept = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            ADAPTED.check(kept["format"], folder / _STATE, remedy="name another --out")
            return cls(folder, kept["rounds"], kept["read"])
        place = cls(folder, [], {})
        if not there:
            write_text(folder / "began.json", json.dumps(made_for, indent=1) + "\n")
        place._use(first, place._recipe(request, overrides, first, folder / _ROWS, request.steps))
        place._keep()
        return place

    # ---- the rollouts ---------------------------------------------------------------------------

    def waiting(self, request: AdaptRequest) -> bool | None:
        """Whether a round can begin; None where none will, as nobody waits for more rows."""
        if self._next.is_dir() or self.new_rows(request.rollouts) >= request.rows:
            return True
        return False if request.watch else None

    def new_rows(self, rollouts: Path) -> int:
        """Rollouts that no round has read."""
        return sum(text.count(b"\n") for _, text in self._unread(rollouts))

    def _unread(self, rollouts: Path) -> Iterator[tuple[str, bytes]]:
        """Of every file the whole lines that are new; somebody may be writing the last one."""
        for path in files_of(rollouts):
            known = self.read.get(path.name, 0)
            if path.stat().st_size < known:
                raise RequestError(
                    f"{path} is shorter than the {known:,} bytes that were read of it; rollouts are added at the end "
                    "of a file, or written to another one: give what is new a name of its own"
                )
            with path.open("rb") as file:
                file.seek(known)
                text = file.read()
            if whole := text[: text.rfind(b"\n") + 1]:
                yield path.name, whole

    def _take(self, request: AdaptRequest, into: Path) -> None:
        """Copy what is new, with how far it goes and how long is trained: the files may grow while a round trains."""
        read, parts = dict(self.read), []
        for name, text in self._unread(request.rollouts):
            read[name] = read.get(name, 0) + len(text)
            parts.append(text)

        def fill(staging: Path) -> None:
            (staging / _ROWS).write_bytes(b"".join(parts))
            (staging / "read.json").write_text(json.dumps(read))
            (staging / "steps").write_text(str(self._steps(request)))

        replace_folder(into, fill)

    def _steps(self, request: AdaptRequest) -> int:
        """Steps of the next round: what is asked for, or what fills the minutes at the pace of the training before."""
        if request.minutes is None:
            return request.steps
        run = self._place(len(self.rounds)) / "run" if self.rounds else request.run_folder
        return steps_within(60 * request.minutes, run)

    # ---- a round --------------------------------------------------------------------------------

    @property
    def _next(self) -> Path:
        return self._place(len(self.rounds) + 1)

    def _place(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:04}"

    def round(self, request: AdaptRequest, overrides: Values, say: Say) -> None:
        """Train, compare, decide, and keep a record.

        Raises:
            DraftsmithError: the new drafter's audit failed.
        """
        began, place = time.monotonic(), self._next
        if not place.is_dir():
            self._take(request, place)
        recipe = self._recipe(request, overrides, self.drafter, place / _ROWS, int((place / "steps").read_text()))
        outcome = train(recipe, out=place / "run")
        gc.collect()  # the target that training held
        found = compared(recipe, self.drafter, place / "run" / "drafter", request)
        taken = (
            found["tau_gain"][1] is not None and found["tau_gain"][1] > 0 and not found["verdict"].startswith("NOT")
        )
        made = {"round": len(self.rounds) + 1, "steps": outcome.steps, **found, "taken": taken}
        made["seconds"] = round(time.monotonic() - began, 1)
        if taken:
            self._use(place / "run" / "drafter", recipe)
        self.rounds.append(made)
        self.read = json.loads((place / "read.json").read_text(encoding="utf-8"))
        self._keep()
        say(in_words(made))
        if made["verdict"].startswith("NOT"):
            raise DraftsmithError(f"the audit of round {made['round']} failed: {place / 'run'}; the old drafter stays")

    @property
    def drafter(self) -> Path:
        """The drafter in use."""
        return self.folder / "drafter"

    def _recipe(self, request: AdaptRequest, overrides: Values, drafter: Path, rows: Path, steps: int) -> Resolved:
        """The run's recipe for a round of so many steps."""
        saved = str(request.run_folder / "run.yaml")
        share = load_recipe(saved).recipe.data.validation_share
        own = {
            "target.path": request.target,
            "target.revision": "null",
            "data.source": str(rows),
            "data.revision": "null",
            "data.validation": "null",
            "data.validation_split": "null",
            "data.limit_rows": "null",
            "data.train_rows": "null",
            "data.validation_share": str(max(_HELD_OUT, share)),
            "model.start_from": str(drafter),
            "loop.steps": str(steps),
            "optimizer.warmup_steps": str(steps // 10),
        }
        return load_recipe(saved, [*own.items(), *overrides])

    def _use(self, drafter: Path, recipe: Resolved) -> None:
        """Put a drafter where the one in use lies, whole or not at all."""

        def fill(staging: Path) -> None:
            shutil.copytree(drafter, staging, dirs_exist_ok=True)

        replace_folder(self.drafter, fill)
        write_text(self.folder / "run.yaml", recipe.yaml())

    def _keep(self) -> None:
        text = json.dumps({"format": ADAPTED.number, "rounds": self.rounds, "read": self.read}, indent=1)
        write_text(self.folder / _STATE, text + "\n")


def files_of(rollouts: Path) -> list[Path]:
    """The JSONL files of a folder, or the file itself."""
    if rollouts.is_file():
        return [rollouts]
    if not rollouts.is_dir():
        raise RequestError(f"{rollouts} is neither a file nor a folder; expected JSONL files of rollouts there")
    return sorted(path for path in rollouts.iterdir() if path.suffix == ".jsonl" and path.is_file())


def steps_within(seconds: float, run: Path) -> int:
    """Training steps that take so long at the pace of a run, as its log has it last.

    Raises:
        RequestError: the log has no pace.
    """
    log = run / "metrics.jsonl"
    lines = json_lines(log) if log.is_file() else []
    paces = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    if not paces:
        raise RequestError(
            f"--minutes needs the pace of the training before, and {log} has none; bound the round by --steps, or "
            "name a run that was trained here"
        )
    recipe = load_recipe(str(run / "run.yaml")).recipe
    return max(2, int(seconds * paces[-1] / (recipe.loop.batch_rows * recipe.row_tokens)))


# ---- which drafter is better --------------------------------------------------------------------


def compared(recipe: Resolved, before: Path, after: Path, request: AdaptRequest) -> dict[str, Any]:
    """Both drafters on the target as it is now, on the same held-out prompts with the same random numbers.

    The target is read once for both; the new drafter is audited before it may take a place.
    """
    held = NamedFolders([TRAINED], recipe.recipe, recipe.recipe.target.path, after, after.parent)
    target = load_named_target(held)
    prompts = held_out_prompts(recipe.recipe, target.tokenizer, request.prompts)
    requests = [Request(Prompt(str(n), "held-out", (), chat=False), ids, n) for n, ids in enumerate(prompts)]
    config = recipe.recipe.eval.model_copy(update={"repeats": 1, "temperatures": [request.temperature], "sweep": []})
    arms = [Arm(name, load_trained(path, recipe.recipe, target)) for name, path in (("old", before), ("new", after))]
    check_answer_length(arms, config)
    verdict = NOT_AUDITED
    if request.audit:
        verdict = audit(target, arms[1].drafter, prompts, recipe.recipe.audit, rule=config.rule).verdict
    for arm in arms:
        arm.at(config.draft_length if arm.sweeps else None)
    old, new = decode(target, [(arm, None) for arm in arms], requests, config, request.temperature)
    gain = tau_gain(new.counts, old.counts, seed=config.seed)
    return {
        "target": shown_name(target),
        "target_sha256": target_hash(target),
        "prompts": len(prompts),
        "temperature": request.temperature,
        "old": _measured(old, before, config.seed),
        "new": _measured(new, after, config.seed),
        "tau_gain": gain.to_list(),
        "verdict": verdict,
    }


def _measured(run: AllRounds, drafter: Path, seed: int) -> dict[str, Any]:
    found = acceptance(run.counts, seed=seed)
    speed = speed_fields(run, seed)["speedup"]
    return {
        "sha256": drafter_hash(drafter),
        "tau": found.tau.to_list(),
        "alpha": found.alpha.to_list(),
        "speedup": speed,
    }


def in_words(made: dict[str, Any]) -> str:
    """A round in a line."""
    end = "the new drafter is in use" if made["taken"] else "the old drafter stays"
    return (
        f"round {made['round']}: tau {interval(made['old']['tau'])} -> {interval(made['new']['tau'])} at T = "
        f"{made['temperature']:g} on {made['prompts']} held-out prompts, {interval(made['tau_gain'])} more, "
        f"{made['verdict']}: {end} ({made['seconds']:.0f} s)"
    )
