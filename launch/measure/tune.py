"""`draftsmith tune`: the setting of each drafter that is fastest on this machine, and whether any pays.

Predictions come from some prompts, measurements from others. Read next: `eval/tune/profile.py`, the
predictions; `eval/tune/race.py`, the measurements; `drafters/tuned_file.py`, what is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.prompts import Prompt
from ...decoding.proposal import Proposer
from ...decoding.target.backbone import Backbone
from ...drafters.config import DrafterConfig
from ...drafters.families import FAMILIES, Family
from ...drafters.folder import read_entry
from ...drafters.grids import Grid
from ...drafters.hub import is_fetched, shown
from ...drafters.identity import shown_name
from ...drafters.registry import load_drafter
from ...drafters.tuned_file import DRAFT_LENGTH, write_tuned
from ...errors import RequestError
from ...eval.config import EvalConfig
from ...eval.measure.arms import NOT_AUDITED, check_longest
from ...eval.measure.environment import environment
from ...eval.measure.requests import Request, make_requests
from ...eval.report.tables import interval, number, plain_table
from ...eval.tune.profile import costs_of, predict
from ...eval.tune.race import FEWEST, Raced, race
from ...eval.tune.settings import Contender, Prediction
from ...storage import writable_folder
from ..check.early import Named
from ..recipe.model import Recipe
from .held_out import held_out_prompts, where
from .methods import TRAINED, make_method, need_draft
from .run import load_named_target, prompts_of, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..requests import TuneRequest

_PROFILED = 4  # a prompt of so many is for the predictions


def run_tune(request: TuneRequest, pairs: Sequence[Named], console: Console) -> list[Raced]:
    """Predict, measure, print, write `tuned.json` beside each drafter; what was measured, the best first."""
    first = pairs[0]
    out = writable_folder(request.out or (request.runs[0] / "eval" if request.runs else Path()))
    target = load_named_target(first)
    contenders = contenders_of(pairs, target)
    config = _config(request, first.recipe)
    _check_longest(contenders, config, request.temperature)
    profiled, raced = _split(_requests(request, first.recipe, target, config), config.batch)
    costs = costs_of(target, profiled, config)
    predictions: list[Prediction] = []
    for contender in contenders:
        console.print(f"predicting {contender.title} ({contender.name}) ...", markup=False, soft_wrap=True)
        predictions += predict(target, contender, profiled, config, request.temperature, costs)
    chosen = best_of(predictions, request.best)
    console.print(f"measuring {len(chosen)} settings beside plain decoding ...")
    done = race(target, chosen, raced, config, request.temperature)
    content = _content(request, first, target, config, predictions, done)
    write_json(out / "tune.json", content)
    console.print(_table(request, done), crop=False)
    for path in _keep(pairs, content, done):
        console.print(f"kept: {path}", markup=False, soft_wrap=True)
    for line in _not_kept(pairs, done):
        console.print(line, markup=False, soft_wrap=True)
    console.print(sentence(done, request.temperature, request.batch), markup=False, soft_wrap=True)
    return done


def contenders_of(pairs: Sequence[Named], target: Backbone) -> list[Contender]:
    """A contender per method of each pair; each is loaded once, so that what cannot be loaded is said at once.

    Raises:
        RequestError: a drafter that is none, or not for this target; a method without what it needs.
    """
    several = sum(pair.drafter is not None for pair in pairs) > 1
    return [_contender(name, pair, target, several=several) for pair in pairs for name in pair.methods]


def _contender(name: str, pair: Named, target: Backbone, *, several: bool) -> Contender:
    folder = pair.drafter if name in need_draft() else None

    def load(values: Mapping[str, str]) -> Proposer:
        recipe = _with(pair.recipe, values)

        def trained() -> Proposer:
            length = recipe.eval.draft_length
            return load_drafter(folder or "", target, draft_length=length, config=recipe.drafter)

        return make_method(name, recipe, target, trained)

    drafter = load({})
    family = FAMILIES[name if name in FAMILIES else str(getattr(drafter, "family", name))]
    grids = [_that_fits(grid, family, folder) for grid in family.grids]
    title = f"{family.title} of {_whose(folder)}" if several and folder else family.title
    stands = any(grid.holds(_own_values(pair.recipe, grid)) for grid in grids)
    return Contender(_name(name, folder), title, grids, not stands, load)


def _check_longest(contenders: Sequence[Contender], config: EvalConfig, temperature: float) -> None:
    """Now, and not behind minutes of decoding, raise RequestError for chains that the answers are too short for."""
    for contender in contenders:
        for grid in contender.grids_at(temperature):
            if grid.chain:
                check_longest(contender.title, grid.sizes[-1], config.max_new_tokens)


def _name(method: str, folder: Path | None) -> str:
    """The drafter's folder for its own method, for one around it with that method's name."""
    if folder is None:
        return method
    return shown(folder) if method == TRAINED else f"{method} {shown(folder)}"


def _whose(folder: Path) -> str:
    """The run that a drafter is of, or its name on the hub."""
    return shown(folder) if is_fetched(folder) else folder.parent.name or folder.name


def _that_fits(grid: Grid, family: Family, folder: Path | None) -> Grid:
    """Without chains that are longer than there are heads."""
    if folder is None or grid.value != DRAFT_LENGTH or not (folder / "config.json").is_file():
        return grid
    most = family.most_tokens(read_entry(folder)["settings"]) if family.build else None
    return grid if most is None else grid.up_to(most)


def _own_values(recipe: Recipe, grid: Grid) -> dict[str, str]:
    """What the recipe itself has for the values of a grid."""
    sections = {"eval": recipe.eval, "drafter": recipe.drafter}
    return {path: str(getattr(sections[path.split(".")[0]], path.split(".")[1])) for path in grid.chosen}


def _with(recipe: Recipe, values: Mapping[str, str]) -> Recipe:
    """The recipe with values of `drafter.*` and `eval.*`, given as flags give them."""
    own: dict[str, dict[str, Any]] = {"drafter": recipe.drafter.model_dump(), "eval": recipe.eval.model_dump()}
    for path, value in values.items():
        section, name = path.split(".")
        own[section][name] = json.loads(value) if value.startswith("[") else value
    update = {"drafter": DrafterConfig.model_validate(own["drafter"]), "eval": EvalConfig.model_validate(own["eval"])}
    return recipe.model_copy(update=update)


def _config(request: TuneRequest, recipe: Recipe) -> EvalConfig:
    limit = request.limit or max(32, 2 * _PROFILED * request.batch)
    update: dict[str, Any] = {"batch": request.batch, "repeats": 1, "limit": limit}
    if request.prompts is not None:
        update["prompts"] = request.prompts
    return recipe.eval.model_copy(update=update)


def _requests(request: TuneRequest, recipe: Recipe, target: Backbone, config: EvalConfig) -> list[Request]:
    if request.prompts is not None:
        return make_requests(target, prompts_of(config), config, later_turns=False)
    prompts = held_out_prompts(recipe, target.tokenizer, config.limit or 0)
    return [Request(Prompt(str(n), "all", (), chat=False), ids, n) for n, ids in enumerate(prompts)]


def _split(requests: Sequence[Request], batch: int) -> tuple[list[Request], list[Request]]:
    """A quarter for predictions, the others for measuring.

    Raises:
        RequestError: too few batches of them to tell settings apart.
    """
    least = 2 * _PROFILED * batch
    if len(requests) < least:
        raise RequestError(
            f"there are {len(requests)} prompts to tune on; expected {least} or more at batch {batch}: {FEWEST} "
            "batches are the fewest that decide; name a longer file by --prompts, or lower --batch"
        )
    raced = [each for at, each in enumerate(requests) if at % _PROFILED]
    return list(requests[::_PROFILED]), raced


def best_of(predictions: Sequence[Prediction], count: int) -> list[Prediction]:
    """The best one of every method, then the best of the others, `count` or one of each."""
    ranked = sorted(predictions, key=lambda each: -each.speedup)
    firsts = list({id(each.setting.contender): each for each in reversed(ranked)}.values())
    others = [each for each in ranked if each not in firsts]
    chosen = [*firsts, *others[: max(0, count - len(firsts))]]
    return sorted(chosen, key=lambda each: -each.speedup)


def sentence(done: Sequence[Raced], temperature: float, batch: int) -> str:
    """What pays, in one sentence."""
    best = done[0]
    where_ = f"at T = {temperature:g}, batch {batch}"
    measured = f"{best.prediction.setting.label}: {interval(best.speedup.to_list())} times plain decoding {where_}"
    if best.pays:
        return measured
    if isnan(best.speedup.low):
        return f"{measured}; too little was timed to tell"
    if best.speedup.high >= 1:
        return f"{measured}; not told apart from plain decoding"
    least, label = best.prediction.pays_from, best.prediction.setting.label
    hope = "and would at no cost of a call"
    if least is not None:
        # predicted and measured differ by some per cent
        hope = f"and would pay if a call of the target took {max(1.1, least):.1f} times as long"
    nearest = f"{label} comes nearest with {interval(best.speedup.to_list())} times"
    return f"nothing beats plain decoding {where_}: {nearest}, {hope}"


def _table(request: TuneRequest, done: Sequence[Raced]) -> Any:
    columns = (
        ("method", ""),
        ("predicted", "speed-up"),
        ("measured", "speed-up"),
        ("tau", "tokens/call"),
        ("audit", ""),
    )
    cells = [
        (
            each.prediction.setting.label,
            number(each.prediction.speedup),
            interval(each.speedup.to_list()),
            interval(each.tau.to_list()),
            NOT_AUDITED,
        )
        for each in done
    ]
    at = f"T = {request.temperature:g}, batch {request.batch}"
    title = f"Speed-up over plain decoding at {at} [95 % intervals, over all looks and settings together]"
    return plain_table(title, columns, cells)


def _content(
    request: TuneRequest,
    first: Named,
    target: Backbone,
    config: EvalConfig,
    predictions: Sequence[Prediction],
    done: Sequence[Raced],
) -> dict[str, Any]:
    """What `tune.json` holds."""
    return {
        "target": shown_name(target),
        "temperature": request.temperature,
        "batch": request.batch,
        "prompts": request.prompts or where(first.recipe),
        "max_new_tokens": config.max_new_tokens,
        "verdict": NOT_AUDITED,
        "sentence": sentence(done, request.temperature, request.batch),
        "measured": [
            _prediction(each.prediction)
            | {"measured": each.speedup.to_list(), "measured_tau": each.tau.to_list(), "requests": each.requests}
            for each in done
        ],
        "predicted": [_prediction(each) for each in predictions],
        "environment": environment(),
    }


def _prediction(each: Prediction) -> dict[str, Any]:
    own = {name: value for name, value in vars(each).items() if name != "setting"}
    return {"method": each.setting.contender.name, "settings": dict(each.setting.values), **own}


def _keep(pairs: Sequence[Named], content: Mapping[str, Any], done: Sequence[Raced]) -> list[Path]:
    """Write the best setting beside each drafter that was measured; an empty one where it does not pay."""
    kept: list[Path] = []
    shared = ("target", "temperature", "batch", "prompts", "max_new_tokens", "verdict")
    for pair in pairs:
        mine = _of(pair, done)
        if pair.drafter is None or is_fetched(pair.drafter) or not mine or isnan(mine[0].speedup.low):
            continue
        best = mine[0]
        facts = {name: content[name] for name in shared}
        facts |= {
            "pays": best.pays,
            "predicted": best.prediction.speedup,
            "speedup": best.speedup.to_list(),
            "processor": content["environment"]["processor"],
        }
        values = best.prediction.setting.values if best.speedup.high >= 1 else {}
        kept.append(write_tuned(pair.drafter, values, facts))
    return kept


def _of(pair: Named, done: Sequence[Raced]) -> list[Raced]:
    """What was measured of a pair's drafter by itself, the best first."""
    return [each for each in done if each.prediction.setting.contender.name == _name(TRAINED, pair.drafter)]


def _not_kept(pairs: Sequence[Named], done: Sequence[Raced]) -> Iterator[str]:
    """The best setting of each drafter of the hub, whose folder is the hub's, as flags."""
    for pair in pairs:
        if pair.drafter is not None and is_fetched(pair.drafter) and (mine := _of(pair, done)):
            flags = " ".join(f"--{name} {value}" for name, value in mine[0].prediction.setting.values.items())
            yield f"not kept, as {shown(pair.drafter)} is of the hub; give its best setting by flags: {flags}"
