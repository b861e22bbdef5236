"""The pre-flight's checks of models: built on torch's meta device, so no weights are read.

Read next: `check.py`, which calls them among the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import DraftsmithError, EnvironmentFailure, RequestError
from .recipe import Recipe

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_Made = TypeVar("_Made")

SAMPLE = 200  # rows of data that are read
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


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
        self.target: Once[PreTrainedModel] = Once(partial(_target, recipe))
        self.tokenizer: Once[PreTrainedTokenizerBase] = Once(partial(_tokenizer, recipe, self))
        self.student: Once[nn.Module] = Once(partial(_student, recipe, self))


def check_target(recipe: Recipe, models: Models) -> str:
    """Size of the target; its state can be rolled back, and training rows fit its context."""
    from ..decoding.attention import use_grouped_attention
    from ..decoding.backbone import refuse_state_without_rollback

    model = models.target()
    use_grouped_attention(model)  # as `load_target` does, where it can
    refuse_state_without_rollback(model)
    config: Any = model.config
    length, context = recipe.data.sequence_length, getattr(config, "max_position_embeddings", None)
    if context is not None and length > context:
        raise RequestError(
            f"data.sequence_length is {length}; the target's context is {context} tokens"
        )
    memory = parameters(model) * _BYTES[recipe.target.dtype]
    return (
        f"{config.model_type}, {parameters(model) / 1e6:,.1f} M parameters, {in_units(memory)} in "
        f"{recipe.target.dtype}, vocabulary {config.vocab_size:,}, context {context}"
    )


def check_model(recipe: Recipe, models: Models) -> str:
    """Size of what is trained, with gradient and two moments in fp32, and the memory for it."""
    from ..trainers.distill import refuse_nothing

    objective, distils = recipe.objective, recipe.method != "target"
    if recipe.method in ("distill", "medusa", "hydra"):
        refuse_nothing(objective)
    model: Any = models.student()
    weights, state = parameters(model), 16 * parameters(model)
    # logits, their softmax and gradient of draft and target exist for one chunk at a time
    need = {"weights, gradient and moments": state}
    speaks: Any = models.target() if distils else model
    need["a chunk of logits"] = objective.chunk * speaks.config.vocab_size * 4 * _BYTES["fp32"]
    if distils:
        need["the target"] = parameters(models.target()) * _BYTES[recipe.target.dtype]
    listed = ", ".join(f"{in_units(count)} for {what}" for what, count in need.items())
    have = _device_memory()
    if sum(need.values()) > have and processes() == 1:  # several may share the state
        raise EnvironmentFailure(
            f"training needs {listed}, and activations; the device has {in_units(have)}. Take a "
            "smaller model or objective.chunk, or shard it with several processes"
        )
    return f"{weights / 1e6:,.2f} M parameters; {listed}, activations beside it"


def _target(recipe: Recipe) -> PreTrainedModel:
    from ..decoding.loading import load_config

    path, revision = recipe.target.path, recipe.target.revision
    trust = recipe.target.trust_remote_code
    return _skeleton(load_config(path, revision=revision, trust_remote_code=trust), trust)


def _tokenizer(recipe: Recipe, models: Models) -> PreTrainedTokenizerBase:
    """The run's tokenizer; one that is yet to be trained learns from the first rows only."""
    from .inspect import tokenizer_of

    if recipe.method != "target":
        models.target()  # where there is no model there is no tokenizer: one reason is enough
    few = recipe.data.model_copy(update={"limit_rows": SAMPLE})
    return tokenizer_of(recipe.model_copy(update={"data": few}))


def _student(recipe: Recipe, models: Models) -> nn.Module:
    """What is trained; a model to go on from must mean the same tokens as the target."""
    import torch

    if recipe.method in ("medusa", "hydra", "eagle", "eagle3"):
        return _heads(recipe, models.target())

    from ..decoding.loading import load_config, load_tokenizer
    from ..trainers.architecture import fresh_model
    from ..trainers.distill import refuse_other_tokens

    given = recipe.model.start_from
    if given is not None:
        if recipe.method != "target":
            refuse_other_tokens(load_tokenizer(given), models.tokenizer(), recipe.model)
        return _skeleton(load_config(given))
    vocabulary, like = recipe.tokenizer.vocabulary, None
    if recipe.method != "target":
        like = models.target().config
        vocabulary = like.vocab_size
    elif recipe.tokenizer.path is not None:
        vocabulary = len(models.tokenizer())
    with torch.device("meta"):
        return fresh_model(recipe.model, vocabulary=vocabulary, eos=None, like=like)


def _heads(recipe: Recipe, target: PreTrainedModel) -> nn.Module:
    """Medusa's heads or EAGLE's network for a target, their weights only shapes."""
    import torch

    from ..drafters.eagle_layers import EagleShape
    from ..drafters.eagle_net import EagleNet
    from ..drafters.eagle_net3 import Eagle3Net, Eagle3Shape
    from ..drafters.hydra import HydraHeads
    from ..drafters.medusa import MedusaHeads, MedusaShape, projection_of
    from ..trainers.eagle import refuse_biased_head
    from ..trainers.eagle3 import chosen_layers

    with torch.device("meta"):
        if recipe.method == "eagle":
            refuse_biased_head(target)
            return EagleNet(EagleShape.like(target.config))
        V, H = projection_of(target).shape
        if recipe.method == "eagle3":
            refuse_biased_head(target)
            words = min(V, recipe.eagle3.vocabulary)
            layers = chosen_layers(recipe.eagle3, target)
            fused = Eagle3Shape.of(
                target.config, layers=layers, vocabulary=V, draft_vocabulary=words
            )
            return Eagle3Net(fused, range(words))
        sizes = recipe.medusa
        shape = MedusaShape(sizes.heads, sizes.layers, H, V, sizes.shared_head)
        return HydraHeads(shape) if recipe.method == "hydra" else MedusaHeads(shape)


def _skeleton(config: Any, trust: bool = False) -> PreTrainedModel:
    """The model of a config, its weights only shapes."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except ValueError as error:
        raise RequestError(f"{config.model_type} is no causal LM: {error!s:.200}") from error


def parameters(model: nn.Module) -> int:
    """How many numbers are in the weights; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def processes() -> int:
    """Processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _device_memory() -> int:
    """Bytes of the first GPU, or of the machine where there is none."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().total)


def in_units(count: float) -> str:
    """Bytes in the unit that fits, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
