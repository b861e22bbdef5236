"""The pre-flight's checks of models: built on torch's meta device, so no weights are read.

Read next: `check.py`, which calls them among the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...drafters.config import check_options
from ...drafters.families import FAMILIES
from ...errors import DraftsmithError, RequestError
from ..recipe.model import Recipe
from .activations import micro_tokens
from .devices import devices_of, in_units
from .memory import check_fits, ends_bytes, held_bytes, nearest_change, needs, parameters, spread_line, trained
from .unread import check_read

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ...trainers.config import TargetConfig

_WORTH_BF16 = 25e6
"""Parameters; fewer lie in the caches in fp32 too."""
_Made = TypeVar("_Made")

SAMPLE = 200  # rows of data that are read


class Once(Generic[_Made]):
    """A value made at the first call; a failure is kept too, as looking twice takes as long."""

    def __init__(self, make: Callable[[], _Made]) -> None:
        self._make = make
        self._kept: _Made | DraftsmithError | None = None

    def __call__(self) -> _Made:
        if self._kept is None:
            try:
                self._kept = self._make()
            except DraftsmithError as error:
                self._kept = error
        if isinstance(self._kept, DraftsmithError):
            raise self._kept
        return self._kept


class Models:
    """What the run would load, each made when a check first asks for it; no weights are read."""

    def __init__(self, recipe: Recipe) -> None:
        self.described = is_described(recipe.target)
        """The target is not here: its sizes are known from a file, its tokenizer is not."""
        self.target: Once[PreTrainedModel] = Once(partial(_target, recipe))
        self.tokenizer: Once[PreTrainedTokenizerBase] = Once(partial(_tokenizer, recipe, self))
        self.student: Once[nn.Module] = Once(partial(_student, recipe, self))
        self._recipe = recipe

    def to_compare(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that a given draft is compared with; None where there is none yet, or no draft."""
        recipe = self._recipe
        if not recipe.record.has_target:
            return None if recipe.tokenizer.path is None else self.tokenizer()
        return self.tokenizer() if recipe.record.origins(recipe) and not self.described else None


def check_target(recipe: Recipe, models: Models) -> str:
    """Size of the target, which can be decoded with."""
    from ...decoding.backbone.backbone import context_limits
    from ...decoding.backbone.quantised import quantisation_of

    model = models.target()
    config: Any = model.config.get_text_config(decoder=True)
    context, reason = min(context_limits(config))
    memory = held_bytes(recipe, model)
    how = recipe.target.quantization or quantisation_of(model.config)
    rounded = "" if how is None else f", linear layers in {how}"
    away = _where(recipe, model)
    away += f"; not here, taken to be like {recipe.target.sizes} (target.sizes)" if models.described else ""
    away += "; its own code runs (target.trust_remote_code)" if recipe.target.trust_remote_code else ""
    return (
        f"{model.config.model_type}, {parameters(model) / 1e6:,.1f} M parameters{_read(model)}, "
        f"{in_units(memory)} in {recipe.target.dtype}{rounded}, vocabulary {config.vocab_size:,}, "
        f"context {context}{reason}{away}{_faster(recipe, model)}"
    )


def _faster(recipe: Recipe, model: PreTrainedModel) -> str:
    """That another precision may decode faster where the check runs; nothing where that is not so."""
    from ...decoding.devices import multiplies_bf16

    plain = recipe.target.dtype == "fp32" and recipe.target.quantization is None
    if not plain or parameters(model) < _WORTH_BF16 or not devices_of(recipe).on_cpu or not multiplies_bf16():
        return ""
    return "; this processor multiplies bf16, which may decode faster: `draftsmith tune` times both"


def _read(model: PreTrainedModel) -> str:
    """How many of a mixture's numbers a token reads."""
    from ...decoding.backbone.experts import unread_by_a_token

    unread = unread_by_a_token(model)
    return f" ({(parameters(model) - unread) / 1e6:,.1f} M of them for a token)" if unread else ""


def _where(recipe: Recipe, model: PreTrainedModel) -> str:
    """What of a target is elsewhere: in an engine, in other processes, with the host."""
    if recipe.features.source == "engine":
        return (
            f"; the engine has it, and {in_units(ends_bytes(recipe, model))} are here: embedding, norm and projection"
        )
    return spread_line(recipe, model)


def check_model(recipe: Recipe, models: Models) -> str:
    """Size of what is trained, with gradient and two moments in fp32, and the memory for it."""
    check_recipe(recipe)
    model = models.student()
    need = needs(recipe, model, models.target() if recipe.record.has_target else None)
    beside = recipe.record.hook("kept_for_probes")
    if beside is not None:
        kept = beside(recipe, models.target(), models.to_compare())
        need |= {"SSMs of earlier rounds": float(kept)} if kept else {}
    devices = devices_of(recipe)
    check_fits(
        need, devices, lambda: nearest_change(recipe, model, models.target() if recipe.record.has_target else None)
    )
    each = {"activations": f" ({in_units(need['activations'] / micro_tokens(recipe))} a token)"}
    listed = ", ".join(f"{in_units(count)} for {what}{each.get(what, '')}" for what, count in need.items())
    total = f"about {in_units(sum(need.values()))} on each of {devices}"
    slow = recipe.record.has_target and parameters(model) >= parameters(models.target())
    warned = "; it is as large as its target, and drafting with it takes as long as the target's own calls" * slow
    return f"{trained(model) / 1e6:,.2f} M parameters; {listed}: {total}{warned}"


