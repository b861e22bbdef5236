"""The pre-flight: what it finds on a good recipe, and every fault at once on a bad one."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.model.early_exit import save_early_exit
from draftsmith.drafters.model.quantised import save_quantised
from draftsmith.errors import DataError, DraftsmithError, EnvironmentFailure, RequestError
from draftsmith.launch.check import devices
from draftsmith.launch.check.activations import BYTES
from draftsmith.launch.check.check import check
from draftsmith.launch.check.devices import in_units
from draftsmith.launch.check.memory import needs
from draftsmith.launch.check.models import Models, Once, check_model, check_target
from draftsmith.launch.check.unread import shorter_drafts
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers import spine
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM


def run(recipe: str, out: Path, **flags: str) -> str:
    """The printed table; flags are `section__field=value`."""
    told = io.StringIO()
    overrides = [(name.replace("__", "."), value) for name, value in flags.items()]
    check(load_recipe(recipe, overrides), Console(file=told, width=400), out)
    return told.getvalue()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {n} of many"}) + "\n" for n in range(300)))
    return path


def test_a_good_recipe(tmp_path: Path, rows: Path) -> None:
    """Sizes are the model's own, and nothing is written."""
    before = sorted(tmp_path.iterdir())
    message = run("distill-tiny", tmp_path / "out", data__source=str(rows))
    assert message.count(" ok ") == 10
    assert "ready to train" in message
    assert "12.0 M parameters, 48.2 MB in fp32, vocabulary 4,096" in message
    assert "0.74 M parameters; 11.8 MB for weights" in message
    assert "250 steps of 16 rows = 4,096 tokens (1 x 16 rows on 1 process)" in message
    assert "of the first 200 rows 200 are usable (text)" in message
    assert sorted(tmp_path.iterdir()) == before


def test_ssms_of_earlier_rounds_count() -> None:
    """Two of three are in memory beside the one in training; side by side all of them train."""
    findings = {}
    for order in ("in_turn", "side_by_side"):
        origins = [("boost.start_from", "[]"), ("boost.order", order)]
        recipe = load_recipe("boost-tiny", origins).recipe
        findings[order] = check_model(recipe, Models(recipe))
    assert "0.74 M parameters" in findings["in_turn"]
    assert "5.9 MB for SSMs of earlier rounds" in findings["in_turn"]
    assert "earlier rounds" not in findings["side_by_side"]


def test_a_quantised_ssm_counts_and_an_early_exit_does_not(tmp_path: Path) -> None:
    """The copy holds a byte for each weight that multiplies, the exit is the target itself."""
    target, findings = load_target("tiny"), {}
    save_quantised(tmp_path / "int8", target, bits=8)
    save_early_exit(tmp_path / "exit", target, layers=4)
    for name in ("int8", "exit"):
        origins = [("boost.start_from", json.dumps([str(tmp_path / name)])), ("boost.members", "2")]
        recipe = load_recipe("boost-tiny", origins).recipe
        findings[name] = check_model(recipe, Models(recipe))
    assert "12 MB for SSMs of earlier rounds" in findings["int8"]
    assert "earlier rounds" not in findings["exit"]


def test_a_target_from_scratch(tmp_path: Path, rows: Path) -> None:
    findings = run("target-tiny", tmp_path / "out", data__source=str(rows))
    assert findings.count(" ok ") == 7
    assert "5.33 M parameters" in findings


