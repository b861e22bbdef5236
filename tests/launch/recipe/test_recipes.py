"""Recipes: forty broken ones, each one clear message; provenance; the schema for editors."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import draftsmith
import jsonschema
import pytest
from draftsmith.errors import RequestError
from draftsmith.launch.check.early import check_audit, named
from draftsmith.launch.check.server import check_server
from draftsmith.launch.cli import main
from draftsmith.launch.recipe import load
from draftsmith.launch.recipe.load import headline, load_recipe, shipped_recipes
from draftsmith.launch.recipe.schema import recipe_schema, schema_file, schema_text
from draftsmith.launch.requests import AuditRequest, EvalRequest, Pair
from ruamel.yaml import YAML

DEEP = "data: " + "{a: " * 3000 + "1" + "}" * 3000
# a few hundred bytes that would be a list of a thousand million words
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 11))

# name, content (or flags behind a good recipe), what the message has to say
RECIPES: list[tuple[str, str | bytes, str]] = [
    ("empty", "", "holds nothing"),
    ("only_a_comment", "# nothing\n", "holds nothing"),
    ("list", "- method: distill\n", "expected sections"),
    ("scalar", "distill\n", "expected sections"),
    ("number", "42\n", "expected sections"),
    ("tab", "method: distill\ndata:\n\tsource: stdlib\n", "not valid YAML"),
    ("open_quote", 'method: "distill\n', "not valid YAML"),
    ("open_bracket", "method: distill\neval:\n  sweep: [1, 2\n", "not valid YAML"),
    ("key_twice", "method: distill\nmethod: target\n", "not valid YAML"),
    ("two_documents", "method: distill\n---\nmethod: target\n", "not valid YAML"),
    ("not_utf8", b"method: distill\nname: caf\xe9\n", "not UTF-8"),
    ("binary", bytes(range(256)), "not "),
    ("python_tag", "method: !!python/object/apply:os.system [ls]\n", "tags are not allowed"),
    ("own_tag", "method: !secret distill\n", "tags are not allowed"),
    ("tag_in_a_list", "method: distill\neval:\n  sweep: [1, !!set {2}]\n", "tags are not allowed"),
    ("tag_on_a_section", "method: distill\nloop: !x\n  steps: 5\n", ":2: YAML tags"),
    ("tag_on_everything", "!!python/object:os.x\nmethod: distill\n", ":1: YAML tags"),
    ("deep", DEEP, "nested more than 16 deep"),
    ("aliases", LAUGHS, "aliases are not allowed"),
    ("aliases_as_value", LAUGHS + "method: *a10\n", "aliases are not allowed"),
    ("aliases_as_list", LAUGHS + "eval: {sweep: *a10}\n", "aliases are not allowed"),
    ("alias_of_itself", "method: distill\ndata: &d\n  columns: *d\n", "found '&d'"),
    ("alias_of_nothing", "method: *nothing\n", "found '*nothing'"),
    ("merged", "method: distill\noptimizer: &o {lr: 1}\nloop:\n  <<: *o\n", ":2: YAML aliases"),
    ("merged_in_place", "method: distill\nloop:\n  <<: {stepz: 1}\n", "'loop.steps'?"),
    ("zero_byte", b"method: distill\nname: a\x00b\n", "not valid YAML"),
    ("utf16", "method: distill\n".encode("utf-16"), "not UTF-8"),
    ("number_of_5000_digits", "method: distill\nloop: {steps: " + "9" * 5000 + "}\n", "digits"),
    ("true_for_a_count", "method: distill\nloop: {steps: true}\n", "found True"),
    ("one_for_a_switch", "method: distill\ndata: {packing: 1}\n", "found 1; "),
    ("quoted_number", "method: distill\nloop: {steps: '5'}\n", "found '5'"),
    ("number_for_text", "method: distill\nsummary: 5\n", "found 5; "),
    ("yes_for_true", "method: distill\ndata: {packing: yes}\n", "found 'yes'"),
    ("method_missing", "name: a\n", "method"),
    ("method_unknown", "method: distil\n", "'distil'"),
    ("method_is_list", "method: [distill]\n", "method"),
    ("misspelt_section", "method: distill\nopimizer: {lr: 0.1}\n", "did you mean 'optimizer'?"),
    ("misspelt_key", "method: distill\noptimizer:\n  learning_rat: 1\n", "unknown key"),
    ("close_key", "method: distill\nloop:\n  step: 5\n", "did you mean 'loop.steps'?"),
    ("wrong_section", "method: distill\nloop:\n  lr: 0.1\n", "did you mean 'optimizer.lr'?"),
    ("section_is_scalar", "method: distill\nloop: 5\n", "expected a section"),
    ("section_is_list", "method: distill\nloop: [1]\n", "expected a section"),
    ("value_is_mapping", "method: distill\nloop:\n  steps: {a: 1}\n", "loop.steps"),
    ("text_for_number", "method: distill\nloop:\n  steps: many\n", "found 'many'"),
    ("fraction_for_count", "method: distill\nloop:\n  steps: 1.5\n", "found 1.5"),
    ("zero_steps", "method: distill\nloop:\n  steps: 0\n", "greater than or equal to 1"),
    ("negative_rate", "method: distill\noptimizer:\n  lr: -1\n", "greater than 0"),
    ("not_a_number", "method: distill\noptimizer:\n  lr: .nan\n", "finite number"),
    ("infinite", "method: distill\noptimizer:\n  lr: .inf\n", "finite number"),
    ("unknown_choice", "method: distill\noptimizer:\n  name: sgd\n", "'adamw' or 'muon'"),
    ("unknown_precision", "method: distill\nloop:\n  precision: fp8\n", "'fp32', 'bf16' or 'fp16'"),
    ("share_too_large", "method: distill\ndata:\n  validation_share: 0.9\n", "less than 0.5"),
    ("bad_name", "method: distill\nname: ../elsewhere\n", "name"),
    ("columns_are_a_list", "method: distill\ndata:\n  columns: [a, b]\n", "data.columns"),
    ("sweep_of_words", "method: distill\neval:\n  sweep: [one]\n", "eval.sweep"),
    ("three_betas", "method: distill\noptimizer:\n  betas: [0.9, 0.9, 0.9]\n", "betas"),
    ("base_missing", "base: nowhere\n", "no recipe is called 'nowhere'"),
    ("base_is_number", "base: 5\n", "base is 5"),
    ("base_of_base", "base: target-chat\n", "only one level"),
    ("base_is_a_folder", "base: ./\n", "./ is a folder; expected a recipe file"),
    ("base_is_itself", "base: base_is_itself.yaml\n", "only one level"),
    ("number_as_key", "method: distill\n5: a\n", "5 (number_as_key.yaml:2): unknown key"),
    ("list_as_key", "method: distill\n? [a, b]\n: 4\n", "unknown key"),
    ("null_method", "method:\n", "found None"),
]


def run(path: Path, *flags: str) -> int:
    return main(["show", str(path), *flags])


@pytest.mark.parametrize(("name", "content", "reason"), RECIPES, ids=[r[0] for r in RECIPES])
def test_one_clear_message(
    name: str, content: str | bytes, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{name}.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run(path) == 2
    message = capfd.readouterr()
    assert message.err.count("draftsmith: ") == 1, message.err
    assert reason in message.err
    assert f"{name}.yaml" in message.err
    assert len(message.err) < 1000, "a message is for reading"
    assert "Traceback" not in message.err
    assert "draftsmith: unexpected" not in message.err
    assert not message.out


def test_there_are_forty() -> None:
    assert len(RECIPES) >= 40


def test_broken_recipes_are_refused_without_torch(tmp_path: Path) -> None:
    """All in one process of its own: an error must not cost the seconds of a heavy import."""
    for name, content, _ in RECIPES:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / f"{name}.yaml").write_bytes(data)
    code = (
        "import sys; from pathlib import Path; from draftsmith.launch.cli import main\n"
        "codes = [main(['train', str(path)]) for path in sorted(Path().glob('*.yaml'))]\n"
        f"assert codes == [2] * {len(RECIPES)}, codes\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--loop.stepps", "5"], "did you mean 'loop.steps'?"),
        (["--loop.steps"], "no value given"),
        (["--loop.steps", "--loop.seed"], "no value given"),
        (["--loop.steps", "x"], "found 'x'"),
        (["--loop.steps=0"], "greater than or equal to 1"),
        (["--nothing.at_all", "1"], "unknown flag"),
        (["--loop.steps", "true"], "found True"),
        (
            ["--model.keep_layers", "[0]"],
            "model.keep_layers (--model.keep_layers): found [0]; keep_layers names layers",
        ),
        (["--loop.steps", "9" * 5000], "loop.steps (--loop.steps)"),
        (["--eval.sweep", "[1, 2"], "found '[1, 2'"),
        (["--data.columns", "question"], "data.columns (--data.columns)"),
    ],
)
def test_flags(flags: list[str], reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "distill-tiny", *flags]) == 2
    message = capfd.readouterr().err
    assert reason in message
    assert message.count("draftsmith: ") == 1


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("loop.steps", "5", 5),
        ("optimizer.lr", "1e-4", 1e-4),
        ("optimizer.lr", "1", 1.0),
        ("optimizer.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("eval.sweep", "[]", []),
        ("eval.limit", "null", None),
        ("eval.limit", "", None),
        ("data.columns", "{question: prompt}", {"question": "prompt"}),
        ("data.packing", "false", False),
        ("name", "2024", "2024"),
        ("summary", "", ""),
        ("target.revision", "1e4", "1e4"),
    ],
)
def test_flag_values(flag: str, text: str, value: object) -> None:
    """As in a recipe's YAML; where text is expected, a number stays the text it was."""
    section: object = load_recipe("distill-tiny", [(flag, text)]).recipe
    for part in flag.split("."):
        section = getattr(section, part)
    assert section == value
    assert type(section) is type(value)


