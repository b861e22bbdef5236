"""What the target's hidden states will cost a run: bytes, memory and time, for the pre-flight.

Time is measured on two of the target's layers with random weights, which compute as fast as its
own, and scaled to all of them; where that would take long itself, it is counted in operations.
Read next: `check.py`, which calls it; `trainers/teacher/features.py`, where features come from.
"""

from __future__ import annotations

import copy
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...drafters.families import FAMILIES
from ...errors import EnvironmentFailure, RequestError
from ...storage import nearest_folder
from ..recipe.model import Recipe
from .activations import BYTES
from .devices import device_memory, devices_of, in_units
from .engine import engine_line
from .memory import needs, parameters

if TYPE_CHECKING:
    import torch

    from ...data.rows.prepare import Prepared
    from .models import Models

_TRIED_LAYERS = 2
_TRIED_TOKENS = 256
_TOO_LONG = 2e11  # operations of a trial on a CPU: some seconds
_ASSUMED = {"cuda": 1e14, "cpu": 2e10}  # operations per second, of a GPU and of a CPU's core


def check_features(recipe: Recipe, models: Models, folder: Path) -> str:
    """Bytes of a token and in all, peak memory and time of the features; a cache must fit.

    Raises:
        RequestError: a cache for a target that is trained too, or smaller than one row.
        EnvironmentFailure: the disk has no room for the cache.
    """
    from ...data.features.shards import token_bytes
    from ...trainers.teacher.tuned import check_tuned

    target: Any = models.target()
    hidden = int(target.config.get_text_config(decoder=True).hidden_size)
    states = _states(recipe, models)
    dtype, source = recipe.target.dtype, recipe.features.source
    used = states * hidden * BYTES[dtype]
    memory = _memory(recipe, models, used)
    if source == "online":
        tokens = recipe.loop.steps * recipe.loop.batch_rows * recipe.row_tokens
        return (
            f"online: {used:,} bytes per token ({states} x {hidden} in {dtype}), {memory}; "
            f"{tokens / 1e6:,.1f} M tokens in about {_pace(recipe, target).of(tokens)}"
        )
    if recipe.tunes_target:
        check_tuned(recipe)
    stored = token_bytes(states, hidden, recipe.features.dtype)
    plan = _Plan.of(recipe, models, stored)
    nearest = plan.check_disk(recipe, folder)
    kept = f"{stored:,} bytes per token ({states} x {hidden} in {recipe.features.dtype}), {plan}; {nearest}; {memory}"
    if source == "engine":
        return f"engine: {kept}; {engine_line(recipe, target, _layers(recipe, models))}"
    return f"cache: {kept}; computed in about {_pace(recipe, target).of(plan.computed)}"


def _layers(recipe: Recipe, models: Models) -> tuple[int, ...]:
    """Which hidden states the drafter is taught by."""
    from ...decoding.backbone.hidden_states import LAST

    own: Any = next((each.config for each in models.student().modules() if hasattr(each, "config")), None)
    return (*getattr(own, "layers", ()), LAST) if _states(recipe, models) > 1 else (LAST,)


def _states(recipe: Recipe, models: Models) -> int:
    """How many hidden states of a token the drafter is taught by."""
    family = FAMILIES[recipe.record.family or ""]
    if family.build is None:
        return 1
    drafter: Any = next(each for each in models.student().modules() if hasattr(each, "config"))
    return family.hidden_states(asdict(drafter.config))


def _answered(rows: Prepared, longest: int) -> tuple[int, int]:
    """How many rows an engine makes of the prompts, to train on and held out: all are made before the first step."""
    from ...data.generate.continuations import count_prompts

    return count_prompts(rows.train, longest), count_prompts(rows.validation, longest)


