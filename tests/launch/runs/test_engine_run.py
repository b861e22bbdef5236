"""Whole runs that learn from an engine, by the command line: the same bits as online, resumed, refused."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draftsmith
import pytest
import torch
from draftsmith.data.generate import continuations
from draftsmith.data.rows.packed import PackedRows
from draftsmith.data.rows.prepare import Prepared, prepare
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.teacher.engine import documents_of
from helpers.servers import fake_engine
from safetensors.torch import load_file

FLAGS = ("--speculative-config", "--kv-transfer-config")
PAGE = Path(draftsmith.__file__).parent / "docs" / "engine.md"
SMALL = {
    "loop.steps": "3",
    "loop.batch_rows": "4",
    "loop.micro_rows": "2",
    "loop.validate_rows": "2",
    "loop.log_every": "1",
    "loop.precision": "fp32",
    "data.sequence_length": "64",
    "checkpoint.every_steps": "2",
    "optimizer.warmup_steps": "0",
    "probe.every_steps": "",
    "features.dtype": "fp32",
    "eagle3.vocabulary": "512",
}
Captured = pytest.CaptureFixture[str]


def words(values: dict[str, str]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}={value}",) if value] + [
        word for name, value in values.items() if not value for word in (f"--{name}", value)
    ]


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target("tiny")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The values of a recipe that name rows of real text: the project's own pages."""
    place = tmp_path_factory.mktemp("texts")
    pages = sorted(PAGE.parent.glob("*.md"))
    for name, some in {"train": pages[:12], "held-out": pages[12:15]}.items():
        lines = (json.dumps({"text": page.read_text(encoding="utf-8")[:300]}) for page in some)
        (place / f"{name}.jsonl").write_text("\n".join(lines))
    return {"data.source": str(place / "train.jsonl"), "data.validation": str(place / "held-out.jsonl")}


@pytest.fixture(scope="module")
def rows(target: Any, texts: dict[str, str]) -> Prepared:
    flags = [(name, value) for name, value in (SMALL | texts).items() if name.startswith("data.")]
    return prepare(load_recipe("eagle3-tiny", flags).recipe.data, target.tokenizer, out=None)


@pytest.fixture(scope="module")
def places(rows: Prepared) -> dict[tuple[int, ...], tuple[PackedRows, int, int]]:
    """Where each document lies: part, row, first token."""
    found: dict[tuple[int, ...], tuple[PackedRows, int, int]] = {}
    for part in (rows.train, rows.validation):
        batch = part.batch(list(range(len(part))))
        for r in range(len(part)):
            for document in documents_of(batch, r):
                found.setdefault(tuple(document.ids), (part, r, document.first))
    return found


@pytest.fixture
def engine(target: Any, places: dict[tuple[int, ...], Any], tmp_path: Path) -> Iterator[fake_engine.Engine]:
    """The embedded target; of a document in a packed row the states that it has there, so that not a bit differs."""
    by_itself = fake_engine.alone(target.model)

    def states(ids: Any) -> torch.Tensor:
        if tuple(ids) not in places:
            return by_itself(ids)
        part, r, first = places[tuple(ids)]
        return fake_engine.all_states(target.model, part.batch([r]))[first : first + len(ids)]

    with fake_engine.running(
        target.model, tmp_path / "shared", (2, 10, 17, 20), name="tiny", room=65, states=states
    ) as server:
        yield server


def by_engine(server: fake_engine.Engine) -> dict[str, str]:
    return {
        "features.source": "engine",
        "features.server": server.url,
        "features.shared": str(server.shared),
        "features.served_model": "tiny",
    }


def losses(run: Path) -> list[dict[str, Any]]:
    kept = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] in ("train", "validation"):
            kept.append({name: value for name, value in record.items() if "loss" in name or name == "step"})
    return kept


