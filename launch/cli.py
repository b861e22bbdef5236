"""The command line: one function per verb, torch imported only by the verbs that compute.

Read next: `recipe.py` for recipes and overrides, `train.py`, `quickstart.py`.
"""

from __future__ import annotations

try:  # so that Ctrl-C is quiet before `main` is there to see to it
    import logging
    import os
    import select
    import sys
    import traceback
    from collections.abc import Callable, Sequence
    from dataclasses import dataclass
    from pathlib import Path
    from typing import TYPE_CHECKING, Annotated, Any, Literal

    import tyro
    from tyro.conf import Positional

    from ..errors import DraftsmithError, RequestError
    from ..storage import OF_THE_MACHINE, writable_folder, write_text
    from .generate import GenerateRequest, generate
    from .recipe import find_recipe, headline, load_recipe, shipped_recipes
except KeyboardInterrupt:
    raise SystemExit(130) from None

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Ls:
    """List the shipped recipes."""

    def run(self) -> None:
        from rich.table import Table

        table = Table("recipe", "method", "what it does")
        for path in shipped_recipes():
            table.add_row(path.stem, *headline(path))
        _console().print(table)


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
            _say(f"{path:28} {value!s:24} {origin}")


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
        _say(f"{self.path}: edit it, then `draftsmith check {self.path}`")


@dataclass
class Check:
    """Pre-flight: everything that can fail, before hours are spent."""

    recipe: Positional[str]
    """Name of a shipped recipe, or path of a file."""
    out: Path | None = None
    """Folder that the run will have; default runs/NAME."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .check import check

        check(load_recipe(self.recipe, overrides), _console(), self.out)


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
        if os.environ.get("RANK", "0") == "0":
            loss = outcome.validation_loss
            held_out = "" if loss != loss else f", held-out loss {loss:.3f}"
            _say(f"trained {outcome.steps} steps{held_out}")
            if outcome.best is not None:
                _say(f"best draft: step {outcome.best['step']:.0f}, not audited yet")
            if resolved.recipe.method != "target":
                _say(f"next: draftsmith eval {out}")


@dataclass
class Pair:
    """A target and a drafter, from a run folder or by themselves."""

    run_folder: Annotated[Positional[Path | None], tyro.conf.arg(metavar="RUN")] = None
    """Folder of a finished run; it names target, drafter and settings."""
    target: str | None = None
    """Folder or hub name of the target; default: the run's."""
    drafter: str | None = None
    """Folder of the drafter; default: the run's."""
    method: str = "trained"
    """Method, or several with commas between. By a drafter: trained, adaptive-draft (its length
    follows what is accepted); without one: prompt-lookup, ngram, llma, rest, lookahead;
    by itself: skeleton-of-thought."""