def test_a_name_that_is_not_shipped(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "distil-tiny"]) == 2
    assert "did you mean 'distill-tiny'?" in capfd.readouterr().err


def test_all_errors_at_once(tmp_path: Path) -> None:
    path = tmp_path / "many.yaml"
    path.write_text("method: distill\nloop:\n  steps: 0\n  sead: 1\noptimizer:\n  lr: big\n")
    with pytest.raises(RequestError) as raised:
        load_recipe(str(path), [("loop.micro_rows", "-1")])
    lines = str(raised.value).splitlines()
    assert "4 errors" in lines[0]
    assert any("loop.steps (many.yaml:3)" in line for line in lines)
    assert any("loop.sead (many.yaml:4)" in line and "'loop.seed'" in line for line in lines)
    assert any("optimizer.lr (many.yaml:6)" in line for line in lines)
    assert any("loop.micro_rows (--loop.micro_rows)" in line for line in lines)


def test_errors_of_flags_alone_blame_no_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "distill-tiny", "--drafter.suffix.least", "2"]) == 2
    first, second = capfd.readouterr().err.splitlines()
    assert first == "draftsmith: 1 error in the flags"
    assert second.startswith("  - drafter.suffix.least (--drafter.suffix.least): found 2")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("method: distill\nloop: {stepz: 1}\n")
    assert main(["show", str(wrong), "--loop.steps", "none"]) == 2
    assert capfd.readouterr().err.startswith(f"draftsmith: {wrong}: 2 errors in the recipe\n")


