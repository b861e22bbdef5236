"""`draftsmith tree`: the best static tree of a drafter, from what it is measured to get right.

Measured on held-out rows of the training data, which the target goes on with: neither on what the
drafter learnt from nor on the prompts that evaluation decodes. Read next: `eval/measure/tree_choice.py`, the
measurement; `eval/measure/tree_choice.py`, the choice; `drafters/tree_file.py`, what is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import autoregressive
from ...decoding.proposal import TeacherForced
from ...decoding.sampling import Warper
from ...drafters.config import DrafterConfig, EagleOptions
from ...drafters.families import FAMILIES, family_of
from ...drafters.folder import read_entry
from ...drafters.sizes import MOST_PARTS
from ...drafters.tree_file import NAME, write_tree
from ...errors import RequestError
from ...eval.measure.arms import NOT_AUDITED
from ...eval.measure.environment import processor
from ...eval.measure.tree_choice import (
    Chosen,
    Ranks,
    Speed,
    WrittenText,
    best_of_size,
    fastest,
    measure_ranks,
    measure_speed,
)
from ...eval.report.tables import number, plain_table
from ..check.early import NamedFolders, named
from .loaded import Loaded, load_pair
from .tune import held_out_prompts, where

if TYPE_CHECKING:
    from rich.console import Console

    from ..requests import RunPair, TreeRequest

_STATIC = DrafterConfig(eagle=EagleOptions(tree="static"))
_RANKS = 10
_SHOWN = 5  # ranks of the table on the screen
_BATCH = 8


def run_tree(request: TreeRequest, overrides: Sequence[tuple[str, str]], console: Console) -> Path:
    """Measure, search, write the tree, print what was found; where it was written.

    Raises:
        RequestError: the drafter has no static tree, or a flag is wrong. DataError: nothing is
            held out, or no candidate was ever right.
    """
    nodes = _nodes(request.nodes)
    loaded = load_pair(_on_its_default_tree(request, overrides))
    drafter = loaded.drafter
    assert isinstance(drafter, TeacherForced)  # as all that draft static trees are
    texts = held_out_texts(loaded, request.texts, request.temperature)
    measured = measure_ranks(loaded.target, drafter, texts, depth=request.depth, ranks=_RANKS)
    speed = None
    if nodes == 0:
        speed = measure_speed(loaded.target, drafter, texts)
        chosen = fastest(drafter, measured, speed)
    else:
        chosen = best_of_size(drafter, measured, nodes or drafter.nodes, request.method)
    out = request.out or _folder(request) / NAME
    write_tree(out, chosen.paths, _facts(request, loaded, texts, measured, chosen, speed))
    _show(loaded, measured, chosen, console)
    return out


def _on_its_default_tree(request: TreeRequest, overrides: Sequence[tuple[str, str]]) -> NamedFolders:
    """The pair, drafting so whatever the recipe says.

    Raises:
        RequestError: the drafter's family has no static tree, and would never read what is measured.
    """
    pair = named(request, [*overrides, ("drafter.tree", "default")])
    assert pair.drafter is not None  # or `named` has said so
    family = family_of(read_entry(pair.drafter)["family"], str(pair.drafter))
    if family.tree_unused(_STATIC) is not None:
        known = [each.title for each in FAMILIES.values() if each.tree_unused(_STATIC) is None]
        raise RequestError(
            f"{pair.drafter} is a drafter of family {family.name!r}, which drafts no static tree; expected one of "
            f"{', '.join(known)}"
        )
    if family.reads("eagle"):
        pair = named(request, [*overrides, ("drafter.tree", "default"), ("drafter.eagle.tree", "static")])
    return pair


def _nodes(given: str | None) -> int | None:
    """A budget; 0 for `auto`, None for as many as the drafter has."""
    if given is None or given == "auto":
        return None if given is None else 0
    if not given.isdecimal() or len(given) > 9 or int(given) < 2:
        raise RequestError(f"--nodes is {given!r:.40}; expected a number from 2 on, or auto")
    if int(given) > MOST_PARTS:
        raise RequestError(f"--nodes is {given}; expected at most {MOST_PARTS:,}")
    return int(given)


def _folder(pair: RunPair) -> Path:
    """The drafter's folder; `load_pair` has found it."""
    assert pair.drafter is not None or pair.run_folder is not None
    return Path(pair.drafter) if pair.drafter is not None else Path(pair.run_folder or "", "drafter")


def held_out_texts(loaded: Loaded, count: int, temperature: float) -> list[WrittenText]:
    """Beginnings of held-out rows, gone on with by the target; errors as for `held_out_prompts`."""
    return list(
        _answered(loaded.target, held_out_prompts(loaded.recipe, loaded.target.tokenizer, count), loaded, temperature)
    )


def _answered(
    target: Backbone, prompts: Sequence[list[int]], loaded: Loaded, temperature: float
) -> Iterator[WrittenText]:
    config = loaded.recipe.eval
    warper = Warper.of(config, temperature)
    for at in range(0, len(prompts), _BATCH):
        part = prompts[at : at + _BATCH]
        done = autoregressive(
            target,
            part,
            warper=warper,
            max_new_tokens=config.max_new_tokens,
            eos_ids=target.eos_ids,
            seed=config.seed,
            requests=range(at, at + len(part)),
        )
        yield from (WrittenText(*pair) for pair in zip(part, done.tokens, strict=True))


def _facts(
    request: TreeRequest,
    loaded: Loaded,
    texts: Sequence[WrittenText],
    measured: Ranks,
    chosen: Chosen,
    speed: Speed | None,
) -> dict[str, Any]:
    """What `tree.json` says of where its tree comes from."""
    return {
        "search": request.method,
        "verdict": NOT_AUDITED,
        "expected_tau": chosen.tau,
        "default_expected_tau": chosen.default_tau,
        "measured": {
            "on": where(loaded.recipe),
            "texts": len(texts),
            "tokens": sum(len(each.answer) for each in texts),
            "temperature": request.temperature,
            "hits": measured.hits_DR.tolist(),
            "trials": measured.trials_D.tolist(),
        },
        "speed": None
        if speed is None
        else {
            "verify": {str(n): cost for n, cost in speed.curve.items()},
            "draft": speed.draft_cost,
            "predicted": chosen.speedup,
            "processor": processor(),
        },
    }


def _show(loaded: Loaded, measured: Ranks, chosen: Chosen, console: Console) -> None:
    ranks = range(min(_SHOWN, measured.hits_DR.shape[1]))
    columns = [("depth", ""), *((f"rank {r + 1}", "share") for r in ranks), ("of", "tests")]
    cells = [
        [str(d + 1), *(number(float(row_R[r])) for r in ranks), f"{measured.trials_D[d]:,}"]
        for d, row_R in enumerate(measured.acceptance)
    ]
    title = f"Right candidates ({NOT_AUDITED}), on {where(loaded.recipe)}"
    console.print(plain_table(title, columns, cells), crop=False)
    usual = ""
    if chosen.default_tau is not None:
        usual = f"; the default tree of that size {chosen.default_tau:.2f}"
    fast = "" if chosen.speedup is None else f", {chosen.speedup:.2f} times as fast as plain decoding"
    console.print(
        f"{chosen.nodes} nodes: {chosen.tau:.2f} tokens per call expected{fast}{usual} ({NOT_AUDITED})",
        markup=False,
        soft_wrap=True,
    )
