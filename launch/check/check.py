"""`draftsmith check`: everything that can fail, before hours are spent. Nothing is trained.

Each check is one function that returns what it found; all of them run, and every failure is
reported at once. Read next: `check/models.py`, `train/run.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import DataError, DraftsmithError, EnvironmentFailure, FieldError, RequestError
from ...storage import check_free, check_name, nearest_folder
from ..recipe.load import Resolved
from ..recipe.model import Recipe
from .devices import check_sharding, devices_of, in_units
from .features import check_features
from .memory import trained
from .models import SAMPLE, Models, check_model, check_recipe, check_target
from .resume import check_places, check_resume, has_begun
from .unread import check_probe_length, check_room, foreign_sections, shorter_drafts

if TYPE_CHECKING:
    from rich.console import Console

    from ...data.prompts import Prompt
    from ...trainers.losses.ramp import Ramp


@dataclass(frozen=True)
class Waits:
    """What a check found that has to be repeated where the run will be."""

    finding: str


def check(resolved: Resolved, console: Console, out: Path | None = None) -> None:
    """Run every check and print what each found; `out` is the run's folder (default runs/NAME).

    Raises:
        RequestError: with all failures; DataError or EnvironmentFailure when all are of that kind.
    """
    from rich.table import Table
    from rich.text import Text

    recipe = resolved.recipe
    if out is not None:
        check_name(out)
    table = Table("check", "found", "verdict")
    failures: list[DraftsmithError] = []
    found_by: dict[str, str] = {}  # what fails, by its words: what several checks need fails in each of them
    waiting: list[str] = []
    models = Models(recipe)
    for name, run in _checks(recipe, models, out).items():
        try:
            result = run()
            if isinstance(result, Waits):
                waiting.append(name)
            text = result.finding if isinstance(result, Waits) else result
            # as Text: brackets in a name are no markup
            table.add_row(name, Text(text), "waits" if isinstance(result, Waits) else "ok")
        except DraftsmithError as found:
            error = _placed(found, resolved)
            failures.append(error)
            first = found_by.setdefault(str(error), name)
            table.add_row(name, Text(str(error).splitlines()[0] if first == name else f"as {first}"), "FAILS")
    console.print(table)
    failing = [str(failure) for failure in failures]
    for line in [
        *foreign_sections(resolved, failing),
        *shorter_drafts(resolved),
        *_of_template(recipe, models, failing),
    ]:
        console.print(Text(line))
    if failures:
        raise _together(failures)
    if waiting:
        text = (
            f"nothing found here speaks against the run; {' and '.join(waiting)} could not be "
            f"looked at: run the check again where {recipe.target.path} is"
        )
        console.print(Text(text))
        return
    console.print("ready to train")


def _checks(recipe: Recipe, models: Models, out: Path | None) -> dict[str, Callable[[], str | Waits]]:
    folder = out or Path("runs") / recipe.name
    checks: dict[str, Callable[[], str | Waits]] = {
        "device": lambda: _device(recipe),
        "batch": lambda: _batch(recipe),
        "objective": lambda: _objective(recipe),
        "model": lambda: check_model(recipe, models),
        "data": lambda: _data(recipe, models),
        "disk": lambda: _disk(recipe, models, folder),
    }
    if out is not None:  # the run may get another name than the recipe's
        checks["folder"] = lambda: _folder(recipe, out)
    if recipe.record.has_target:
        checks = {
            "target": lambda: check_target(recipe, models),
            **checks,
            "features": lambda: check_features(recipe, models, folder),
            "prompts": lambda: _prompts(recipe, models),
        }
    return checks


def _of_template(recipe: Recipe, models: Models, failures: Sequence[str]) -> list[str]:
    """What a chat template has that a run should know: ends that the target does not stop at, a clock."""
    if failures or models.described or not recipe.record.has_target:
        return []
    from ...data.rows.chats.ends import endless_answers
    from ...data.rows.templates import ChatTemplate
    from ...decoding.backbone.hub import ends_of

    tokenizer, data = models.tokenizer(), recipe.data
    config = models.target().config.get_text_config(decoder=True)
    lines = [endless_answers(tokenizer, ends_of(recipe.target.path, config))]
    if ChatTemplate(tokenizer, data.chat_template, data.template_values).reads_clock:
        day = data.template_date or "the day on which the run begins, on every later one too"
        lines.append(f"the chat template has a clock, which will show {day} (data.template_date)")
    return [f"note: {line}" for line in lines if line]


def _folder(recipe: Recipe, folder: Path) -> str:
    """What the run would find in its folder."""
    check_resume(folder, recipe, "auto")
    check_places(folder)
    check_free(folder)
    return f"{folder}: {'the run there goes on' if has_begun(folder) else 'a new run'}"


def _device(recipe: Recipe) -> str:
    import torch

    from ...trainers.loop.compiled import check_compiler
    from ...trainers.loop.setup import check_machine

    devices = devices_of(recipe)
    precision = recipe.loop.precision_on(cpu=devices.on_cpu)
    if devices.described:
        check_machine(recipe.loop, on_cpu=False)
        check_sharding(recipe)
        return f"{devices}, sharding {devices.sharding}, precision {precision}, as described"
    check_machine(recipe.loop, on_cpu=devices.on_cpu)
    check_compiler(recipe.loop, on_cpu=devices.on_cpu)
    if devices.on_cpu:
        return f"CPU, {os.cpu_count()} cores, precision {precision}"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, precision {precision}"


def _batch(recipe: Recipe) -> str:
    from ...decoding.backbone.cut import teams
    from ...trainers.loop.setup import accumulation

    count, loop = devices_of(recipe).processes, recipe.loop
    if count > 1:  # one alone has the whole target
        teams(count, recipe.target.tensor_parallel)
    steps = accumulation(loop, count)
    tokens, parts = loop.batch_rows * recipe.row_tokens, loop.context_parallel
    where = f"{count} process{'es' * (count > 1)}"
    if parts > 1:
        where = f"each of {count // parts} group{'s' * (count > parts)} of {parts} processes, which share each row"
    return (
        f"{loop.steps:,} steps of {loop.batch_rows} rows = {tokens:,} tokens "
        f"({steps} x {loop.micro_rows} rows on {where}); "
        f"{tokens * loop.steps / 1e6:,.1f} M tokens in all"
    )


def _objective(recipe: Recipe) -> str:
    """What is minimised, on which rows; the method takes every value that is set."""
    from ...trainers.losses.ramp import Ramp

    check_recipe(recipe)
    return "; ".join((*_minimised(recipe, Ramp.of(recipe.objective)), *_drafted_rows(recipe)))


def _minimised(recipe: Recipe, ramp: Ramp) -> list[str]:
    if not recipe.record.reads_value("objective.from_kl_share", recipe):
        return [f"method {recipe.method}'s own terms and what the recipe adds"]
    parts = [", ".join(f"{name} {getattr(ramp.last, name):g}" for name in ramp.last.asked)]
    return [*parts, *([f"from kl alone over {ramp.share:.0%} of the steps"] if ramp.share else [])]


def _drafted_rows(recipe: Recipe) -> list[str]:
    """Which rows are not learnt from as they stand."""
    rollouts = recipe.rollouts
    if not rollouts.share:
        return []
    if not recipe.record.drafts_its_own:
        return [f"{rollouts.share:.0%} of the rows written by {rollouts.by}"]
    return [
        f"{rollouts.share:.0%} of the rows learnt along own drafts behind {rollouts.places} places, "
        f"at temperature {rollouts.temperature:g}"
    ]


def _data(recipe: Recipe, models: Models) -> str | Waits:
    """The first rows, read, rendered, tokenised and masked as for training."""
    if models.described:
        return _rows(recipe)
    from ...data.rows.encode import Encoded, Encoder
    from ...data.rows.records import Placed, RecordReader
    from ...data.rows.report import Tally, check_tally
    from ...data.rows.sources import open_sources
    from ...trainers.student.fused import coverage
    from ...trainers.teacher.unused import check_unused

    data = recipe.data
    source, validation = open_sources(data)
    encoder = Encoder.of(models.tokenizer(), data)
    tally, reader = Tally(), RecordReader(data)
    rows = list(islice(reader.read(source), SAMPLE))
    placed = [row for row in rows if isinstance(row, Placed)]
    tally.rejected += [row for row in rows if not isinstance(row, Placed)]
    texts, labels = [], []
    for row, encoded in zip(placed, encoder([row.record for row in placed]), strict=True):
        if isinstance(encoded, Encoded):
            tally.read(row.record)
            tally.add(encoded)
            texts += [each.ids for each in encoded.documents]
            labels += [each.ids[each.in_loss] for each in encoded.documents]
        else:
            tally.reject(row, encoded)
    check_unused(recipe, texts)
    covered = coverage(recipe, labels)
    unembedded = _check_embedded(recipe, models, [number for text in texts for number in text], "a row")
    # a few bad rows among the first ones prove nothing about the share in all
    allowed = data.max_rejected_share
    check_tally(tally, source.name, allowed if len(rows) < SAMPLE else max(allowed, 0.5), None)
    held = "a share by hash" if validation is None else validation.name
    return (
        f"{source.name}: of the first {len(rows)} rows {tally.usable} are usable "
        f"({', '.join(sorted(set(reader.shapes.values())))}), {tally.cut} longer than "
        f"{data.sequence_length} tokens; held out: {held}{tally.of_answers()}{covered}{unembedded}"
    )


def _check_embedded(recipe: Recipe, models: Models, ids: Sequence[int], where: str) -> str:
    """Raise RequestError for tokens of texts without a row in the target's embedding; how many tokens have none."""
    from ...decoding.backbone.backbone import Backbone, check_token_ids

    if not recipe.record.has_target:
        return ""
    target = models.target()
    check_token_ids(Backbone(target, name=recipe.target.path), max(ids, default=0), where)
    embedding: Any = target.get_input_embeddings()
    lacking = len(models.tokenizer()) - len(embedding.weight)
    return f"; {lacking} tokens of the tokenizer have no row in the target's embedding" if lacking > 0 else ""


