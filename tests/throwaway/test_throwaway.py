"""A new family is one short file, which registers its records, and nothing else is touched.

It trains, is probed, resumes to the same bits, is initialised from a finished one, decodes, is
audited, measured, exported and refused where the records say so: through the real command line, in a
process of its own whose recipes were made before the family was registered.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.models.shallow_target import SHALLOW
from safetensors.torch import load_file

# two minutes of commands in processes of their own
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
RECIPE = """\
method: bigram
name: bigram
target: {path: SHALLOW}
data: {limit_rows: 60, sequence_length: 64}
bigram: {inner: 16}
objective: {chunk: 64}
optimizer: {lr: 1.0e-1, warmup_steps: 2}
loop: {steps: 24, batch_rows: 8, micro_rows: 8, precision: fp32, validate_every: 12, validate_rows: 4, log_every: 1}
checkpoint: {every_steps: 8, keep: 3}
probe: {every_steps: 12, prompts: 1, max_new_tokens: 6, draft_length: 2}
eval: {limit: 2, max_new_tokens: 8, draft_length: 2, sweep: [1], repeats: 1}
audit: {tokens: 500, sequences: 10000, prompts: 1, max_new_tokens: 8, draft_length: 2}
"""
DRIVER = """\
import json, sys
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
load_recipe("medusa-tiny")
import bigram
exec(sys.argv[2])
for line in json.loads(sys.argv[1]):
    print("CODE", main(line.split()), flush=True)
"""


# tokens are drawn from q and judged as if they had been drawn evenly
MISDECLARED = """\
import dataclasses, bigram
honest = bigram.Bigram.propose
def propose(self, *args):
    made = honest(self, *args)
    return dataclasses.replace(made, q_BNV=made.q_BNV * 0 + 1 / made.q_BNV.shape[-1])
bigram.Bigram.propose = propose
"""


def run(folder: Path, *lines: str, before: str = "") -> tuple[list[int], str]:
    """Exit codes of the commands, and everything that they printed; `before` is run in front of them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(lines), before],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("CODE")], printed


def test_it_is_one_file_that_a_reader_takes_in() -> None:
    assert [path.name for path in HERE.glob("*.py") if not path.name.startswith("test_")] == ["bigram.py"]
    lines = (HERE / "bigram.py").read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 119


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("throwaway")
    (folder / "bigram.yaml").write_text(RECIPE.replace("SHALLOW", SHALLOW))
    codes, printed = run(folder, "check bigram.yaml", "train bigram.yaml --out whole")
    assert codes == [0, 0], printed
    assert "ready to train" in printed
    assert "probe_tau" in printed
    return folder


@pytest.mark.run
def test_it_decodes_and_is_proven(folder: Path) -> None:
    codes, printed = run(folder, "eval whole", "export whole")
    assert codes == [0, 0], printed
    rows = json.loads((folder / "whole" / "eval" / "results.json").read_text())["rows"]
    assert {(row["method"], row["verdict"]) for row in rows} == {("bigram", "lossless")}
    assert "vllm serve" in printed
    config = json.loads((folder / "whole" / "vllm" / "config.json").read_text())
    assert config["architectures"] == ["Bigram"]


@pytest.mark.run
def test_a_wrong_proposer_of_it_fails_the_audit(folder: Path) -> None:
    codes, printed = run(folder, "audit whole --out wrong --audit.sequences 100000", before=MISDECLARED)
    assert codes == [5], printed
    assert "enumeration" in printed


@pytest.mark.run
def test_it_resumes_to_the_same_bits(folder: Path) -> None:
    shutil.copytree(folder / "whole", folder / "cut")
    shutil.rmtree(folder / "cut" / "drafter")
    for step in (16, 24):
        shutil.rmtree(folder / "cut" / "checkpoints" / f"step-{step:08d}")
    codes, printed = run(folder, "train bigram.yaml --out cut")
    assert codes == [0], printed
    assert "step=9/24" in printed
    assert "step=8/24" not in printed
    names = ["drafter/model.safetensors", "checkpoints/step-00000024/model.safetensors"]
    for name in names:
        mine, theirs = load_file(folder / "cut" / name), load_file(folder / "whole" / name)
        assert mine.keys() == theirs.keys()
        assert all(mine[key].equal(theirs[key]) for key in mine)


REFUSED = {
    "train bigram.yaml --out no --bigram.inner 7": "bigram.inner is 7; expected an even number",
    "train bigram.yaml --out no --medusa.heads 2": "medusa.heads is 2, and method `bigram` does not read it",
    "train eagle-tiny --out no --bigram.inner 4": "method `eagle` does not read it; leave it out, or train with `bigram`",
    "train bigram.yaml --out whole --bigram.inner 8": "holds a run of another recipe; these values differ: bigram.inner",
    "train bigram.yaml --out no --model.start_from whole/drafter --bigram.inner 8": "set bigram.inner to 16, or leave",
    "eval whole --drafter.adapter one --no-audit": "which has no adapters; leave it out",
    "eval whole --drafter.members 2 --no-audit": "not an ensemble; leave it out",
    "export whole --format sglang": "expected vllm",
}


@pytest.mark.run
def test_it_is_refused_where_its_records_say_so(folder: Path) -> None:
    (folder / "other").mkdir(exist_ok=True)
    codes, printed = run(folder, *REFUSED)
    assert codes == [2] * len(REFUSED), printed
    for message in REFUSED.values():
        assert message in printed
    codes, printed = run(folder, "train bigram.yaml --out behind --model.start_from whole/drafter --loop.steps 2")
    assert codes == [0], printed
    assert "the drafter is initialised from whole/drafter" in printed
