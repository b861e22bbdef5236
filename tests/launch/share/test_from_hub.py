"""`hub:NAME` wherever a drafter is named: fetched, pinned, kept for later, and read as a stranger's."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import make_drafter
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.eagle.net import EagleNet, EagleShape
from draftsmith.drafters.folder import save_draft_model
from draftsmith.drafters.registry import load_drafter
from draftsmith.launch.cli import main
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.random_models import save_with_tokenizer
from helpers.runs.small_flags import AUDIT
from helpers.servers.fake_hub import TOKEN, Hub, Repository, running, use

NAME = "somebody/a-drafter"
SMALL = [
    "--eval.limit",
    "1",
    "--eval.prompt_tokens",
    "16",
    "--eval.max_new_tokens",
    "12",
    "--eval.repeats",
    "1",
    "--eval.temperatures",
    "[0]",
]
Captured = pytest.CaptureFixture[str]


class Payload:
    """Whoever unpickles it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (str(self.mark), "w"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    target = load_target(str(save_with_tokenizer(place / "target")))
    for number in (1, 2):
        save_draft_model(make_drafter(target, seed=number).module, place / f"draft-{number}", target)
    torch.manual_seed(0)
    saver(target, "eagle")(EagleNet(EagleShape.of(target.model.config)), place / "eagle")
    (place / "texts.jsonl").write_text((json.dumps({"text": "abc def ghi jkl mno pqr\n" * 8}) + "\n") * 8)
    (place / "prompts.jsonl").write_text((json.dumps({"prompt": "abc def"}) + "\n") * 8)
    return place


@pytest.fixture
def target(made: Path) -> Backbone:
    return load_target(str(made / "target"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running() as server:
        use(server, tmp_path / "hub-cache", monkeypatch, token=False)
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        yield server


def weights_of(drafter: object) -> torch.Tensor:
    return torch.cat([each.flatten() for each in drafter.module.parameters()])  # type: ignore[attr-defined]


def test_the_weights_come_back_and_a_revision_stays(made: Path, target: Backbone, hub: Hub) -> None:
    first = hub.put(NAME, made / "draft-1")
    hub.put(NAME, made / "draft-2")
    one, two = (weights_of(load_drafter(made / f"draft-{number}", target)) for number in (1, 2))
    assert not torch.equal(one, two)
    assert torch.equal(weights_of(load_drafter(f"hub:{NAME}", target)), two)
    assert torch.equal(weights_of(load_drafter(f"hub:{NAME}@{first}", target)), one)


def verbs(made: Path, out: Path) -> list[list[str]]:
    pair = ["--target", str(made / "target"), "--drafter", f"hub:{NAME}"]
    prompts = ["--prompts", str(made / "prompts.jsonl")]
    eval_ = ["eval", *pair, *prompts, "--out", str(out / "eval"), "--no-audit", *SMALL, "--eval.sweep", "[]"]
    audit = ["audit", *pair, *prompts, "--out", str(out / "audit"), *AUDIT, *SMALL]
    chat = ["chat", *pair, "--prompt", "abc def", "--max-new-tokens", "8"]
    rows = ["--source", str(made / "texts.jsonl"), "--prompt-tokens", "8", "--max-new-tokens", "8"]
    generate = ["generate", *pair, *rows, "--out", str(out / "answers")]
    tune = ["tune", *pair, *prompts, "--out", str(out / "tune"), "--limit", "8", "--eval.max_new_tokens", "12"]
    export = ["export", *pair, "--format", "vllm", "--out", str(out / "export")]
    tree = ["tree", *pair]
    return [eval_, audit, chat, generate, [*tune, "--method", "trained"], export, tree]


def test_verbs_take_it(made: Path, tmp_path: Path, hub: Hub, capfd: Captured) -> None:
    """Results say which commit it was; an export has the drafter's weights."""
    commit = hub.put(NAME, made / "eagle")
    eval_, _, _, generate, _, export, tree = verbs(made, tmp_path)
    for words in (eval_, generate, export):
        assert main(words) == 0, words
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert results["draft"]["loaded"][0]["path"] == f"hub:{NAME}@{commit}"
    assert json.loads((tmp_path / "export" / "config.json").read_text())["model_type"] == "llama"
    assert json.loads((tmp_path / "answers" / "manifest.json").read_text())["rows"]["answered"] == 8
    assert main(tree) == 2
    assert "nothing is written beside it; name a file by --out" in capfd.readouterr().err


@pytest.mark.slow
def test_the_other_verbs_take_it(made: Path, tmp_path: Path, hub: Hub, capfd: Captured) -> None:
    """Nothing is written into the hub's cache but by the hub's library."""
    commit = hub.put(NAME, made / "eagle")
    _, audit, chat, _, tune, _, _ = verbs(made, tmp_path)
    for words in (audit, chat, tune):
        assert main(words) == 0, words
    assert f"not kept, as hub:{NAME}@{commit} is of the hub; " in capfd.readouterr().out
    snapshot = next((tmp_path / "hub-cache").glob("models--*/snapshots/*"))
    assert sorted(path.name for path in snapshot.iterdir()) == ["config.json", "model.safetensors"]


def test_what_is_fetched(made: Path, target: Backbone, tmp_path: Path, hub: Hub) -> None:
    """JSON and safetensors alone, whatever else a stranger has put there."""
    folder, mark = tmp_path / "theirs", tmp_path / "executed"
    shutil.copytree(made / "draft-1", folder)
    for name in ("pytorch_model.bin", "training_args.bin", "adapters.pkl", "weights.pt"):
        (folder / name).write_bytes(pickle.dumps(Payload(mark)))
    for name in ("modeling.py", "__init__.py", "chat_template.jinja", "setup.sh"):
        (folder / name).write_text(f"open({str(mark)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}))
    hub.put(NAME, folder)
    load_drafter(f"hub:{NAME}", target)
    assert {Path(name).suffix for name in hub.fetched()} == {".json", ".safetensors"}
    assert not mark.exists()


def hostile(made: Path, folder: Path, mark: Path) -> dict[str, Path]:
    """Folders of a hostile hand, by what the refusal says."""
    found = {}
    pickled = "never read|no file named model.safetensors"
    for reason in ("holds NaN", pickled, "is damaged", "does not describe a drafter", "was made for"):
        found[reason] = Path(shutil.copytree(made / "draft-1", folder / re.sub(r"\W", "-", reason)))
    from safetensors.torch import load_file, save_file

    weights = load_file(made / "draft-1" / "model.safetensors")
    weights[next(iter(weights))][0] = float("nan")
    save_file(weights, found["holds NaN"] / "model.safetensors", metadata={"format": "pt"})
    (found[pickled] / "model.safetensors").unlink()
    (found[pickled] / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    (found["is damaged"] / "tuned.json").write_text("[" * 5000)
    (found["does not describe a drafter"] / "config.json").write_text("{}")
    config = json.loads((made / "draft-1" / "config.json").read_text())
    config["draftsmith"]["target"]["tokenizer"] = "0" * 64
    (found["was made for"] / "config.json").write_text(json.dumps(config))
    return found


def test_a_hostile_repository(made: Path, tmp_path: Path, hub: Hub, capfd: Captured) -> None:
    """The rules of local folders, in their words."""
    mark = tmp_path / "executed"
    for number, (reason, folder) in enumerate(hostile(made, tmp_path / "folders", mark).items()):
        hub.put(f"somebody/hostile-{number}", folder)
        for drafter in (str(folder), f"hub:somebody/hostile-{number}"):
            words = ["eval", "--target", str(made / "target"), "--drafter", drafter, "--no-audit", *SMALL]
            assert main([*words, "--out", str(tmp_path / "out")]) == 2, reason
            said = capfd.readouterr().err
            assert re.search(reason, said), said
            assert said.count("draftsmith: ") == 1
    assert not mark.exists()


def test_names_that_lead_out_of_the_cache(made: Path, target: Backbone, tmp_path: Path, hub: Hub) -> None:
    """A file's name is the hub's to choose."""
    hub.put(NAME, made / "draft-1")
    for name in ("../../../escaped.json", f"{tmp_path}/escaped-absolute.json", "a/../../../../escaped.json"):
        hub.files(NAME)[name] = b"{}"
        with pytest.raises(Exception, match="hub|pointer|path|answered"):
            load_drafter(f"hub:{NAME}", target)
        del hub.files(NAME)[name]
    assert list(tmp_path.rglob("escaped*")) == []


def test_offline_it_is_taken_from_the_cache(
    made: Path, target: Backbone, hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    hub.put(NAME, made / "draft-1")
    here = weights_of(load_drafter(f"hub:{NAME}", target))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert torch.equal(weights_of(load_drafter(f"hub:{NAME}", target)), here)
    words = ["eval", "--target", str(made / "target"), "--drafter", "hub:somebody/else", "--no-audit", *SMALL]
    assert main(words) == 4
    assert "was not fetched whole before; unset HF_HUB_OFFLINE, or name a folder" in capfd.readouterr().err
    assert len(hub.asked) == asked


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("hub:somebody/nothing", 2, "is not there, or not for us to see"),
        ("hub:somebody/secret", 2, "set HF_TOKEN where it is private"),
        (f"hub:{NAME}@v9", 2, "has no such revision"),
        ("hub:", 2, "names nothing on a hub"),
        ("hub:../../etc", 2, "names nothing on a hub"),
        (f"hub:{NAME}@", 2, "names nothing on a hub"),
        (f"hub:{NAME}@../../x", 2, "names nothing on a hub"),
    ],
)
def test_names_that_lead_nowhere(name: str, code: int, reason: str, made: Path, hub: Hub, capfd: Captured) -> None:
    hub.put(NAME, made / "draft-1")
    hub.repositories["somebody/secret"] = Repository(private=True)
    hub.put("somebody/secret", made / "draft-1")
    for words in (["eval", "--target", str(made / "target"), "--no-audit", *SMALL], ["chat", "--target", "tiny"]):
        assert main([*words, "--drafter", name]) == code
        said = capfd.readouterr().err
        assert reason in said
        assert said.count("draftsmith: ") == 1


def test_a_private_one_with_the_token(
    made: Path, target: Backbone, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository(private=True)
    hub.put(NAME, made / "draft-1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    load_drafter(f"hub:{NAME}", target)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


def test_the_environment_is_all_it_takes(made: Path, hub: Hub, tmp_path: Path) -> None:
    """Another process, with nothing but the library's own variables set; and without torch."""
    hub.put(NAME, made / "draft-1")
    code = (
        "import sys; from draftsmith.drafters.hub import drafter_folder; "
        "print(drafter_folder(sys.argv[1]), 'torch' in sys.modules)"
    )
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, f"hub:{NAME}"], env=os.environ | own, capture_output=True, text=True
    )
    folder, _, torch_was_imported = done.stdout.strip().rpartition(" ")
    assert torch_was_imported == "False", done.stderr
    assert Path(folder).is_relative_to(tmp_path / "home")
    assert (Path(folder) / "model.safetensors").read_bytes() == hub.files(NAME)["model.safetensors"]
