"""The verbs of the command line: what each takes, with its defaults, and whom it calls.

torch is imported only by the verbs that compute. Read next: `cli.py`, which calls them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from .. import __version__
from ..errors import DraftsmithError, RequestError
from ..eval.measure.environment import environment
from ..storage import is_first, writable_folder, write_text
from .generate import generate
from .recipe.load import find_recipe, headline, load_recipe, shipped_recipes
from .requests import (
    AuditRequest,
    ChatRequest,
    ConvertRequest,
    DatastoreRequest,
    DeriveRequest,
    EvalRequest,
    ExportRequest,
    GenerateRequest,
    PushRequest,
    TreeRequest,
    TuneRequest,
)
from .screen import console, say


@dataclass
class Ls:
    """List the shipped recipes."""

    def run(self) -> None:
        from rich.table import Table

        table = Table("recipe", "method", "what it does")
        for path in shipped_recipes():
            table.add_row(path.stem, *headline(path))
        console().print(table)


@dataclass
class Show:
    """Print a recipe resolved, with where each value comes from."""

    recipe: Positional[str]
    """Name of a shipped recipe, or path of a file."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        resolved = load_recipe(self.recipe, overrides)
        for path, origin in resolved.origin.items():
            value: object = resolved.recipe
            for part in path.split("."):
                value = getattr(value, part)
            say(f"{path:28} {value!s:24} {origin}")


@dataclass
class Copy:
    """Copy a shipped recipe to edit it."""

    recipe: Positional[str]
    """Name of a shipped recipe."""
    path: Positional[Path]
    """Where to write it."""

    def run(self) -> None:
        if self.path.exists():
            raise RequestError(f"{self.path} exists; name a new file")
        text = find_recipe(self.recipe).read_text(encoding="utf-8")
        writable_folder(self.path.parent)
        write_text(self.path, text)
        say(f"{self.path}: edit it, then `draftsmith check {self.path}`")


@dataclass
class Check:
    """Pre-flight: everything that can fail, before hours are spent."""

    recipe: Positional[str]
    """Name of a shipped recipe, or path of a file."""
    out: Path | None = None
    """Folder that the run will have; default runs/NAME."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .check.check import check

        check(load_recipe(self.recipe, overrides), console(), self.out)


@dataclass
class Train:
    """Train from a recipe."""

    recipe: Positional[str]
    """Name of a shipped recipe, or path of a file."""
    out: Path | None = None
    """Folder of the run; default runs/NAME."""
    resume: str = "auto"
    """auto (go on if there is a checkpoint), never, or the path of a checkpoint."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        resolved = load_recipe(self.recipe, overrides)
        from .train import train

        out = self.out or Path("runs") / resolved.recipe.name
        outcome = train(resolved, out=out, resume=self.resume)
        if is_first():
            loss = outcome.validation_loss
            held_out = "" if loss != loss else f", held-out loss {loss:.3f}"
            say(f"trained {outcome.steps} steps{held_out}")
            if outcome.best is not None:
                say(f"best draft: step {outcome.best['step']:.0f}, not audited yet")
            if resolved.recipe.record.has_target:
                say(f"next: draftsmith eval {out}")


@dataclass
class Eval(EvalRequest):
    """Measure acceptance and speed with the real decoder, or of a server, beside the audit's verdict."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .check.server import check_server

        if (served := check_server(self, overrides)) is not None:
            from .measure.server import run_server_eval

            run_server_eval(self, overrides, served, console())
            return
        from .check.early import named

        pair = named(self, overrides, tuned=True)  # a wrong word costs no import of torch
        from .measure.run import run_eval

        run_eval(self, overrides, console(), pair)


@dataclass
class Audit(AuditRequest):
    """Prove that the decoder's output, or a server's, is the target's own; exit code 5 if it is not."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .check.server import check_server

        if (served := check_server(self, overrides)) is not None:
            from .measure.server import run_server_audit

            run_server_audit(self, served, console())
            return
        from .check.early import check_audit

        pair = check_audit(self, overrides)
        from .measure.run import run_audit

        if not run_audit(self, overrides, console(), pair):
            raise DraftsmithError("the audit failed: the output is not the target's own")


