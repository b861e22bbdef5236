"""The report, read as a person reads it: in a browser, light and dark, with hostile text."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from draftsmith.errors import RequestError
from draftsmith.eval.report.report import visible, write_report
from draftsmith.eval.report.tables import interval, number
from helpers.browser import WORST_CONTRAST, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SCHEMES = ["light", pytest.param("dark", marks=pytest.mark.slow)]
PLOTS = [
    "Acceptance by depth",
    "Acceptance against draft length",
    "Speed-up against draft length",
    "Histogram of the audit",
    "Training",
]
# ways out of an element, an attribute, a style, a comment, a template, a formula, a reading direction
HOSTILE = (
    "</pre></td></style></title>--><script>document.title='broken'</script>"
    "<b onclick='x'>\"'&lt;{{ 7*7 }}$\\frac{$|`\n\u202e\u2066\u200f\0\r\x1b[31m\ud800"
    "null undefined NaN \U0001f40d\U0001f469\u200d\U0001f52c שלום עולם"
)


def read(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / "eval" / name).read_text())


def write(run: Path, name: str, content: object) -> None:
    (run / "eval" / name).write_text(json.dumps(content))


def poisoned(node: Any, key: str = "") -> Any:
    """The same results with hostile text wherever text is free."""
    if isinstance(node, dict):
        return {k: poisoned(v, k) for k, v in node.items()}
    if key == "tokens" and isinstance(node, list):
        return [[HOSTILE, origin] for _, origin in node]
    if isinstance(node, list):
        return [poisoned(each, key) for each in node]
    fixed = ("verdict", "decoder", "category")
    return HOSTILE if isinstance(node, str) and key not in fixed else node


@pytest.fixture
def poisoned_run(run_folder: Path) -> Path:
    results = poisoned(read(run_folder, "results.json"))
    for row in results["rows"]:
        for each in row["categories"]:
            each["category"] += HOSTILE
    write(run_folder, "results.json", results)
    audit = poisoned(read(run_folder, "audit.json"))
    audit |= {"plant": HOSTILE, "failures": [HOSTILE], "verdict": "NOT lossless"}
    write(run_folder, "audit.json", audit)
    return run_folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_person_can_read_it(browser: Browser, run_folder: Path, scheme: str) -> None:
    page, messages = opened(browser, write_report(run_folder), scheme)
    results, audit = read(run_folder, "results.json"), read(run_folder, "audit.json")
    text = page.inner_text("body")
    for row in results["rows"]:
        assert interval(row["tau"]) in text
        assert interval(row["speedup"]) in text
        assert number(row["predicted_speedup"]) in text
        assert row["verdict"] in text
        for each, tested in zip(row["n_alpha"], row["n_alpha_counts"], strict=True):
            assert re.search(rf"{re.escape(interval(each))}\s+of {tested}", text)
    for row in results["sweep"]:
        assert interval(row["tau"]) in text
        assert interval(row["speedup"]) in text
    assert f"{audit['rosenblatt']['detectable']:.4f}" in text
    assert f"{audit['enumeration']['detectable']:.4f}" in text
    for origin in ("drafted and accepted", "correction after a rejection", "bonus after a full"):
        assert origin in text
    for category in results["rows"][0]["categories"]:
        assert interval(category["tau"]) in text
        assert category["category"] in text
    assert results["environment"]["versions"]["torch"] in text
    assert results["environment"]["processor"] in text
    assert messages == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_can_be_seen(browser: Browser, run_folder: Path, scheme: str) -> None:
    """Contrast of all text and lines, plots that are there, no sideways scrolling."""
    page, _ = opened(browser, write_report(run_folder), scheme)
    ground = page.eval_on_selector("body", "e => getComputedStyle(e).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 380) == (scheme == "light")
    ratio, where = page.evaluate(WORST_CONTRAST)
    assert ratio >= 4.5, where
    assert page.locator("svg").count() == len(PLOTS)
    for label in PLOTS:
        assert page.locator(f"svg[aria-label='{label}']").is_visible()
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids))
    for width in (1100, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    # the verdict stands near each tau, inside the window even where a table has to scroll
    for row in page.locator("#acceptance tbody tr").all():
        assert row.locator(".verdict").is_visible()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_origins_can_be_told_apart(browser: Browser, run_folder: Path, scheme: str) -> None:
    """By colour, and by underline for those who do not see the colours."""
    page, _ = opened(browser, write_report(run_folder), scheme)
    colours, lines = set(), set()
    for origin in ("draft", "correction", "bonus"):
        style = "e => { const s = getComputedStyle(e); return [s.backgroundColor, s.textDecoration]}"
        colour, line = page.eval_on_selector(f".legend .{origin}", style)
        colours.add(colour)
        lines.add(line.split("rgb")[0])
    assert len(colours) == 3
    assert len(lines) == 3
    results = read(run_folder, "results.json")
    first = page.locator("pre").first
    for origin in ("draft", "correction", "bonus", "prefill"):
        expected = [t for t, o in results["rows"][0]["sample"][0]["tokens"] if o == origin]
        assert first.locator(f".{origin}").all_text_contents() == [str(visible(t)) for t in expected]


def test_hostile_text_stays_text(browser: Browser, poisoned_run: Path) -> None:
    page, messages = opened(browser, write_report(poisoned_run), "light")
    assert "<script>document.title='broken'</script>" in page.title()
    assert page.locator("script, [onclick], base, iframe, link").count() == 0
    text = page.inner_text("body")
    assert "<script>document.title='broken'</script>" in text
    assert "{{ 7*7 }}" in text
    assert "\U0001f40d\U0001f469\u200d\U0001f52c שלום עולם" in text
    # nothing turns the line around, and what was there can be seen
    assert not re.search("[\0\x1b\u202e\u2066\u200f]", page.content())
    assert "[U+202E][U+2066][U+200F][U+0000]" in text
    assert page.locator(".sample").count() == 3
    assert page.locator("#speed tbody tr").count() == 2
    assert page.locator("svg").count() == len(PLOTS)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert messages == []


def test_hostile_text_in_markdown(poisoned_run: Path) -> None:
    """It cannot close the code block, break a table's row, or become markup."""
    write_report(poisoned_run)
    text = (poisoned_run / "report.md").read_text(encoding="utf-8")
    fences = re.findall(r"^`{3,}$", text, flags=re.MULTILINE)
    assert len(fences) == 6
    assert len(set(fences)) == 1
    longest = max(map(len, re.findall("`+", text.replace(fences[0], ""))))
    assert len(fences[0]) > longest
    outside = re.sub(rf"^{fences[0]}$.*?^{fences[0]}$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"(?<!\\)<", outside)
    tables = re.findall(r"(?:^\|.*\n)+", outside, flags=re.MULTILINE)
    assert len(tables) == 8
    for table in tables:
        rows = table.splitlines()
        bars = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        assert set(bars) == {bars[0]}, table
    assert not re.search("[\0\x1b\u202e]", text)


def test_markdown_says_the_same(run_folder: Path) -> None:
    write_report(run_folder)
    results, audit = read(run_folder, "results.json"), read(run_folder, "audit.json")
    text = (run_folder / "report.md").read_text(encoding="utf-8")
    for row in (*results["rows"], *results["sweep"]):
        for measure in ("tau", "alpha", "speedup"):
            assert f"| {interval(row[measure])}" in text
        assert number(row["predicted_speedup"]) in text
    for row in results["rows"]:
        for each, tested in zip(row["n_alpha"], row["n_alpha_counts"], strict=True):
            assert f"{interval(each)} of {tested}" in text
        for each in row["categories"]:
            assert interval(each["tau"]) in text
    assert f"{audit['rosenblatt']['detectable']:.4f}" in text
    assert results["environment"]["versions"]["transformers"] in text
    for piece, origin in results["rows"][0]["sample"][0]["tokens"]:
        mark = {"correction": "[-{}-]", "bonus": "[+{}+]"}.get(origin, "{}")
        assert mark.format(visible(piece)) in text


def tuned(name: str) -> dict[str, Any]:
    """`tune.json` as `draftsmith tune` leaves it, as far as a report reads it."""
    surface = {"label": name, "points": [[1, 1.4], [2, 1.1], [4, 0.8]], "crosses_1_at": [2.67]}
    return {
        **{
            "sentence": f"{name}: 1.4 times",
            "temperature": 0.0,
            "batch": 1,
            "prompts": name,
            "verdict": "not audited",
        },
        "measured": [{"label": name, "speedup": 1.5, "predicted_at_tau": 1.33, "measured": [1.4, 1.3, 1.5]}],
        "pays_from": [{"title": name, "label": name, "words": f"{name} would pay from a target call of 14 ms"}],
        "surfaces": [{**surface, "axis": axis} for axis in ("draft length", "batch", "temperature")],
    }


def test_it_shows_where_settings_pay(run_folder: Path) -> None:
    plain = write_report(run_folder).read_text(encoding="utf-8")
    assert "Where it pays" not in plain
    write(run_folder, "tune.json", tuned("medusa, nodes 8"))
    page = write_report(run_folder).read_text(encoding="utf-8")
    markdown = (run_folder / "report.md").read_text(encoding="utf-8")
    for text in (page, markdown):
        assert "predicted within 10% of measured: 1 of 1 rows; off by +7 %, +7 % on average" in text
        assert "pays up to batch 2.67" in text
        assert "would pay from a target call of 14 ms" in text
        assert "not audited" in text
    assert page.count("<svg") == plain.count("<svg") + 3
    assert 'aria-label="Speed-up against batch"' in page
    assert "| medusa, nodes 8 | not audited | 1.50 | 1.40 [1.30, 1.50] | +7 | -5 |" in markdown
    (run_folder / "eval" / "tune.json").write_text("{")
    with pytest.raises(RequestError, match=r"tune.json is not JSON"):
        write_report(run_folder)
    write(run_folder, "tune.json", {"measured": 3})
    with pytest.raises(RequestError, match="tune.json"):
        write_report(run_folder)


def test_hostile_settings_stay_text(run_folder: Path) -> None:
    write(run_folder, "tune.json", tuned(HOSTILE))
    page = write_report(run_folder).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<b onclick" not in page
    rows = [line for line in (run_folder / "report.md").read_text("utf-8").splitlines() if "1.40 [1.30, 1.50]" in line]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in rows] == [7]
    assert "pays_from" in tuned("x")  # the words of which are cells too


