"""`tuned.json`: the setting of a drafter that was measured to pay on a machine, beside its weights. No torch here.

`draftsmith tune` writes it (`launch/measure/tune.py`); `eval`, `audit`, `generate` and `export` take its
values where no flag gives others. Read next: `grids.py`, what is chosen from.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..storage import write_text
from ..storage.formats import TUNED
from .config import current_path
from .grids import NO_FACTORS

NAME = "tuned.json"
DRAFT_LENGTH = "eval.draft_length"
_PLAIN = re.compile(r"[a-z0-9_-]{1,20}|[0-9]{1,9}\.[0-9]{1,9}|\[[0-9., ]{0,160}\]")
_AGAIN = "delete it, or run `draftsmith tune` again"


def write_tuned(folder: Path, settings: Mapping[str, str], facts: Mapping[str, Any]) -> Path:
    """Write the recipe values of a drafter, none where plain decoding is faster, and what they were chosen from.

    Args:
        facts: among them `plain`, whether nothing was faster than plain decoding. That no value is set does not
            say it: the recipe's own setting may be the fastest.
    """
    path = folder / NAME
    write_text(path, json.dumps({"format": TUNED.number, "settings": dict(settings), **facts}, indent=1) + "\n")
    return path


@dataclass(frozen=True)
class Tuned:
    """A drafter's setting, and what it was measured for."""

    values: dict[str, str]
    """Of the recipe, as flags give them; empty: the drafter was not tuned, its recipe's own setting is the fastest,
    or none pays."""
    measured: str = ""
    """At which temperature and batch, and on what, in words; empty: it was not tuned."""
    plain: bool = False
    """Whether it was tuned, and nothing was faster than plain decoding, which then is the tuned setting."""
    hope: str = ""
    """Where it does not pay: from which cost of a target call it would, in words."""

    def unless(self, given: Iterable[str]) -> Tuned:
        """None of it where a flag sets a value of its kind: half a setting is another one."""
        return Tuned({}) if any(map(_is_ours, given)) else self

    @property
    def shown(self) -> str:
        """The values as flags."""
        return " ".join(f"--{name} {shlex.quote(value)}" for name, value in self.values.items() if value != NO_FACTORS)

    def none_pays(self, then: str) -> str:
        """That plain decoding is the tuned setting, in a line; `then` is what is done about it."""
        return f"tuning found nothing faster than plain decoding for {self.measured}{self.hope}; {then}"

    @property
    def is_chain(self) -> bool:
        """Whether it drafts a chain, as serving engines do."""
        nodes = any(name.endswith(".nodes") for name in self.values)
        return not nodes and self.values.get("drafter.eagle.tree", "chain") == "chain"