def _rows(recipe: Recipe) -> Waits:
    """The first rows, read alone: without the target's tokenizer nothing more can be said."""
    from ...data.rows.presets import is_on_hub
    from ...data.rows.records import Placed, RecordReader
    from ...data.rows.sources import open_sources

    data = recipe.data
    if is_on_hub(data.source):
        return Waits(f"{data.source}: read, rendered and masked where the target's tokenizer is")
    source, _ = open_sources(data)
    reader = RecordReader(data)
    rows = list(islice(reader.read(source), SAMPLE))
    known = sum(isinstance(row, Placed) for row in rows)
    if not known:
        raise DataError(
            f"{source.name}: none of the first {len(rows)} rows has a known shape; expected a column of texts, "
            "messages, or questions and answers (docs/data.md lists them), or their names in data.columns"
        )
    return Waits(
        f"{source.name}: {known} of the first {len(rows)} rows have a known shape "
        f"({', '.join(sorted(set(reader.shapes.values())))}); rendered and masked where the "
        "target's tokenizer is"
    )


def _disk(recipe: Recipe, models: Models, folder: Path) -> str | Waits:
    """Room for the checkpoints that exist at once: those kept, and the one being written."""
    need = 12 * trained(models.student()) * (recipe.checkpoint.keep + 1) * recipe.record.runs(recipe)
    nearest = nearest_folder(folder)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "cannot be written to" if nearest.is_dir() else "is a file"
        raise EnvironmentFailure(f"{nearest} {reason}; name another folder with --out")
    free = shutil.disk_usage(nearest).free
    if devices_of(recipe).described:
        return Waits(f"checkpoints need {in_units(need)} in {folder}; {in_units(free)} are free here")
    if free < need:
        raise EnvironmentFailure(
            f"{folder}: checkpoints need {in_units(need)}, and {in_units(free)} are free; lower "
            "checkpoint.keep, or name another folder with --out"
        )
    return f"checkpoints need {in_units(need)} in {folder}; {in_units(free)} are free"


