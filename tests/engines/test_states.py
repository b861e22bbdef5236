"""`features.source: engine` at vLLM itself: the losses of a run that computes the same states online."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from draftsmith.data.features.engine import EngineRequest, start_command
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.launch.cli import main
from engines.engine import NEEDED
from engines.findings import STATES_OF, Findings
from engines.serving import NAME, serving
from helpers.runs.launcher import launched
from safetensors.torch import load_file
from torch import Tensor

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


def test_answers_and_states_from_one_request(target: Backbone, findings: Findings, tmp_path: Path) -> None:
    """vLLM's greedy answers are the target's own, and their states those that it makes of the finished rows."""
    shared, tokens = tmp_path / "shared", 12
    shared.mkdir()
    with serving(tmp_path / "server", target.name, *asked_for(target, shared)) as url:
        more = ["--features.source", "engine", "--features.server", url, "--features.shared", str(shared)]
        more += ["--features.served_model", NAME, "--features.answers", str(tokens), "--data.limit_rows", "40"]
        at_once = train(tmp_path / "at-once", more, 1)
        shutil.copytree(tmp_path / "at-once" / "answers", tmp_path / "later" / "answers")
        later = train(tmp_path / "later", more, 1)
    parts = [load_file(path) for path in sorted((tmp_path / "at-once" / "answers").glob("part-*"))]
    rows = [row for part in parts for row in zip(part["ids"], part["labels"], part["documents"], strict=True)]
    own = [answer_of(target, *row, tokens) for row in rows[:24]]
    equal = sum(theirs == ours for theirs, ours in own)
    difference = max(abs(a - b) / abs(b) for a, b in zip(at_once, later, strict=True))
    findings.add(STATES_OF, "1, with answers", losses=str(len(later)), difference=f"{difference:.1e}")
    assert equal == len(own)
    assert len(later) == len(at_once) >= STEPS
    assert difference < TOLERANCE
    assert list(shared.iterdir()) == []


def answer_of(
    target: Backbone, ids_S: Tensor, labels_S: Tensor, documents_S: Tensor, tokens: int
) -> tuple[list[int], list[int]]:
    """A row's answer, and the one that the target decodes here behind the same prompt."""
    prompt, answer = ids_S[(documents_S == 0) & ~labels_S].tolist(), ids_S[labels_S].tolist()
    made = autoregressive(target, [prompt], warper=Warper(0.0), max_new_tokens=tokens, eos_ids=target.eos_ids, seed=0)
    return answer, list(made.tokens[0])


def asked_for(target: Backbone, shared: Path) -> tuple[dict[str, object], tuple[str, ...]]:
    """The options of `draftsmith check`'s command, with a connector that needs no CUDA."""
    request = EngineRequest("http://localhost:1", NAME, shared, LAYERS, target.model.config.hidden_size)
    words = shlex.split(start_command(target.name, request))
    speculative, transfer = (json.loads(words[words.index(flag) + 1]) for flag in FLAGS)
    transfer |= {"kv_connector": "CpuStates", "kv_connector_module_path": "cpu_states"}
    return speculative, (FLAGS[1], json.dumps(transfer))