def read_tuned(folder: Path) -> Tuned:
    """What a drafter was tuned to; nothing where it was not.

    Raises:
        RequestError: the file is damaged, of another format, or sets what is no drafter's.
    """
    path = folder / NAME
    if not path.is_file():
        return Tuned({})
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        number, settings = content["format"], content["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(f"{path} is damaged ({type(error).__name__}: {error}); {_AGAIN}") from error
    TUNED.check(number, path, remedy=_AGAIN)
    wrong = (
        [settings] if not isinstance(settings, dict) else [each for each in settings.items() if not _is_setting(each)]
    )
    if wrong:
        raise RequestError(
            f"{path} sets {wrong[0]!r:.120}; expected values of drafter.* and {DRAFT_LENGTH}, each a number, a word "
            f"or a list of numbers; {_AGAIN}"
        )
    measured = _measured(content, content)
    # before `plain` was written, nothing else said that no setting pays
    plain = content.get("plain", content.get("pays") is False and not settings)
    if not isinstance(plain, bool) or (plain and settings):
        raise RequestError(f"{path} sets {settings!r:.120} with plain {plain!r:.20}; expected one of them; {_AGAIN}")
    values = {current_path(name): value for name, value in settings.items()}
    return Tuned(values, measured, plain, _hope(content) if plain else "")


def read_tuned_methods(file: Path) -> dict[str, Tuned]:
    """What `draftsmith tune` found for each method, by name, in the `tune.json` that it wrote.

    Raises:
        RequestError: no such file, another one's, or a value that is no drafter's.
    """
    again = "name the tune.json that `draftsmith tune` writes into the folder eval of a run, or into its --out"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = [(row["method"], row["settings"], row["measured"][2] < 1) for row in content["measured"]]
        wrong = [item for _, settings, _ in found for item in settings.items() if not _is_setting(item)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(f"{file} holds no measured settings ({type(error).__name__}: {error}); {again}") from error
    if wrong:
        raise RequestError(f"{file} sets {wrong[0]!r:.120}; expected values of drafter.* and {DRAFT_LENGTH}; {again}")
    measured = _measured(content, content.get("environment"))
    # the best of a method stands first
    made = {}
    for name, settings, plain in reversed(found):
        values = {} if plain else {current_path(key): value for key, value in settings.items()}
        made[str(name)] = Tuned(values, measured, plain)
    return made


def _measured(content: Mapping[str, Any], machine: object) -> str:
    """For what a setting was chosen, in words."""
    processor = machine.get("processor") if isinstance(machine, dict) else None
    facts = [f"T = {content.get('temperature')!s:.8}", f"batch {content.get('batch')!s:.8}"]
    return ", ".join([*facts, f"{processor!s:.60}"])


def _hope(content: Mapping[str, Any]) -> str:
    """From which cost of a target call the drafter would pay; nothing where tuning has not kept it."""
    if "pays_from" not in content:
        return ""
    factor, call = _positive(content["pays_from"]), _positive(content.get("target_call_seconds"))
    return f" (it would pay {from_call(factor, call)})"


def from_call(factor: float | None, call_seconds: float | None = None) -> str:
    """From which cost of a target call a drafter pays, as the speed model has it: what follows "it would pay".

    Args:
        factor: how many times as long as measured a call would have to take; None: at no length.
        call_seconds: what it took; None where that is not known.
    """
    if factor is None:
        return "at no cost of a target call"
    if factor == 0:
        return "at any cost of a target call"
    took = "" if call_seconds is None else f"of {factor * call_seconds * 1e3:.3g} ms, "
    return f"from a target call {took}{factor:.2f} times the one measured"


def _positive(value: object) -> float | None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if ok else None  # type: ignore[arg-type]


def _is_setting(item: tuple[str, Any]) -> bool:
    name, value = item
    if not isinstance(value, str) or not _PLAIN.fullmatch(value):  # numbers or a word, no place on this machine
        return False
    if name == DRAFT_LENGTH:
        return value.isdecimal() and int(value) > 0
    return _is_ours(name)


def _is_ours(name: str) -> bool:
    return name == DRAFT_LENGTH or name.startswith("drafter.")


@dataclass(frozen=True)
class Promise:
    """What the speed model predicted for a drafter's setting, and what was measured here."""

    temperature: float
    batch: int
    predicted: float
    """Tokens per second over plain decoding's."""
    measured: float | None
    processor: str

    def is_of(self, temperature: float, batch: int | None) -> bool:
        """Whether it is for that temperature, and for so many prompts at a time."""
        return self.temperature == temperature and self.batch == batch


def read_promise(folder: Path) -> Promise:
    """The prediction in a drafter's `tuned.json`.

    Raises:
        RequestError: the drafter was not tuned, or before predictions were kept.
    """
    path = folder / NAME
    read_tuned(folder)  # refuses what is damaged
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measured = content["speedup"][0]
        return Promise(
            float(content["temperature"]),
            int(content["batch"]),
            float(content["predicted"]),
            None if measured is None else float(measured),
            f"{content.get('processor')!s:.60}",
        )
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise RequestError(
            f"{path} holds no prediction ({type(error).__name__}: {error}): `draftsmith tune` makes one; "
            "or leave --drafter out"
        ) from error
