"""Several runs on one page: in a browser with its script and without, light and dark, by keyboard, with hostile text."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from draftsmith.errors import RequestError
from draftsmith.eval.report import plots
from draftsmith.eval.report.comparison import _calls, _times, names_of, write_comparison
from draftsmith.launch.cli import main
from helpers.browser import WORST_CONTRAST, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Measured = tuple[dict[str, Any], dict[str, Any]]
SPEEDS = {"slow": 0.8, "fast": 2.5, "mid": 1.4}
TOKENS = [("a", "prefill"), (" b", "draft"), (" c", "draft"), (" d", "bonus"), (" e", "draft"), (" f", "correction")]


def run_of(folder: Path, results: dict[str, Any], speed: float, **more: Any) -> Path:
    """A run whose every row has that speed-up, over a plain 10 tokens a second."""
    made = copy.deepcopy(results)
    for row in made["rows"]:
        row |= {"speedup": [speed, speed - 0.1, speed + 0.1], "tokens_per_second": 10 * speed, "tau": [2.5, 2.4, 2.6]}
        row |= {"baseline_tokens_per_second": 10.0, **more}
        row["sample"] = [{"id": "7", "prompt": "Why?", "tokens": [list(each) for each in TOKENS]}]
    (folder / "eval").mkdir(parents=True)
    (folder / "eval" / "results.json").write_text(json.dumps(made))
    return folder


@pytest.fixture
def runs(measured: Measured, tmp_path: Path) -> list[Path]:
    return [run_of(tmp_path / name, measured[0], speed) for name, speed in SPEEDS.items()]


@pytest.fixture(scope="module")
def compared(measured: Measured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of such runs, which no test changes."""
    folder = tmp_path_factory.mktemp("runs")
    return write_comparison([run_of(folder / name, measured[0], speed) for name, speed in SPEEDS.items()])


def names(page: Any) -> list[str]:
    return list(dict.fromkeys(cell.inner_text() for cell in page.locator("#rows td:first-child").all()))


def test_the_table_sorts_by_keyboard(browser: Browser, compared: Path) -> None:
    page, messages = opened(browser, compared, "light")
    assert names(page) == ["fast", "mid", "slow"]  # as it is without a script
    heads = page.locator("#rows th")
    assert heads.nth(4).get_attribute("aria-sort") == "descending"
    heads.nth(4).locator("button").focus()
    page.keyboard.press("Enter")
    assert heads.nth(4).get_attribute("aria-sort") == "ascending"
    assert names(page) == ["slow", "mid", "fast"]
    page.keyboard.press("Shift+Tab")  # the heads follow one another
    heads.nth(0).locator("button").focus()
    page.keyboard.press("Space")
    assert names(page) == ["fast", "mid", "slow"]
    assert [each.get_attribute("aria-sort") for each in heads.all()].count(None) == heads.count() - 1
    assert heads.nth(0).get_attribute("aria-sort") == "ascending"
    assert messages == []


def test_an_answer_plays_in_proportion_and_pauses(browser: Browser, compared: Path) -> None:
    """Plain decoding has a token every 100 ms, and `fast` two calls of 100 ms for the same text."""
    from playwright.sync_api import expect

    page, messages = opened(browser, compared, "light")
    replay = page.locator(".replay").nth(1)
    assert "fast" in replay.locator("h3").inner_text()
    at = [
        [float(token.get_attribute("data-at")) for token in side.locator("[data-at]").all()] for side in sides(replay)
    ]
    assert at == [[0, 100, 200, 300, 400, 500], [0, 100, 100, 100, 200, 200]]
    assert replay.locator(".later").count() == 0
    place = replay.locator("input")
    place.fill("150")
    assert [side.locator(".later").count() for side in sides(replay)] == [4, 2]
    assert [side.locator(".count").inner_text() for side in sides(replay)] == [
        "2 tokens, 1 target calls",
        "4 tokens, 1 target calls",
    ]
    assert place.get_attribute("aria-valuetext") == "0.15 of 0.50 seconds"
    button = replay.get_by_role("button")
    replay.locator("select").select_option("20")
    button.focus()
    page.keyboard.press("Enter")
    assert button.inner_text() == "Pause"
    page.keyboard.press("Enter")
    assert button.inner_text() == "Play"
    assert replay.get_by_role("status").inner_text().startswith("Paused at 0.1")
    place.fill("480")
    replay.locator("select").select_option("1")
    button.click()
    # asked from outside: the page's own policy lets nobody evaluate a string in it
    expect(replay.get_by_role("status")).to_have_text(re.compile("^B"), timeout=60_000)
    assert replay.locator(".later").count() == 0
    assert messages == []


def sides(replay: Any) -> list[Any]:
    return replay.locator("article").all()


