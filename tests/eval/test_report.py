"""The report, read as a person reads it: in a browser, light and dark, with hostile text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from draftsmith.errors import RequestError
from draftsmith.eval.report import write_report
from draftsmith.eval.tables import interval

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


def opened(browser: Browser, page_file: Path, scheme: str) -> tuple[Page, list[str]]:
    """The page in a light or a dark browser, and what its console said."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1100, "height": 900})
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda request: said.append(request.url) if "file://" not in request.url else None,
    )
    page.goto(page_file.as_uri())
    return page, said


def luminance(page: Page, element: str, what: str) -> float:
    """Relative luminance (WCAG 2) of an element's computed colour."""
    colour = page.eval_on_selector(element, f"e => getComputedStyle(e)['{what}']")
    channels = [int(part) / 255 for part in colour.split("(")[1].rstrip(")").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page: Page, element: str, ground: str) -> float:
    pair = luminance(page, element, "color"), luminance(page, ground, "background-color")
    return (max(pair) + 0.05) / (min(pair) + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_person_can_read_it(browser: Browser, run_folder: Path, scheme: str) -> None:
    page, said = opened(browser, write_report(run_folder), scheme)
    results = json.loads((run_folder / "eval" / "results.json").read_text())
    audit = json.loads((run_folder / "eval" / "audit.json").read_text())
    text = page.inner_text("body")
    for row in results["rows"]:
        assert interval(row["tau"]) in text
        assert row["verdict"] in text
    for row in results["sweep"]:
        assert interval(row["speedup"]) in text
    assert f"{audit['rosenblatt']['detectable']:.4f}" in text
    assert "drafted and accepted" in text
    assert "bonus after a full draft" in text
    for category in results["rows"][0]["categories"]:
        assert interval(category["tau"]) in text
        assert category["category"] in text
    assert page.locator("svg").count() == 3
    for label in ("Acceptance by depth", "Speed-up against draft length", "Training"):
        assert page.locator(f"svg[aria-label='{label}']").is_visible()
    assert (luminance(page, "body", "background-color") > 0.5) == (scheme == "light")
    assert contrast(page, "body", "body") >= 7
    assert contrast(page, ".soft", "body") >= 4.5
    # no sideways scrolling of the page, on a phone either
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_origins_can_be_told_apart(browser: Browser, run_folder: Path, scheme: str) -> None:
    """By colour, and without colour by underline; the text stays readable on each."""
    page, _ = opened(browser, write_report(run_folder), scheme)
    looks = set()
    for origin in ("draft", "correction", "bonus"):
        element = f"p .{origin}"
        style = page.eval_on_selector(
            element, "e => getComputedStyle(e).backgroundColor + getComputedStyle(e).textDecorationLine"
            "+ getComputedStyle(e).textDecorationStyle",
        )  # fmt: skip
        looks.add(style)
        pair = luminance(page, "pre", "color"), luminance(page, element, "background-color")
        assert (max(pair) + 0.05) / (min(pair) + 0.05) >= 4.5
    assert len(looks) == 3


def test_hostile_text_stays_text(browser: Browser, hostile_run: Path) -> None:
    page, said = opened(browser, write_report(hostile_run), "light")
    assert page.title() == "draftsmith report"
    assert page.locator("script").count() == 0
    assert page.locator("b").count() == 0
    assert "<script>document.title='broken'</script>" in page.inner_text("body")
    assert said == []


def test_hostile_text_in_markdown(hostile_run: Path) -> None:
    """It cannot close the code block, and cannot break a table's row."""
    write_report(hostile_run)
    text = (hostile_run / "report.md").read_text()
    fences = [line for line in text.splitlines() if line.startswith("````")]
    assert len(fences) >= 2
    assert len(fences) % 2 == 0
    assert len(set(fences)) == 1
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows
    assert not any("<script>" in line.replace("\\<", "") for line in rows)
    assert {line.replace("\\|", "").count("|") for line in rows[:3]} <= {6, 9}
    assert "\0" not in text


def test_no_verdict_no_acceptance(run_folder: Path) -> None:
    """Where the run was not audited, every table says so beside the figures."""
    path = run_folder / "eval" / "results.json"
    results: dict[str, Any] = json.loads(path.read_text())
    for row in results["rows"]:
        row["verdict"] = "not audited"
    path.write_text(json.dumps(results))
    (run_folder / "eval" / "audit.json").unlink()
    page = write_report(run_folder).read_text()
    assert page.count("not audited") >= len(results["rows"]) + 1
    assert "has not been audited" in page
    assert "not audited" in (run_folder / "report.md").read_text()


def test_a_run_without_results(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="draftsmith eval"):
        write_report(tmp_path)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "results.json").write_text("{")
    with pytest.raises(RequestError, match="not JSON"):
        write_report(tmp_path)