def test_every_fault_at_once(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as raised:
        run(
            "distill-tiny",
            tmp_path / "out",
            target__path=str(tmp_path / "no-target"),
            data__source=str(tmp_path / "no-rows"),
            loop__micro_rows="3",
            objective__kl="0",
            loop__precision="fp16",
        )
    head, *reasons = str(raised.value).splitlines()
    assert head == "the pre-flight fails:"
    assert all(line.startswith("  - ") for line in reasons)
    expected = ["no-target", "no-rows", "loop.batch_rows", "objective.kl"]
    for word in [*expected, "loop.precision"]:
        assert sum(word in line for line in reasons) == 1, word


@pytest.mark.parametrize(
    ("flags", "kind", "reason"),
    [
        ({"loop__micro_rows": "3"}, RequestError, "not a multiple of loop.micro_rows"),
        ({"data__sequence_length": "4096"}, RequestError, "of target.path 'tiny' is 2048"),
        ({"eval__max_new_tokens": "2000"}, RequestError, "do not fit the target's context"),
        ({"eval__prompts": "none.jsonl"}, RequestError, "there is no prompt file none.jsonl"),
        ({"model__heads": "3", "model__kv_heads": "2"}, RequestError, "model.heads is 3"),
        ({"model__start_from": "none"}, RequestError, "'none'"),
        ({"loop__trackers": "[aim]"}, EnvironmentFailure, "loop.trackers names aim"),
        ({"model__hidden": "100000", "model__layers": "999"}, EnvironmentFailure, "the device has"),
    ],
)
def test_one_fault(
    flags: dict[str, str], kind: type[DraftsmithError], reason: str, tmp_path: Path, rows: Path
) -> None:
    with pytest.raises(DraftsmithError, match="the pre-flight fails") as raised:
        run("distill-tiny", tmp_path / "out", data__source=str(rows), **flags)
    assert type(raised.value) is kind
    assert reason in str(raised.value)


def test_bad_rows(tmp_path: Path, rows: Path) -> None:
    """A file read to its end is judged by the recipe's share; the beginning of one is not."""
    few = tmp_path / "few.jsonl"
    few.write_text('{"text": "good"}\n' * 9 + '{"text": 5}\n')
    with pytest.raises(DataError, match=r"1 of 10 rows \(10.0%\) are unusable"):
        run("distill-tiny", tmp_path / "out", data__source=str(few))
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(['{"text": 5}\n'] * 9 + lines))
    message = run("distill-tiny", tmp_path / "out", data__source=str(rows))
    assert "of the first 200 rows 191 are usable" in message
    rows.write_text("".join(['{"text": 5}\n'] * 150 + lines))
    with pytest.raises(DataError, match="150 of 200 rows"):
        run("distill-tiny", tmp_path / "out", data__source=str(rows))


def test_a_draft_to_go_on_from(tmp_path: Path, rows: Path, chat_tokenizer_folder: Path) -> None:
    """One with the target's tokens is measured, one with other tokens refused by a token."""
    mine = Path(shutil.copytree(embedded_target(), tmp_path / "mine"))
    out, source = tmp_path / "out", str(rows)
    message = run("distill-tiny", out, data__source=source, model__start_from=str(mine))
    assert "12.05 M parameters" in message
    assert "it is as large as its target" in message
    for path in chat_tokenizer_folder.iterdir():
        shutil.copy(path, mine / path.name)
    with pytest.raises(RequestError, match="has another tokenizer than the target: token"):
        run("distill-tiny", out, data__source=source, model__start_from=str(mine))