def test_as_many_errors_as_fit_on_a_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.yaml"
    path.write_text("method: distill\n" + "".join(f"stepz_{n}: 1\n" for n in range(2_000)))
    assert run(path) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"draftsmith: {path}: 2,000 errors in the recipe"
    assert lines[1].endswith("stepz_0 (many.yaml:2): unknown key")
    assert (len(lines), lines[-1]) == (12, "  - and 1,990 more")


@pytest.mark.parametrize("letters", [300, 5000])
def test_a_path_that_no_file_can_have(letters: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"./{'a' * letters}.yaml"]) == 2
    message = capfd.readouterr().err
    assert "there is no recipe file ./a" in message
    assert len(message) < 400


def test_where_values_come_from(tmp_path: Path) -> None:
    """Defaults, then the base, then the recipe, then flags."""
    (tmp_path / "low.yaml").write_text("method: distill\nloop:\n  steps: 7\n  seed: 7\n")
    (tmp_path / "high.yaml").write_text("base: low.yaml\nloop:\n  seed: 8\n  micro_rows: 8\n")
    found = load_recipe(str(tmp_path / "high.yaml"), [("loop.micro_rows", "9")])
    loop = found.recipe.loop
    assert (loop.steps, loop.seed, loop.micro_rows, loop.log_every) == (7, 8, 9, 10)
    assert found.origin["loop.steps"] == "low.yaml:3"
    assert found.origin["loop.seed"] == "high.yaml:3"
    assert found.origin["loop.micro_rows"] == "--loop.micro_rows"
    assert found.origin["loop.log_every"] == "default"


