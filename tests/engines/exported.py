"""A run as `draftsmith export` hands it over: the words that it prints are what an engine is started with."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.launch.cli import main

PROBABILISTIC = {"draft_sample_method": "probabilistic"}


@dataclass(frozen=True)
class Command:
    """`vllm serve MODEL --speculative-config CONFIG`, and what else is said of the target."""

    model: str
    config: dict[str, Any]
    of_target: dict[str, Any]

    @property
    def greedy(self) -> dict[str, Any]:
        """The same without the word for how drafts are drawn: vLLM takes the argmax."""
        return {name: value for name, value in self.config.items() if name not in PROBABILISTIC}

    @property
    def samples(self) -> bool:
        return self.config.items() >= PROBABILISTIC.items()


def exported(run: Path, form: str, out: Path) -> Command:
    """Export in fp32 to `out`; of a draft model nothing is written, and the command names the drafter itself."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["export", str(run), "--format", form, "--out", str(out), "--dtype", "fp32"])
    line = said.getvalue().strip().splitlines()[-1]
    assert code == 0, said.getvalue()
    program, verb, model, flag, config, *told = shlex.split(line)
    assert (program, verb, flag) == ("vllm", "serve", "--speculative-config"), line
    assert told[:1] in ([], ["--hf-overrides"]), line
    return Command(model, json.loads(config), json.loads(told[1]) if told else {})
