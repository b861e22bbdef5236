"""Results as tables for the terminal, 80 columns wide.

Acceptance never stands without the audit's verdict. Read next: `measure/evaluate.py`, which makes the
results; `report.py` shows the same as a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

MISSING = "-"
MEAN = "mean over sets"
DEGENERATE = "do not believe tau"
NEAR = 0.1
"""How far a prediction of speed may be off, as a share of what was measured."""
_LEFT_ALIGNED = ("method", "audit", "set")
_DEPTHS = 6  # of the table by depth: more do not fit the line
_NAME = 12  # columns that a method's name keeps when the line is full
_COLOURS = {"lossless": "green", "NOT lossless": "bold red", "not audited": "yellow", "lossy": "yellow"}


def show(results: dict[str, Any], console: Console) -> None:
    """Print drift, acceptance, speed and the sweep; a row whose tau cannot be believed is named.

    On a terminal narrower than 80 columns lines run over: better than a number without its end.
    """
    if "drift" in results["target"]:
        console.print(Text(f"drift: {drifted(results['target']['drift'])}\n"))
    console.print(acceptance_table(results["rows"]), crop=False)
    for row in results["rows"]:
        if row["flagged"]:
            console.print(Text(f"! {degenerate(row)}", style="yellow"))
    for message in left_out(results):
        console.print(Text(f"! {message}", style="yellow"))
    console.print()
    console.print(depth_table(results["rows"]), crop=False)
    console.print()
    console.print(speed_table(results["rows"]), crop=False)
    console.print(Text(accuracy([(row["predicted_speedup"], row["speedup"][0]) for row in results["rows"]])))
    for line in cost_lines(results["target"]):
        console.print(Text(line))
    console.print()
    if "sets" in results["rows"][0]:
        console.print(sets_table(results["rows"]), crop=False)
        console.print()
    second = results.get("second")
    if second:
        console.print(second_table(second), crop=False)
        console.print(Text(agreement_line(second)))
        console.print()
    if results["sweep"]:
        console.print(sweep_table(results["sweep"]), crop=False)
        console.print(Text(best_lengths(results["sweep"])))
        console.print()


def left_out(results: dict[str, Any]) -> list[str]:
    """What was not decoded because it is too long, if anything."""
    if not results["left_out"]:
        return []
    most = results["settings"]["prompt_tokens"]
    return [f"{results['left_out']} turns of chats are left out: longer than {most} tokens (eval.prompt_tokens)"]


def acceptance_table(rows: Sequence[dict[str, Any]]) -> Table:
    """tau and alpha with intervals, beside the share of looping text and the audit's verdict."""
    cells = [
        (
            *_who(row),
            interval(row["tau"]),
            interval(row["alpha"]),
            f"{'! ' if row['flagged'] else ''}{share(row['loop_share'])}",
            _verdict(row),
        )
        for row in rows
    ]
    columns = (("method", ""), ("T", ""), ("tau", "tokens/call"), ("alpha", "accepted"), ("loops", "%"), ("audit", ""))
    rules = {row["rule"] for row in rows} - {None}
    by = f", by {', '.join(sorted(rules))}" if rules else ""
    return plain_table(f"Acceptance [95 % interval]{by}", columns, cells)


def depth_table(rows: Sequence[dict[str, Any]]) -> Table:
    """n-alpha, of which the report shows every depth and the intervals."""
    depths = min(_DEPTHS, max(len(row["n_alpha"]) for row in rows))
    columns = [("method", ""), ("T", ""), *((f"n = {n}", "") for n in range(depths)), ("audit", "")]
    cells: list[tuple[str | Text, ...]] = []
    for row in rows:
        shares = [number(value) for value, _, _ in row["n_alpha"][:depths]]
        shares += [""] * (depths - len(shares))
        cells.append((*_who(row), *shares, _verdict(row)))
    return plain_table("n-alpha: accepted at depth n + 1, given that the n before were", columns, cells)


