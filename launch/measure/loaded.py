"""What `eval`, `audit` and `chat` decode with: a target and its drafters, read from disk.

Several processes may hold one target together: all of them decode, the first one speaks.

    accelerate launch --config_file ddp.yaml -m draftsmith.launch.cli eval RUN --target.tensor_parallel 8

`tune`, `tree` and `chat` decide by themselves and are refused (`check_alone`).

Read next: `run.py`, which measures them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.rows.chats.ends import endless_answers
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.cut import Cut
from ...decoding.backbone.loading import load_target
from ...decoding.backbone.quantised import quantisation_of
from ...decoding.devices import runs_on_cpu
from ...decoding.proposal import Proposer
from ...drafters.hub import shown
from ...drafters.identity import TargetIdentity
from ...drafters.tuned_file import DRAFT_LENGTH
from ...drafters.tuned_file import NAME as TUNED
from ...errors import RequestError
from ...eval.config import EvalConfig
from ...eval.measure.arms import Arm
from ...storage import is_first
from ..check.devices import processes
from ..check.early import NamedFolders, tuned_target
from ..drafted import load_trained
from ..methods import SKELETON, TRAINED, make_method, need_draft
from ..recipe.load import load_recipe
from ..recipe.model import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from ..recipe.model import Recipe

SWEEP = "eval.sweep"
MEASURED_ANYWAY = "what is measured here drafts all the same, as the recipe has it"
_ROWS, _COMPARED = 400, 8
"""Rows of the data that are read, and packed rows of those held out that are compared, for the drift by rounding."""


@dataclass(frozen=True)
class Loaded:
    """A target and its drafters ready to decode, the recipe that says how, the run's folder."""

    recipe: Recipe
    target: Backbone
    drafters: dict[str, Proposer]
    """By the name of the method, in the order asked for."""
    folder: Path
    paths: dict[str, Path]
    """By the name of the method, the folders of those drafters that were read from one."""

    @property
    def drafter(self) -> Proposer:
        """The first one."""
        return next(iter(self.drafters.values()))


def load_named_target(pair: NamedFolders) -> Backbone:
    """The target that a command names; in a launch of several processes they hold it together."""
    config = pair.recipe.target
    cut, device = joined(pair.recipe)
    return load_target(
        pair.target,
        revision=config.revision,
        dtype=config.dtype,
        device=device,
        cut=cut,
        trust_remote_code=config.trust_remote_code,
        quantization=config.quantization,
    )


def load_pair(pair: NamedFolders) -> Loaded:
    """The target and the drafters that a command names."""
    recipe, drafter_path = pair.recipe, pair.drafter
    target = load_named_target(pair)

    def trained() -> Proposer:
        return load_trained(drafter_path or "", recipe, target)

    drafters = {name: make_method(name, recipe, target, trained) for name in pair.methods if name != SKELETON}
    paths = {name: Path(drafter_path or "") for name in drafters if name in need_draft()}
    return Loaded(recipe, target, drafters, pair.folder, paths)


def say_changed_target(pair: Loaded, console: Console) -> Recipe | None:
    """The recipe of the run that has changed the target that decodes; printed, as no verdict tells it.

    None where nobody has. A target named by hand is known by the run folder that it lies in.
    """
    folder = Path(pair.target.name).parent
    saved = folder / "run.yaml"
    if not saved.is_file():
        return None
    recipe = pair.recipe if folder == pair.folder else load_recipe(str(saved)).recipe
    tuned = tuned_target(folder, recipe)
    if tuned is None or Path(tuned) != Path(pair.target.name):
        return None
    console.print(
        f"the run has tuned its target: {pair.target.name} decodes, and the audit compares with it",
        markup=False,
        soft_wrap=True,
    )
    return recipe


def say_tuned(pair: NamedFolders, console: Console, *, none_pays: str = MEASURED_ANYWAY) -> None:
    """The values that come from the drafter's `tuned.json`, if any do, or that none pays.

    Args:
        none_pays: what is done where plain decoding is the tuned setting.
    """
    where = f"({shown(pair.drafter or Path())}/{TUNED})"
    if pair.tuned.values:
        console.print(f"tuned for {pair.tuned.measured}: {pair.tuned.shown} {where}", markup=False, soft_wrap=True)
    elif pair.tuned.plain and TRAINED in pair.methods:
        console.print(f"{pair.tuned.none_pays(none_pays)} {where}", markup=False, soft_wrap=True)


def say_ends(target: Backbone, console: Console) -> None:
    """That the target writes on behind the end that its chat template writes, if it does."""
    warning = endless_answers(target.tokenizer, target.eos_ids)
    if warning is not None:
        console.print(f"note: {warning}", markup=False, soft_wrap=True)


def say_length(named: NamedFolders, pair: Loaded, overrides: Sequence[tuple[str, str]], console: Console) -> None:
    """That the run's drafter drafts more or fewer tokens than were asked for, by flag or recipe, if it does."""
    asked, drafter = pair.recipe.eval.draft_length, pair.drafters.get(TRAINED)
    typed = any(name == DRAFT_LENGTH for name, _ in overrides)
    told = typed or (asked != EvalConfig().draft_length and DRAFT_LENGTH not in named.tuned.values)
    if drafter is None or not told or drafter.draft_length == asked:
        return
    console.print(
        f"{DRAFT_LENGTH} is {asked}, and the drafter drafts {drafter.draft_length} a call, "
        f"{'all that it can' if drafter.draft_length < asked else 'as deep as its tree is'}",
        markup=False,
        soft_wrap=True,
    )


