"""What a machine may be like: clocks, zones, folders, languages, names; as a command's environment."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

NOWHERE = "/proc/nowhere"  # no user can make it
HUB = {"HF_HUB_OFFLINE": None, "HF_DATASETS_OFFLINE": None}
NO_NETWORK = HUB | {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}


@dataclass(frozen=True)
class Surroundings:
    """Variables of the environment (None: taken away), a folder's name, and what the clock does."""

    variables: dict[str, str | None] = field(default_factory=dict)
    folder: str = "run"
    clock: str = "right"

    @property
    def environment(self) -> dict[str, str]:
        """This process's own, with the variables set or taken away."""
        changed = {**os.environ, **self.variables}
        return {name: value for name, value in changed.items() if value is not None}


EMOJI, LONG = "ein Lauf \U0001f98a mit Lücken", "n" * 120
C_LOCALE: dict[str, str | None] = {"LC_ALL": "C", "LANG": "C"}
# Python would take UTF-8 in the locale C by itself
ASCII = C_LOCALE | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ALL: dict[str, Surroundings] = {
    "clock an hour back at every look": Surroundings(clock="back"),
    "clock years ahead and back": Surroundings(clock="wild"),
    "clock at 1970": Surroundings(clock="1970"),
    "clock that stands": Surroundings(clock="stands"),
    "clock behind 2038": Surroundings(clock="2039"),
    "zone behind the date line": Surroundings({"TZ": "Pacific/Kiritimati"}),
    "zone of half hours": Surroundings({"TZ": "Asia/Kathmandu"}),
    "zone unknown": Surroundings({"TZ": "No/Where"}),
    "zone empty": Surroundings({"TZ": ""}),
    "temporary folder missing": Surroundings({"TMPDIR": NOWHERE, "TEMP": NOWHERE, "TMP": NOWHERE}),
    "temporary folder is a device that is full": Surroundings({"TMPDIR": "/dev/full"}),
    "no home": Surroundings({"HOME": None}),
    "home missing": Surroundings({"HOME": NOWHERE}),
    "home is a file": Surroundings({"HOME": "/dev/null"}),
    "no network": Surroundings(NO_NETWORK),
    "no network and no home": Surroundings(NO_NETWORK | {"HOME": NOWHERE, "HF_HOME": NOWHERE}),
    "cache read-only": Surroundings({"XDG_CACHE_HOME": NOWHERE}),
    "cache is a file": Surroundings({"XDG_CACHE_HOME": "/dev/null"}),
    "locale C, and no UTF-8": Surroundings(ASCII),
    "locale not UTF-8": Surroundings({"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}),
    "locale Turkish": Surroundings({"LC_ALL": "tr_TR.UTF-8", "LANGUAGE": "tr"}),
    "spaces and an emoji": Surroundings(folder=EMOJI),
    "emoji under locale C": Surroundings(C_LOCALE, folder=EMOJI),
    "long names, quotes and brackets": Surroundings(folder=f'{LONG}/it\'s [red]"x"[/red] & $HOME;#'),
    "all at once": Surroundings(
        NO_NETWORK | C_LOCALE | {"TZ": "No/Where", "TMPDIR": "/dev/full", "HOME": NOWHERE, "XDG_CACHE_HOME": NOWHERE},
        folder=EMOJI,
        clock="wild",
    ),
}


@contextmanager
def clock(kind: str) -> Iterator[None]:
    """`time.time` as a clock that is set while the program runs."""
    real, calls, chance = time.time, [0], random.Random(0)

    def now() -> float:
        calls[0] += 1
        moved = {"back": -3600.0 * calls[0], "wild": chance.uniform(-1e9, 1e9), "right": 0.0}
        fixed = {"1970": 1.0, "stands": 1.7e9, "2039": 2.2e9}
        return fixed[kind] if kind in fixed else real() + moved[kind]

    time.time = now
    try:
        yield
    finally:
        time.time = real


def main(kind: str, recipe: str, out: str) -> int:
    """The body of a command's process."""
    from draftsmith.launch.cli import main as draftsmith

    with clock(kind):
        return draftsmith(["train", recipe, "--out", out])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