@dataclass(frozen=True)
class _Plan:
    """How many rows a cached run reads, and how many of them the cache holds."""

    distinct: int
    asked: int
    """Times that a row is asked for, in training and by every validation."""
    kept: int
    row_bytes: int
    length: int
    is_exact: bool

    @classmethod
    def of(cls, recipe: Recipe, models: Models, token: int) -> _Plan:
        asked = recipe.loop.steps * recipe.loop.batch_rows
        distinct, held_out = asked, recipe.loop.validate_rows
        samples = recipe.record.samples(recipe)
        if samples is not None:  # the same ones every time
            asked *= samples.times
            distinct, held_out = min(asked, samples.rows), samples.held_out
        elif not models.described:  # its tokenizer is here, so the run finds the rows prepared
            from ...data.rows.prepare import prepare

            rows = prepare(recipe.data, models.tokenizer(), out=None)
            if recipe.features.answers is None:
                distinct, held_out = min(asked, len(rows.train)), min(held_out, len(rows.validation))
            else:
                distinct, held_out = _answered(rows, recipe.data.sequence_length - recipe.features.answers)
        row = token * recipe.row_tokens
        bound, count = recipe.features.max_gb * 1e9, distinct + held_out
        if row > bound:
            raise RequestError(
                f"features.max_gb is {recipe.features.max_gb:g}, and the features of one row take "
                f"{in_units(row)}; raise it, or take features online"
            )
        kept = min(count, int(bound // row))
        asked += held_out * max(1, recipe.loop.steps // recipe.loop.validate_every)
        return cls(count, asked, kept, row, recipe.row_tokens, not models.described)

    @property
    def bytes(self) -> int:
        """Of the rows that are kept."""
        return self.kept * self.row_bytes

    @property
    def computed(self) -> int:
        """Tokens whose states are computed, those that are not kept in every epoch again."""
        again = (1 - self.kept / self.distinct) * max(0, self.asked - self.distinct)
        return int((self.distinct + again) * self.length)

    def __str__(self) -> str:
        most = "" if self.is_exact else "at most "
        text = f"{most}{self.distinct:,} rows = {in_units(self.distinct * self.row_bytes)} in all"
        if self.kept == self.distinct:
            return text
        return (
            f"{text}, of which features.max_gb keeps {self.kept / self.distinct:.0%} and the rest "
            "is computed in every epoch"
        )

    def check_disk(self, recipe: Recipe, out: Path) -> str:
        """Room for what the cache will hold, beside what of it is there."""
        from ...trainers.teacher.feature_cache import features_folder

        folder = features_folder(recipe.features, out)
        free = shutil.disk_usage(nearest_folder(folder)).free
        here = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        # the disk of a described machine is not this one
        if self.bytes - here > free and not devices_of(recipe).described:
            raise EnvironmentFailure(
                f"{folder}: the feature cache needs {in_units(self.bytes - here)}, and "
                f"{in_units(free)} are free; lower features.max_gb or features.dtype, name another "
                "features.folder, or take features online"
            )
        return f"{in_units(self.bytes)} in {folder}, {in_units(free)} free"


def _memory(recipe: Recipe, models: Models, token: int) -> str:
    """The states of a micro-batch, twice where the next one's are fetched, and the pass itself."""
    held = token * recipe.loop.micro_rows * recipe.row_tokens
    if recipe.features.prefetch and (not devices_of(recipe).on_cpu or recipe.features.source != "online"):
        held *= 2
    if recipe.features.source == "engine":
        return f"{in_units(held)} of them held at peak"
    reading = needs(recipe, models.student(), models.target())["its pass"]
    return f"{in_units(held)} of them held at peak beside a pass of {in_units(reading)}"


# ---- time -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pace:
    seconds_per_token: float
    how: str

    def of(self, tokens: int) -> str:
        """How long so many tokens take, and how that is known."""
        seconds = tokens * self.seconds_per_token
        for unit, length in (("h", 3600), ("min", 60)):
            if seconds >= 2 * length:
                return f"{seconds / length:.1f} {unit} ({self.how})"
        return f"{seconds:.2g} s ({self.how})"


def _pace(recipe: Recipe, target: Any) -> _Pace:
    """Seconds of the target's pass per token, all processes together."""
    import torch

    from ...decoding.backbone.experts import unread_by_a_token
    from ...decoding.backbone.hidden_states import decoder_of

    config = target.config.get_text_config(decoder=True)
    count = int(config.num_hidden_layers)
    layers = parameters(decoder_of(target)) - parameters(target.get_input_embeddings())
    devices = devices_of(recipe)
    on_gpu = not devices.on_cpu
    together = devices.processes if on_gpu else 1  # processes share the cores that one has alone
    tried = min(_TRIED_LAYERS, count)
    tokens = min(recipe.row_tokens, _TRIED_TOKENS)
    share = layers * tried / count
    fits = share * BYTES[recipe.target.dtype] < device_memory() / 4
    if devices.described or not fits or (not on_gpu and 2 * share * tokens > _TOO_LONG):
        rate = _ASSUMED["cuda"] if on_gpu else _ASSUMED["cpu"] * (os.cpu_count() or 1)
        at = f"{rate / 1e12:g} T" if on_gpu else f"{rate / 1e9:g} G"
        how = f"2 operations per weight that a token reads, at an assumed {at} per second of each device"
        return _Pace(2 * (layers - unread_by_a_token(target)) / rate / together, how)
    device = torch.device("cuda" if on_gpu else "cpu")
    seconds = _trial(config, tried, tokens, recipe.target.dtype, device)
    how = f"measured on {tried} of {count} layers and {tokens} tokens"
    return _Pace(seconds * count / tried / tokens / together, how)


def _trial(config: Any, layers: int, tokens: int, dtype: str, device: torch.device) -> float:
    """Seconds of a pass of one row through so many layers with random weights, the best of three.

    The vocabulary is cut: an embedding is looked up, however long it is.
    """
    import torch
    from transformers import AutoModel

    few = copy.deepcopy(config)
    few.num_hidden_layers, few.vocab_size, few.pad_token_id = layers, 256, None
    if getattr(few, "layer_types", None):
        few.layer_types = few.layer_types[:layers]
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    state = torch.get_rng_state()  # nobody else's numbers depend on what is drawn here
    with torch.device(device):
        model: Any = AutoModel.from_config(few, dtype=kinds[dtype]).eval()
        ids = torch.zeros(1, tokens, dtype=torch.long)
    torch.set_rng_state(state)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(4):  # the first one is slower
            began = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - began)
    return best
