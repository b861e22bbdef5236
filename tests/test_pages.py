"""The pages as a site: the README's list is the navigation, and every link of every page stays inside."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import draftsmith
import pytest
from helpers.benchmark_scripts import load

ROOT = Path(draftsmith.__file__).parent
PAGES = load("pages", ROOT / ".ci")
PLACES = {*PAGES.OUTSIDE.values(), *(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md"))}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_lists_every_page_once() -> None:
    listed = list(PAGES.listed(PAGES.navigation(README)))
    assert sorted(listed) == sorted(PLACES)


def test_sections_of_the_navigation() -> None:
    readme = """\
A [page](docs/other.md) before the list.

## Documentation

**Use**: [install](docs/install.md) · [first
run](docs/first-run.md)

| reference | |
|---|---|
| families | [Medusa](docs/medusa.md), [EAGLE](docs/eagle.md) |

**Understand**: [contributing](CONTRIBUTING.md)
"""
    assert PAGES.navigation(readme.replace("[first\nrun]", "\n[first run]")) == [
        {"Home": "index.md"},
        {"Use": [{"Install": "install.md"}, {"First run": "first-run.md"}]},
        {"Reference": [{"Families": [{"Medusa": "medusa.md"}, {"EAGLE": "eagle.md"}]}]},
        {"Understand": [{"Contributing": "CONTRIBUTING.md"}]},
    ]


@pytest.mark.parametrize("place", sorted(PLACES))
def test_links_stay_inside(place: str) -> None:
    made = PAGES.for_site((ROOT / PAGES.source_of(place)).read_text(encoding="utf-8"), PAGES.source_of(place))
    prose = "".join(PAGES.FENCE.split(made)[::2])
    assert not re.search(r"^<!--", prose, re.MULTILINE)
    for _, _, target in PAGES.LINK.findall(prose):
        name = target.partition("#")[0]
        if name and "://" not in name:
            there = posixpath.normpath(posixpath.join(posixpath.dirname(place), name))
            assert there in PLACES or (ROOT / "docs" / there).is_file(), target


@pytest.mark.parametrize(
    ("path", "text", "made"),
    [
        ("README.md", "![a run](docs/report.png)", "![a run](report.png)"),
        ("README.md", "[how](docs/results/gpu.md#parts)", "[how](results/gpu.md#parts)"),
        ("docs/results/gpu.md", "[memory](../memory.md), [here](#parts)", "[memory](../memory.md), [here](#parts)"),
        ("docs/results/gpu.md", "[first](../../README.md)", "[first](../index.md)"),
        ("docs/tour.md", "[`engine.py`](../decoding/engine.py) and [all](results)", "`engine.py` and all"),
        ("docs/tour.md", "[there](https://example.org/a.md)", "[there](https://example.org/a.md)"),
        ("docs/tour.md", "<!-- run: it\nwas -->\n| a |", "\n| a |"),
        ("docs/tour.md", "```text\n<!-- run: it -->\n```", "```text\n<!-- run: it -->\n```"),
    ],
)
def test_a_page_for_the_site(path: str, text: str, made: str) -> None:
    assert PAGES.for_site(text, path) == made


def test_diagrams_are_those_of_the_script() -> None:
    drawn = load("diagrams").drawings()
    shown = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md"))
    assert {path.stem for path in (ROOT / "docs" / "diagrams").iterdir()} == drawn.keys()
    for name, drawing in drawn.items():
        assert (ROOT / f"docs/diagrams/{name}.svg").read_text(encoding="utf-8") == drawing, (
            "run benchmarks/diagrams.py"
        )
        assert f"](diagrams/{name}.svg)" in shown


def test_every_family_of_the_table_is_drawn_once() -> None:
    table = re.split(r"\n\n", (ROOT / "docs/families.md").read_text(encoding="utf-8").split("## How they differ")[1])[
        2
    ]
    families = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    drawn = (ROOT / "docs/diagrams/reads.svg").read_text(encoding="utf-8")
    named = [name for line in re.findall(r'class="left">(.*)<', drawn) for name in line.split(", ")]
    assert sorted(named) == sorted(name for family in families for name in family.split(", "))


def test_the_site_asks_nobody() -> None:
    """No font, script or style of another host; what the theme would fetch is beside it."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "://" not in settings
    assert "font: false" in settings
    assert "polyfills: [iframe-worker.js]" in settings
    assert {Path(path).name for path in PAGES.ASSETS} == {"iframe-worker.js", "site.css"}
    assert all((ROOT / path).is_file() for path in PAGES.ASSETS)