def _prompts(recipe: Recipe, models: Models) -> str:
    """Prompts are read, rendered, and have room in the target's context with their answers."""
    from ...data.prompts import load_prompts, second_set

    config, audit = recipe.eval, recipe.audit
    prompts = load_prompts(config.prompts, limit=config.limit, seed=config.seed, data=recipe.data)
    if config.second_prompts is not None:
        second_set(config.second_prompts, prompts, limit=config.limit, seed=config.seed)
    longest, note = config.prompt_tokens, ""  # nothing longer is read
    if not models.described:
        longest, note = _lengths(prompts, recipe, models)
    answer = max(config.max_new_tokens, audit.max_new_tokens, recipe.probe.max_new_tokens)
    depth = recipe.record.drafts_of(recipe, max(config.draft_length, audit.draft_length, *config.sweep))
    depth = max(depth, recipe.record.probe_depth(recipe))
    check_room(recipe, models.target().config, longest, answer=answer, depth=depth)
    check_probe_length(recipe)
    categories = sorted({prompt.category for prompt in prompts})
    reads = _of_the_draft(models, longest + answer + depth)
    bound = models.described or any(len(prompt.points) > 1 for prompt in prompts)
    return (
        f"{len(prompts)} of {config.prompts}: {', '.join(categories[:6])}; "
        f"the longest has {'at most ' * bound}{longest} tokens{note}{reads}"
    )


