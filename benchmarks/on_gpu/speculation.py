"""What a speculative step costs over an autoregressive one, with a drafter that knows nothing.

Speed-up is tau times t_AR / t_step, and of the two factors the second needs no good drafter: an EAGLE-3 network with
random weights drafts as long as a trained one. Steps are those of `generate`, replayed and eager, to the end of an
answer. Read next: `calls.py`; `../common/waits.py`, which counts where the host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.common.waits import Watched, count_waits
from draftsmith.benchmarks.on_gpu.arms import why
from draftsmith.benchmarks.on_gpu.calls import made, seconds_a_call
from draftsmith.benchmarks.on_gpu.setting import Setting
from draftsmith.benchmarks.on_gpu.shapes import eagle3_for
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import Generation, autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.eagle.net3 import Eagle3Net
from draftsmith.drafters.eagle.proposer import Eagle3

LENGTH = 4
NODES = 20
WATCHED = 8
"""Steps that are watched for waits of the host."""


@dataclass(frozen=True)
class Sampling:
    """A warper, the share of a perfect step that counts as good behind a chain, and what was estimated."""

    name: str
    warper: Warper
    goal: float
    estimate: str


SAMPLINGS = (
    Sampling("T = 0", Warper(0.0), 0.75, "0.79"),
    Sampling("T = 1", Warper(1.0), 0.75, "0.75"),
    Sampling("T = 0.8, top-p 0.95", Warper(0.8, top_p=0.95), 0.70, "0.34 by the kernel"),
)
HEADS = {
    "draft": "{draft}",
    "sampling": "{sampling}",
    "steps": "{how}",
    "t_step": "{step} ms",
    "t_AR": "{ar} ms",
    "tokens a step": "{tokens}",
    "speed-up / tau": "{share}",
    "goal": "{goal}",
    "estimate": "{estimate}",
    "waits a step": "{waits}",
}


class WatchedEagle3(Watched, Eagle3):
    """EAGLE-3 that opens the watch for some steps."""


def measure(setting: Setting, name: str) -> Iterator[Record]:
    """A row for each draft, sampling and way of stepping, written as they come."""
    target = made(setting, setting.shapes[name])
    net = eagle3_for(target, setting.dtype, drafted=setting.drafted)
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    for replayed in (True, False) if setting.cuda else (False,):
        for sampling in SAMPLINGS:
            ar = base(setting, target, sampling.warper, notes, graphs=replayed)
            for draft, chosen in drafts(setting).items():
                row: dict[str, Cell] = {"draft": draft, "sampling": sampling.name, "ar": ar}
                row |= filled(row, setting, target, net, sampling, chosen, notes, graphs=replayed)
                rows.append(row)
                yield assembled(setting, name, rows, notes)


def drafts(setting: Setting) -> dict[str, dict[str, Any]]:
    """Settings of the proposer, by what it drafts."""
    return {
        f"chain, K = {LENGTH}": {"tree": "chain", "draft_length": LENGTH},
        f"dynamic tree of {NODES}": {
            "tree": "dynamic",
            "draft_length": LENGTH,
            "nodes": NODES,
            "top_k": setting.top_k,
        },
    }


def base(setting: Setting, target: Backbone, warper: Warper, notes: list[str], *, graphs: bool) -> float | None:
    """Milliseconds of an autoregressive step."""

    def answer(count: int) -> Generation:
        prompts = [setting.prompt(target.vocabulary)]
        return autoregressive(target, prompts, warper=warper, max_new_tokens=count, static=True, graphs=graphs)

    return milliseconds(answer, setting, notes, f"baseline, {warper}", graphs=graphs)


def milliseconds(
    answer: Callable[[int], Generation], setting: Setting, notes: list[str], what: str, *, graphs: bool
) -> float | None:
    """Of a step; None and a note where it fails."""
    lengths, rounds = (setting.steps, setting.whole_rounds) if graphs else (setting.eager_steps, 1)
    try:
        return 1e3 * seconds_a_call(answer, lengths, rounds, setting.device)
    except Exception as error:  # noqa: BLE001
        notes.append(f"{what}, {'replayed' if graphs else 'eager'}: {why(error)}")
        return None


def filled(
    row: dict[str, Cell],
    setting: Setting,
    target: Backbone,
    net: Eagle3Net,
    sampling: Sampling,
    chosen: dict[str, Any],
    notes: list[str],
    *,
    graphs: bool,
) -> dict[str, Cell]:
    """What a step of that draft takes and emits; of eager ones what it waits for, by which a replay is no slower."""
    done: list[Generation] = []

    def answer(count: int) -> Generation:
        drafter = Eagle3(net, target, **chosen)
        prompts = [setting.prompt(target.vocabulary)]
        done.append(
            generate(
                target, drafter, prompts, warper=sampling.warper, max_new_tokens=count, static=True, graphs=graphs
            )
        )
        return done[-1]

    step = milliseconds(answer, setting, notes, f"{row['draft']}, {sampling.name}", graphs=graphs)
    ar, good = row["ar"], graphs and chosen["tree"] == "chain"
    return {
        "how": "replayed" if graphs else "eager",
        "step": step,
        "share": ar / step if isinstance(ar, float) and step else None,
        "tokens": len(done[-1].tokens[0]) / max(1, done[-1].target_calls) if done else None,
        "goal": f"at least {sampling.goal:.2f}" if good else "",
        "estimate": sampling.estimate if good else "",
        "waits": None if graphs else waits(setting, target, net, sampling.warper, chosen, notes),
    }


def waits(
    setting: Setting, target: Backbone, net: Eagle3Net, warper: Warper, chosen: dict[str, Any], notes: list[str]
) -> float | None:
    """Operations of a steady step that make the host wait; their places are noted."""
    drafter = WatchedEagle3(net, target, **chosen)
    where = f"{chosen['tree']}, {warper}"
    room = min((WATCHED + 4) * (drafter.draft_length + 1), setting.steps[1])
    try:
        found = count_waits(
            target, drafter, setting.prompt(target.vocabulary), warper=warper, steps=WATCHED, room=room
        )
    except Exception as error:  # noqa: BLE001
        notes.append(f"waits, {where}: {why(error)}")
        return None
    notes += [f"{count} x the host waited for {place} ({where})" for place, count in found["places"].items()]
    return found["count"] / found["steps"] if found["steps"] else None


def assembled(setting: Setting, name: str, rows: list[dict[str, Cell]], notes: list[str]) -> Record:
    """The record as far as it goes."""
    return setting.record(
        list(rows),
        f"{name}'s shape and an EAGLE-3 network over {setting.drafted:,} tokens, both with random weights in "
        f"{setting.dtype}; batch 1, context {setting.context:,}. A step's time is the difference of two answers of "
        f"{setting.steps[0]} and {setting.steps[1]} tokens (eager {setting.eager_steps[0]} and "
        f"{setting.eager_steps[1]}) over that of their steps. Speed-up / tau is t_AR / t_step, both replayed or both "
        "eager.",
        title="A speculative step",
        formats={"step": ".3f", "ar": ".3f", "tokens": ".2f", "share": ".2f", "waits": "g"},
        tables={"gpu-speculation": table_of(HEADS)},
        notes=list(notes),
    )
