"""How often the first draft of trained drafters is accepted, each less the first one's, on the same held-out tokens.

A block drafter's first slot and EAGLE-3's first draft read the same: states of the target up to a token, and that
token. After equal training they should be accepted about as often, or a label or an anchor is wrong. Decoding says so
to a tenth; here every token of held-out rows is asked (`eval/measure/tree_choice.py` has the states, each drafter its
logits along a known text): at T = 0 whether both argmaxes agree, at T = 1 sum_v min(p, q), which is the acceptance of
a draft from q in the mean. Differences are paired token by token. Rows are added until the interval of every
difference is narrow. Several runs of one drafter, of other training seeds, stand behind each other with commas. With
`--slots-alone` drafters whose slots are corrected by the token in front are asked without that too: what a selector
cannot choose, or a head gets wrong, is then told from what the slots do not know.

    python benchmarks/first_draft.py EAGLE-3=runs/eagle3-tiny/drafter DFlash=runs/dflash-tiny/drafter
    python benchmarks/first_draft.py EAGLE-3=runs/a/drafter,runs/b/drafter DSpark=runs/c/drafter,runs/d/drafter

Shapes: S tokens of a text, X of them that a first draft may be of, V vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftsmith.benchmarks.common.acceptance import Sums, gain, mean
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, named_by_seed, record_of, target_weights
from draftsmith.benchmarks.common.records import Figure, Record, table_of
from draftsmith.benchmarks.common.runs import parser_of
from draftsmith.data.rows.packed import PackedRows
from draftsmith.data.rows.prepare import prepare
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hidden_states import LAST
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.proposal import TeacherForced
from draftsmith.drafters.block.proposer import DFlash
from draftsmith.drafters.block.walked import WalkedBlock
from draftsmith.drafters.projection import Projection
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.measure.arms import NOT_AUDITED
from draftsmith.eval.measure.tree_choice import states_along
from draftsmith.launch.recipe.load import load_recipe
from torch import Tensor

TEMPERATURES = ("T0", "T1")
ONE_RUN = "what another seed changes, which several runs of every drafter measure"
ALONE = ", slots alone"
Measured = dict[str, list[Sums]]
"""By drafter, sums over the tokens of every row, one a training seed."""


def main() -> None:
    args = arguments()
    recipes = {name: [recipe_of(folder) for folder in folders] for name, folders in args.drafters.items()}
    first = check_alike(recipes)
    target = load_target(first.target.path)
    drafters = {name: [loaded(each, target) for each in folders] for name, folders in args.drafters.items()}
    if args.slots_alone:
        added = slots_alone(drafters, target)
        drafters |= added
        recipes |= {name: recipes[name.removesuffix(ALONE)] for name in added}
    rows = prepare(first.data, target.tokenizer, out=None).validation
    record = assembled(measured_on(rows, target, drafters, args), recipes, args)
    print(printed(record))
    finish(record, args.json)


def recipe_of(folder: Path) -> Any:
    """The recipe of the run that a drafter is from.

    Raises:
        SystemExit: the folder is not that of a run's drafter.
    """
    path = folder.parent / "run.yaml"
    if not path.is_file():
        raise SystemExit(f"{folder}: no {path.name} beside it says which rows were held out; name RUN/drafter")
    return load_recipe(str(path)).recipe


def check_alike(recipes: Mapping[str, Sequence[Any]]) -> Any:
    """The first recipe, whose target and rows are those of all.

    Raises:
        SystemExit: another one has others, so what is held out for one was learnt by the other.
    """
    first = next(iter(recipes.values()))[0]
    for name, own in recipes.items():
        for each in own:
            if (each.target.path, each.data) != (first.target.path, first.data):
                raise SystemExit(f"{name} was trained for another target or on other rows than {first.name}")
    return first


def loaded(folder: Path, target: Backbone) -> TeacherForced:
    """A drafter that gives its logits along a known text.

    Raises:
        SystemExit: this one does not.
    """
    drafter = load_drafter(folder, target, draft_length=1)
    if not isinstance(drafter, TeacherForced):
        raise SystemExit(
            f"{folder}: this drafter gives no logits along a known text; name one that reads hidden states"
        )
    return drafter


def slots_alone(drafters: Mapping[str, Sequence[TeacherForced]], target: Backbone) -> dict[str, list[TeacherForced]]:
    """Those of them that correct their slots by the token in front, drafting by the slots as they are."""
    return {
        f"{name}{ALONE}": [DFlash(each.net, target, draft_length=1) for each in own if isinstance(each, WalkedBlock)]
        for name, own in drafters.items()
        if isinstance(own[0], WalkedBlock)
    }


# ---- measuring --------------------------------------------------------------------------------


def measured_on(
    rows: PackedRows, target: Backbone, drafters: Mapping[str, Sequence[TeacherForced]], args: argparse.Namespace
) -> Measured:
    """Sums of every drafter over as many rows as make all intervals narrow, or all rows there are."""
    order = np.random.default_rng(0).permutation(len(rows))
    sums = {name: [empty() for _ in own] for name, own in drafters.items()}
    for number in range(0, len(order), args.rows):
        for row in order[number : number + args.rows].tolist():
            add_row(sums, rows, row, target, drafters)
        if widest(sums) <= args.half_width:
            break
    return sums


def empty() -> Sums:
    return {f"{at} {side}": [] for at in TEMPERATURES for side in ("above", "below")}


@torch.inference_mode()
def add_row(
    sums: Measured, rows: PackedRows, row: int, target: Backbone, drafters: Mapping[str, Sequence[TeacherForced]]
) -> None:
    """A row's sums, for every drafter."""
    texts = [(tokens_S, counts_S, said(target, tokens_S)) for tokens_S, counts_S in texts_of(rows, row)]
    for name, of_seeds in drafters.items():
        for drafter, own in zip(of_seeds, sums[name], strict=True):
            parts = [accepted(target, drafter, *text) for text in texts]
            for at, above in zip(TEMPERATURES, np.sum([[0.0, 0.0], *parts], 0), strict=True):
                own[f"{at} above"].append(float(above))
                own[f"{at} below"].append(sum(int(counts_S[2:].sum()) for _, counts_S, _ in texts))


