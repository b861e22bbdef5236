"""Trackers get what `metrics.jsonl` gets, offline, and a run that was killed goes on in the record that it began."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import get_available_trackers
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.trainers.loop.progress import TRACKED, begin_trackers
from helpers.runs.small_run import losses, write_recipe


class Given:
    """An accelerator that keeps what its trackers are started with."""

    is_main_process = True

    def __init__(self, run_id: str = "", error: Exception | None = None) -> None:
        self.run_id, self.error = run_id, error
        self.kwargs: dict[str, Any] = {}

    def init_trackers(self, project: str, init_kwargs: dict[str, Any]) -> None:
        assert project == "draftsmith"
        self.kwargs = init_kwargs
        if self.error is not None:
            raise self.error

    def get_tracker(self, name: str, unwrap: bool) -> Any:
        assert (name, unwrap) == ("mlflow", True)
        return type("Run", (), {"info": self})


def test_a_second_start_names_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_DIR", raising=False)
    first, second, other = Given("7f"), Given("7f"), Given("8a")
    trackers = ["tensorboard", "wandb", "trackio", "mlflow"]
    begin_trackers(first, trackers, tmp_path)  # type: ignore[arg-type]
    assert first.kwargs["mlflow"] == {"run_id": None, "run_name": tmp_path.name}
    assert first.kwargs["wandb"]["dir"] == str(tmp_path)
    begin_trackers(second, trackers, tmp_path)  # type: ignore[arg-type]
    assert second.kwargs["wandb"] == first.kwargs["wandb"]
    assert second.kwargs["trackio"] == first.kwargs["trackio"]
    assert second.kwargs["mlflow"]["run_id"] == "7f"
    (tmp_path / "other").mkdir()
    begin_trackers(other, trackers, tmp_path / "other")  # type: ignore[arg-type]
    assert other.kwargs["wandb"]["id"] != first.kwargs["wandb"]["id"]
    assert json.loads((tmp_path / "other" / TRACKED).read_text())["mlflow"] == "8a"
    begin_trackers(Given(), ["tensorboard"], tmp_path / "other")  # type: ignore[arg-type]
    assert set(json.loads((tmp_path / "other" / TRACKED).read_text())) == {"wandb", "trackio", "mlflow"}


def test_what_cannot_start_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match=r"loop.trackers \(wandb\) cannot start: ValueError \(no key\)"):
        begin_trackers(Given(error=ValueError("no key\nat all")), ["wandb"], tmp_path)  # type: ignore[arg-type]
    (tmp_path / TRACKED).write_text("[]")
    with pytest.raises(RequestError, match="trackers.json is damaged: expected trackers' names"):
        begin_trackers(Given(), ["wandb"], tmp_path)  # type: ignore[arg-type]


def of_tensorboard(run: Path, _kept: dict[str, str]) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "draftsmith"))
    events.Reload()
    return {each.step: each.value for each in events.Scalars("loss")}


def of_wandb(run: Path, kept: dict[str, str]) -> dict[int, float]:
    """One file for each start, of one id: `wandb sync` makes one run of them."""
    from wandb.proto import wandb_internal_pb2

    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    found = {}
    for folder in folders:
        assert folder.name.endswith(f"-{kept['wandb']}")
        for content in blocks(next(folder.glob("*.wandb")).read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if "loss" in values:
                found[record.history.step.num] = float(values["loss"])
    return found


def blocks(data: bytes) -> Iterator[bytes]:
    """The records of a file of W&B, a log as LevelDB's: a checksum, a length and a kind in front of each piece, and no
    piece across the end of 32 kB."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of it, or its last piece
            yield whole
            whole = b""


def of_trackio(_run: Path, kept: dict[str, str]) -> dict[int, float]:
    from trackio.sqlite_storage import SQLiteStorage

    [name] = SQLiteStorage.get_runs("draftsmith")
    assert name.endswith(kept["trackio"][:8])
    return {each["step"]: each["loss"] for each in SQLiteStorage.get_logs("draftsmith", name) if "loss" in each}


def of_mlflow(_run: Path, kept: dict[str, str]) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    [experiment] = [each for each in client.search_experiments() if each.name == "draftsmith"]
    assert [each.info.run_id for each in client.search_runs([experiment.experiment_id])] == [kept["mlflow"]]
    return {each.step: each.value for each in client.get_metric_history(kept["mlflow"], "loss")}


READERS: dict[str, Callable[[Path, dict[str, str]], dict[int, float]]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "trackio": of_trackio,
    "mlflow": of_mlflow,
}


@pytest.mark.slow
@pytest.mark.run
@pytest.mark.fault
@pytest.mark.parametrize("tracker", READERS)
def test_values_arrive_and_a_killed_run_goes_on(tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B and Trackio write by themselves, and lose what they hold when the run is killed: there it is stopped."""
    if tracker not in {str(getattr(each, "value", each)) for each in get_available_trackers()}:
        pytest.skip(f"{tracker} is not installed here (the extra `{tracker}`)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tmp_path / "run"
    words = ["train", str(write_recipe(tmp_path)), "--out", str(run), "--loop.trackers", tracker]
    command = [sys.executable, "-m", "draftsmith.launch.cli", *words]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=dict(os.environ))
    while not list(run.glob("checkpoints/step-*")) or max(losses(run)) < 8:
        assert first.poll() is None, first.stderr.read().decode() if first.stderr else ""
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM if tracker in ("wandb", "trackio") else signal.SIGKILL)
    first.wait()
    assert max(losses(run)) < 24
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    kept = json.loads((run / TRACKED).read_text()) if (run / TRACKED).is_file() else {}
    found = READERS[tracker](run, kept)
    assert found == pytest.approx(losses(run), rel=1e-4)
    assert sorted(found) == list(range(1, 25))