def _of_the_draft(models: Models, needed: int) -> str:
    """That a draft model reads shorter texts than are decoded, where it does."""
    from ...decoding.backbone.backbone import context_limits

    try:
        config: Any = getattr(models.student(), "config", None)
    except DraftsmithError:
        return ""  # which has a row of its own
    if not hasattr(config, "get_text_config"):
        return ""  # no model of its own
    context, reason = min(context_limits(config.get_text_config(decoder=True)))
    if needed <= context:
        return ""
    return (
        f"; the draft reads {context} tokens{reason}, and with answer and drafts that is up to {needed}: behind its "
        f"{context} nothing is drafted"
    )


def _lengths(prompts: Sequence[Prompt], recipe: Recipe, models: Models) -> tuple[int, str]:
    """Tokens of the longest prompt that is decoded, and what becomes of longer ones."""
    from ...data.prompts import fitting, render

    config = recipe.eval
    tokenizer, most = models.tokenizer(), config.prompt_tokens
    kept = fitting(prompts, tokenizer, most)
    _check_embedded(recipe, models, [number for each in kept for number in render(each, tokenizer)], "a prompt")

    def last_turn(prompt: Prompt) -> int:
        # what the target will have answered before is not known yet: as much as it may
        earlier = len(prompt.points) - 1
        ids = render(prompt, tokenizer, answers=["."] * earlier)
        return len(ids) + earlier * config.max_new_tokens

    longer = {
        "left out (chats)": len(prompts) - len(kept),
        "cut to their end (texts)": sum(len(render(each, tokenizer)) > most for each in kept),
    }
    listed = ", ".join(f"{count} {what}" for what, count in longer.items() if count)
    note = f"; longer than eval.prompt_tokens = {most}: {listed}" if listed else ""
    return min(most, max(map(last_turn, kept))), note


def _placed(error: DraftsmithError, resolved: Resolved) -> DraftsmithError:
    """An error of a field's value with the line that has it, where nobody typed it."""
    if not isinstance(error, FieldError):
        return error
    where = resolved.origin.get(error.field, "default")
    if where == "default" or where.startswith("--"):
        return error
    return RequestError(f"{error.field} ({where}) {error.reason}")


def _together(failures: list[DraftsmithError]) -> DraftsmithError:
    reasons = dict.fromkeys(str(failure) for failure in failures)
    message = "\n".join(["the pre-flight fails:", *(f"  - {reason}" for reason in reasons)])
    kinds = {type(failure) for failure in failures}
    if kinds <= {DataError} or kinds <= {EnvironmentFailure}:
        return kinds.pop()(message)
    return RequestError(message)
