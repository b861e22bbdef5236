"""`draftsmith recommend`: what is said of a target by its config, held to the pre-flight and to the records."""

from __future__ import annotations

import json
from math import inf, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draftsmith
import pytest
from draftsmith.drafters.published.known import known_drafters
from draftsmith.launch.check.memory import needs, parameters
from draftsmith.launch.check.models import Models
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe, shipped_recipes
from draftsmith.launch.recommend.recommend import _hours, _rules, made_for, recommend
from draftsmith.launch.recommend.target import PLAIN, described
from helpers.models.gguf_files import pytestmark_gguf, write_llama

ROOT = Path(draftsmith.__path__[0])
Captured = pytest.CaptureFixture[str]
QWEN3_8B = json.loads((ROOT / "recipes/assets/sizes/qwen3-8b.json").read_text(encoding="utf-8"))
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
SMOLLM2 = LLAMA_8B | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def folder(path: Path, config: Any, **files: str) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, text in files.items():
        (path / f"{name}.json").write_text(text)
    return str(path)


def test_qwen3_8b_by_its_sizes(tmp_path: Path) -> None:
    said = recommend(folder(tmp_path / "model", QWEN3_8B, tokenizer_config="{}"))
    assert "qwen3, 8,190.7 M parameters, 36 layers of 4,096" in said  # as its card has it: 8.2 B
    assert "no chat template" in said
    assert "eagle3-8b: trains 399.52 M parameters, 6.39 GB" in said
    assert "142.1 h on one H100" in said
    assert "mtp-8b" in said
    assert "time not measured" in said
    assert "found by its sizes, which are those of qwen3-8b" in said
    assert all(f"hub:{each.name}: {each.form}" in said for each in known_drafters("Qwen/Qwen3-8B"))
    assert "--target.sizes null" in said  # the recipe's are of a model that is not here


