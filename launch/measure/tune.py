"""`draftsmith tune`: the setting of each drafter that is fastest on this machine, and whether any pays.

Predictions come from some prompts, measurements from others. Read next: `eval/tune/profile.py`, the
predictions; `eval/tune/race.py`, the measurements;
`drafters/tuned_file.py`, what is kept.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.prompt_sets import chosen_sets
from ...data.prompts import Prompt
from ...data.rows.prepare import prepare
from ...decoding.backbone.backbone import Backbone
from ...drafters.families import training_free
from ...drafters.hub import is_fetched, shown
from ...drafters.identity import shown_name
from ...drafters.tuned_file import from_call, write_tuned
from ...errors import DataError, RequestError
from ...eval.config import EvalConfig
from ...eval.measure.arms import NOT_AUDITED
from ...eval.measure.environment import environment, target_hash
from ...eval.measure.requests import Request, in_turn, make_requests
from ...eval.report.pays import in_words
from ...eval.report.tables import accuracy, interval, number, off, plain_table
from ...eval.tune.precision import compared
from ...eval.tune.profile import Bench, costs_of, predict
from ...eval.tune.race import FEWEST, Raced, race
from ...eval.tune.settings import Prediction
from ...eval.tune.surfaces import AT_LEAST, BreakEven, Surface, break_evens, by_size, measured_surfaces
from ...storage import writable_folder
from ..check.early import NamedFolders
from ..methods import TRAINED
from ..recipe.model import Recipe
from .contenders import check_chains, contenders_of, name_of
from .loaded import load_named_target, say_ends
from .run import prompts_of, write_json

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from ...data.rows.packed import PackedRows
    from ..recipe.model import Recipe
    from ..requests import TuneRequest


_SHORTEST = 8  # tokens of a prompt


def held_out_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Token ids of at most `count` beginnings of held-out rows, an even spread.

    Raises:
        RequestError: these rows are the prompts of the evaluation. DataError: none is long enough.
    """
    if recipe.eval.prompts == recipe.data.validation:
        raise RequestError(
            f"data.validation and eval.prompts are both {recipe.eval.prompts!r}: what is chosen on them would be "
            "measured on the prompts that it is judged by; name other --eval.prompts"
        )
    rows = prepare(recipe.data, tokenizer, out=None).validation
    prompts = list(_beginnings(rows, recipe.eval.prompt_tokens))
    if not prompts:
        raise DataError(
            f"none of the {len(rows)} held-out rows has a beginning of {_SHORTEST} tokens or more, "
            f"of a chat at most eval.prompt_tokens = {recipe.eval.prompt_tokens}"
        )
    count = min(count, len(prompts))
    return [prompts[at * len(prompts) // count] for at in range(count)]


def where(recipe: Recipe) -> str:
    """What the prompts are, in words."""
    data = recipe.data
    return f"held-out rows of {data.validation or data.source}"


def _beginnings(rows: PackedRows, longest: int) -> Iterator[list[int]]:
    """Of every held-out document what stands before its first label, or else its first half."""
    for ids_S, labels_S, documents_S in zip(rows.ids_RS, rows.in_loss_RS, rows.document_RS, strict=True):
        for document in range(int(documents_S.max()) + 1):
            inside_S = documents_S == document
            ids, labels = ids_S[inside_S], labels_S[inside_S]
            first = int(labels.argmax()) if labels.any() else 0
            # a plain text is label from its first token on
            end = first if first > 1 else len(ids) // 2
            # a chat is not cut, as in an evaluation: without its beginning it is none
            if end >= _SHORTEST and (end <= longest or first <= 1):
                yield ids[max(0, end - longest) : end].tolist()


def sentence(done: Sequence[Raced], temperature: float, batch: int) -> str:
    """What pays, in one sentence."""
    best = done[0]
    where_ = f"at T = {temperature:g}, batch {batch}"
    measured = f"{best.prediction.setting.label}: {interval(best.speedup.to_list())} times plain decoding {where_}"
    if best.pays:
        return measured + _closest(done)
    if isnan(best.speedup.low):
        return f"{measured}; too little was timed to tell"
    if best.speedup.high >= 1:
        return f"{measured}; not told apart from plain decoding"
    least, label = best.prediction.pays_from, best.prediction.setting.label
    hope = from_call(None if least is None else max(AT_LEAST, least))
    nearest = f"{label} comes nearest with {interval(best.speedup.to_list())} times"
    return f"nothing beats plain decoding {where_}: {nearest}, and would pay {hope}"


def _closest(done: Sequence[Raced]) -> str:
    """Which setting was measured faster than the one that is kept, by less than its interval."""
    best, method = done[0], done[0].prediction.setting.contender.name
    faster = [
        each.prediction.setting.label
        for each in done[1:]
        if each.speedup.value > best.speedup.value and each.prediction.setting.contender.name == method
    ]
    return f" (measured level with {', '.join(faster)}; predicted and measured together decide)" if faster else ""


def table(request: TuneRequest, done: Sequence[Raced]) -> Any:
    """What was measured, the setting that is kept first, beside what was predicted."""
    columns = (
        ("method", ""),
        ("predicted", "speed-up"),
        ("measured", "speed-up"),
        ("off", "%"),
        ("by cost", "%"),
        ("tau", "tokens/call"),
    )
    cells = [
        (
            each.prediction.setting.label,
            number(each.prediction.speedup),
            interval(each.speedup.to_list()),
            off(each.prediction.speedup, each.speedup.value),
            off(each.predicted_at_tau, each.speedup.value),
            interval(each.tau.to_list()),
        )
        for each in done
    ]
    at = f"T = {request.temperature:g}, batch {request.batch}"
    # one verdict for all rows: a column of it would leave no room for the settings' names
    intervals = "95 % intervals, over all looks and settings together"
    title = f"Speed-up over plain decoding at {at}, {NOT_AUDITED} [{intervals}]"
    return plain_table(title, columns, cells)


def accuracy_lines(done: Sequence[Raced]) -> list[str]:
    """How far predictions were off; then what is left of it, which is the costs', once the prompts' tau is known."""
    return [
        accuracy([(each.prediction.speedup, each.speedup.value) for each in done]),
        "by cost, at the tau of the measured prompts: "
        + accuracy([(each.predicted_at_tau, each.speedup.value) for each in done]),
    ]


def content_of(
    request: TuneRequest,
    first: NamedFolders,
    target: Backbone,
    config: EvalConfig,
    predictions: Sequence[Prediction],
    done: Sequence[Raced],
) -> dict[str, Any]:
    """What `tune.json` holds."""
    return {
        "target": shown_name(target),
        "target_sha256": target_hash(target),
        "temperature": request.temperature,
        "batch": request.batch,
        "prompts": request.prompts or where(first.recipe),
        "max_new_tokens": config.max_new_tokens,
        "verdict": NOT_AUDITED,
        "sentence": sentence(done, request.temperature, request.batch),
        "measured": [_raced(each) for each in done],
        "predicted": [_prediction(each) for each in predictions],
        "environment": environment(),
    }


def _raced(each: Raced) -> dict[str, Any]:
    """A row of the table: what was predicted, measured, and how far off that was."""
    return _prediction(each.prediction) | {
        "label": each.prediction.setting.label,
        "predicted_at_tau": each.predicted_at_tau,
        "measured": each.speedup.to_list(),
        "predicted_over_measured": None if isnan(each.speedup.value) else each.prediction.speedup / each.speedup.value,
        "measured_tau": each.tau.to_list(),
        "requests": each.requests,
    }


def break_even_lines(evens: Sequence[BreakEven]) -> list[str]:
    """From which cost of a target call each method pays."""
    return [f"{each.setting.label}: {each.words}" for each in evens]


def surface_lines(surfaces: Sequence[Surface]) -> list[str]:
    """Where each surface lies above 1."""
    return [f"{each.label}: {in_words(each.axis, each.points, each.crossings())}" for each in surfaces if each.points]


def _prediction(each: Prediction) -> dict[str, Any]:
    own = {name: value for name, value in vars(each).items() if name != "setting"}
    return {"method": each.setting.contender.name, "settings": dict(each.setting.values), **own}


_BEHIND = 256  # tokens in front of a call that is timed
_PROFILED = 4  # a prompt of so many is for the predictions


def run_tune(request: TuneRequest, pairs: Sequence[NamedFolders], console: Console) -> list[Raced]:
    """Predict, measure, print, write `tuned.json` beside each drafter; what was measured, the best first."""
    first = pairs[0]
    out = writable_folder(request.out or (request.runs[0] / "eval" if request.runs else Path()))
    target = load_named_target(first)
    contenders = contenders_of(pairs, target, chains=request.chains)
    config = _config(request, first.recipe)
    check_chains(contenders, config, request.temperature)
    requests = _requests(request, first.recipe, target, config)
    if any(each.prompt.chat for each in requests):
        say_ends(target, console)
    profiled, raced = _split(requests, config.batch)
    bench = Bench(target, profiled, config, request.temperature, costs_of(target, profiled, config))
    predictions: list[Prediction] = []
    for contender in contenders:
        console.print(f"predicting {contender.title} ({contender.name}) ...", markup=False, soft_wrap=True)
        predictions += predict(bench, contender)
    chosen = best_of(predictions, request.best)
    console.print(f"measuring {len(chosen)} settings beside plain decoding ...")
    done = race(target, chosen, raced, config, request.temperature)
    evens = break_evens(predictions, done, bench.costs.target_call_seconds)
    content = content_of(request, first, target, config, predictions, done) | {
        "target_call_seconds": bench.costs.target_call_seconds,
        "pays_from": [each.to_dict() for each in evens],
    }
    write_json(out / "tune.json", content)
    console.print(table(request, done), crop=False)
    for line in accuracy_lines(done):
        console.print(line, markup=False, soft_wrap=True)
    for path in _keep(pairs, content, done):
        console.print(f"kept: {path}", markup=False, soft_wrap=True)
    for line in (*_not_kept(pairs, done), *_without_a_drafter(done)):
        console.print(line, markup=False, soft_wrap=True)
    surfaces = by_size(predictions, request.temperature)
    if request.surfaces:
        console.print("measuring where the fastest pay: batch, context, temperature ...")
        surfaces += _surfaces(target, done, profiled, config, request.temperature)
    write_json(out / "tune.json", content | {"surfaces": [each.to_dict() for each in surfaces]})
    for line in break_even_lines(evens):
        console.print(line, markup=False, soft_wrap=True)
    for line in surface_lines(surfaces):
        console.print(line, markup=False, soft_wrap=True)
    console.print(sentence(done, request.temperature, request.batch), markup=False, soft_wrap=True)
    if (precisions := _precisions(first, target, done[0], profiled)) is not None:
        console.print(precisions, markup=False, soft_wrap=True)
    return done


def _precisions(pair: NamedFolders, target: Backbone, best: Raced, requests: Sequence[Request]) -> str | None:
    """Whether the best setting's calls are faster in the other precision; None where it is not compared."""
    if pair.recipe.target.is_shared:
        return None

    def load(dtype: str) -> Backbone:
        there = pair.recipe.target.model_copy(update={"dtype": dtype})
        return load_named_target(replace(pair, recipe=pair.recipe.model_copy(update={"target": there})))

    text = [each for request in requests for each in request.ids]
    nodes = max(2, round(best.prediction.nodes))
    return compared(target, load, nodes, text, min(len(text), target.context - nodes - 1, _BEHIND))


def _surfaces(
    target: Backbone, done: Sequence[Raced], requests: Sequence[Request], config: EvalConfig, temperature: float
) -> list[Surface]:
    """Batch, context and temperature of the setting of each method that was fastest."""
    fastest = {each.prediction.setting.contender.name: each.prediction for each in reversed(done)}
    return list(measured_surfaces(target, list(fastest.values()), requests, config, temperature))


def _config(request: TuneRequest, recipe: Recipe) -> EvalConfig:
    limit = request.limit or max(32, 2 * _PROFILED * request.batch)
    update: dict[str, Any] = {"batch": request.batch, "repeats": 1, "limit": limit}
    if request.prompts is not None:
        sets = len(chosen_sets(request.prompts)) if "," in request.prompts else 1
        update |= {"prompts": request.prompts, "limit": -(-limit // sets)}  # each gives its part
    return recipe.eval.model_copy(update=update)


def _requests(request: TuneRequest, recipe: Recipe, target: Backbone, config: EvalConfig) -> list[Request]:
    if request.prompts is not None:
        return in_turn(make_requests(target, prompts_of(config, recipe.data), config, later_turns=False))
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
            f"the prompts to tune on are {len(requests)}; expected {least} or more at batch {batch}, a quarter to "
            f"predict with and {FEWEST} batches, the fewest that decide, to measure with; name a longer file by "
            "--prompts" + (", or lower --batch" if batch > 1 else "")
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


def _keep(pairs: Sequence[NamedFolders], content: Mapping[str, Any], done: Sequence[Raced]) -> list[Path]:
    """Write the best setting beside each drafter that was measured; plain decoding where that is faster."""
    kept: list[Path] = []
    of_target = ("target", "target_sha256", "target_call_seconds")
    shared = (*of_target, "temperature", "batch", "prompts", "max_new_tokens", "verdict")
    evens = {each["method"]: each["factor"] for each in content["pays_from"]}
    for pair in pairs:
        mine = _of(pair, done)
        if pair.drafter is None or is_fetched(pair.drafter) or not mine or isnan(mine[0].speedup.low):
            continue
        best = mine[0]
        facts = {name: content[name] for name in shared}
        plain = best.speedup.high < 1
        facts |= {
            "pays": best.pays,
            "plain": plain,
            "pays_from": evens[best.prediction.setting.contender.name],
            "predicted": best.prediction.speedup,
            "speedup": best.speedup.to_list(),
            "processor": content["environment"]["processor"],
        }
        values = {} if plain else best.prediction.setting.values
        kept.append(write_tuned(pair.drafter, values, facts))
    return kept


def _of(pair: NamedFolders, done: Sequence[Raced]) -> list[Raced]:
    """What was measured of a pair's drafter by itself, the best first."""
    return [each for each in done if each.prediction.setting.contender.name == name_of(TRAINED, pair.drafter)]


def _not_kept(pairs: Sequence[NamedFolders], done: Sequence[Raced]) -> Iterator[str]:
    """The best setting of each drafter of the hub, whose folder is the hub's, as flags; or that none pays."""
    for pair in pairs:
        if pair.drafter is None or not is_fetched(pair.drafter) or not (mine := _of(pair, done)):
            continue
        flags = _flags(mine[0])
        setting = f"give its best setting by flags: {flags}" if flags else "its best setting is the recipe's"
        if mine[0].speedup.high < 1:
            setting = "nothing of it is faster than plain decoding here"
        yield f"not kept, as {shown(pair.drafter)} is of the hub; {setting}"


def _without_a_drafter(done: Sequence[Raced]) -> Iterator[str]:
    """The best setting of each method without training that pays, as flags: it has no folder to be kept in."""
    free = training_free()
    best = {each.prediction.setting.contender.name: each for each in reversed(done)}
    for name, each in best.items():
        if name in free and each.pays:
            yield " ".join(f"{name} is used as it was tuned by: --method {name} {_flags(each)}".split())


def _flags(raced: Raced) -> str:
    return " ".join(f"--{name} {shlex.quote(value)}" for name, value in raced.prediction.setting.values.items())