def test_without_a_run_no_shipped_recipe_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edit or delete any: what commands go by that are given no run stays."""
    monkeypatch.setattr(load, "shipped_recipes", list)
    flags = [("eval.limit", "5")]
    pair = named(Pair(target="tiny", method="prompt-lookup"), flags)
    assert (pair.recipe.eval.limit, pair.recipe.eval.max_new_tokens, pair.recipe.eval.repeats) == (5, 64, 1)
    assert check_audit(AuditRequest(survey=True), [("audit.sequences", "20000")]) is None
    served = check_server(EvalRequest(server="http://127.0.0.1:1", model="m"), flags)
    assert served is not None
    assert served.recipe.eval == pair.recipe.eval
    with pytest.raises(RequestError, match="^1 error in the flags\n  - --evil.limit: unknown flag"):
        named(Pair(target="tiny", method="prompt-lookup"), [("evil.limit", "5")])


def test_no_code_reads_one_recipe_by_name() -> None:
    """What stands in a shipped recipe is its own; what is shared has a base."""
    root = Path(draftsmith.__file__).parent
    called = [
        (path.name, call.args[0].value)
        for room in ("launch", "eval", "trainers", "data", "drafters")
        for path in (root / room).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("load_recipe")
        if call.args and isinstance(call.args[0], ast.Constant)
    ]
    assert called == []


@pytest.mark.parametrize("path", shipped_recipes(), ids=lambda path: path.stem)
def test_shipped_recipes(path: Path, tmp_path: Path) -> None:
    """Each resolves, fits the schema, and its resolved copy says the same."""
    resolved = load_recipe(str(path))
    assert resolved.recipe.name == path.stem
    assert resolved.recipe.summary
    assert headline(path) == (resolved.recipe.method, resolved.recipe.summary)
    jsonschema.validate(YAML(typ="safe", pure=True).load(path.read_text()), recipe_schema())
    saved = tmp_path / "run.yaml"
    saved.write_text(resolved.yaml())
    assert load_recipe(str(saved)).recipe == resolved.recipe


def test_the_schema_is_current() -> None:
    """`python -m draftsmith.launch.recipe.schema` writes it anew."""
    assert schema_file().read_text() == schema_text()
    schema = json.loads(schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for wrong in ({"method": "distil"}, {"name": "a"}, {"method": "distill", "loop": {"step": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