def test_it_says_whether_a_second_set_agrees(run_folder: Path) -> None:
    results = read(run_folder, "results.json")
    assert len(results["second"]) == len(results["rows"])
    for differs in (False, True):
        results["second"][0]["agrees"], results["second"][1]["agrees"] = not differs, True
        write(run_folder, "results.json", results)
        page = html.unescape(write_report(run_folder).read_text(encoding="utf-8"))
        text = (run_folder / "report.md").read_text(encoding="utf-8")
        for row in results["second"]:
            assert f"| {interval(row['tau'])} | {interval(row['first_tau'])} |" in text
        said = "differs from the first set's beyond" if differs else "agrees with the first set's"
        assert said in page
        assert said in text
        assert (page.count(">differ<"), text.count("| differ |")) == (differs, differs)
    del results["second"]
    write(run_folder, "results.json", results)
    assert "On other prompts" not in write_report(run_folder).read_text(encoding="utf-8")


def test_no_verdict_no_acceptance(run_folder: Path) -> None:
    """Where the run was not audited, every table says so beside the figures."""
    results = read(run_folder, "results.json")
    for row in results["rows"]:
        for each in (row, *row["categories"], *results["sweep"], *results["second"]):
            each["verdict"] = "not audited"
    write(run_folder, "results.json", results)
    (run_folder / "eval" / "audit.json").unlink()
    page = write_report(run_folder).read_text(encoding="utf-8")
    chips = len(re.findall(r'class="verdict warn">\? not audited', page))
    tables = 2 * len(results["rows"]) + len(results["rows"][0]["categories"])
    assert chips == 1 + tables + len(results["sweep"]) + len(results["second"])
    assert "verdict good" not in page
    assert "made without an audit" in page
    assert "has not been audited" in page
    assert "has not been audited" in (run_folder / "report.md").read_text(encoding="utf-8")


