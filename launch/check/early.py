"""Checks of `eval`, `audit` and `tree` that need no torch: importing it takes seconds.

Read next: `measure/run.py` and `tree.py`, which do what is asked; `methods.py`, the names of methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from ...errors import RequestError
from ...storage import writable_folder
from ..measure.methods import SKELETON, TRAINED, need_draft, split_methods
from ..recipe.load import load_recipe
from ..recipe.model import Recipe
from ..requests import AuditRequest, Pair, RunPair, TreeRequest


@dataclass(frozen=True)
class Named:
    """What a command names, nothing of it loaded."""

    methods: list[str]
    recipe: Recipe
    target: str
    drafter: Path | None
    folder: Path
    """The run's, or the one that we are in."""


def named(pair: RunPair, overrides: Sequence[tuple[str, str]]) -> Named:
    """The target and drafter of a run folder, or those that --target and --drafter name.

    Raises:
        RequestError: no such run, nothing named, a method without its drafter, a wrong override.
    """
    method = pair.method if isinstance(pair, Pair) else TRAINED
    names = split_methods(method)
    drafter: Path | None = None if pair.drafter is None else Path(pair.drafter)
    if pair.run_folder is not None:
        folder, saved = pair.run_folder, pair.run_folder / "run.yaml"
        if not saved.is_file():
            raise RequestError(
                f"{folder} is no run folder: run.yaml is missing; name the --out of a training "
                "run, or use --target and --drafter"
            )
        recipe = load_recipe(str(saved), overrides).recipe
        target = pair.target or tuned_target(folder, recipe) or recipe.target.path
        drafter = drafter or folder / "drafter"
    elif pair.target is not None:
        recipe = load_recipe("distill-tiny", overrides).recipe
        folder, target = Path(), pair.target
    else:
        raise RequestError(
            "nothing to measure: name a run folder, or --target and --drafter, or --target and a "
            "--method that needs no drafter"
        )
    if drafter is None and set(names) & set(need_draft()):
        raise RequestError(f"--method {method} needs a drafter: name its folder by --drafter, or a run")
    return Named(names, recipe, target, drafter, folder)


def tuned_target(folder: Path, recipe: Recipe) -> str | None:
    """The target that a run has changed and its drafter fits; None where it was frozen."""
    tuned = folder / "target"
    return str(tuned) if recipe.record.has_target and tuned.is_dir() else None


def check_audit(request: AuditRequest, overrides: Sequence[tuple[str, str]]) -> Named | None:
    """What is audited; None with --survey, which takes no pair.

    Raises:
        RequestError: flags that exclude each other, or that would be passed over.
    """
    asked = {
        "--plant": request.plant is not None,
        "--decoder hf": request.decoder == "hf",
        "--determinism": request.determinism,
        "--survey": request.survey,
    }
    flags = [flag for flag, is_set in asked.items() if is_set]
    if len(flags) > 1:
        raise RequestError(f"{' and '.join(flags)} exclude each other; leave all but one out")
    if request.survey:
        if request.run_folder or request.target or request.drafter:
            raise RequestError("--survey decodes over tables: leave out run, target and drafter")
        load_recipe("distill-tiny", overrides)
        return None
    if flags and request.method != "trained":
        raise RequestError(f"{flags[0]} takes the trained drafter alone: leave out --method")
    pair = named(request, overrides)
    if SKELETON in split_methods(request.method):
        raise RequestError(f"{SKELETON} is not lossless: there is nothing to audit")
    return pair


def check_tree(request: TreeRequest, overrides: Sequence[tuple[str, str]]) -> None:
    """Raise where nothing can be measured as asked, or the tree not be written."""
    for flag, least in {"depth": 1, "texts": 1, "temperature": 0}.items():
        value = getattr(request, flag)
        if not least <= value < inf:
            raise RequestError(f"--{flag} is {value}; expected {least} or more")
    drafter = named(request, overrides).drafter
    if request.out is None:
        writable_folder(drafter or Path())
    elif request.out.is_dir():
        raise RequestError(f"--out {request.out} is a folder; name a file, tree.json in it say")
    else:
        writable_folder(request.out.parent)
