"""The other end of `in_vllm/vllm_job.py`: a process of vLLM's own environment that answers jobs, one after another.

Read next: `test_vllm.py`, what is asked of it; the Makefile's `test-engines`, which makes the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "DRAFTSMITH_ENGINES"
PLACE = os.environ.get(VARIABLE, "")
NEEDED = pytest.mark.skipif(
    not PLACE, reason="needs vLLM's CPU build, 2 GB in an environment of its own: make test-engines"
)
MOST_TOKENS = 32
INSIDE = Path(__file__).with_name("in_vllm")
"""What runs in vLLM's processes."""


@dataclass(frozen=True)
class Asked:
    """Prompts at a temperature."""

    prompts: Sequence[Sequence[int]]
    temperature: float

    @property
    def job(self) -> dict[str, Any]:
        return {"prompts": self.prompts, "temperature": self.temperature, "max_tokens": MOST_TOKENS}


@dataclass(frozen=True)
class Answered:
    """What vLLM wrote, and what its own metrics count."""

    tokens: list[list[int]]
    drafts: int
    """Steps that verified a draft."""
    accepted: list[int]
    """In how many of them each position was accepted."""


@dataclass(frozen=True)
class Served:
    """A loaded pair of target and drafter."""

    version: str
    faults: list[str]
    engine_class: str
    untouched: list[str]
    runs: list[Answered]
    again: list[Answered]
    """The same runs, with the weights that took the drafter's place."""


class Vllm:
    """A running process; `log` is what vLLM prints."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._log = (folder / "vllm.log").open("w")
        self._process = subprocess.Popen(
            [str(Path(PLACE) / "bin" / "python"), str(INSIDE / "vllm_job.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # our own environment has other versions of the same packages
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )

    def serve(
        self,
        model: str,
        speculative_config: dict[str, Any] | None,
        asked: Sequence[Asked],
        of_target: dict[str, Any] | None = None,
        *,
        as_it_comes: bool = False,
        replaced_by: Path | None = None,
    ) -> Served:
        """Load `model` with that draft, answer, and unload; what goes wrong there is raised here.

        Args:
            of_target: words that are put into the model's config.
            as_it_comes: with the build's own key norms of DFlash (`in_vllm/mended.py`).
            replaced_by: a folder whose weights take the place of the drafter's, before all is asked once more.
        """
        self._count += 1
        job, result = (self._folder / f"{kind}-{self._count}.json" for kind in ("job", "result"))
        runs = [each.job for each in asked]
        job.write_text(
            json.dumps(
                {
                    "model": model,
                    "speculative_config": speculative_config,
                    "of_target": of_target or {},
                    "as_it_comes": as_it_comes,
                    "replaced_by": None if replaced_by is None else str(replaced_by),
                    "runs": runs,
                }
            )
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(job), str(result)]), file=self._process.stdin, flush=True)
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError(f"vLLM's process ended; {self._log.name} ends with\n{self._tail()}")
        found = json.loads(result.read_text())
        if "error" in found:
            raise RuntimeError(f"vLLM refused the job; {self._log.name}\n{found['error']}")
        answers, again = ([Answered(**run) for run in found[name]] for name in ("runs", "again"))
        return Served(found["version"], found["faults"], found["class"], found["untouched"], answers, again)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._log.close()

    def _tail(self) -> str:
        return "\n".join(Path(self._log.name).read_text().splitlines()[-20:])
