"""A run's drafter goes to a hub and comes back: what goes up, what it says of itself, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import make_drafter
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.folder import save_draft_model
from draftsmith.drafters.tuned_file import write_tuned
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from helpers.models.random_models import save_with_tokenizer
from helpers.runs.small_flags import AUDIT
from helpers.servers.fake_hub import TOKEN, Hub, running, use
from huggingface_hub import ModelCard

NAME = "somebody/a-drafter"
EVAL = [
    *AUDIT,
    *[
        "--eval.limit",
        "4",
        "--eval.prompt_tokens",
        "16",
        "--eval.max_new_tokens",
        "12",
        "--eval.sweep",
        "[]",
        "--eval.repeats",
        "1",
    ],
]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a run on it that was audited, measured and tuned, prompts; all by their whole paths."""
    place = tmp_path_factory.mktemp("place-of-the-user")
    (place / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "def ghi")))
    target = load_target(str(save_with_tokenizer(place / "the-target")))
    save_draft_model(make_drafter(target).module, place / "run" / "drafter", target)
    values = [("target.path", str(place / "the-target")), ("eval.prompts", str(place / "prompts.jsonl"))]
    (place / "run" / "run.yaml").write_text(load_recipe("distill-tiny", values).yaml())
    write_tuned(
        place / "run" / "drafter", {"eval.draft_length": "3"}, {"prompts": f"held-out rows of {place}/prompts.jsonl"}
    )
    assert main(["eval", str(place / "run"), *EVAL]) == 0
    return place


@pytest.fixture
def place(measured: Path, tmp_path: Path) -> Path:
    """The same, to be changed; the target stays where the run's recipe says."""
    shutil.copytree(measured / "run", tmp_path / "run")
    return tmp_path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running() as server:
        use(server, tmp_path / "hub-cache", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield server


def target_of(measured: Path) -> list[str]:
    return ["--target", str(measured / "the-target")]


def test_what_goes_up(measured: Path, place: Path, hub: Hub, capfd: Captured) -> None:
    """Weights to the bit, JSON, a card; no path, no token."""
    (place / "run" / "drafter" / "training_args.bin").write_bytes(b"\x80\x04.")
    assert main(["push", str(place / "run"), NAME]) == 0
    said = capfd.readouterr()
    files = hub.files(NAME)
    own = {path.name for path in (place / "run" / "drafter").iterdir()}
    assert files.keys() == own - {"training_args.bin"}
    assert files["model.safetensors"] == (place / "run" / "drafter" / "model.safetensors").read_bytes()
    assert files["config.json"] == (place / "run" / "drafter" / "config.json").read_bytes()
    assert "left out are training_args.bin" in said.out
    assert json.loads(files["tuned.json"])["prompts"] == "held-out rows of prompts.jsonl"
    assert json.loads(files["tuned.json"])["settings"] == {"eval.draft_length": "3"}
    for name, content in files.items():
        for word in (str(measured), str(place), "the-target/", TOKEN):
            assert word.encode() not in content, (name, word)
    assert TOKEN not in said.out + said.err
    for path in place.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


def test_the_card(measured: Path, place: Path, hub: Hub) -> None:
    """Every tau beside its verdict, the prompts, the commands as `export` prints them, what the hub reads."""
    words = ["--license", "apache-2.0", "--base-model", "somebody/the-target"]
    assert main(["push", str(place / "run"), NAME, *words]) == 0
    text = hub.files(NAME)["README.md"].decode()
    card = ModelCard(text)
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "somebody/the-target")
    assert {"speculative-decoding", "draftsmith", "draft_model"} <= set(card.data.tags or ())
    results = json.loads((place / "run" / "eval" / "results.json").read_text())
    rows = [line for line in text.splitlines() if line.startswith("| draft model |")]
    assert len(rows) == len(results["rows"]) == 2
    for line, row in zip(rows, results["rows"], strict=True):
        assert f"{row['tau'][0]:.2f} [" in line
        assert line.endswith(f"| {row['verdict']} |")
        assert "2 of prompts.jsonl" in line
    assert row["verdict"] == "lossless"
    fewer = all(row["tau"][0] > 1 and not row["flagged"] for row in results["rows"])
    claim = "With it the target decoded in fewer calls; the" if fewer else "The"
    assert f"method `distill`. {claim} audit found the text to be the target's own.\n" in text, text[:600]
    served = '\'{"method": "draft_model", "model": "somebody/a-drafter", "num_speculative_tokens": 3'
    assert f"vllm serve somebody/the-target --speculative-config {served}" in text
    assert f"--drafter hub:{NAME}" in text


