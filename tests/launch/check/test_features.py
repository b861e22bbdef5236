"""What `check` says of the features: bytes, room, memory, time, all known by other ways too."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.launch.check import features as module
from draftsmith.launch.check.features import check_features
from draftsmith.launch.check.models import Models
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe

# some 48 rows of 32 tokens
LINES = "".join(json.dumps({"text": f"the {n}th line of this file of rows"}) + "\n" for n in range(99))
SMALL = {"data.sequence_length": "32", "data.validation_share": "0.2", "loop.batch_rows": "4", "loop.micro_rows": "2"}


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text(LINES)
    return str(path)


def finding(method: str, out: Path, **flags: str) -> str:
    words = SMALL | {name.replace("__", "."): value for name, value in flags.items()}
    recipe = load_recipe(f"{method}-tiny", list(words.items())).recipe
    return check_features(recipe, Models(recipe), out)


def test_online(tmp_path: Path) -> None:
    """The tokens are those of the steps, and nothing needs a place."""
    message = finding("medusa", tmp_path, loop__steps="10")
    assert message.startswith("online: 832 bytes per token (1 x 208 in fp32)")
    assert "0.0 M tokens" in message
    assert "4 x 208 in bf16" in finding("eagle3", tmp_path, target__dtype="bf16")
    assert "3,328 bytes" in finding("eagle3", tmp_path)


@pytest.mark.parametrize(("dtype", "token"), [("fp32", 3328), ("bf16", 1664), ("fp8", 848)])
def test_a_cache(dtype: str, token: int, source: str, tmp_path: Path) -> None:
    """As large as it then is, rows counted as the run will find them."""
    flags = {
        "features__source": "cache",
        "features__dtype": dtype,
        "data__source": source,
        "loop__steps": "20",
        "loop__validate_rows": "2",
    }
    message = finding("eagle3", tmp_path, **flags)
    assert message.startswith(f"cache: {token:,} bytes per token (4 x 208 in {dtype})")
    rows = int(re.search(r", (\d+) rows = ", message)[1])
    assert 30 < rows < 50, "not the 80 that the steps ask for"
    assert "measured on 2 of 20 layers and 32 tokens" in message
    if dtype == "fp8":
        words = [f"--{name.replace('__', '.')}={value}" for name, value in flags.items()]
        small = [f"--{name}={value}" for name, value in SMALL.items()]
        out = tmp_path / "run"
        assert (
            main(
                [
                    "train",
                    "eagle3-tiny",
                    "--out",
                    str(out),
                    *words,
                    *small,
                    "--probe.prompts=1",
                    "--probe.max_new_tokens=6",
                    "--eagle3.passes=1",
                ]
            )
            == 0
        )
        shards = list((out / "features").glob("*.safetensors"))
        size = sum(path.stat().st_size for path in shards)
        assert size == pytest.approx(rows * 32 * token, rel=0.02)


def test_a_bound_keeps_a_part(source: str, tmp_path: Path) -> None:
    flags = {"features__source": "cache", "data__source": source}
    whole = finding("medusa", tmp_path, **flags)
    rows = int(re.search(r"(\d+) rows", whole)[1])
    row = 32 * 208 * 2
    part = finding("medusa", tmp_path, **flags, features__max_gb=str(0.5 * rows * row / 1e9))
    share = (rows // 2) / rows
    assert f"of which features.max_gb keeps {share:.0%} and the rest is computed" in part
    with pytest.raises(RequestError, match="features of one row take 13.3 kB; raise it"):
        finding("medusa", tmp_path, **flags, features__max_gb="1e-5")


def test_a_disk_without_room(source: str, tmp_path: Path, monkeypatch) -> None:  # noqa: ANN001
    flags = {"features__source": "cache", "data__source": source}
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**5, 10**5))
    with pytest.raises(EnvironmentFailure, match=r"cache needs \d+ kB, and 100 kB are free; lower"):
        finding("medusa", tmp_path, **flags)
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "000-x.safetensors").write_bytes(bytes(600_000))  # what is there needs no room
    assert "100 kB free" in finding("medusa", tmp_path, **flags)


def test_a_trained_target_has_no_cache(source: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="this bpd trains the target"):
        finding("bpd", tmp_path, features__source="cache", data__source=source, bpd__backbone="tuned")


def test_time_is_counted_where_a_trial_would_take_long(tmp_path: Path, monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(module, "_TOO_LONG", 1e6)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    message = finding("medusa", tmp_path, loop__steps="1000")
    assert "2 operations per weight that a token reads, at an assumed 40 G per second" in message
    # 20 layers of 0.56 M weights: 2 x 11.2 M / 40 G = 0.56 ms a token, 128,000 tokens
    assert re.search(r"0.1 M tokens in about (7[0-9] s|1 min)", message)


def test_drawing_random_weights_is_nobody_elses_matter(tmp_path: Path) -> None:
    import torch

    before = torch.get_rng_state()
    finding("medusa", tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_that_are_kept_are_computed_once() -> None:
    """Ten rows asked for thirty times, four of them kept: 10 + 20 x 0.6 of 8 tokens."""
    plan = module._Plan(distinct=10, asked=30, kept=4, row_bytes=1, length=8, is_exact=True)
    assert plan.computed == 176


@pytest.mark.parametrize(("row", "tried"), [(32, 32), (512, 256)])
def test_a_trial_stands_for_all_layers_and_has_all_cores(
    row: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1 s for 2 of 20 layers are 1 s, of as many tokens as were tried; two processes would have half of a CPU each."""
    asked: list[tuple[int, int]] = []

    def trial(_config: Any, layers: int, tokens: int, *_how: Any) -> float:
        asked.append((layers, tokens))
        return 0.1

    monkeypatch.setattr(module, "_trial", trial)
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = load_recipe("medusa-tiny", [("data.sequence_length", str(row))]).recipe
    pace = module._pace(recipe, Models(recipe).target())
    assert pace.seconds_per_token == pytest.approx(1 / tried)
    assert (asked, pace.how) == ([(2, tried)], f"measured on 2 of 20 layers and {tried} tokens")