def texts_of(rows: PackedRows, row: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A row's documents of three tokens and more: the tokens [S], and which of them count as labels."""
    batch = rows.batch([row])
    documents_S = batch["documents"][0]
    for document in documents_S[documents_S >= 0].unique():
        own_S = documents_S == document
        if own_S.sum() > 2:
            yield batch["input_ids"][0][own_S], batch["loss_mask"][0][own_S]


def said(target: Backbone, tokens_S: Tensor) -> Tensor:
    """The target's logits of every token that a first draft may be of: the third one and those behind it, [X, V]."""
    return Projection.of(target.model).logits(states_along(target, (LAST,), tokens_S)[1:-1])


def accepted(
    target: Backbone, drafter: TeacherForced, tokens_S: Tensor, counts_S: Tensor, p_XV: Tensor
) -> tuple[float, float]:
    """Of the tokens that count, how many the argmaxes agree on, and sum_v min(p, q) over them."""
    features_SF = states_along(target, drafter.layers, tokens_S)
    (q_XV,) = drafter.teacher_forced(features_SF, tokens_S, 1)
    agree_X = p_XV.argmax(-1) == q_XV.argmax(-1)
    overlap_X = torch.minimum(p_XV.softmax(-1), q_XV.softmax(-1)).sum(-1)
    return float(agree_X[counts_S[2:]].sum()), float(overlap_X[counts_S[2:]].sum())


def gains(sums: Measured, name: str, at: str) -> Figure | None:
    """A drafter's acceptance less that of the first."""
    return gain(sums[name], next(iter(sums.values())), at)


def widest(sums: Measured) -> float:
    """Half the width of the widest interval of a difference."""
    figures = [gains(sums, name, at) for name in list(sums)[1:] for at in TEMPERATURES]
    return max((half_width(each) for each in figures), default=0.0)


def half_width(figure: Figure | None) -> float:
    if figure is None or figure.low is None or figure.high is None:
        return float("inf")
    return (figure.high - figure.low) / 2


# ---- the record -------------------------------------------------------------------------------


def assembled(sums: Measured, recipes: Mapping[str, Sequence[Any]], args: argparse.Namespace) -> Record:
    reference, *_ = sums
    parts = next(iter(sums.values()))
    seeds = [each.loop.seed for each in recipes[reference]]
    folders = {
        called: folder
        for name, own in args.drafters.items()
        for called, folder in named_by_seed(name, own, seeds).items()
    }
    heads = {"drafter": "{drafter}", "steps": "{steps}"}
    for at in TEMPERATURES:
        shown = at.replace("T", "T = ")
        heads |= {shown: f"{{alpha_{at}}}", f"{shown}, less {reference}'s": f"{{less_{at}}} {{gate_{at}}}"}
    return record_of(
        args,
        title="Acceptance of the first draft, teacher-forced",
        needs=["the drafters, each trained by its recipe"],
        target=target_weights(next(iter(recipes.values()))[0].target.path),
        drafters=drafter_weights(folders),
        setup=f"{len(parts[0]['T0 below'])} held-out rows of {recipes[reference][0].data.source}, "
        f"{sum(parts[0]['T0 below']):,} tokens, the same for all. T = 0: the argmaxes agree; T = 1: sum of min(p, q).",
        intervals="95 % bootstrap intervals over rows; differences are paired by row and training seed",
        audit={"verdict": f"{NOT_AUDITED}: along known texts, nothing was decoded"},
        seeds=len(seeds),
        seed_values=seeds,
        **({"tells_apart": ONE_RUN} if len(seeds) == 1 else {}),
        formats={f"alpha_{at}": ".3f" for at in TEMPERATURES} | {f"less_{at}": "+.3f" for at in TEMPERATURES},
        rows=[row_of(name, sums, recipes, args.gate) for name in sums],
        tables={"first-draft": table_of(heads)},
    )


def row_of(name: str, sums: Measured, recipes: Mapping[str, Sequence[Any]], gate: float) -> dict[str, Any]:
    """A drafter's cells; the first one is not compared with itself."""
    steps = sorted({each.loop.steps for each in recipes[name]})
    row: dict[str, Any] = {"drafter": name, "steps": ", ".join(map(str, steps))}
    for at in TEMPERATURES:
        less = None if name == next(iter(sums)) else gains(sums, name, at)
        row |= {f"alpha_{at}": mean(sums[name], at), f"less_{at}": less, f"gate_{at}": passed(less, gate)}
    return row


def passed(less: Figure | None, gate: float) -> str | None:
    """Where the interval of a difference lies: within so much of none, beyond it, or across that bound."""
    if less is None or less.low is None or less.high is None:
        return None
    if less.low > gate:
        return f"more than {gate:g} above"
    if less.high < -gate:
        return f"more than {gate:g} below"
    return f"within {gate:g}" if -gate <= less.low and less.high <= gate else f"not told from {gate:g}"


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("drafters", nargs="+", type=named, metavar="NAME=FOLDER,FOLDER", help="the first is compared")
    parser.add_argument("--rows", type=int, default=64, help="rows that are added at once")
    parser.add_argument("--half-width", type=float, default=0.02, help="of an interval that is narrow enough")
    parser.add_argument("--gate", type=float, default=0.03, help="a difference that is none")
    parser.add_argument("--slots-alone", action="store_true", help="ask block drafters without the token in front too")
    args = parser.parse_args()
    args.drafters = dict(args.drafters)
    if len({len(folders) for folders in args.drafters.values()}) > 1:
        parser.error("name as many folders of every drafter, one a training seed")
    return args


def named(text: str) -> tuple[str, list[Path]]:
    name, _, folders = text.partition("=")
    return name, [Path(each) for each in folders.split(",")]


if __name__ == "__main__":
    main()