@dataclass
class TreeVerb(TreeRequest):
    """Choose the static tree of heads or of EAGLE by what they are measured to get right."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .check.early import check_tree

        check_tree(self, overrides)
        from .measure.tree import run_tree

        say(f"tree: {run_tree(self, overrides, console())}")


@dataclass
class Tune(TuneRequest):
    """Find the setting of drafters that is fastest on this machine, and keep it beside each."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .check.early import check_tune

        pairs = check_tune(self, overrides)
        from .measure.tune import run_tune

        run_tune(self, pairs, console())


@dataclass
class ChatVerb(ChatRequest):
    """Type prompts and watch the drafter work: tokens coloured by origin, speed beside plain decoding."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .check.early import check_chat

        pair = check_chat(self, overrides)
        from .chat import chat

        chat(self, pair, console())


@dataclass
class DatastoreVerb(DatastoreRequest):
    """Build the datastore that the methods `rest` and `suffix` retrieve from."""

    def run(self) -> None:
        from .derive import build

        say(build(self))


@dataclass
class Derive(DeriveRequest):
    """Make a drafter of the target itself, without training: a quantised copy, or an early exit."""

    def run(self) -> None:
        from .derive import derive

        say(derive(self))


@dataclass
class Convert(ConvertRequest):
    """Write a GGUF file's model as an ordinary folder: config, safetensors, tokenizer, chat template."""

    def run(self) -> None:
        from .convert import convert

        say(convert(self))


@dataclass
class Generate(GenerateRequest):
    """Answer the rows of a source anew by the target; run it again to go on after a stop."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        say(generate(self, overrides))


@dataclass
class Report:
    """Write report.html and report.md of an evaluated run."""

    run_folder: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, which holds eval/results.json, or an --out of `eval`."""

    def run(self) -> None:
        writable_folder(self.run_folder)
        from ..eval.report.report import write_report

        say(f"report: {write_report(self.run_folder)}")


@dataclass
class ExportVerb(ExportRequest):
    """Write a trained drafter as a folder that a serving engine loads."""

    def run(self) -> None:
        from .export import export

        say(export(self))


@dataclass
class Push(PushRequest):
    """Put a run's drafter on a hub, with a card of what it is worth; a dry run where HF_TOKEN is not set."""

    def run(self) -> None:
        from .share.push import push

        say(push(self))


@dataclass
class Inspect:
    """Print rows as input token -> label token, in or out of the loss."""

    recipe: Positional[str]
    """Name of a shipped recipe, or path of a file."""
    rows: int = 2
    """How many rows."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .inspect import inspect

        say(inspect(load_recipe(self.recipe, overrides), self.rows))


@dataclass
class Quickstart:
    """From nothing to a trained, audited and reported drafter, offline, on a CPU."""

    out: Path = Path("quickstart")
    """Folder for everything."""

    def run(self) -> None:
        from .quickstart import quickstart

        quickstart(self.out, console())


@dataclass
class Doctor:
    """Print the environment block that a bug report needs."""

    def run(self) -> None:

        say(doctor())


VERBS: dict[str, type] = {
    "ls": Ls,
    "show": Show,
    "copy": Copy,
    "check": Check,
    "train": Train,
    "eval": Eval,
    "audit": Audit,
    "report": Report,
    "inspect": Inspect,
    "quickstart": Quickstart,
    "datastore": DatastoreVerb,
    "derive": Derive,
    "convert": Convert,
    "generate": Generate,
    "tree": TreeVerb,
    "tune": Tune,
    "chat": ChatVerb,
    "export": ExportVerb,
    "push": Push,
    "doctor": Doctor,
}
WITH_OVERRIDES = {"show", "check", "train", "eval", "audit", "tree", "tune", "chat", "inspect", "generate"}
"""The verbs that take values of a recipe too."""


def doctor() -> str:
    """A block to paste; no user names, no paths, no tokens."""
    block = {"draftsmith": __version__, "git": _git_state(), **environment()}
    return json.dumps(block, indent=1)


def _git_state() -> str:
    root = Path(__file__).parent.parent
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(root, "status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return commit + (" with changes" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    process = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return process.stdout.strip()