def speed_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Measured and predicted speed-up; c and c_v are the costs that the prediction rests on."""
    cells = [
        (
            *_who(row),
            number(row["draft_length"], 0),
            interval(row["speedup"]),
            number(row["predicted_speedup"]),
            number(row["tokens_per_second"], 0),
            number(row["c"]),
            number(row["c_v"]),
        )
        for row in rows
    ]
    columns = (
        ("method", ""),
        ("T", ""),
        ("K", ""),
        ("measured", "times"),
        ("predicted", "times"),
        ("speed", "tokens/s"),
        ("c", "calls"),
        ("c_v", "calls"),
    )
    return plain_table("Speed over plain decoding in the same engine", columns, cells)


def off(predicted: float | None, measured: float | None) -> str:
    """How far a prediction lies from what was measured: `+4`, in per cent of the latter."""
    share = _over(predicted, measured)
    return MISSING if share is None else f"{100 * (share - 1):+.0f}"


def accuracy(pairs: Sequence[tuple[float | None, float | None]]) -> str:
    """Of pairs of a predicted and a measured speed-up, how far each is off, and how many by `NEAR` at most."""
    shares = [share for share in (_over(*pair) for pair in pairs) if share is not None]
    if not shares:
        return "no prediction can be compared: nothing was timed, or nothing predicted"
    near = sum(abs(share - 1) <= NEAR + 1e-9 for share in shares)
    mean = 100 * (sum(shares) / len(shares) - 1)
    each = ", ".join(off(*pair) for pair in pairs)
    found = f"predicted within {NEAR:.0%} of measured: {near} of {len(shares)} rows"
    return f"{found}; off by {each} %, {mean:+.0f} % on average"


def _over(predicted: float | None, measured: float | None) -> float | None:
    if predicted is None or not measured or math.isnan(predicted) or math.isnan(measured):
        return None
    return predicted / measured


def sets_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Each prompt set by itself, and the mean over them."""
    cells: list[tuple[str | Text, ...]] = []
    for row in rows:
        for each in (*row["sets"], {"set": MEAN, "requests": row["requests"], **row["over_sets"]}):
            tau = f"{'! ' if each['flagged'] else ''}{interval(each['tau'])}"
            cells.append((*_who(row), Text(each["set"]), str(each["requests"]), tau, interval(each["speedup"])))
    verdicts = ", ".join(sorted({verdict_of(row) for row in rows}))
    columns = (("method", ""), ("T", ""), ("set", ""), ("turns", ""), ("tau", "tokens/call"), ("speed-up", "times"))
    return plain_table(f"By prompt set (audit: {verdicts})", columns, cells)


def sweep_table(sweep: Sequence[dict[str, Any]]) -> Table:
    """Acceptance and speed against the draft length."""
    cells = [
        (
            str(row["draft_length"]),
            interval(row["tau"]),
            interval(row["alpha"]),
            interval(row["speedup"]),
            number(row["predicted_speedup"]),
        )
        for row in sweep
    ]
    columns = (("K", ""), ("tau", "tokens/call"), ("alpha", "accepted"), ("measured", "times"), ("predicted", "times"))
    verdicts = ", ".join(sorted({row["verdict"] for row in sweep}))
    return plain_table(f"Draft length K at T = 0 (audit: {verdicts})", columns, cells)


def second_table(rows: Sequence[dict[str, Any]]) -> Table:
    """tau on the second prompt set beside that on the first."""
    columns = (("method", ""), ("T", ""), ("tau", "second set"), ("tau", "first set"), ("sets", ""), ("audit", ""))
    cells = [
        (
            *_who(row),
            interval(row["tau"]),
            interval(row["first_tau"]),
            "agree" if row["agrees"] else "differ",
            Text(row["verdict"], style=_COLOURS[row["verdict"]]),
        )
        for row in rows
    ]
    return plain_table("Acceptance on a second prompt set", columns, cells)


def agreement_line(rows: Sequence[dict[str, Any]]) -> str:
    """Whether the two sets agree, in a sentence."""
    apart = [f"{row['method']} at T = {row['temperature']:g}" for row in rows if not row["agrees"]]
    said = f"on {rows[0]['requests']} other prompts ({rows[0]['prompts']}) tau"
    if not apart:
        return f"{said} agrees with the first set's in every row, within the interval of the difference"
    return f"{said} differs from the first set's beyond the interval of the difference: {', '.join(apart)}"


def best_lengths(sweep: Sequence[dict[str, Any]]) -> str:
    """The best K by the speed model and by the clock."""
    predicted, measured = best_predicted(sweep), best_measured(sweep)
    return f"best K: {predicted} predicted, {measured} measured"


def best_predicted(sweep: Sequence[dict[str, Any]]) -> int:
    """The draft length that the speed model likes best."""
    return int(max(sweep, key=lambda row: row["predicted_speedup"] or 0)["draft_length"])


def best_measured(sweep: Sequence[dict[str, Any]]) -> int:
    """The draft length that was fastest by the clock."""
    return int(max(sweep, key=lambda row: row["speedup"][0] or 0)["draft_length"])


def degenerate(row: dict[str, Any]) -> str:
    """Why the tau of a flagged row means nothing."""
    return (
        f"{row['method']}, T = {row['temperature']:g}: the target's own text is degenerate "
        f"(distinct-2 {row['distinct_2']:.2f}, {row['loop_share']:.0%} in loops): {DEGENERATE}"
    )