def test_the_bits_of_a_run_online(engine: fake_engine.Engine, texts: dict[str, str], tmp_path: Path) -> None:
    """Every loss, the drafter; stopped half-way and resumed; no file left, two layers read."""
    online, asked = tmp_path / "online", tmp_path / "asked"
    assert main(["train", "eagle3-tiny", "--out", str(online), *words(SMALL | texts)]) == 0
    values = words(SMALL | texts | by_engine(engine))
    assert main(["train", "eagle3-tiny", "--out", str(asked), *values]) == 0
    assert len(losses(asked)) >= 4
    assert losses(asked) == losses(online)
    ours, theirs = (load_file(run / "drafter" / "model.safetensors") for run in (asked, online))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert list(engine.shared.iterdir()) == []
    assert engine.busiest > 1
    seen = len(engine.asked)
    assert json.loads((asked / "engine.json").read_text())["system_fingerprint"] == engine.fingerprint
    # a run that is done goes on with the engine that it knows, and with no other
    engine.fingerprint = "vllm-0.40.0"
    (asked / "drafter" / "model.safetensors").unlink()
    assert main(["train", "eagle3-tiny", "--out", str(asked), *values]) == 2
    assert len(engine.asked) == seen + 3


@pytest.mark.slow
def test_another_engine_on_resume(
    engine: fake_engine.Engine, texts: dict[str, str], tmp_path: Path, capfd: Captured
) -> None:
    """An engine that dies after some steps is waited for; a new one in its place is refused."""
    run, values = tmp_path / "run", SMALL | texts | by_engine(engine) | {"checkpoint.every_steps": "1"}

    def dies(server: fake_engine.Engine, answer: fake_engine.Answer) -> None:
        if any((run / "checkpoints").glob("step-*")):
            fake_engine.refused(server, answer)

    engine.fault = dies
    assert main(["train", "eagle3-tiny", "--out", str(run), *words(values)]) == 2
    assert "refuses with status 400" in capfd.readouterr().err
    assert list((run / "checkpoints").glob("step-*"))
    engine.fault = None
    engine.fingerprint = "vllm-0.40.0"
    assert main(["train", "eagle3-tiny", "--out", str(run), *words(values)]) == 2
    said = capfd.readouterr().err
    assert "system_fingerprint is vllm-0.32.0-abc there and vllm-0.40.0 here" in said
    assert "learnt from another server: start that one again, or begin in another --out" in said
    engine.fingerprint = "vllm-0.32.0-abc"
    assert main(["train", "eagle3-tiny", "--out", str(run), *words(values)]) == 0
    assert (run / "drafter" / "model.safetensors").is_file()