def test_a_target_whose_state_cannot_go_back(tmp_path: Path, rows: Path) -> None:
    odd = Path(shutil.copytree(embedded_target(), tmp_path / "odd"))
    config = json.loads((odd / "config.json").read_text())
    config["layer_types"][-1] = "linear_attention"
    (odd / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
    with pytest.raises(RequestError, match="layers of type linear_attention"):
        run("distill-tiny", tmp_path / "out", data__source=str(rows), target__path=str(odd))


def test_a_target_of_another_kind_is_named_and_nothing_else(tmp_path: Path, rows: Path) -> None:
    """What would be trained for it cannot even be sized; one reason is enough."""
    odd = Path(shutil.copytree(embedded_target(), tmp_path / "odd"))
    sizes = {"vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 1}
    AutoConfig.for_model("mamba", **sizes).save_pretrained(odd)
    with pytest.raises(RequestError, match=r"the pre-flight fails:\n  - Mamba.*\Z"):
        run("eagle-tiny", tmp_path / "out", data__source=str(rows), target__path=str(odd))


@pytest.mark.parametrize("method", ["dflash", "dflash2", "mtp", "pard", "distill"])
def test_a_target_of_gpt_2_s_layers(method: str, tmp_path: Path, rows: Path) -> None:
    """They multiply without being `nn.Linear`; the widest of one reads and makes 5 x 32 numbers a token."""
    folder = Path(shutil.copytree(embedded_target(), tmp_path / "gpt2", ignore=lambda *_: ["model.safetensors"]))
    sizes = {"vocab_size": 4096, "n_embd": 32, "n_head": 4, "n_layer": 4, "bos_token_id": 0, "eos_token_id": 0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).save_pretrained(folder)
    words = {"target__path": str(folder), "data__source": str(rows)}
    assert "ready to train" in run(f"{method}-tiny", tmp_path / "out", **words)
    recipe = load_recipe(f"{method}-tiny", [("target.path", str(folder))]).recipe
    models, tokens = Models(recipe), recipe.loop.micro_rows * recipe.data.sequence_length
    need = needs(recipe, models.student(), models.target())
    assert need["its pass"] == tokens * (5 * 32 + 4 * 5 * 32) * BYTES["fp32"]


def test_what_training_would_refuse_at_once(tmp_path: Path, rows: Path) -> None:
    """Weights that are cut short, a folder with another run."""
    bare = Path(shutil.copytree(embedded_target(), tmp_path / "bare"))
    weights = bare / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:1000])
    words = {"data__source": str(rows), "target__path": str(bare)}
    with pytest.raises(RequestError, match="model.safetensors"):
        run("distill-tiny", tmp_path / "out", **words)
    (tmp_path / "out" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "out" / "run.yaml").write_text(load_recipe("eagle-tiny").yaml())
    with pytest.raises(RequestError, match="holds a run of another recipe"):
        run("distill-tiny", tmp_path / "out", data__source=str(rows))


DISTRIBUTIONS = {
    "gemma2": {"final_logit_softcapping": 30.0},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
}


@pytest.mark.parametrize("family", DISTRIBUTIONS)
def test_logits_that_are_more_than_a_product(family: str, tmp_path: Path) -> None:
    """Taken as a target and as a model to go on from, without weights too; a run looks at its own forward pass."""
    other = Path(shutil.copytree(embedded_target(), tmp_path / "other"))
    (other / "model.safetensors").unlink()
    config = json.loads((other / "config.json").read_text())
    config |= {"model_type": family, "architectures": None, "sliding_window": 512} | DISTRIBUTIONS[family]
    (other / "config.json").write_text(json.dumps(config))
    for section, look, recipes in [
        ("target.path", check_target, ["distill-tiny", "boost-tiny", "medusa2-tiny", "eagle-tiny"]),
        ("model.start_from", check_model, ["distill-tiny", "boost-tiny", "target-tiny"]),
    ]:
        for each in recipes:
            recipe = load_recipe(each, [(section, str(other))]).recipe
            assert look(recipe, Models(recipe))


def test_disk(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFailure, match=r"rows\.jsonl is a file"):
        run("distill-tiny", rows / "out", data__source=str(rows))
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**7, 10**7))
    with pytest.raises(EnvironmentFailure, match="checkpoints need 26.6 MB, and 10 MB are free"):
        run("distill-tiny", tmp_path / "out", data__source=str(rows))


def test_processes_of_the_launch(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RequestError, match=r"x processes \(3\) = 48"):
        run("distill-tiny", tmp_path / "out", data__source=str(rows))
    flags = {"data__source": str(rows), "loop__micro_rows": "4", "loop__batch_rows": "24"}
    assert "2 x 4 rows on 3 processes" in run("distill-tiny", tmp_path / "out", **flags)


