"""Recipes and flags that were changed at random: one message that fits a screen, and the name that was meant."""

from __future__ import annotations

import copy
import io
import random
import string
from pathlib import Path
from typing import Any

import pytest
from draftsmith.errors import DraftsmithError
from draftsmith.launch.check.models import check_recipe
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import field_paths, load_recipe, shipped_recipes
from helpers.reliability_tally import tally
from ruamel.yaml import YAML

ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        3.7,
        1e300,
        float("nan"),
        float("-inf"),
        10**40,
        "",
        "x",
        "[/red]",
        "\x1b[31m",
        "\ud800",
        "\x00",
    ),
    *(
        "y" * 5_000,
        "../../x",
        "*a",
        "!!python/object/apply:os.system [id]",
        [],
        {},
        [[1]],
        ["x"] * 3_000,
        {"a": {"b": 1}},
    ),
    *({1: 2}, [None], "2020-01-01", ".nan", "0x10", "1_000"),
]
FLAGS = [
    "x",
    "",
    "-1",
    "nan",
    "[",
    "{a: b}",
    "&a [*a]",
    "!!set {a}",
    "1e400",
    "9" * 5_000,
    "[1, [2",
    "? a",
    "2020-01-01",
    "\\",
]


def _misspelt(name: str, random_: random.Random) -> str:
    at = random_.choice([n for n in range(1, len(name)) if name[n] != "."])
    return name[:at] + random_.choice(string.ascii_lowercase) + name[at + 1 :]


def _mutated(recipe: dict[str, Any], random_: random.Random) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """A recipe that was changed in one to four places; and a name that was misspelt, with the right one."""
    recipe, misspelt = copy.deepcopy(recipe), None
    for _ in range(random_.randint(1, 4)):
        sections = [key for key, value in recipe.items() if isinstance(value, dict) and value]
        section = random_.choice(sections) if sections else None
        kind = random_.choice(["value", "value", "key", "section", "new", "lost", "moved"])
        if kind == "value" and section:
            recipe[section][random_.choice([*recipe[section]])] = copy.deepcopy(random_.choice(ODD))
        elif kind == "key" and section:
            name = random_.choice([*recipe[section]])
            wrong = _misspelt(str(name), random_)
            if f"{section}.{wrong}" not in field_paths():
                recipe[section][wrong] = recipe[section].pop(name)
                misspelt = (f"{section}.{wrong}", f"{section}.{name}")
        elif kind == "section":
            recipe[random_.choice([*recipe])] = copy.deepcopy(random_.choice(ODD))
        elif kind == "new":
            recipe["".join(random_.choices(string.printable, k=8))] = copy.deepcopy(random_.choice(ODD))
        elif kind == "lost":
            recipe.pop(random_.choice([*recipe]))
        elif section:
            name = random_.choice([*recipe[section]])
            recipe[name] = recipe.pop(section)
        if not recipe:
            break
    return recipe, misspelt


def _flags(random_: random.Random) -> list[str]:
    words = []
    for _ in range(random_.randint(0, 3)):
        path = random_.choice(field_paths())
        if random_.random() < 0.3:
            path = _misspelt(path, random_)
        words += [f"--{path}={random_.choice(FLAGS)}"]
    return words


def _checked(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """As `check` looks at a recipe before it looks at the machine."""
    code = main(["show", *words])
    message = capfd.readouterr()
    if code == 0:
        overrides = [tuple(word.removeprefix("--").split("=", 1)) for word in words[1:]]
        try:
            check_recipe(load_recipe(words[0], overrides).recipe)
        except DraftsmithError as error:
            return error.exit_code, f"draftsmith: {error}"
    return code, message.err


def fuzz(count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    real = [path for path in shipped_recipes() if "8b" not in path.stem]
    recipes = [YAML(typ="safe", pure=True).load(path.read_text()) for path in real]
    told = 0
    for seed in range(count):
        random_ = random.Random(seed)
        changed, misspelt = _mutated(random_.choice(recipes), random_)
        text = io.StringIO()
        YAML(typ="safe", pure=True).dump(changed, text)
        file = tmp_path / f"r{seed}.yaml"
        file.write_text(text.getvalue(), encoding="utf-8", errors="surrogatepass")
        code, err = _checked([str(file), *_flags(random_)], capfd)
        assert code in (0, 2, 3, 4), (seed, err)
        assert "unexpected" not in err, (seed, err)
        assert "Traceback" not in err, (seed, err)
        assert "\x1b" not in err, seed
        if code:
            assert err.count("draftsmith: ") == 1, (seed, err)
            assert len(err.splitlines()) <= 24, (seed, err)
            assert len(err) <= 24 * 110, (seed, err)
        # a name that was misspelt twice has no right one beside it
        known = misspelt and any(f"{path}.".startswith(f"{misspelt[1]}.") for path in field_paths())
        if misspelt and known and f"{misspelt[0]} (" in err and len(misspelt[1].split(".")[1]) > 4:
            told += 1
            assert f"did you mean {misspelt[1]!r}?" in err, (seed, err)
        file.unlink()
    assert told >= count // 20
    tally("recipes", tried=count)


def test_forty_changed_recipes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fuzz(40, tmp_path, capfd)


@pytest.mark.slow
def test_two_hundred_changed_recipes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fuzz(240, tmp_path, capfd)


@pytest.mark.parametrize(("count", "says"), [(3_000, "and 2,990 more"), (20_000, "a recipe has a few thousand")])
def test_thousands_of_unknown_keys_fit_a_screen(
    count: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "many.yaml"
    file.write_text("method: distill\n" + "".join(f"key{n}: {n}\n" for n in range(count)))
    assert main(["show", str(file)]) == 2
    message = capfd.readouterr().err
    assert says in message
    assert len(message.splitlines()) < 24


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- a\n- b\n", "holds a list"),
        ("just text\n", "holds a single value"),
        ("5\n", "holds a single value"),
        ("", "holds nothing"),
    ],
)
def test_what_is_no_recipe_is_named_in_plain_words(
    content: str, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(content)
    assert main(["show", str(file)]) == 2
    assert says in capfd.readouterr().err


@pytest.mark.parametrize("name", ["./" + "x" * 5_000 + ".yaml", "./" + "y/" * 3_000 + "r.yaml"])
def test_a_name_that_no_file_can_have(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", name]) == 2
    message = capfd.readouterr().err
    assert "there is no recipe file" in message
    assert len(message) < 300