def test_the_pages_recipe(
    engine: fake_engine.Engine, texts: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The lines of docs/engine.md beneath a shipped recipe, its check, which prints the page's command, its run."""
    (lines,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for old, new in {
        "http://localhost:8000": engine.url,
        "/dev/shm/states": str(engine.shared),
        "the-target": engine.name,
    }.items():
        assert old in lines
        lines = lines.replace(old, new)
    recipe = tmp_path / "mine.yaml"
    own = "".join(f", {name.removeprefix('data.')}: {value}" for name, value in texts.items())
    data = f"data: {{sequence_length: 64{own}}}\n"
    loop = "loop: {steps: 1, batch_rows: 2, micro_rows: 2, validate_rows: 2, precision: fp32}\n"
    recipe.write_text(f"method: eagle3\nname: mine\ntarget: {{path: tiny}}\n{data}{loop}{lines}")
    assert main(["check", str(recipe), "--out", str(tmp_path / "run")]) == 0
    said = "\n".join(caplog.messages)
    (line,) = re.findall(r"^vllm serve .*", said, re.MULTILINE)
    printed = shlex.split(line)
    assert printed[:5] == ["vllm", "serve", "tiny", "--served-model-name", "tiny"]
    speculative, transfer = (json.loads(printed[printed.index(flag) + 1]) for flag in FLAGS)
    assert speculative["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 10, 17, 20]}
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(engine.shared)}
    shown = re.findall(r"^vllm serve .*(?:\n  --.*)+", PAGE.read_text(), re.MULTILINE)[0]
    assert [word for word in shlex.split(shown.replace("\\\n", "")) if word.startswith("--")] == [
        "--served-model-name",
        *FLAGS,
    ]
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "drafter" / "model.safetensors").is_file()


@pytest.mark.slow
def test_answers_and_states_from_one_request(
    engine: fake_engine.Engine,
    texts: dict[str, str],
    rows: Prepared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Captured,
) -> None:
    """Each prompt is sent once and nothing again; an engine that dies half-way costs no answer; the states are those
    that the finished rows have."""
    monkeypatch.setattr(continuations, "_PART", 8)
    run, other = tmp_path / "run", tmp_path / "other"
    values = SMALL | texts | by_engine(engine) | {"features.answers": "5", "features.answer_temperature": "1"}
    prompts = sum(continuations.count_prompts(part, 64 - 5) for part in (rows.train, rows.validation))
    proofs = 3  # requests of a handshake, before the answers and before the first step
    answered = 12
    assert prompts > answered  # the pages' words are counted, and pages change

    def dies(server: fake_engine.Engine, answer: fake_engine.Answer) -> None:
        if len(server.asked) > proofs + answered:
            fake_engine.refused(server, answer)

    by_itself = engine.states
    # a document's bits may depend on its length, which is not the answer's to change here
    engine.states = lambda ids: by_itself([*ids, *[0] * (64 - len(ids))])[: len(ids)]
    engine.fault = dies
    assert main(["train", "eagle3-tiny", "--out", str(run), *words(values)]) == 2
    assert "refuses with status 400" in capfd.readouterr().err
    assert len(list((run / "answers").glob("part-*"))) == 1
    engine.fault, engine.asked = None, []
    assert main(["train", "eagle3-tiny", "--out", str(run), *words(values)]) == 0
    assert len(engine.asked) == proofs + (prompts - 8) + proofs
    assert list(engine.shared.iterdir()) == []
    # the same answers, whose states are asked for by themselves
    other.mkdir()
    shutil.copytree(run / "answers", other / "answers")
    assert main(["train", "eagle3-tiny", "--out", str(other), *words(values)]) == 0
    assert len(losses(run)) >= 4
    assert losses(other) == losses(run)
    ours, theirs = (load_file(each / "drafter" / "model.safetensors") for each in (run, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_answers_to_something_else(
    engine: fake_engine.Engine, texts: dict[str, str], tmp_path: Path, capfd: Captured
) -> None:
    """A folder's answers are those to its own prompts, in its own way."""
    values = SMALL | texts | by_engine(engine) | {"features.answers": "3", "loop.steps": "1"}
    assert main(["train", "eagle3-tiny", "--out", str(tmp_path / "run"), *words(values)]) == 0
    shutil.copytree(tmp_path / "run" / "answers", tmp_path / "new" / "answers")
    capfd.readouterr()
    more = values | {"features.answers": "4"}
    assert main(["train", "eagle3-tiny", "--out", str(tmp_path / "new"), *words(more)]) == 2
    assert re.search(r"tokens is 3 there and 4\s+here", capfd.readouterr().err)


REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("eagle3-tiny", {"features.server": ""}, "features.server is not set"),
    ("eagle3-tiny", {"features.shared": ""}, "features.shared is not set"),
    ("eagle3-tiny", {"features.source": "online"}, "features.server is 'http://localhost:1', and features.source"),
    ("eagle3-tiny", {"probe.every_steps": "2"}, "a probe every 2 steps"),
    ("eagle3-tiny", {"features.server": "nowhere"}, "features.server is 'nowhere', no URL"),
    ("eagle3-tiny", {"features.answers": "4", "features.source": "online"}, "features.server is"),
    ("eagle3-tiny", {"features.answers": "255"}, "no room is left for a prompt"),
    ("eagle3-tiny", {"features.answer_temperature": "1"}, "no answers are asked for"),
    ("medusa2-tiny", {}, "medusa2 trains it"),
    ("boost-tiny", {}, "boost learns from texts that it writes"),
    ("distill-tiny", {"rollouts.share": "0.5"}, "rollouts.share has it follow texts"),
    ("prune-tiny", {}, "model.start_from target cuts the draft out of it"),
]


@pytest.mark.parametrize(
    ("recipe", "values", "reason"),
    [REFUSED[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in REFUSED[1:])],
)
def test_what_takes_the_whole_target(
    recipe: str, values: dict[str, str], reason: str, tmp_path: Path, capfd: Captured
) -> None:
    own = {"features.source": "engine", "features.server": "http://localhost:1", "features.shared": str(tmp_path)}
    given = words({"probe.every_steps": ""} | own | values)
    for verb in ("check", "train"):
        if verb == "train" and "no URL" in reason:
            continue  # only the pre-flight and the first request look at it
        assert main([verb, recipe, "--out", str(tmp_path / "run"), *given]) == 2
        said = capfd.readouterr()
        assert reason in (said.err + said.out).replace("\n", " ") or reason in re.sub(r"\s+", " ", said.err + said.out)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_targets_folder_is_what_is_served(target: Any) -> None:
    """Without features.served_model the engine is asked for target.path."""
    assert target.name == embedded_target()
