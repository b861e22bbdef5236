"""The pre-flight's checks of models: built on torch's meta device, so no weights are read.

Read next: `check.py`, which calls them among the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...errors import DraftsmithError, RequestError
from ..recipe.load import Recipe
from .memory import BYTES, check_fits, devices_of, in_units, needs, parameters, trained

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ...trainers.config import TargetConfig

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


def check_target(recipe: Recipe, models: Models) -> str:
    """Size of the target; it can be decoded with, and training rows fit its context."""
    from ...decoding.target.backbone import context_limits

    model = models.target()
    _check_row_length(model, recipe, f"target.path {recipe.target.path!r}")
    config: Any = model.config.get_text_config(decoder=True)
    context, reason = min(context_limits(config))
    memory = parameters(model) * BYTES[recipe.target.dtype]
    away = f"; not here, sizes from {recipe.target.sizes}" if models.described else ""
    return (
        f"{model.config.model_type}, {parameters(model) / 1e6:,.1f} M parameters, "
        f"{in_units(memory)} in {recipe.target.dtype}, vocabulary {config.vocab_size:,}, "
        f"context {context}{reason}{away}"
    )


def _check_row_length(model: PreTrainedModel, recipe: Recipe, whose: str) -> None:
    from ...trainers.loop.objective import check_row_length

    named = "--data.sequence_length"
    if recipe.method == "boost":
        named = "the sum of --boost.prompt_tokens and --boost.continuation"
    check_row_length(model.config, recipe.row_tokens, whose, named=named)


def check_model(recipe: Recipe, models: Models) -> str:
    """Size of what is trained, with gradient and two moments in fp32, and the memory for it."""
    distils = recipe.method != "target"
    _check_objective(recipe)
    model = models.student()
    need = needs(recipe, model, models.target() if distils else None)
    if recipe.method == "boost":
        from .boost import kept_for_probes

        kept = kept_for_probes(recipe, lambda each: _draft(each, models), models.target())
        need |= {"SSMs of earlier rounds": float(kept)} if kept else {}
    devices = devices_of(recipe)
    check_fits(need, devices)
    listed = ", ".join(f"{in_units(count)} for {what}" for what, count in need.items())
    total = f"about {in_units(sum(need.values()))} on each of {devices}"
    return f"{trained(model) / 1e6:,.2f} M parameters; {listed}: {total}"


def _check_objective(recipe: Recipe) -> None:
    """Raise RequestError where the objective does not suit the method, as training would."""
    from ...trainers import distill, eagle, eagle3, target
    from ...trainers.student.lora import check_adapter

    check_adapter(recipe.lora, recipe.model, recipe.method)
    objective = recipe.objective
    if recipe.method == "target":
        target.check_only_ce(objective)
    elif recipe.method == "eagle":
        eagle.check_objective(recipe.eagle, objective)
    elif recipe.method == "eagle3":
        eagle3.check_objective(recipe.eagle3, objective)
    else:
        together = recipe.method in ("medusa", "medusa2", "hydra")
        distill.check_terms(objective, places=recipe.medusa.heads if together else 1)


def _target(recipe: Recipe) -> PreTrainedModel:
    """The target's shapes, for every check that asks; refused where training would refuse it."""
    from ...decoding.target.attention import use_grouped_attention
    from ...decoding.target.backbone import check_rollback
    from ...decoding.target.hub import load_config, load_sizes
    from ...decoding.target.loading import check_weight_files
    from ...drafters.projection import check_plain_logits

    path, revision = recipe.target.path, recipe.target.revision
    trust, sizes = recipe.target.trust_remote_code, recipe.target.sizes
    if sizes is not None and is_described(recipe.target):
        model = skeleton(load_sizes(sizes))
    else:
        model = skeleton(load_config(path, revision=revision, trust_remote_code=trust), trust)
    use_grouped_attention(model)  # as `load_target` does, where it can
    check_rollback(model)
    check_plain_logits(model, f"target.path {path!r}")
    check_weight_files(path)
    return model


def is_described(target: TargetConfig) -> bool:
    """Whether a target has to be taken from `sizes`."""
    from ...decoding.target.hub import is_here

    return target.sizes is not None and not is_here(target.path, revision=target.revision)


def _tokenizer(recipe: Recipe, models: Models) -> PreTrainedTokenizerBase:
    """The run's tokenizer; one that is yet to be trained learns from the first rows only."""
    from ..inspect import tokenizer_of

    if recipe.method != "target":
        models.target()  # where there is no model there is no tokenizer: one reason is enough
    few = recipe.data.model_copy(update={"limit_rows": SAMPLE})
    return tokenizer_of(recipe.model_copy(update={"data": few}))


def _student(recipe: Recipe, models: Models) -> nn.Module:
    """What is trained; a model to go on from must mean the same tokens as the target."""
    if recipe.method in ("medusa", "medusa2", "hydra", "bpd", "eagle", "eagle3"):
        drafter = _heads(recipe, models.target())
        _check_warm_start(drafter, recipe, models)
        return _with_tuned(drafter, recipe, models.target()) if recipe.tunes_target else drafter

    from ...trainers.student.lora import adapt_shapes
    from .boost import at_once

    if recipe.method == "boost":
        return at_once(recipe, lambda each: _draft(each, models))
    return adapt_shapes(_draft(recipe, models), recipe.lora, recipe.model)


