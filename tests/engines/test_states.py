"""`features.source: engine` at vLLM itself: the losses of a run that computes the same states online."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from draftsmith.data.features.engine import EngineRequest, start_command
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.launch.cli import main
from engines.engine import NEEDED
from engines.findings import STATES_OF, Findings
from engines.serving import NAME, serving
from launching import launched

pytestmark = NEEDED
LAYERS = (2, 10, 17, 20)
FLAGS = ("--speculative-config", "--kv-transfer-config")
STEPS = 6
VALUES = {
    "loop.steps": STEPS,
    "loop.batch_rows": 4,
    "loop.micro_rows": 2,
    "loop.validate_every": STEPS,
    "loop.validate_rows": 4,
    "loop.log_every": 1,
    "loop.precision": "fp32",
    "data.limit_rows": 200,
    "data.sequence_length": 128,
    "features.dtype": "fp32",
    "eagle3.vocabulary": 512,
}
# what two programs' fp32 makes of the same states, over a few steps of training
TOLERANCE = 1e-3


def losses(run: Path) -> list[float]:
    """Every loss of a run, in its order."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        float(value)
        for record in records
        if record["kind"] in ("train", "validation")
        for name, value in sorted(record.items())
        if "loss" in name
    ]


def train(out: Path, more: Sequence[str], processes: int) -> list[float]:
    """The losses of EAGLE-3 on the embedded target."""
    words = ["eagle3-tiny", "--out", str(out), *(f"--{name}={value}" for name, value in VALUES.items())]
    words += ["--probe.every_steps", "", *more]
    if processes == 1:
        assert main(["train", *words]) == 0
    else:
        launched("multi_cpu", "-m", "draftsmith.launch.train", *words)
    return losses(out)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_losses_of_a_run_online(processes: int, target: Backbone, findings: Findings, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    online = train(tmp_path / "online", [], processes)
    with serving(tmp_path / "server", target.name, *asked_for(target, shared)) as url:
        more = ["--features.source", "engine", "--features.server", url, "--features.shared", str(shared)]
        engine = train(tmp_path / "engine", [*more, "--features.served_model", NAME], processes)
    assert len(engine) == len(online) >= STEPS
    difference = max(abs(a - b) / abs(b) for a, b in zip(engine, online, strict=True))
    findings.add(STATES_OF, str(processes), losses=str(len(engine)), difference=f"{difference:.1e}")
    assert all(map(math.isfinite, engine))
    assert difference < TOLERANCE
    assert engine != online  # two programs do not round alike: otherwise the engine was not asked
    assert list(shared.iterdir()) == []


def asked_for(target: Backbone, shared: Path) -> tuple[dict[str, object], tuple[str, ...]]:
    """The options of `draftsmith check`'s command, with a connector that needs no CUDA."""
    request = EngineRequest("http://localhost:1", NAME, shared, LAYERS, target.model.config.hidden_size)
    words = shlex.split(start_command(target.name, request))
    speculative, transfer = (json.loads(words[words.index(flag) + 1]) for flag in FLAGS)
    transfer |= {"kv_connector": "CpuStates", "kv_connector_module_path": "cpu_states"}
    return speculative, (FLAGS[1], json.dumps(transfer))