def check_recipe(recipe: Recipe) -> None:
    """Raise RequestError for values that the method or its drafter ignores, or sections that do not fit each other."""
    from ...trainers.student.lora import check_adapter

    check_adapter(recipe.lora, recipe.model, recipe.method)
    check_read(recipe)
    if recipe.record.family is not None:
        check_options(FAMILIES[recipe.record.family], recipe.drafter, f"what method `{recipe.method}` trains")
    recipe.record.code().check_recipe(recipe)


def _target(recipe: Recipe) -> PreTrainedModel:
    """The target's shapes, for every check that asks; refused where no method could train for it."""
    from ...decoding.backbone.cut import check_layers, check_team
    from ...decoding.backbone.foreign import check_generation_config
    from ...decoding.backbone.hub import folder_or_name, load_config, load_sizes, loading_errors
    from ...decoding.backbone.quantised import check_can_read
    from ...decoding.backbone.weights import check_held, check_weight_files
    from ...decoding.gguf.file import find_gguf
    from ...decoding.gguf.model import check_from_gguf

    path, revision = recipe.target.path, recipe.target.revision
    trust, sizes = recipe.target.trust_remote_code, recipe.target.sizes
    described = None if sizes is None else load_sizes(sizes)  # a wrong name is one wherever the target is
    if described is not None and is_described(recipe.target):
        model = decodable(described)
    else:
        model = decodable(load_config(path, revision=revision, trust_remote_code=trust), trust)
    if not devices_of(recipe).described:
        with loading_errors("model", path, "config.json and safetensors weights"):
            check_can_read(path, model.config, recipe.target.quantization)
    if (file := find_gguf(path)) is not None:
        is_cut = recipe.target.tensor_parallel > 1 or recipe.target.sharding != "none"
        check_from_gguf(file, quantization=recipe.target.quantization, is_cut=is_cut)
    if recipe.target.tensor_parallel > 1:
        check_team(model, recipe.target.tensor_parallel)
    if recipe.target.sharding != "none":
        check_layers(model)
    check_weight_files(path)
    if (not trust or file is not None) and not is_described(recipe.target):
        with loading_errors("generation settings of", path, "generation_config.json"):
            check_generation_config(path, folder_or_name(path), revision)
        check_held(model, path)
    return model


def decodable(config: Any, trust: bool = False) -> PreTrainedModel:
    """The shapes of a model that is decoded with, as it will be set up.

    Raises:
        RequestError: it is no causal LM, or its state cannot be rolled back.
        EnvironmentFailure: the installed release computes its kind wrongly.
    """
    from ...decoding.backbone.attention import use_grouped_attention
    from ...decoding.backbone.backbone import check_rollback
    from ...decoding.backbone.hub import skeleton
    from ...decoding.backbone.loading import check_release, keep_soft_cap

    model = skeleton(config, trust)
    check_release(model.config)
    keep_soft_cap(model)
    use_grouped_attention(model)  # as `load_target` does, where it can
    check_rollback(model)
    return model


def is_described(target: TargetConfig) -> bool:
    """Whether a target has to be taken from `sizes`."""
    from ...decoding.backbone.hub import is_here

    if target.sizes is None or is_here(target.path, revision=target.revision):
        return False
    if Path(target.path).is_absolute():
        raise RequestError(
            f"target.path is {target.path}, and there is no such folder; name one, or a model of the hub, which "
            f"target.sizes ({target.sizes}) describes until it is fetched"
        )
    return True


def _tokenizer(recipe: Recipe, models: Models) -> PreTrainedTokenizerBase:
    """The run's tokenizer; one that is yet to be trained learns from the first rows only."""
    from ..inspect import tokenizer_of

    if recipe.record.has_target:
        models.target()  # where there is no model there is no tokenizer: one reason is enough
    few = recipe.data.model_copy(update={"limit_rows": SAMPLE})
    return tokenizer_of(recipe.model_copy(update={"data": few}))


def _student(recipe: Recipe, models: Models) -> nn.Module:
    """What is trained, made by its trainer in shapes alone; for a target that suits the method."""
    import torch

    from ...trainers import spine

    record = recipe.record
    make = record.code().student
    target = models.target() if record.has_target else None
    if target is not None:
        spine.check_target(recipe, target)
    if record.family is None or FAMILIES[record.family].build is None:  # models of `transformers`
        tokenizer = models.to_compare()
        with torch.device("meta"):
            draft: nn.Module = make(recipe, target, tokenizer)
        return draft
    with torch.device("meta"):
        drafter: nn.Module = make(recipe, target)
    _check_warm_start(drafter, recipe, models)
    return _with_tuned(drafter, recipe, models.target()) if recipe.tunes_target else drafter


def _check_warm_start(drafter: nn.Module, recipe: Recipe, models: Models) -> None:
    """Raise RequestError where the drafter could not be initialised from the one that is named."""
    from ...drafters.identity import TargetIdentity
    from ...trainers.student.warm_start import check_warm_start

    if recipe.model.start_from is None:
        return
    identity = None  # a tokenizer is needed to know the target
    if not models.described:
        target = recipe.target
        identity = TargetIdentity.of_parts(
            models.target().config, models.tokenizer(), name=target.path, revision=target.revision
        )
    check_warm_start(drafter, recipe, identity, models.target().config)


def _with_tuned(drafter: nn.Module, recipe: Recipe, target: PreTrainedModel) -> nn.Module:
    """A drafter and what of the target moves with it."""
    import copy

    import torch

    from ...decoding.backbone.backbone import Backbone
    from ...trainers.teacher.tuned import TunedTarget

    with torch.device("meta"):
        own: Any = copy.deepcopy(target)
        tuned = TunedTarget(Backbone(own, name=recipe.target.path), recipe.tune, row_tokens=recipe.row_tokens)
    moving = torch.nn.ParameterList(tuned.trained().values())
    return torch.nn.ModuleList([drafter, moving])