def test_the_verb(tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["check", "distill-tiny", "--data.source", str(rows), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert "ready to train" in capfd.readouterr().out
    assert main([*words, "--loop.micro_rows", "3"]) == 2
    message = capfd.readouterr()
    assert message.err.startswith("draftsmith: the pre-flight fails:\n  - loop.batch_rows is 16")
    assert "FAILS" in message.out
    assert "ready to train" not in message.out


def test_what_fails_for_one_reason_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Model, data and others need the target; where it is not, their rows name its row."""
    assert main(["check", "distill-tiny", "--target.path", str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 2
    table = capfd.readouterr().out
    fails = [line.split("\u2502")[2].strip() for line in table.splitlines() if "FAILS" in line]
    assert fails.count("as target") == len(fails) - 1 > 1


def test_a_drafter_s_own_failure_is_no_other_row_s(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["check", "dflash-tiny", "--block.mask_token", "999999", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    table = capfd.readouterr().out
    failing = [line.split("\u2502")[1].strip() for line in table.splitlines() if "FAILS" in line]
    assert failing == ["model", "disk", "features"], (
        table
    )  # the target, the data and the prompts are as they should be


def test_a_failure_is_looked_up_once() -> None:
    tries = []

    def fail() -> int:
        tries.append(1)
        raise RequestError("gone")

    once = Once(fail)
    for _ in range(3):
        with pytest.raises(RequestError, match="gone"):
            once()
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (26_600_000, "26.6 MB"), (4.32e14, "432 TB")]
)
def test_units(count: float, text: str) -> None:
    assert in_units(count) == text


def test_memory_is_the_devices(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State, a chunk of logits, the target and what both passes keep: 267 MB for this recipe."""
    flags = {"data__source": str(rows)}
    monkeypatch.setattr(devices, "device_memory", lambda: 269_000_000)
    assert "ready" in run("distill-tiny", tmp_path / "out", **flags)
    monkeypatch.setattr(devices, "device_memory", lambda: 265_000_000)
    with pytest.raises(EnvironmentFailure, match="the device has 265 MB"):
        run("distill-tiny", tmp_path / "out", **flags)


def test_drafts_that_are_shorter_than_asked_for_are_told(tmp_path: Path, rows: Path) -> None:
    """The default length is no wish."""
    own = {"data__source": str(rows), "block__size": "4"}
    told = run("dflash-tiny", tmp_path / "out", eval__draft_length="6", **own)
    assert "note: eval.draft_length is 6 (--eval.draft_length), and what is trained drafts at most 3 tokens" in told
    assert "ready to train" in told
    for recipe, flags in (
        ("dflash-tiny", {"block.size": "4"}),
        ("eagle-tiny", {"eval.draft_length": "40"}),
        ("medusa-tiny", {"eval.draft_length": "4"}),
    ):
        assert shorter_drafts(load_recipe(recipe, list(flags.items()))) == []
    assert len(shorter_drafts(load_recipe("medusa-tiny", [("eval.draft_length", "9")]))) == 1


def test_a_cut_draft_s_size_is_traced_to_the_recipe_that_has_it(tmp_path: Path, rows: Path) -> None:
    cut = {"model__start_from": "target", "data__source": str(rows)}
    (tmp_path / "own.yaml").write_text("base: pard-tiny\nmodel:\n  head_size: 32\n")
    own = str(tmp_path / "own.yaml")
    with pytest.raises(RequestError) as raised:
        run(own, tmp_path / "out", **cut)
    assert "model.head_size (own.yaml:3) is 32, and a draft cut from the target keeps its 64" in str(raised.value)
    assert "a recipe's own by --model.head_size ''" in str(raised.value)
    recipe = load_recipe(own, [("model.start_from", "target")]).recipe
    with pytest.raises(RequestError, match="model.head_size is 32"):  # as training asks, before any row is made
        spine.check_target(recipe, Models(recipe).target())
    assert "ready to train" in run(own, tmp_path / "out", **cut, model__head_size="")


def test_one_fault_is_told_once_behind_the_table(tmp_path: Path, rows: Path) -> None:
    told, flags = io.StringIO(), [("eagle3.vocabulary", "100"), ("data.source", str(rows))]
    with pytest.raises(RequestError) as raised:
        check(load_recipe("dflash-tiny", flags), Console(file=told, width=400), tmp_path / "out")
    assert str(raised.value).count("eagle3.vocabulary is 100") == 1
    assert told.getvalue().count("eagle3.vocabulary") == 1
    assert "no section of method" not in told.getvalue()
