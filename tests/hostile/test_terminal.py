"""What strangers wrote on its way to a terminal: as it is, and nothing that the terminal would obey."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from draftsmith.launch import screen
from draftsmith.launch.check.unread import foreign_sections
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.recipe.values import split_overrides
from draftsmith.launch.requests import EvalRequest, GenerateRequest, TrainRequest
from draftsmith.launch.screen import console, printable

Captured = pytest.CaptureFixture[str]
ESCAPE = "\x1b[31mred\x1b]0;title\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[red]plain[/red] :smile: \t é 你好\n", "[red]plain[/red] :smile: \t é 你好\n"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\rb\x08\x7f\x9b", r"a\rb\x08\x7f\x9b"),
        ("left‮right", r"left\u202eright"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_table_shows_brackets_and_escapes(capfd: Captured) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("a[/b]", title="[bold]t[/bold]")
    table.add_row("[/red] :smile: [red]x[/red]")
    table.add_row(Text(f"{ESCAPE}"))
    console().print(table)
    console().print("[/red] and \x1b[31m")
    message = capfd.readouterr().out
    for shown in ("a[/b]", "[bold]t[/bold]", "[/red] :smile: [red]x[/red]", r"\x1b[31mred", "[/red] and"):
        assert shown in message
    assert "\x1b" not in message


def test_lines_and_records_and_failures(monkeypatch: pytest.MonkeyPatch, capfd: Captured) -> None:
    screen.say(f"a line {ESCAPE}")
    assert main(["train", f"./{'[/b]'}none.yaml"]) == 2
    message = capfd.readouterr()
    assert "[/b]none.yaml" in message.err
    assert "\x1b" not in message.out + message.err


def test_records_of_any_library() -> None:
    """transformers writes its warnings by itself, of a config's keys and values for instance.

    In a process of its own: handlers keep the stream that stood there when they were made.
    """
    code = f"""
import logging
from draftsmith.launch.cli import main
from transformers.utils.logging import get_logger
assert main(["show", "nothing"]) == 2
get_logger("transformers.x").warning("found %s", {ESCAPE!r})
logging.getLogger("draftsmith.x").warning("seen %s", {ESCAPE!r})
"""
    message = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert f"found {printable(ESCAPE)}" in message
    assert f"seen {printable(ESCAPE)}" in message
    assert "\x1b" not in message


def test_a_terminal_of_few_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    few = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", few)
    assert main(["show", "distill-tiny", "--summary", "ein Prüfstück"]) == 0
    few.flush()
    assert rb"ein Pr\xfcfst\xfcck" in few.buffer.getvalue()


def test_check_shows_names_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured) -> None:
    """A file, a column and a target of that name; the other findings are there too."""
    monkeypatch.setenv("COLUMNS", "400")
    name = "[/red]a [red]b[0]:smile:"
    source = tmp_path / f"{name}.jsonl"
    source.parent.mkdir(parents=True)
    source.write_text("".join(json.dumps({name: n}) + "\n" for n in range(20)))
    assert main(["check", "distill-tiny", "--data.source", str(source)]) == 3
    message = capfd.readouterr()
    assert str(source) in message.out
    assert name in message.err
    assert "device" in message.out
    assert main(["check", "distill-tiny", "--target.path", str(tmp_path / name / "x")]) == 2
    message = capfd.readouterr()
    assert str(tmp_path / name / "x") in message.out
    assert "device" in message.out


@pytest.mark.parametrize(
    "place", ["summary: a{}", "data: {{source: a{}}}", "data: {{columns: {{a{}: b}}}}", "eval: {{sweep: [a{}]}}"]
)
@pytest.mark.parametrize("sign", [r"\e[31m", r"\u202e", r"\0", r"\ud800"])
def test_control_characters_in_a_recipe(place: str, sign: str, tmp_path: Path, capfd: Captured) -> None:
    file = tmp_path / "r.yaml"
    body = place.replace("a{}", f'"a{sign}"').replace("{{", "{").replace("}}", "}")
    file.write_text(f"method: distill\n{body}\n")
    assert main(["show", str(file)]) == 2
    message = capfd.readouterr().err
    assert "r.yaml:2" in message
    assert printable(message) == message


@pytest.mark.parametrize("word", ["\x1b[31m", "a\x00b", "caf\udce9", "--data.source=\x07"])
def test_control_characters_among_the_words(word: str, capfd: Captured) -> None:
    for words in ([word], ["show", "distill-tiny", word], ["report", word]):
        assert main(words) == 2
        message = capfd.readouterr()
        assert message.err.startswith("draftsmith: the word ")
        assert printable(message.err) == message.err


@pytest.mark.parametrize(
    ("verb", "words", "found"),
    [
        (TrainRequest, ["r", "--name", "x"], [("name", "x")]),
        (TrainRequest, ["r", "--summary=a b"], [("summary", "a b")]),
        (TrainRequest, ["r", "--method", "medusa"], [("method", "medusa")]),
        (EvalRequest, ["--method", "ngram", "--name", "x"], [("name", "x")]),
        (GenerateRequest, ["--model", "x"], []),
    ],
)
def test_values_beside_the_sections(verb: type, words: list[str], found: list[tuple[str, str]]) -> None:
    assert split_overrides(words, of=verb)[1] == found


def test_a_name_by_flag(capfd: Captured) -> None:
    assert main(["show", "distill-tiny", "--name", "mine"]) == 0
    assert any(line.split() == ["name", "mine", "--name"] for line in capfd.readouterr().out.splitlines())
    assert main(["show", "distill-tiny", "--name", "../../x"]) == 2
    assert "found '../../x'" in capfd.readouterr().err


def test_a_section_by_flag_is_explained(capfd: Captured) -> None:
    assert main(["train", "distill-tiny", "--data", "x.jsonl"]) == 2
    message = capfd.readouterr().err
    assert "--data names a section" in message
    assert "--data.source" in message


def test_sections_of_other_methods_are_named(tmp_path: Path) -> None:
    """With the defaults' values, or none: `check` says so. A run's own record has every section."""
    file = tmp_path / "r.yaml"
    file.write_text("method: distill\nmedusa: {heads: 4}\nbpd:\nlora: {}\n")
    lines = foreign_sections(load_recipe(str(file)))
    assert [line.split()[1:3] for line in lines] == [["`bpd`", "(r.yaml:3)"], ["`medusa`", "(r.yaml:2)"]]
    file.write_text(load_recipe("distill-tiny").yaml())
    assert foreign_sections(load_recipe(str(file))) == []


def test_unknown_sizes_are_told_where_the_target_is_here(tmp_path: Path, capfd: Captured) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(100)))
    assert main(["check", "distill-tiny", "--data.source", str(source), "--target.sizes", "nope"]) == 2
    assert "no sizes are called 'nope'" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", "-", "a b\\c", "../../..", "https://evil.example/x", "x" * 300, "hub:x", "[/b]"])
@pytest.mark.parametrize(
    "words", [["eval", "--method", "prompt-lookup", "--target"], ["report"], ["export"], ["tree"]]
)
def test_odd_names_of_places(
    words: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main([*words, name])
    message = capfd.readouterr().err
    assert code in (2, 4), message
    assert "unexpected" not in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_of_too_many_letters(tmp_path: Path, capfd: Captured) -> None:
    assert main(["train", "distill-tiny", "--out", str(tmp_path / ("x" * 300))]) in (2, 4)
    message = capfd.readouterr().err
    assert "unexpected" not in message
    assert len(message) < 500