def say_no_sweep(arm: Arm, config: EvalConfig, overrides: Sequence[tuple[str, str]], console: Console) -> None:
    """That no other lengths are decoded, where a flag asks for them and the first method has one length."""
    if any(name == SWEEP for name, _ in overrides) and config.sweep and not arm.sweeps:
        console.print(
            f"{SWEEP} is {config.sweep}, and {arm.name} is decoded with one length: draft models and ensembles alone "
            "are swept; `draftsmith tune` tries the lengths of others",
            markup=False,
            soft_wrap=True,
        )


def drift_of(pair: Loaded, console: Console) -> dict[str, Any] | None:
    """How far a run, or rounding, has moved the target from the original, on held-out rows.

    None where neither has, and where nobody says what a published checkpoint was rounded from (`target.unquantised`).
    """
    recipe = say_changed_target(pair, console)
    if recipe is None:
        return _rounded(pair)
    from ...data.rows.prepare import prepare
    from ...eval.measure.drift import measure_drift

    config = recipe.target
    original = load_target(
        config.path,
        revision=config.revision,
        dtype=config.dtype,
        device=str(pair.target.device),
        trust_remote_code=pair.recipe.target.trust_remote_code,  # what the command says, not the folder
    )
    rows = prepare(recipe.data, pair.target.tokenizer, out=None).validation
    loop = recipe.loop
    drift = measure_drift(original, pair.target, rows, count=loop.validate_rows, seed=loop.seed)
    return drift.to_dict()


def _rounded(pair: Loaded) -> dict[str, Any] | None:
    """The same for a quantised target: when it was loaded, or as its checkpoint; None for others.

    Raises:
        RequestError: `target.unquantised` is given, and the target is not quantised, or is no copy of that model.
    """
    recipe = pair.recipe
    config = recipe.target
    if config.quantization is None and config.unquantised is None:
        return None
    if config.unquantised is not None:
        _check_quantised(pair.target, config.unquantised)
    from ...data.rows.prepare import prepare
    from ...eval.measure.drift import measure_drift

    original = load_target(
        config.unquantised or pair.target.name,
        revision=None if config.unquantised else config.revision,
        dtype=config.dtype,
        device="cpu",  # where the target is quantised, the device may not hold both
        trust_remote_code=config.trust_remote_code,
    )
    if config.unquantised is not None:
        _check_copy(TargetIdentity.of(original), TargetIdentity.of(pair.target))
    data = recipe.data if recipe.data.limit_rows is not None else recipe.data.model_copy(update={"limit_rows": _ROWS})
    rows = prepare(data, pair.target.tokenizer, out=None).validation
    count = min(recipe.loop.validate_rows, _COMPARED)
    drift = measure_drift(original, pair.target, rows, count=count, seed=recipe.loop.seed, change="rounded")
    return drift.to_dict()


def _check_quantised(target: Backbone, original: str) -> None:
    """Raise RequestError where `target.unquantised` is given for a target whose weights are not quantised."""
    if quantisation_of(target.model.config) is None:
        raise RequestError(
            f"target.unquantised is {original!r}, and the config.json of {target.name!r} says of no quantisation; "
            "leave target.unquantised out, or name the quantised checkpoint as the target"
        )


def _check_copy(original: TargetIdentity, target: TargetIdentity) -> None:
    """Raise RequestError where one cannot have been quantised from the other."""
    expected = {field: getattr(target, field) for field in ("tokenizer", "vocabulary", "hidden_size")}
    for field, theirs in {"quantisation": None, **expected}.items():
        mine = getattr(original, field)
        if mine != theirs:
            raise RequestError(
                f"target.unquantised is {original.name!r}, whose {field} is {mine}; expected {theirs}, as the model "
                f"has it that {target.name!r} was quantised from. Name that one, or leave target.unquantised out"
            )


def joined(recipe: Recipe) -> tuple[Cut | None, str | None]:
    """Join the processes of this launch: how they hold the target, and this one's device; None for one process alone.

    Raises:
        RequestError: there are several, and the recipe does not say that they hold the target together.
    """
    count, team = processes(), recipe.target.tensor_parallel
    if count == 1:
        return None, None
    if team != count:
        raise RequestError(
            f"{count} processes were launched, and target.tensor_parallel is {team}: each would decode everything by "
            f"itself; set --target.tensor_parallel {count}, so that they hold the target together, or start one"
        )
    from accelerate import PartialState

    on_cpu = runs_on_cpu()
    bound = timedelta(seconds=recipe.loop.stall_seconds)
    state = PartialState(cpu=on_cpu, timeout=bound, **({"backend": "gloo"} if on_cpu else {}))
    return Cut(team, bound=bound), str(state.device)


def speaks() -> bool:
    """Whether this process prints and writes what all of them have measured."""
    return processes() == 1 or is_first()


def of_first(console: Console) -> Console:
    """The console, which says nothing in the other processes."""
    if not speaks():
        console.quiet = True
        os.environ["TQDM_DISABLE"] = "1"
    return console
