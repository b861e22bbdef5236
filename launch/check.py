"""`draftsmith check`: everything that can fail, before hours are spent. Nothing is trained.

Each check is one function that returns what it found; all of them run, and every failure is
reported at once. Models are only measured (on torch's meta device): no weights are needed.
Read next: `train.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, DraftsmithError, EnvironmentFailure, RequestError
from .recipe import Recipe, Resolved

if TYPE_CHECKING:
    from rich.console import Console

_SAMPLE = 200  # rows of data that are read


def check(resolved: Resolved, console: Console) -> None:
    """Run every check and print what each found.

    Raises:
        RequestError: with all failures; DataError or EnvironmentFailure when all are of that kind.
    """
    from rich.table import Table

    recipe = resolved.recipe
    folder = Path("runs") / recipe.name
    table = Table("check", "found", "verdict")
    failures: list[DraftsmithError] = []
    for name, run in _checks(recipe, folder).items():
        try:
            table.add_row(name, run(), "ok")
        except DraftsmithError as error:
            failures.append(error)
            table.add_row(name, str(error).splitlines()[0], "FAILS")
    console.print(table)
    if failures:
        raise _together(failures)
    console.print("ready to train")


def _checks(recipe: Recipe, folder: Path) -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {
        "device": lambda: _device(recipe),
        "batch": lambda: _batch(recipe),
        "model": lambda: _model(recipe),
        "data": lambda: _data(recipe),
        "disk": lambda: _disk(recipe, folder),
    }
    if recipe.method != "target":
        found = {"target": lambda: _target(recipe), **found, "prompts": lambda: _prompts(recipe)}
    return found


def _target(recipe: Recipe) -> str:
    config = _target_config(recipe)
    length, context = recipe.data.sequence_length, getattr(config, "max_position_embeddings", None)
    if context is not None and length > context:
        raise RequestError(
            f"data.sequence_length is {length}; the target's context is {context} tokens"
        )
    weights, bytes_each = _parameters(config), {"fp32": 4, "bf16": 2, "fp16": 2}
    memory = weights * bytes_each[recipe.target.dtype]
    return (
        f"{config.model_type}, {weights / 1e6:,.1f} M parameters, {_size(memory)} in "
        f"{recipe.target.dtype}, vocabulary {config.vocab_size:,}, context {context}"
    )


def _target_config(recipe: Recipe) -> Any:
    from ..decoding.loading import load_config

    target = recipe.target
    return load_config(
        target.path, revision=target.revision, trust_remote_code=target.trust_remote_code
    )


def _device(recipe: Recipe) -> str:
    import torch

    if not torch.cuda.is_available():
        if recipe.loop.precision == "fp16":
            raise RequestError("loop.precision is fp16, which needs a GPU; use bf16 or fp32 here")
        return f"CPU, {os.cpu_count()} cores, precision {recipe.loop.precision}"
    name = torch.cuda.get_device_name(0)
    return f"{torch.cuda.device_count()} x {name}, precision {recipe.loop.precision}"


def _batch(recipe: Recipe) -> str:
    from ..trainers.setup import accumulation

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    loop = recipe.loop
    steps = accumulation(loop, processes)
    tokens = loop.batch_rows * recipe.data.sequence_length
    return (
        f"{loop.steps:,} steps of {loop.batch_rows} rows = {tokens:,} tokens "
        f"({steps} x {loop.micro_rows} rows on {processes} process{'es' * (processes > 1)}); "
        f"{tokens * loop.steps / 1e6:,.1f} M tokens in all"
    )


def _model(recipe: Recipe) -> str:
    """Size and memory of what is trained: weights, gradient and two moments in fp32."""
    weights, vocabulary = _trained(recipe)
    # logits, their softmax and gradient of draft and target exist for one chunk at a time
    chunk = recipe.objective.chunk * vocabulary * 4 * 4
    return (
        f"{weights / 1e6:,.2f} M parameters; {_size(16 * weights)} for weights, gradient and "
        f"moments, {_size(chunk)} for a chunk of logits, activations beside it"
    )


def _trained(recipe: Recipe) -> tuple[int, int]:
    """Parameters of the model that is trained, and its vocabulary."""
    import torch

    from ..decoding.loading import load_config
    from ..trainers.architecture import fresh_model

    if recipe.model.start_from is not None:
        config = load_config(recipe.model.start_from)
        return _parameters(config), config.vocab_size
    like = None if recipe.method == "target" else _target_config(recipe)
    vocabulary = recipe.tokenizer.vocabulary if like is None else like.vocab_size
    with torch.device("meta"):
        model = fresh_model(recipe.model, vocabulary=vocabulary, eos=None, like=like)
    return sum(parameter.numel() for parameter in model.parameters()), vocabulary


def _parameters(config: Any) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _data(recipe: Recipe) -> str:
    """The first rows, read, rendered, tokenised and masked as for training."""
    from ..data.encode import Encoded, Encoder
    from ..data.records import Placed, RecordReader
    from ..data.report import Tally, check_tally
    from ..data.sources import open_sources
    from .inspect import tokenizer_of

    few = recipe.model_copy(update={"data": recipe.data.model_copy(update={"limit_rows": _SAMPLE})})
    source, validation = open_sources(few.data)
    encoder = Encoder.of(tokenizer_of(few), few.data)
    tally, reader = Tally(), RecordReader(few.data)
    rows = list(islice(reader.read(source), _SAMPLE))
    placed = [row for row in rows if isinstance(row, Placed)]
    tally.rejected += [row for row in rows if not isinstance(row, Placed)]
    for row, found in zip(placed, encoder([row.record for row in placed]), strict=True):
        if isinstance(found, Encoded):
            tally.add(found)
        else:
            tally.rejected.append(row.rejected(str(found)))
    check_tally(tally, source.name, few.data.max_rejected_share, None)
    held = "a share by hash" if validation is None else validation.name
    return (
        f"{source.name}: of the first {len(rows)} rows {tally.usable} are usable "
        f"({', '.join(sorted(set(reader.shapes.values())))}), {tally.cut} longer than "
        f"{few.data.sequence_length} tokens; held out: {held}"
    )


def _disk(recipe: Recipe, folder: Path) -> str:
    """Room for the checkpoints that exist at once: those kept, and the one being written."""
    need = 12 * _trained(recipe)[0] * (recipe.checkpoint.keep + 1)
    place = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    if not os.access(place, os.W_OK):
        raise EnvironmentFailure(f"{place} cannot be written to; name another folder with --out")
    free = shutil.disk_usage(place).free
    if free < need:
        raise EnvironmentFailure(
            f"{folder}: checkpoints need {_size(need)}, and {_size(free)} are free; lower "
            "checkpoint.keep, or name another folder with --out"
        )
    return f"checkpoints need {_size(need)} in {folder}; {_size(free)} are free"


def _prompts(recipe: Recipe) -> str:
    from ..data.prompts import load_prompts

    prompts = load_prompts(recipe.eval.prompts, limit=recipe.eval.limit, seed=recipe.eval.seed)
    categories = sorted({prompt.category for prompt in prompts})
    return f"{len(prompts)} of {recipe.eval.prompts}: {', '.join(categories[:6])}"


def _together(failures: list[DraftsmithError]) -> DraftsmithError:
    message = "\n".join(["the pre-flight fails:", *(f"  - {failure}" for failure in failures)])
    kinds = {type(failure) for failure in failures}
    if kinds <= {DataError} or kinds <= {EnvironmentFailure}:
        return kinds.pop()(message)
    return RequestError(message)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
