"""The scripts that train and compare: each runs to its table at the smallest size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from draftsmith.benchmarks.common.records import Figure, read_record
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.folder import read_entry
from draftsmith.drafters.model.early_exit import save_early_exit
from draftsmith.launch.recipe.load import load_recipe
from helpers.benchmark_scripts import SCRIPTS

SMALL = {"data.limit_rows": "40", "data.sequence_length": "64"}


def run(script: str, *words: str) -> str:
    done = subprocess.run([sys.executable, str(SCRIPTS / script), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_families_from_recipes_to_a_table(tmp_path: Path) -> None:
    values = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    words = [
        "--out",
        str(tmp_path),
        "--json",
        str(tmp_path / "record.json"),
        "--families",
        "EAGLE-1,EAGLE-2,HASS behind EAGLE-1",
        "--steps",
        "2",
        "--limit",
        "2",
        "--max-new-tokens",
        "8",
        "--repeats",
        "1",
        "--audit-tokens",
        "500",
        "--audit-sequences",
        "10000",
        *values,
    ]
    printed = run("families.py", *words)
    lines = [line for line in printed.splitlines() if line.startswith(("| EAGLE", "| HASS"))]
    names = [line.split("|")[1].strip() for line in lines]
    assert names == ["EAGLE-1", "EAGLE-2", "HASS behind EAGLE-1"] * 2
    assert all("| lossless (sees 0." in line for line in lines)
    # both draft with one run's weights, and the same chain: the same acceptance
    first, second = (json.loads((tmp_path / f"eagle-{n}.json").read_text())["trained"]["chain"] for n in (1, 2))
    assert first == second
    assert list(first) == ["0", "1"]
    assert len(first["0"]["emitted"]) == 2
    runs = {folder.parent.name for folder in (tmp_path / "runs").glob("*/drafter")}
    behind = "hass-tiny-1-behind-eagle-tiny"
    assert runs == {"eagle-tiny-2", "eagle-tiny-0", "eagle-tiny-1", behind, "hass-tiny-0"}
    recipe = load_recipe(str(tmp_path / "runs" / behind / "run.yaml")).recipe
    assert recipe.model.start_from == str(tmp_path / "runs" / "eagle-tiny-1" / "drafter")
    record = read_record(tmp_path / "record.json")
    assert record.origin == "measured"
    assert "--json" not in record.command
    assert len(record.rows) == 6
    assert {each.name for each in record.drafters} == {f"{name}, seed 0" for name in names}
    assert run("families.py", *words) == printed, "what is measured is not measured again"


@pytest.mark.slow
def test_two_training_seeds_of_a_family(tmp_path: Path) -> None:
    """Each seed trains its own run; a cell is their mean, with both behind it."""
    values = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    small = "--steps 2 --limit 2 --max-new-tokens 12 --no-speed --audit-tokens 500 --audit-sequences 10000"
    words = [
        "--families",
        "BPD (frozen)",
        "--shapes",
        "chain",
        "--seeds",
        "0,1",
        "--json",
        str(tmp_path / "record.json"),
    ]
    printed = run("families.py", "--out", str(tmp_path / "out"), *small.split(), *words, *values)
    assert "training seeds: 2 (0, 1)" in printed
    record = read_record(tmp_path / "record.json")
    assert len({each.sha256 for each in record.drafters}) == 2, "other seeds, other weights"
    for row in record.rows:
        assert isinstance(row["tau_chain"], Figure)
        seeds = row["tau_chain"].seeds
        assert seeds is not None
        assert row["tau_chain"].value == pytest.approx(sum(seeds) / 2)
    assert (tmp_path / "out" / "seed-1" / "bpd--frozen-.json").is_file()


@pytest.mark.slow
def test_another_ssm_behind_one_that_is_taken_as_it_stands(tmp_path: Path) -> None:
    save_early_exit(tmp_path / "exit", load_target("tiny"), layers=6)
    small = {
        **SMALL,
        "loop.batch_rows": "2",
        "loop.micro_rows": "2",
        "loop.validate_rows": "2",
        "boost.samples": "8",
        "boost.held_out": "4",
        "boost.continuation": "8",
        "probe.prompts": "1",
    }
    values = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    printed = run(
        "ensembles.py",
        "--out",
        str(tmp_path / "out"),
        "--first",
        str(tmp_path / "exit"),
        "--members",
        "2",
        "--sizes",
        "",
        "--settings",
        "soft 2",
        "--base-steps",
        "1",
        "--steps",
        "1",
        "--limit",
        "2",
        "--max-new-tokens",
        "4",
        "--audit-tokens",
        "500",
        "--audit-sequences",
        "10000",
        *values,
    )
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in printed.splitlines()
        if line.startswith(("| copies", "| soft"))
    ]
    assert [row[:2] for row in rows] == [["copies", "1"], ["copies", "2"], ["soft 2", "2"]] * 2
    assert {row[6] for row in rows} == {""}, "SSMs of several costs: no speed-up is predicted"
    assert "lossless at T = 0.6, lossless at T = 1" in printed
    for arm in ("copies", "soft-2"):
        first, second = (tmp_path / "out" / "runs" / arm / "drafter" / f"ssm-{n}" for n in (1, 2))
        families = [read_entry(folder)["family"] for folder in (first, second)]
        assert families == ["early_exit", "draft_model"]


@pytest.mark.slow
def test_merging_is_measured_for_every_size_and_temperature() -> None:
    printed = run(
        "merge_cost.py", "--prompts", "1", "--max-new-tokens", "6", "--members", "1", "2", "--draft-length", "2"
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")][
        2:
    ]
    assert [row[:2] for row in rows] == [["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]
    assert all(0 < float(row[-1].rstrip("%")) < 100 for row in rows)
    assert [float(row[2]) for row in rows[:2]] == [3.0, 3.0]


@pytest.mark.slow
def test_origins_from_recipes_to_a_table(tmp_path: Path) -> None:
    values = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    words = [
        "--out",
        str(tmp_path),
        "--rows",
        "layers evenly,from scratch,8 bits,early exit 2",
        "--steps",
        "2",
        "--limit",
        "2",
        "--max-new-tokens",
        "8",
        "--audit-tokens",
        "500",
        "--audit-sequences",
        "10000",
        *values,
    ]
    printed = run("origins.py", *words)
    lines = [line for line in printed.splitlines() if line.endswith("| lossless |")]
    cells = [[each.strip() for each in line.split("|")[1:-1]] for line in lines]
    assert [each[:2] for each in cells] == [
        ["layers evenly", "1.97 M"],
        ["from scratch", "1.97 M"],
        ["8 bits", "12.90 M"],
        ["early exit 2", "1.97 M"],
    ]
    assert [each[4] for each in cells] == ["0 7", "", "", ""]
    assert [each[2] for each in cells] == ["16%", "16%", "26%", "16%"]
    assert run("origins.py", *words) == printed, "what is measured is not measured again"


@pytest.mark.slow
def test_curves_from_recipes_to_a_table(tmp_path: Path) -> None:
    values = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    measured = ["--limit", "2", "--max-new-tokens", "12", "--audit-tokens", "500", "--audit-sequences", "10000"]
    record, chosen = tmp_path / "record.json", ["--families", "EAGLE-1,DSpark", "--lengths", "2,3"]
    run("curves.py", "--out", str(tmp_path / "out"), "--json", str(record), *chosen, *measured, *values)
    made = read_record(record)
    assert [row["family"] for row in made.rows] == ["EAGLE-1", "DSpark"] * 2
    assert {row["verdict"] for row in made.rows} == {"lossless"}
    assert all(row["seconds_3"] > 0 for row in made.rows)


@pytest.mark.slow
@pytest.mark.run
def test_processes_from_launches_to_tables(tmp_path: Path) -> None:
    values = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    record = tmp_path / "record.json"
    run("scaling.py", "--rounds", "1", "--steps", "4", "--batch-rows", "4", "--json", str(record), *values)
    made = read_record(record)
    assert [row["setup"] for row in made.rows if row["kind"] == "measured"][-1] == "2 processes, target cut"
    assert len([row for row in made.rows if row["kind"] == "model"]) == 4
