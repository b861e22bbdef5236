"""The files for Slurm and Kubernetes start what they say: their lines are run with launchers that write down words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.launch.recipe.load import find_recipe
from ruamel.yaml import YAML

CONFIGS = Path(draftsmith.__file__).parent / "launch" / "configs"
LAUNCHER = """\
printf '%s\\n' "$@" > launched
printf '%s' "$TORCHELASTIC_SIGNALS_TO_HANDLE" > signals
printf '%s' "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > patience
mkdir -p "$OUT"
printf '{"state": "x", "exit_code": %s}' "$ENDS_WITH" > "$OUT/status.json"
[ "$ENDS_WITH" = 0 ]
"""
SCONTROL = """\
if [ "$1" = requeue ]; then echo "$2" > requeued; else printf 'first\\nsecond\\n'; fi
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Programs of a cluster, in front of those of this machine."""
    programs = {
        "accelerate": LAUNCHER,
        "scontrol": SCONTROL,
        "srun": 'SLURM_NODEID=1 exec "$@"\n',
        "python": f'exec {sys.executable} "$@"\n',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def run(command: list[str], here: Path, path: str, **values: str) -> int:
    environment = os.environ | {"PATH": path, "ENDS_WITH": "0"} | values
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert "not found" not in done.stderr, done.stderr
    return done.returncode


def given(here: Path) -> dict[str, str]:
    """The launcher's flags, and what it was to train."""
    words = (here / "launched").read_text().splitlines()
    assert words[0] == "launch"
    at = words.index("-m")
    assert words[at : at + 2] == ["-m", "draftsmith.launch.train"]
    flags = dict(zip(words[1:at:2], words[2:at:2], strict=True))
    return flags | {"recipe": words[at + 2], words[at + 3]: words[at + 4]}


WARNED = 120
"""Seconds before the end of its time that a Slurm job is told."""
STOPPED_IN = 30
"""Seconds after which torch's launcher ends what it has told to stop, where nothing else is said."""
SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "h100:4"}


@pytest.mark.parametrize(("ends_with", "code", "again"), [("0", 0, False), ("75", 1, True), ("3", 1, False)])
def test_slurm(ends_with: str, code: int, again: bool, tmp_path: Path, path: str) -> None:
    """A run that was stopped goes back into the queue, one that failed does not."""
    values = SLURM | {"RECIPE": "a b.yaml", "ENDS_WITH": ends_with}
    assert run(["bash", str(CONFIGS / "slurm.sh")], tmp_path, path, **values) == code
    assert given(tmp_path) == {
        "--config_file": str(CONFIGS / "zero2_nodes.yaml"),
        "--num_machines": "2",
        "--num_processes": "8",
        "--machine_rank": "1",
        "--main_process_ip": "first",
        "--main_process_port": "29500",
        "recipe": "a b.yaml",
        "--out": "runs/a b",
    }
    assert "SIGUSR1" in (tmp_path / "signals").read_text()
    assert STOPPED_IN < int((tmp_path / "patience").read_text()) < WARNED
    assert (tmp_path / "requeued").is_file() == again


def test_slurm_asks_for_what_it_starts() -> None:
    text = (CONFIGS / "slurm.sh").read_text(encoding="utf-8")
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    asked = dict(line.split("=", 1) for line in lines if "=" in line)
    assert asked["nodes"] == "2"
    assert asked["ntasks-per-node"] == "1"
    assert asked["signal"] == f"USR1@{WARNED}"  # to the tasks, not to the script alone
    assert "requeue" in lines
    find_recipe("eagle3-8b")


def test_kubernetes(tmp_path: Path, path: str) -> None:
    text = (CONFIGS / "kubernetes.yaml").read_text(encoding="utf-8")
    service, job = YAML(typ="safe", pure=True).load_all(text)
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"] == {"clusterIP": "None", "selector": {"job-name": job["metadata"]["name"]}}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completions"] == spec["parallelism"] == 2
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    (container,) = pod["containers"]
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in pod["volumes"]}
    values = {each["name"]: each["value"] for each in container["env"]}
    find_recipe(values["RECIPE"])
    assert values["OUT"].startswith(container["volumeMounts"][0]["mountPath"])
    command = [*container["command"], *container["args"]]
    given_values: dict[str, Any] = values | {"OUT": "run", "JOB_COMPLETION_INDEX": "1"}
    assert run(command, tmp_path, path, **given_values) == 0
    flags = given(tmp_path)
    assert Path(flags["--config_file"]).is_file()
    assert (flags["--num_machines"], flags["--machine_rank"]) == (str(spec["completions"]), "1")
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(flags["--num_processes"]) == spec["completions"] * gpus
    assert flags["--main_process_ip"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert STOPPED_IN < int((tmp_path / "patience").read_text()) < pod["terminationGracePeriodSeconds"]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 0