def cost_lines(target: dict[str, Any]) -> list[str]:
    """What makes a verify call dearer than that of a dense model that attends in every layer, a sentence for each."""
    lines = [experts_line(target["experts"])] if "experts" in target else []
    return [*lines, recurrent_line(target["recurrent"])] if "recurrent" in target else lines


def recurrent_line(recurrent: dict[str, int]) -> str:
    """What a verify call does in layers that fold the text into a state, in one sentence."""
    return (
        f"recurrent layers: {recurrent['layers']} of {recurrent['of']} fold the text into a state; a verify call goes "
        "node by node there, which c_v counts, and keeps the state behind each, so no accepted token is run again"
    )


def experts_line(experts: dict[str, Any]) -> str:
    """What a verify call reads of a mixture of experts, in one sentence."""
    read, size = experts["read"], experts["call_bytes"]
    widest = max(read, key=int)
    return (
        f"experts: a call on {widest} nodes reads {read[widest]:.1f} of {experts['of']:g} in a layer, one on a single "
        f"token {read['1']:.1f}; that is {size[widest] / size['1']:.2f} times the bytes, which c_v and mbsu count"
    )


def drifted(drift: dict[str, Any]) -> str:
    """How far what decodes is from the original target, in one sentence."""
    same = drift.get("same")  # not in results of before it was measured
    agreed = "" if same is None else f"; both have the same most probable token for {bounded_share(same)} of them"
    return (
        f"KL({drift['original']} || {drift.get('change', 'tuned')}) is {nats(drift['kl'])} nats per token on "
        f"{drift['tokens']:,} tokens of held-out text; the loss on them went from "
        f"{nats(drift['loss_original'])} to {nats(drift['loss_tuned'])}{agreed}{_moved(drift)}"
    )


def _moved(drift: dict[str, Any]) -> str:
    """How far the hidden states are, that drafters read; nothing in results of before it was measured."""
    states = drift.get("states")
    if not states:
        return ""
    listed = ", ".join(f"{far:.2%} of state {number}" for number, far in states.items())
    return f"; its hidden states are away by {listed}"


def verdict_of(row: dict[str, Any]) -> str:
    """The verdict of a row; `as NAME` where another drafter was audited in its place, and passed."""
    if row["distance"] is not None:
        return f"{row['verdict']} {row['distance']:.2f}"
    if row["rule"] is not None and row["rule"].startswith("lossy"):
        return "lossy, not measured"
    return f"as {row['audited']}" if row["verdict"] == "lossless" and stand_in(row) else str(row["verdict"])


def stand_in(row: Mapping[str, Any]) -> str | None:
    """The drafter that was audited in place of the row's own; None where that one was, or none."""
    audited: str | None = row["audited"]
    return None if audited == row["method"] else audited


def interval(value: Sequence[float | None]) -> str:
    """`1.72 [1.65, 1.79]`."""
    middle, low, high = value
    if middle is None:
        return MISSING
    return f"{middle:.2f}" if low is None else f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def bounded_share(value: Sequence[float | None]) -> str:
    """`95% [90%, 100%]`."""
    middle, low, high = value
    if middle is None:
        return MISSING
    return f"{middle:.0%}" if low is None else f"{middle:.0%} [{low:.0%}, {high:.0%}]"


def nats(value: Sequence[float | None]) -> str:
    """`0.0123 [0.0119, 0.0127]`, for what is small."""
    middle, low, high = value
    if middle is None:
        return MISSING
    return f"{middle:.4f}" if low is None else f"{middle:.4f} [{low:.4f}, {high:.4f}]"


def number(value: float | None, digits: int = 2) -> str:
    """`1.72`; what could not be computed is a dash."""
    return MISSING if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """`31`, in per cent; what could not be computed is a dash."""
    return MISSING if value is None else f"{100 * value:.0f}"


def plain_table(title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str | Text]]) -> Table:
    """Name and unit above each column; a long name of a method gives way, a number never."""
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for at, (name, unit) in enumerate(columns):
        needed = max(len(name), len(unit), *(cell_len(str(row[at])) for row in rows))
        table.add_column(
            Text.assemble(name, "\n", (unit, "not bold dim")),
            justify="left" if name in _LEFT_ALIGNED else "right",
            # rich would rather crop a number without a word than print a wide line
            min_width=min(needed, _NAME) if name == "method" else needed,
            no_wrap=name != "method",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return table


def _who(row: dict[str, Any]) -> tuple[Text, str]:
    # as Text: brackets in a name are no markup
    return Text(row["method"]), f"{row['temperature']:g}"


def _verdict(row: dict[str, Any]) -> Text:
    return Text(verdict_of(row), style=_COLOURS[row["verdict"]])