def test_a_row_that_was_not_audited_itself_says_so(run_folder: Path) -> None:
    results = read(run_folder, "results.json")
    results["rows"].append({**results["rows"][0], "method": "untrained draft"})
    write(run_folder, "results.json", results)
    page = write_report(run_folder).read_text(encoding="utf-8")
    markdown = (run_folder / "report.md").read_text(encoding="utf-8")
    note = "untrained draft was not audited itself: its verdict is that of draft model"
    assert page.count("as draft model<") == 2
    assert markdown.count("| lossless (as draft model) |") == 2
    assert page.count(note) == markdown.count(note) == 1


def test_a_failed_audit_is_not_hidden(run_folder: Path) -> None:
    results, audit = read(run_folder, "results.json"), read(run_folder, "audit.json")
    results["rows"][-1]["verdict"] = "NOT lossless"
    audit |= {"verdict": "NOT lossless", "failures": ["enumeration, p = 1e-12"]}
    write(run_folder, "results.json", results)
    write(run_folder, "audit.json", audit)
    page = write_report(run_folder).read_text(encoding="utf-8")
    head = page.split("<h2>")[0]
    assert "✗ NOT lossless" in head
    assert "No figure of acceptance or speed here can be used" in head
    assert "Failed: enumeration, p = 1e-12" in page
    assert "**Failed:** enumeration, p = 1e-12" in (run_folder / "report.md").read_text("utf-8")