def test_llama_8b_by_the_name_in_its_config(tmp_path: Path) -> None:
    config = LLAMA_8B | {"_name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}
    said = recommend(folder(tmp_path / "model", config, tokenizer_config='{"chat_template": "x"}'))
    assert "llama, 8,030.3 M parameters" in said
    assert "a chat template" in said
    assert "found by _name_or_path in its config.json" in said
    assert "hub:RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3: EAGLE-3" in said
    nobodys = folder(tmp_path / "other", LLAMA_8B)
    assert f"none found by the name {nobodys} or other in the shipped list of {len(known_drafters())}" in recommend(
        nobodys
    )
    assert "whether it has a chat template is not known" in recommend(nobodys)


def test_a_folder_s_name_goes_before_what_its_config_says(tmp_path: Path) -> None:
    target = described(folder(tmp_path / "Qwen3-4B", QWEN3_8B | {"_name_or_path": "Qwen/Qwen3-8B"}))
    assert [*target.names.values()] == ["its name", "its name", "_name_or_path in its config.json"]
    assert "distill-qwen3-4b: `check` counts what it trains" in recommend(str(tmp_path / "Qwen3-4B"))
    said = recommend(str(tmp_path / "Qwen3-4B"))
    assert "found by its name:" in said
    assert said.index("recipes for Qwen3-4B itself:") < said.index("distill-qwen3-4b:") < said.index("that end in -8b")


def test_a_folder_by_another_path_is_called_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that one stands in, a link, and a page of the hub in its cache."""
    here = tmp_path / "gpt-oss 20b" / "Qwen3-4B"
    here.parent.mkdir()
    folder(here, QWEN3_8B)
    (tmp_path / "link").symlink_to(here)
    cached = tmp_path / "models--Qwen--Qwen3-4B" / "snapshots" / ("0" * 40)
    cached.parent.mkdir(parents=True)
    folder(cached, QWEN3_8B)
    monkeypatch.chdir(here)
    found = known_drafters("Qwen/Qwen3-4B")
    assert found
    for name in (".", str(tmp_path / "link"), str(cached)):
        assert f"hub:{found[0].name}" in recommend(name)
    assert f"--target.path '{here}'" in recommend(str(here))


def test_smollm2(tmp_path: Path) -> None:
    said = recommend(folder(tmp_path / "model", SMOLLM2))
    assert "134.5 M parameters" in said
    assert "recipes for 100 million to 2 billion, those that end in -small:" in said
    assert "eagle3-small: trains 9.81 M parameters, 157 MB" in said
    assert "3.1 h on two cores of an AMD EPYC" in said
    assert said.splitlines()[-1] == (
        f"next: draftsmith copy eagle3-small my.yaml && draftsmith check my.yaml --target.path {tmp_path / 'model'}"
    )


def test_between_the_sizes_the_nearest_is_named_and_said_to_be_another(tmp_path: Path) -> None:
    said = recommend(folder(tmp_path / "model", SMOLLM2 | {"num_hidden_layers": 5}))
    assert "46" in said.split(" M parameters")[0]  # below 50 M: inside
    assert "another size" not in said
    said = recommend(folder(tmp_path / "model", SMOLLM2 | {"num_hidden_layers": 9}))
    assert "end in -tiny; this target is of another size" in said
    said = recommend(folder(tmp_path / "model", SMOLLM2 | {"num_hidden_layers": 20}))
    assert "end in -small; this target is of another size" in said
    assert "time not measured for a target of this size" in said


def test_the_embedded_target(capfd: Captured) -> None:
    assert main(["recommend", "tiny"]) == 0
    said = capfd.readouterr().out
    assert "recipes for some ten million parameters" in said
    assert "no chat template" in said
    assert "next: draftsmith copy eagle-tiny my.yaml" in said
    assert "published drafters: none found in the shipped list" in said
    assert "target-tiny" not in said  # makes a target


def test_a_small_target_with_a_template_has_the_recipe_for_chats(tmp_path: Path) -> None:
    made = folder(tmp_path / "model", LLAMA_8B | SMALL)
    (tmp_path / "model" / "chat_template.jinja").write_text("x")
    assert "next: draftsmith copy distill-chat" in recommend(made)


@pytestmark_gguf
def test_a_gguf_file(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m.gguf", fields={"general.name": "Qwen3 8B"})
    target = described(str(tmp_path / "m.gguf"))
    assert target.parameters == parameters(model)
    assert (target.layers, target.hidden, target.heads, target.kv_heads, target.head_size) == (2, 64, 4, 2, 16)
    assert target.chats
    assert target.quantised == "GGUF, F32"
    said = recommend(str(tmp_path))  # the only one of its folder
    assert "found by general.name of the file" in said


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, {}) for kind in PLAIN),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
        ("mistral", {"attention_bias": True, "head_dim": 12}),
        ("qwen2", {"attention_bias": False, "num_key_value_heads": 4}),
        ("gpt_neox", {}),  # not counted here, so built in shapes
    ],
)
def test_parameters_are_those_of_the_model(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    made = folder(tmp_path / "model", {"model_type": kind} | SMALL | more)
    models = Models(load_recipe("eagle3-tiny", [("target.path", made)]).recipe)
    assert described(made).parameters == parameters(models.target())


@pytest.mark.parametrize(("ending", "kind"), [("-tiny", "llama"), ("-small", "qwen3")])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa"])
def test_what_is_trained_is_what_the_pre_flight_counts(method: str, ending: str, kind: str, tmp_path: Path) -> None:
    made = folder(tmp_path / "model", {"model_type": kind} | SMALL)
    recipe = load_recipe(method + ending, [("target.path", made)]).recipe
    models = Models(recipe)
    count = recipe.record.numbers(recipe, described(made))
    assert count == parameters(models.student())
    need = needs(recipe, models.student(), models.target())
    assert need["weights, gradient and moments"] == 16 * count


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert"}, "BertLMHeadModel (bert) attends to what comes later; expected a causal LM"),
        ({"model_type": "mamba"}, "whose state cannot be rolled back"),
        ({"model_type": "nothing-known"}, "has no class for its model_type 'nothing-known'"),
        ({"model_type": "llama"} | SMALL | {"hidden_size": None}, "names no hidden_size"),
        ({"model_type": "llama"} | SMALL | {"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"model_type": "llama"} | SMALL | {"vocab_size": -1}, "vocab_size is -1; expected a whole number"),
        ({"hidden_size": 4}, "its config.json names no model_type"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "an EAGLE-3 drafter in a form"),
        ("{", "is no JSON"),
        ("[]", "names no model_type"),
    ],
)
def test_refusals(config: Any, said: str, tmp_path: Path, capfd: Captured) -> None:
    assert main(["recommend", folder(tmp_path / "model", config)]) == 2
    message = capfd.readouterr().err
    assert said in message
    assert message.count("draftsmith: ") == 1


def test_what_is_not_there(tmp_path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["recommend", str(tmp_path)]) == 2
    assert "it holds no config.json; expected a folder with config.json, a GGUF file" in capfd.readouterr().err
    assert main(["recommend", "no such name"]) == 2
    assert "no hub has such a name" in capfd.readouterr().err
    (tmp_path / "notes.txt").write_text("x")
    assert main(["recommend", str(tmp_path / "notes.txt")]) == 2
    assert "it is a file; name the folder that it is in" in capfd.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["recommend", "nobody/nothing"]) == 4
    assert "cannot be asked for" in capfd.readouterr().err


def test_rules_name_recipes_that_are_shipped_and_leave_no_size_out() -> None:
    shipped = {path.stem for path in shipped_recipes()}
    rows = made_for()
    for row in rows:
        assert {*row.first, *row.chats} <= shipped
        assert all(each.endswith(row.ending) for each in row.first)
        shown = {
            word.strip("`,") for word in row.recipes.split() if word.startswith("`") and not word.startswith("`-")
        }
        assert {each.rstrip("`;") for each in shown} <= shipped
        assert row.ending in row.recipes
    sizes = [(row.least, row.most) for row in rows if row.model is None]
    assert sizes == sorted(sizes)
    assert (sizes[0][0], sizes[-1][1]) == (0.0, inf)
    assert [sizes[1], rows[1].away(1e8), rows[1].away(4e9)] == [(1e8, 2e9), 0.0, log(2)]


def test_rates_are_those_of_the_records() -> None:
    found = {each["recipe"]: each for each in _rules()["measured"]}
    assert len(found) == len(_rules()["measured"])

    def rows(name: str, **where: Any) -> Any:
        record = json.loads((ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8"))
        return next(row for row in record["rows"] if all(row[key] == value for key, value in where.items()))

    for recipe, family in {"eagle-tiny": "EAGLE-1", "eagle3-tiny": "EAGLE-3", "mtp-tiny": "MTP"}.items():
        row = rows("families-20-wall", family=family)
        assert found.pop(recipe)["rate"] == round(row["steps"] * 4 * 256 / row["seconds"])
    for recipe, method in {"eagle3-small": "eagle3", "mtp-small": "mtp"}.items():
        row = rows("smollm2", method=method)
        assert found.pop(recipe)["rate"] == round(float(row["tokens"].split()[0]) * 1e6 / (int(row["minutes"]) * 60))
    assert found.pop("eagle3-8b")["rate"] == round(rows("step-gpu", chunk="2,048", recompute="no")["rate"])
    assert not found


@pytest.mark.parametrize(("parameters", "known"), [(4e9, False), (6e9, True), (12e9, True), (16e9, False)])
def test_a_rate_is_said_of_targets_of_about_its_size(parameters: float, known: bool) -> None:
    """Measured at 8.19e9, within a factor of 1.5 to either side."""
    target: Any = SimpleNamespace(parameters=int(parameters))
    said = _hours(load_recipe("eagle3-8b", []).recipe, target)
    assert ("time not measured" not in said) == known