@dataclass
class Eval(Pair):
    """Measure acceptance and speed with the real decoder, beside the audit's verdict."""

    prompts: str | None = None
    """`stdlib` or a JSONL file; default: the recipe's."""
    out: Path | None = None
    """Folder for results.json; default RUN/eval, without RUN a folder eval-NAME here, of the
    drafter's or the methods' name."""
    audit: bool = True
    """Run the losslessness audit first; --no-audit shows "not audited" in its place."""
    samples: int = 0
    """Also write that many samples per prompt: agreement with the greedy answer, majority vote."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .early import named

        named(self, overrides)  # a wrong word costs no import of torch
        from .measure import run_eval

        run_eval(self, overrides, _console())


@dataclass
class Audit(Pair):
    """Prove that the decoder's output is the target's own; exit code 5 if it is not."""

    plant: str | None = None
    """A known bug to decode with; the audit then has to fail."""
    decoder: Literal["draftsmith", "hf"] = "draftsmith"
    """`hf` audits transformers' own assisted generation."""
    prompts: str | None = None
    """`stdlib` or a JSONL file; default: the recipe's."""
    out: Path | None = None
    """Folder for audit.json; default RUN/eval, without RUN a folder eval-NAME here, of the
    drafter's or the methods' name; of --survey the folder that you are in."""
    determinism: bool = False
    """In place of the audit: greedy text at other batch sizes, paddings, widths and dtypes."""
    survey: bool = False
    """In place of the audit: every method and rule in miniature, at many temperatures; no pair."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .early import refuse_audit

        refuse_audit(self, overrides)
        from .measure import run_audit

        if not run_audit(self, overrides, _console()):
            raise DraftsmithError("the audit failed: the output is not the target's own")


@dataclass
class Tree:
    """Choose the static tree of heads or of EAGLE by what they are measured to get right."""

    run_folder: Annotated[Positional[Path | None], tyro.conf.arg(metavar="RUN")] = None
    """Folder of a finished run; it names target, drafter and settings."""
    target: str | None = None
    """Folder or hub name of the target; default: the run's."""
    drafter: str | None = None
    """Folder of the drafter; default: the run's."""
    nodes: str | None = None
    """Nodes of the tree, the root included; `auto` takes the fastest size on this machine; default:
    as many as the drafter's default tree has."""
    method: Literal["greedy", "dp"] = "greedy"
    """How the tree is searched; both find one of the same worth."""
    depth: int = 6
    """Deepest candidate that is measured; heads have one depth each."""
    texts: int = 32
    """Held-out texts of the training data to measure on, `eval.max_new_tokens` of each."""
    temperature: float = 0.0
    """At which the target writes them."""
    out: Path | None = None
    """File to write; default `tree.json` beside the drafter, for `--drafter.tree optimised`."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .early import refuse_tree

        pair = Pair(self.run_folder, self.target, self.drafter)
        refuse_tree(self, pair, overrides)
        from .tree import run_tree

        _say(f"tree: {run_tree(self, pair, overrides, _console())}")


@dataclass
class Datastore:
    """Build the datastore that the method `rest` retrieves from."""

    action: Positional[Literal["build"]]
    """What to do."""
    source: str
    """Texts, as in data.source: `stdlib`, a file, a folder, a glob, `hub:NAME[:CONFIG]`."""
    out: Path
    """New folder."""
    target: str = "tiny"
    """Folder or hub name of the target, whose tokenizer is used."""
    limit: int | None = None
    """Use only the first rows."""
    shard_tokens: int = 16_000_000
    """Tokens per shard; building takes memory for one at a time."""

    def run(self) -> None:
        from .datastore import build

        _say(build(self))


@dataclass
class Derive:
    """Make a drafter of the target itself, without training: a quantised copy, or an early exit."""

    kind: Positional[Literal["quantised", "early-exit"]]
    """A copy with weights of fewer bits, or the target's first layers."""
    out: Path
    """New folder of the drafter."""
    target: str = "tiny"
    """Folder or hub name of the target."""
    revision: str | None = None
    """Commit, tag or branch of the target on the hub."""
    bits: Literal[4, 8] | None = None
    """Of `quantised`: bits of a weight; default 8."""
    group_size: int | None = None
    """Of 4 bits: inputs that share a scale; default: the largest of 128, 64, 32, 16 that fits."""
    layers: int | None = None
    """Of `early-exit`: how many layers draft."""

    def run(self) -> None:
        from .derive import derive

        _say(derive(self))


@dataclass
class Generate(GenerateRequest):
    """Answer the rows of a source anew by the target; run it again to go on after a stop."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        _say(generate(self, overrides))


@dataclass
class Report:
    """Write report.html and report.md of an evaluated run."""

    run_folder: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, which holds eval/results.json, or an --out of `eval`."""

    def run(self) -> None:
        writable_folder(self.run_folder)
        from ..eval.report import write_report

        _say(f"report: {write_report(self.run_folder)}")


@dataclass
class Export:
    """Write a trained drafter as a folder that a serving engine loads."""

    run_folder: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    format: Literal["vllm", "sglang", "speculators"] = "vllm"
    """Whose: vllm (Medusa, EAGLE, EAGLE-3), sglang (EAGLE, EAGLE-3), speculators (EAGLE-3)."""
    out: Path | None = None
    """New folder; default RUN/FORMAT."""
    target: str | None = None
    """Folder or hub name that the engine knows the target by; default: the run's."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the weights."""

    def run(self) -> None:
        from .export import export

        _say(export(self))


@dataclass
class Inspect:
    """Print rows as input token -> label token, in or out of the loss."""

    recipe: Positional[str]
    """Name of a shipped recipe, or path of a file."""
    rows: int = 2
    """How many rows."""

    def run(self, overrides: Sequence[tuple[str, str]]) -> None:
        from .inspect import inspect

        _say(inspect(load_recipe(self.recipe, overrides), self.rows))