@pytest.mark.slow
def test_an_audit_of_another_time_is_told(run_folder: Path) -> None:
    audit = read(run_folder, "audit.json")
    for change in ({"decoder": "hf"}, {"verdict": "NOT lossless"}):
        write(run_folder, "audit.json", audit)
        assert "of another time or decoder" not in write_report(run_folder).read_text("utf-8")
        write(run_folder, "audit.json", {**audit, **change})
        assert "of another time or decoder" in write_report(run_folder).read_text("utf-8")


def test_degenerate_text_is_told(run_folder: Path) -> None:
    results = read(run_folder, "results.json")
    for flagged in (False, True):
        for row in results["rows"]:
            row["flagged"] = flagged
        write(run_folder, "results.json", results)
        page = write_report(run_folder).read_text(encoding="utf-8")
        assert page.count("do not believe tau") == 4 * flagged  # a warning and a cell for each
        markdown = (run_folder / "report.md").read_text(encoding="utf-8")
        assert markdown.count("do not believe tau") == 4 * flagged


def test_without_sweep_curve_and_whole_steps(run_folder: Path) -> None:
    """What is missing leaves its section out; what could not be measured is a dash."""
    results = read(run_folder, "results.json")
    results["sweep"] = []
    nothing = [None] * 3
    depths = [nothing] * len(results["rows"][0]["n_alpha"])
    results["rows"][0] |= {
        "tau": nothing,
        "alpha": nothing,
        "predicted_speedup": None,
        "mbsu": None,
        "tokens_per_second": None,
        "n_alpha": depths,
    }
    write(run_folder, "results.json", results)
    (run_folder / "metrics.jsonl").unlink()
    page = write_report(run_folder).read_text(encoding="utf-8")
    assert "Draft length" not in page
    assert page.count("<svg") == 2
    assert not re.search(r"\bnan\b|\bNone\b", page)


def test_a_curve_cut_short_by_a_kill(run_folder: Path) -> None:
    path = run_folder / "metrics.jsonl"
    path.write_text(path.read_text() + '\n{"kind": "train", "st')
    assert 'aria-label="Training"' in write_report(run_folder).read_text(encoding="utf-8")
    path.write_text("not a record\n" + path.read_text())
    with pytest.raises(RequestError, match="damaged"):
        write_report(run_folder)


def test_it_says_what_was_measured_and_how_to_repeat_it(run_folder: Path) -> None:
    results = read(run_folder, "results.json")
    page = write_report(run_folder).read_text(encoding="utf-8")
    markdown = (run_folder / "report.md").read_text(encoding="utf-8")
    for text in (html.unescape(page), markdown.replace("\\", "")):
        for line in (*results["repeat"], "runs/a_b/drafter", "0f" * 32, "drafter.policy = argmax"):
            assert line in text
        assert "tau / (c_v + draft steps x c)" in text
    results["draft"] |= {"loaded": [], "settings": {}}
    results["repeat"] = []
    write(run_folder, "results.json", results)
    page = write_report(run_folder).read_text(encoding="utf-8")
    assert "<dt>repeat" not in page
    assert "<dt>drafters" not in page
    assert "| repeat" not in (run_folder / "report.md").read_text(encoding="utf-8")


def test_of_what_eval_wrote_elsewhere(run_folder: Path) -> None:
    """`eval --out FOLDER` leaves its files in FOLDER itself."""
    elsewhere = run_folder / "eval"
    assert write_report(elsewhere) == elsewhere / "report.html"
    assert "has not been audited" not in (elsewhere / "report.html").read_text(encoding="utf-8")
    (elsewhere / "results.json").write_text("{")
    renamed = elsewhere.rename(run_folder / "elsewhere")
    with pytest.raises(RequestError, match=f"draftsmith eval RUN --out {renamed}`"):
        write_report(renamed)


def test_a_run_without_results(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"eval/results.json is missing.*draftsmith eval RUN"):
        write_report(tmp_path)


def test_a_damaged_audit(run_folder: Path) -> None:
    (run_folder / "eval" / "audit.json").write_text("{")
    with pytest.raises(RequestError, match="not JSON"):
        write_report(run_folder)
