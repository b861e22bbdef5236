"""Low-rank changes to a model's linear layers (LoRA, Hu et al. 2021), inserted by `peft`.

Shared by a target that is tuned (`teacher/tuned.py`) and a draft with an adapter (`distill.py`): which
layers get a change, and the model without them. Read next: `drafters/model/adapters.py`, which
switches, saves and loads a draft's adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...drafters.folder import adapters_of, save_draft_model
from ...drafters.model.adapters import (
    BASE,
    FOLDER,
    adapted_layers,
    adapter_names,
    inject,
    load_adapters,
    save_adapters,
)
from ...errors import RequestError
from ..config import ModelConfig
from ..method_config import LoraConfig
from ..methods import METHODS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CUT_BY_ZERO_3 = (
    "a draft with an adapter decodes in probes as it is, which ZeRO-3 cuts into pieces; use "
    "ZeRO-2: only the adapter needs memory for its moments"
)
TUNED_NAME = "default"  # of the one adapter of a tuned target, which is never selected by name


def add_adapter(
    model: nn.Module, name: str, *, rank: int, alpha: float, dropout: float, layers: Sequence[str], section: str
) -> None:
    """Insert an adapter into the layers; it alone is trained and, beside the base, computed.

    Args:
        layers: names of those that get one, without the path; none: every linear layer in front of
            the output projection.
        section: the recipe's section, for the message.

    Raises:
        RequestError: no layer has one of these names.
    """
    from peft import LoraConfig as Lora

    known = _linear_layers(model)
    unknown = sorted(set(layers) - known)
    if unknown:
        raise RequestError(
            f"{section}.layers names {', '.join(unknown)}, and the model has no such linear layer "
            f"in front of its output projection; it has {', '.join(sorted(known))}"
        )
    scale: Any = alpha
    lora = Lora(r=rank, lora_alpha=scale, lora_dropout=dropout, target_modules=sorted(layers or known))
    inject(lora, model, name)
    model.requires_grad_(False)
    for layer in adapted_layers(model):
        layer.set_adapter(name)  # which sets what is trained, too
    for parameter in model.parameters():
        if parameter.requires_grad:  # adapters of a half-precision model: small steps need fp32
            parameter.data = parameter.data.float()


def without_adapters(model: PreTrainedModel, *, add: str | None = None) -> PreTrainedModel:
    """A model of the same class without adapters; the change of `add` is added to its weights."""
    source: Any = model
    with torch.device("meta"):
        plain = type(source)(source.config)
    plain.load_state_dict(_plain_state(model, add), assign=True)
    for name, buffer in source.named_buffers():  # some are not in the state: rotary frequencies
        owner, _, last = name.rpartition(".")
        setattr(plain.get_submodule(owner), last, buffer)
    plain.generation_config = source.generation_config
    return plain


def _plain_state(model: nn.Module, add: str | None) -> dict[str, Tensor]:
    """The state of a model as if it had never had adapters."""
    changed = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and add in module.lora_A
    }
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        layer: Any = changed.get(plain)
        if layer is not None:
            tensor = (tensor.float() + layer.get_delta_weight(add).float()).to(tensor.dtype)
        state[plain] = tensor
    return state


def _linear_layers(model: Any) -> set[str]:
    """Names, without paths, of the linear layers in front of the output projection, adapted ones included."""
    from transformers.pytorch_utils import Conv1D

    # code that reads the output projection's weight itself would not see a change beside it
    names = {
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and ".lora_" not in name
        and module is not model.get_output_embeddings()
    }
    return {name.rsplit(".", 1)[-1] for name in names}


# ---- an adapter of a draft -------------------------------------------------------------------


def check_adapter(lora: LoraConfig, model: ModelConfig, method: str) -> None:
    """Raise RequestError for a recipe with an adapter that its method does not train."""
    if lora.rank is None:
        return
    if "lora" not in METHODS[method].sections:
        readers = " or ".join(f"`{each.name}`" for each in METHODS.values() if "lora" in each.sections)
        raise RequestError(
            f"lora.rank is set, and method {method!r} trains no adapter of a draft; expected "
            f"method {readers}, or `tune` for adapters that go into the target"
        )
    if model.start_from is None:
        raise RequestError(
            "lora.rank is set and model.start_from is empty: an adapter changes an existing draft; "
            "name its folder, for example the `drafter` of a run"
        )
    if lora.name == BASE:
        raise RequestError(f"lora.name is {BASE!r}, which stands for no adapter; choose another")


def adapt(draft: nn.Module, lora: LoraConfig, model: ModelConfig) -> None:
    """Load the adapters of the folder that `model.start_from` names, and add a fresh one.

    Raises:
        RequestError: the draft has an adapter of that name, no such layers, or ZeRO-3 shards it.
    """
    existing = _existing_adapters(lora, model)
    if lora.rank is not None:
        _check_not_sharded()
        load_adapters(draft, Path(model.start_from or ""), existing)
        _add_own(draft, lora, lora.rank)


def adapt_shapes(draft: PreTrainedModel, lora: LoraConfig, model: ModelConfig) -> PreTrainedModel:
    """`draft`, whose weights are only shapes, with the adapter to be trained; errors as `adapt`."""
    _existing_adapters(lora, model)
    if lora.rank is not None:
        with torch.device("meta"):
            _add_own(draft, lora, lora.rank)
    return draft


def _add_own(draft: nn.Module, lora: LoraConfig, rank: int) -> None:
    add_adapter(
        draft, lora.name, rank=rank, alpha=lora.alpha, dropout=lora.dropout, layers=lora.layers, section="lora"
    )


def _existing_adapters(lora: LoraConfig, model: ModelConfig) -> list[str]:
    """Names of the adapters in the folder that `start_from` names, if the recipe can start from them."""
    existing = [] if model.start_from is None else adapters_of(Path(model.start_from))
    if existing and lora.rank is None:
        raise RequestError(
            f"model.start_from {model.start_from!r} has adapters ({', '.join(existing)}), made for "
            "its base as it is; set lora.rank to train another one, or start from a copy without "
            f"its folder `{FOLDER}` and without them in its config.json"
        )
    if lora.name in existing:
        raise RequestError(
            f"model.start_from {model.start_from!r} has an adapter {lora.name!r} already; choose another lora.name"
        )
    return existing


def save_adapted(draft: nn.Module, folder: Path, target: Backbone, lora: LoraConfig) -> None:
    """Write a drafter folder: the unchanged base and every adapter, the trained one as the default."""
    model: Any = draft
    settings = {"adapters": list(adapter_names(draft)), "adapter": lora.name}
    save_draft_model(without_adapters(model), folder, target, settings=settings)
    save_adapters(draft, folder)


def _check_not_sharded() -> None:
    plugin = getattr(AcceleratorState(), "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise RequestError(CUT_BY_ZERO_3)