@pytest.mark.parametrize("processes", [1, 4])
def test_what_is_counted_is_shared_by_the_processes(processes: int) -> None:
    """Two operations per weight of the layers at 100 T of each device, as a described machine is never tried."""
    values = {"machine.processes": str(processes), "machine.device_gb": "80"}
    recipe = load_recipe("medusa-tiny", list(values.items())).recipe
    target: Any = Models(recipe).target()
    weights = sum(each.numel() for name, each in target.named_parameters() if "embed_tokens" not in name)
    assert 20 * 0.5e6 < weights < 20 * 0.6e6
    assert module._pace(recipe, target).seconds_per_token == pytest.approx(2 * weights / 1e14 / processes)


def test_a_trial_is_as_long_as_its_quickest_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 5, 3, 1 and 4 s on a planned clock."""
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=iter([0, 5, 10, 13, 20, 21, 30, 34]).__next__))
    recipe = load_recipe("medusa-tiny", []).recipe
    config: Any = Models(recipe).target().config
    assert module._trial(config, 1, 4, "fp32", torch.device("cpu")) == 1


@pytest.mark.parametrize(
    ("train", "validation", "distinct", "every", "asked"),
    [
        (5, 9, 5 + 3, 100, 8 + 3),
        (8, 3, 8 + 3, 1, 8 + 2 * 3),
        (20, 2, 8 + 2, 2, 8 + 2),
    ],  # two steps ask for four rows each, and three are held out
)
def test_rows_that_nothing_asks_for_are_not_computed(
    train: int, validation: int, distinct: int, every: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"loop.steps": "2", "loop.batch_rows": "4", "loop.micro_rows": "2", "loop.validate_rows": "3"}
    values["loop.validate_every"] = str(every)
    recipe = load_recipe("eagle-tiny", list(values.items())).recipe
    rows = SimpleNamespace(train=range(train), validation=range(validation))
    monkeypatch.setattr("draftsmith.data.rows.prepare.prepare", lambda *_, **__: rows)
    models: Any = SimpleNamespace(described=False, tokenizer=lambda: None)
    plan = module._Plan.of(recipe, models, 100)
    assert (plan.distinct, plan.asked, plan.kept) == (distinct, asked, distinct)
    assert plan.bytes == distinct * 100 * recipe.row_tokens