def _draft(recipe: Recipe, models: Models) -> PreTrainedModel:
    """A model of its own, given or fresh."""
    import torch

    from ...decoding.target.hub import is_here, load_config, load_sizes
    from ...drafters.folder import check_trainable_model
    from ...trainers.config import FROM_TARGET
    from ...trainers.distill import check_same_tokens
    from ...trainers.pruning.sizes import check_not_pruned, pruned_config
    from ...trainers.student.architecture import fresh_model

    given, sizes = recipe.model.start_from, recipe.model.sizes
    if recipe.method not in ("distill", "boost"):
        check_not_pruned(recipe.model)
    if given == FROM_TARGET:
        target = models.target()
        name = type(target).__name__
        return skeleton(pruned_config(recipe.model, target.config, name))
    if given is not None:
        check_trainable_model(given)
    if given is not None and sizes is not None and not is_here(given):
        return _to_go_on_from(given, load_sizes(sizes), recipe)
    if given is not None:
        if recipe.method != "target" and not models.described:
            check_same_tokens(given, models.tokenizer())
        return _to_go_on_from(given, load_config(given), recipe)
    vocabulary, like = recipe.tokenizer.vocabulary, None
    if recipe.method != "target":
        like = models.target().config.get_text_config(decoder=True)
        vocabulary = like.vocab_size
    elif recipe.tokenizer.path is not None:
        vocabulary = len(models.tokenizer())
    with torch.device("meta"):
        made = fresh_model(recipe.model, vocabulary=vocabulary, eos=None, like=like)
    _check_row_length(made, recipe, "a model from scratch (model.max_positions)")
    return made


def _to_go_on_from(given: str, config: Any, recipe: Recipe) -> PreTrainedModel:
    """A model that `model.start_from` names; its loss will read its projection alone."""
    from ...drafters.projection import check_plain_logits

    model = skeleton(config)
    check_plain_logits(model, f"model.start_from {given!r}")
    _check_row_length(model, recipe, f"model.start_from {given!r}")
    return model


def _heads(recipe: Recipe, target: PreTrainedModel) -> nn.Module:
    """Medusa's heads or EAGLE's network for a target, their weights only shapes."""
    import torch

    from ...drafters.eagle.layers import EagleShape
    from ...drafters.eagle.net import EagleNet
    from ...drafters.eagle.net3 import Eagle3Net, Eagle3Shape
    from ...drafters.heads.bpd import BpdHeads
    from ...drafters.heads.hydra import HydraHeads, HydraShape
    from ...drafters.heads.medusa import MedusaHeads, MedusaShape, projection_of
    from ...trainers.eagle3 import chosen_layers
    from ...trainers.medusa import check_no_prefix

    with torch.device("meta"):
        if recipe.method == "eagle":
            return EagleNet(EagleShape.like(target.config))
        V, H = projection_of(target).shape
        if recipe.method == "bpd":
            return BpdHeads.for_target(target, block=recipe.bpd.block, inner=recipe.bpd.inner)
        if recipe.method == "eagle3":
            words = min(V, recipe.eagle3.vocabulary)
            layers = chosen_layers(recipe.eagle3, target)
            fused = Eagle3Shape.of(
                target.config,
                layers=layers,
                vocabulary=V,
                draft_vocabulary=words,
                feature_norms=recipe.eagle3.feature_norms,
            )
            return Eagle3Net(fused, range(words))
        chosen = recipe.medusa
        sizes = (chosen.heads, chosen.layers, H, V, chosen.shared_head)
        if recipe.method == "hydra":
            layer = EagleShape.like(target.config) if chosen.prefix else None
            return HydraHeads(HydraShape(*sizes, layer))
        check_no_prefix(chosen)
        return MedusaHeads(MedusaShape(*sizes))


def _check_warm_start(drafter: nn.Module, recipe: Recipe, models: Models) -> None:
    """Raise RequestError where training could not go on from the drafter that is named."""
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
    check_warm_start(drafter, recipe.model, identity)


def _with_tuned(drafter: nn.Module, recipe: Recipe, target: PreTrainedModel) -> nn.Module:
    """A drafter and what of the target moves with it."""
    import copy

    import torch

    from ...decoding.target.backbone import Backbone
    from ...trainers.teacher.tuned import TunedTarget, check_precision

    check_precision(recipe.tune, recipe.target)
    with torch.device("meta"):
        own: Any = copy.deepcopy(target)
        tuned = TunedTarget(Backbone(own, name=recipe.target.path), recipe.tune)
    moving = torch.nn.ParameterList(tuned.trained().values())
    return torch.nn.ModuleList([drafter, moving])


def skeleton(config: Any, trust: bool = False) -> PreTrainedModel:
    """The model of a config, its weights only shapes."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except ValueError as error:
        raise RequestError(f"{config.model_type} is no causal LM: {error!s:.200}") from error