@dataclass
class Quickstart:
    """From nothing to a trained, audited and reported drafter, offline, on a CPU."""

    out: Path = Path("quickstart")
    """Folder for everything."""

    def run(self) -> None:
        from .quickstart import quickstart

        quickstart(self.out, _console())


@dataclass
class Doctor:
    """Print the environment block that a bug report needs."""

    def run(self) -> None:
        from .doctor import doctor

        _say(doctor())


_VERBS: dict[str, type] = {
    "ls": Ls, "show": Show, "copy": Copy, "check": Check, "train": Train, "eval": Eval,
    "audit": Audit, "report": Report, "inspect": Inspect, "quickstart": Quickstart,
    "datastore": Datastore, "derive": Derive, "generate": Generate, "tree": Tree, "export": Export,
    "doctor": Doctor,
}  # fmt: skip
_WITH_OVERRIDES = {"show", "check", "train", "eval", "audit", "tree", "inspect", "generate"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (see `errors.py`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    _log_to_screen()
    try:
        code = _run(words)
        print(end="", flush=True)  # noqa: T201 - here, where it can still be told that nobody reads
        return code
    except DraftsmithError as error:
        return _fail(str(error), error.exit_code, debug)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, debug)
    except Exception as error:  # noqa: BLE001 - the last resort of a command line
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 141
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            place = error.filename or "a file"
            text = f"{place}: {error.strerror}; make room or get the right, or name another place"
            return _fail(text, 4, debug)
        text = f"unexpected {type(error).__name__}: {error}"
        return _fail(f"{text}\nrun again with --debug for the traceback", 5, debug)


def _nobody_reads() -> bool:
    """Whether the standard output is a pipe whose reader is gone, as `head` is; closes it then."""
    watch = select.poll()
    watch.register(1, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0)):
        return False  # another pipe broke, which is a fault
    # or Python would complain of what is left when it flushes at its end
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def _run(words: list[str]) -> int:
    overrides: list[tuple[str, str]] = []
    if words and words[0] in _WITH_OVERRIDES:
        words, overrides = split_overrides(words)
    try:
        verb = tyro.cli(_union(words), args=words, prog="draftsmith", description=_ABOUT)
    except SystemExit as stop:
        return int(stop.code or 0)
    run: Callable[..., None] = verb.run
    run(overrides) if type(verb) in _taking_overrides() else run()
    return 0


_ABOUT = "Train, prove and ship drafters for speculative decoding."
_VALUES = "Values of the recipe are set with --section.field VALUE."


def _union(words: Sequence[str]) -> Any:
    from functools import reduce
    from operator import or_

    # said by the verb's own help alone: in the list of all it would stand eight times
    more = {name: f"{_VERBS[name].__doc__}\n\n{_VALUES}" for name in _WITH_OVERRIDES & {*words[:1]}}
    parts = [
        Annotated[
            verb, tyro.conf.subcommand(name=name, prefix_name=False, description=more.get(name))
        ]
        for name, verb in _VERBS.items()
    ]
    return reduce(or_, parts)


def _taking_overrides() -> set[type]:
    return {_VERBS[name] for name in _WITH_OVERRIDES}


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take `--section.field value` and `--section.field=value` out of the words."""
    rest: list[str] = []
    found: list[tuple[str, str]] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            rest.append(word)
            continue
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise RequestError(f"{word}: no value given; expected {word} VALUE")
            value = waiting.pop(0)
        found.append((name.replace("-", "_"), value))
    return rest, found


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"draftsmith: {message}", file=sys.stderr)  # noqa: T201
    return code


def _log_to_screen() -> None:
    rank = os.environ.get("RANK")
    prefix = f"[rank {rank}] " if rank else ""
    level = logging.INFO if rank in (None, "0") else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format=f"{prefix}%(message)s", stream=sys.stderr)
    logging.getLogger("draftsmith").setLevel(level)
    # transformers imports torchao wherever there is one, and it tells of other machines' kernels
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _console() -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - what it is called in; `main` knows the code

    return Plain(highlight=False)


def _say(text: str) -> None:
    print(text)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