def test_it_is_whole_without_a_script(browser: Browser, compared: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(compared.as_uri())
    text = page.locator("body").inner_text()
    assert "2.50 [2.40, 2.60]" in text
    assert "lossless" in text
    assert page.get_by_role("button").count() == 0
    assert page.locator(".controls").first.is_hidden()
    assert page.locator(".replay pre").nth(1).inner_text() == "Why?a b c d e f"
    context.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_it_can_be_seen(browser: Browser, compared: Path, scheme: str) -> None:
    page, _ = opened(browser, compared, scheme)
    ratio, where = page.evaluate(WORST_CONTRAST)
    assert ratio >= 4.5, where
    for label in ("Speed-up of each run", "Acceptance by depth"):
        assert page.locator(f"svg[aria-label='{label}']").is_visible()
    assert "fast, T = 0: 2.50." in page.locator("svg desc").first.text_content()
    unlabelled = "e => !e.closest('label') && !e.ariaLabel && !e.innerText"
    assert not any(each.evaluate(unlabelled) for each in page.locator("button, input, select").all())
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids))
    for width in (1100, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_text_stays_text(browser: Browser, measured: Measured, tmp_path: Path) -> None:
    hostile = "</pre></td></script><script>document.title='broken'</script><b onclick='x'>\"'{{ 7*7 }}\u202e$\\frac{$"
    runs = [run_of(tmp_path / "a'\"<b>", measured[0], 1.2, method=hostile), run_of(tmp_path / "b", measured[0], 1.1)]
    page, messages = opened(browser, write_comparison(runs), "light")
    assert page.title() == "2 runs compared - draftsmith report"
    assert page.locator("script").count() == 1
    assert page.locator("[onclick], b b, iframe, link").count() == 0
    assert "a'\"<b>" in names(page)
    assert messages == []


def test_unlike_runs_are_named(measured: Measured, tmp_path: Path) -> None:
    results = copy.deepcopy(measured[0])
    results["target"]["name"], results["environment"]["processor"] = "another", "other"
    runs = [
        run_of(tmp_path / "a", measured[0], 1.2),
        run_of(tmp_path / "b", results, 1.2, prompts="gsm8k", verdict="not audited", audited=None),
    ]
    page = write_comparison(runs).read_text(encoding="utf-8")
    for what in ("targets, so tau", "prompts, so tau", "machines, so speed"):
        assert f"The runs are of different {what}" in page
    assert "not audited, so its figures prove nothing yet" in page
    again = [run_of(tmp_path / name, measured[0], 1.2, flagged=False) for name in ("c", "d")]
    assert 'class="warning"' not in write_comparison(again).read_text(encoding="utf-8")
    looped = [run_of(tmp_path / "e", measured[0], 1.2, flagged=True), again[0]]
    said = re.findall(
        'class="warning">(.*?), T = 0: the target.* degenerate', write_comparison(looped).read_text("utf-8")
    )
    assert said == ["e"]


def test_points_of_many_runs_stay_by_their_depth(measured: Measured) -> None:
    """No interval of one depth stands among those of the next."""
    rows = [{**measured[0]["rows"][0], "label": f"run {n}"} for n in range(24)]
    drawn: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_errorbar", lambda _axes, points, *_: drawn.append(points[0][0]))
        plots.acceptance_by_depth([{**row, "method": row["label"]} for row in rows])
    assert len(drawn) == len(rows)
    assert 0.6 < min(drawn) < 0.8 < 1.2 < max(drawn) < 1.4


def test_times_are_an_answers_own_where_they_were_kept() -> None:
    row = {
        "method": "m",
        "temperature": 0.0,
        "tau": [2.0],
        "tokens_per_second": 20.0,
        "baseline_tokens_per_second": 8.0,
    }
    line = {"id": "7", "temperature": 0.0, "turn": 0}
    answers = [
        line | {"method": None, "seconds": 1.5, "steps": [1, 1, 1]},
        line | {"method": "m", "seconds": 0.8, "steps": [3, 1]},
    ]
    assert _times(row, {"id": "7"}, answers) == (500.0, 400.0, True)
    assert _times(row, {"id": "8"}, answers) == (125.0, 100.0, False)
    assert _times(row, {"id": "7"}, [answers[0], answers[1] | {"seconds": None}]) == (125.0, 100.0, False)
    assert _calls([origin for _, origin in TOKENS]) == [0, 1, 1, 1, 2, 2]
    assert _calls(["draft", "bonus", "correction"]) == [1, 1, 2]


def test_names_are_the_shortest_that_differ() -> None:
    assert names_of([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert names_of([Path("one/a"), Path("two/a")]) == ["one/a", "two/a"]


def test_the_verb(runs: list[Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *map(str, runs), "--markdown"]) == 0
    assert f"report: {runs[0] / 'comparison.html'}" in capfd.readouterr().out
    assert not (runs[0] / "report.html").exists()
    table = (runs[0] / "table.md").read_text(encoding="utf-8")
    assert all(f"{speed:.2f} [" in table for speed in SPEEDS.values())
    assert main(["report", str(runs[0]), str(runs[0])]) == 2
    assert "is named twice; expected each run once" in capfd.readouterr().err
    assert main(["report", str(runs[0]), str(runs[0].parent / "none")]) == 2
    assert "results.json is missing" in capfd.readouterr().err


def test_damaged_results_are_one_message(measured: Measured, tmp_path: Path) -> None:
    broken = copy.deepcopy(measured[0])
    del broken["rows"][0]["alpha"]
    runs = [run_of(tmp_path / "a", measured[0], 1.2), run_of(tmp_path / "b", broken, 1.2)]
    with pytest.raises(RequestError, match="one is damaged: .*`draftsmith report RUN` of each says which"):
        write_comparison(runs)