def test_without_a_token_nothing_is_sent(
    place: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    assert main(["push", str(place / "run"), NAME, "--dry-run"]) == 0
    assert "dry run (--dry-run): nothing was sent" in capfd.readouterr().out
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", str(place / "run"), NAME]) == 0
    said = capfd.readouterr().out
    assert "dry run (HF_TOKEN is not set): nothing was sent" in said
    assert "## What it is worth" in said
    assert "note: tuned.json named paths of this machine" in said
    assert hub.asked == []


def test_a_drafter_that_was_not_measured_has_no_tau(place: Path, hub: Hub) -> None:
    shutil.rmtree(place / "run" / "eval")
    assert main(["push", str(place / "run"), NAME]) == 0
    text = hub.files(NAME)["README.md"].decode()
    assert "Nothing has been measured, and nothing audited" in text
    assert "tau" not in text
    assert "method `distill`.\n" in text
    assert "fewer calls" not in text
    assert "target's own" not in text


def test_a_verdict_that_failed_is_on_the_card(place: Path, hub: Hub) -> None:
    path = place / "run" / "eval" / "results.json"
    results = json.loads(path.read_text())
    results["rows"][0] |= {"verdict": "not audited", "audited": None}
    results["rows"][1] |= {"verdict": "NOT lossless"}
    for row in results["rows"]:
        row["tau"] = [1.0, 1.0, 1.0]
    path.write_text(json.dumps(results))
    assert main(["push", str(place / "run"), NAME]) == 0
    text = hub.files(NAME)["README.md"].decode()
    assert "fewer calls" not in text
    assert "found the text to be" not in text
    rows = [line for line in text.splitlines() if line.startswith("| draft model |")]
    assert [line.rsplit("| ", 1)[1] for line in rows] == ["not audited |", "NOT lossless |"]


def test_what_was_there_before_goes(measured: Path, place: Path, hub: Hub, capfd: Captured) -> None:
    """A setting that the drafter before was tuned to would be taken for this one's."""
    assert main(["push", str(place / "run"), NAME, "--private"]) == 0
    assert hub.repositories[NAME].private
    (place / "run" / "drafter" / "tuned.json").unlink()
    assert main(["push", str(place / "run"), NAME]) == 0
    assert "removed: tuned.json" in capfd.readouterr().out
    assert "tuned.json" not in hub.files(NAME)
    assert len(hub.repositories[NAME].commits) == 2


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["{run}", "no-owner"], 2, "expected hub:OWNER/NAME"),
        (["{run}", "a/b/c"], 2, "names nothing on a hub"),
        (["{run}", f"{NAME}@main"], 2, "a push makes a new commit; leave out @main"),
        (["{run}", NAME, "--license", "My Own!"], 2, "expected an id of the hub"),
        (["{run}", NAME, "--base-model", "/models/mine"], 2, "names nothing on a hub"),
        (["{run}/drafter", NAME], 2, "is no run folder"),
        (["{run}", "somebody/a-model"], 2, "holds something else than a drafter"),
        (["{run}", "somebody/public", "--private"], 2, "is there and public"),
    ],
)
def test_what_cannot_be_pushed(
    words: list[str], code: int, reason: str, measured: Path, place: Path, hub: Hub, capfd: Captured
) -> None:
    hub.put("somebody/a-model", measured / "the-target")
    hub.put("somebody/public", measured / "run" / "drafter")
    assert main(["push", *(word.format(run=place / "run") for word in words)]) == code
    said = capfd.readouterr().err
    assert reason in said
    assert said.count("draftsmith: ") == 1
    assert all(len(each.commits) == 1 for each in hub.repositories.values())
    assert hub.repositories.keys() == {"somebody/a-model", "somebody/public"}


def test_results_of_other_weights(place: Path, hub: Hub, capfd: Captured) -> None:
    path = place / "run" / "drafter" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"changed": True}))
    assert main(["push", str(place / "run"), NAME]) == 2
    assert "was measured with a drafter of other weights" in capfd.readouterr().err
    assert NAME not in hub.repositories


def test_a_path_that_cannot_be_cut_away(place: Path, hub: Hub, capfd: Captured) -> None:
    shutil.rmtree(place / "run" / "eval")
    path = place / "run" / "drafter" / "generation_config.json"
    path.write_text(json.dumps({"note": f"made in {place / 'run'} by me"}))
    assert main(["push", str(place / "run"), NAME]) == 2
    assert "a path of this machine, which everybody would read" in capfd.readouterr().err
    path.write_text(json.dumps({"base": str(place / "models" / "mine")}))
    assert main(["push", str(place / "run"), NAME]) == 0
    assert json.loads(hub.files(NAME)["generation_config.json"]) == {"base": "mine"}


@pytest.mark.parametrize(
    ("path", "status", "code", "reason"),
    [
        ("/api/models", 401, 2, "set HF_TOKEN to a token that may do this|not for us to see"),
        ("/api/repos/create", 403, 2, "refused \\(403\\)"),
        ("/api/models/somebody/a-drafter/commit", 422, 4, "the hub answered 422"),
        ("/upload", 403, 4, "no answer of a hub"),
    ],
)
def test_a_hub_that_refuses(
    path: str, status: int, code: int, reason: str, place: Path, hub: Hub, capfd: Captured
) -> None:
    hub.fail = (path, status)
    assert main(["push", str(place / "run"), NAME]) == code
    said = capfd.readouterr()
    assert any(part in said.err or part.replace("\\", "") in said.err for part in reason.split("|")), said.err
    assert said.err.count("draftsmith: ") == 1
    assert "Traceback" not in said.err
    assert TOKEN not in said.err + said.out
    assert not any(each.commits for each in hub.repositories.values())
