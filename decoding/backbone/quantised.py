"""Targets whose linear layers hold weights of fewer bits: quantised checkpoints, and models quantised on request.

`transformers` reads and rounds them. This file says which quantisers a model's config may name and which package each
needs, and keeps the output projection as it is, because training and drafters compute with its weight. Hidden states
have the precision that the target is loaded in. Read next: `loading.py`; `foreign.py`, the rest of a config.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...errors import EnvironmentFailure, RequestError

if TYPE_CHECKING:
    from torch import Tensor, nn

KEY = "quantization_config"
"""Entry of a config: how the weights are quantised."""
ASKED = {"int8": 8, "int4": 4}
"""Bits of a weight, by the value of `target.quantization`."""
GROUPS = (128, 64, 32, 16)
"""Inputs that share a scale, of 4 bits: the usual sizes."""
_PACKAGES = {
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
    "fp8": (),
    "gptq": ("gptqmodel", "optimum"),
    "torchao": ("torchao",),
}
"""Quantisers whose configs are data, and the packages that each needs beside `transformers`."""
_TORCHAO = frozenset(
    (
        "Float8DynamicActivationFloat8WeightConfig",
        "Float8WeightOnlyConfig",
        "Int4PackingFormat",
        "Int4WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Int8WeightOnlyConfig",
        "IntxChooseQParamsAlgorithm",
        "IntxPackingFormat",
        "IntxWeightOnlyConfig",
        "MappingType",
        "PerAxis",
        "PerGroup",
        "PerRow",
        "PerTensor",
        "torch.dtype",
    )
)
"""What a config of torchao may name: torchao would call anything that its modules have under a name."""


def check_quantisation(path: str, file: str, how: Any) -> None:
    """Refuse a `quantization_config` of a model from elsewhere that names anything but a known quantiser.

    Args:
        path: the model, as the user named it.
        file: where the entry stands.

    Raises:
        RequestError: it does; what it names is in the message.
    """
    method = method_of(how)
    if method not in _PACKAGES:
        raise RequestError(
            f"the {file} of {path!r} says that its weights are quantised by {method} ({str(how):.80}), which is not "
            f"supported; expected one of {', '.join(sorted(_PACKAGES))}: take the unquantised model (bf16), and set "
            "target.quantization if it has to be small"
        )
    odd = next((name for name in _types(how) if name not in _TORCHAO), None) if method == "torchao" else None
    if odd is not None:
        raise RequestError(
            f"the {file} of {path!r} names {odd!r:.80} of torchao as the way its weights are quantised, which is not "
            "a known one; take the unquantised model (bf16), and set target.quantization if it has to be small"
        )


def check_can_read(path: str, config: Any, asked: str | None = None) -> None:
    """Refuse, before any weight is read, a quantised target that this machine cannot compute.

    Args:
        config: the model's own.
        asked: the value of `target.quantization`.

    Raises:
        RequestError: it is quantised already, and asked for in other bits.
        EnvironmentFailure: a package or a device is missing.
    """
    how = entry_of(config)
    if asked is not None and how is not None:
        raise RequestError(
            f"target.quantization is {asked}, and {path!r} is quantised already (by {method_of(how)}, as its "
            "config.json says); leave target.quantization out, or name the unquantised model"
        )
    method = "torchao" if asked is not None else method_of(how)
    if how is None and asked is None:
        return
    missing = [name for name in _PACKAGES.get(method, ()) if find_spec(name) is None]
    if missing:
        what = f"target.quantization {asked}" if asked is not None else f"{path!r}, which is quantised by {method},"
        extra = "'draftsmith[quant]'" if missing == ["torchao"] else " ".join(missing)
        raise EnvironmentFailure(
            f"{what} needs the package {' and '.join(missing)}, which is not here: pip install {extra}, or take the "
            "unquantised model (bf16)"
        )
    if how is not None:
        _check_machine(path, method, how)


def asked_config(asked: str, model: nn.Module) -> Any:
    """What `from_pretrained` takes to round the weights of a model while they are read; as of `torchao_config`.

    Args:
        model: in shapes alone is enough.
    """
    from transformers import TorchAoConfig

    bits = ASKED[asked]
    return TorchAoConfig(torchao_config(bits, group_for(model) if bits == 4 else None))


def torchao_config(bits: int, group_size: int | None) -> Any:
    """torchao's own description of weights of `bits` bits.

    Args:
        bits: 8 (one scale per output) or 4 (one scale per group of inputs).
        group_size: inputs that share a scale; for 4 bits only.

    Raises:
        RequestError: there is none such.
        EnvironmentFailure: torchao is missing.
    """
    import torch

    try:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
    except ImportError as error:
        raise EnvironmentFailure(
            f"quantised weights need torchao, which cannot be imported here ({error}): pip install 'draftsmith[quant]'"
        ) from error
    if bits == 8 and group_size is None:
        return Int8WeightOnlyConfig()
    if bits == 4 and isinstance(group_size, int) and group_size > 0:
        # of torchao's layouts the one that every device reads: a byte holds one weight of 4 bits
        four: Any = torch.int4  # type: ignore[attr-defined]
        return IntxWeightOnlyConfig(weight_dtype=four, granularity=PerGroup(group_size))
    raise RequestError(
        f"weights of {bits} bits with groups of {group_size}; expected 8 bits without groups, or 4 with"
    )


def group_for(model: nn.Module) -> int:
    """The largest usual group that divides the inputs of every linear layer.

    Raises:
        RequestError: there is none.
    """
    common = math.gcd(*(each.in_features for _, each in linear(model)))
    group = next((size for size in GROUPS if common % size == 0), None)
    if group is None:
        raise RequestError(
            f"the target's linear layers have {common} as the largest common divisor of their "
            f"inputs; 4 bits need groups of {', '.join(map(str, GROUPS))}: take 8 bits"
        )
    return group


def check_projection(model: Any, path: str) -> None:
    """Raise RequestError if the embedding or the output projection of a loaded model holds no plain numbers."""
    from torch import nn

    for what, layer in (
        ("embedding", model.get_input_embeddings()),
        ("output projection", model.get_output_embeddings()),
    ):
        weight = getattr(layer, "weight", None)
        if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.element_size() == 1:
            raise RequestError(
                f"the {what} of {path!r} is quantised too; training and drafters compute with its weight: take a "
                "checkpoint that leaves it as it is (most do), or the unquantised model and target.quantization"
            )


def quantisation_of(config: Any) -> str | None:
    """How the weights of a model with that config are quantised, in a few words; None if they are not."""
    how = entry_of(config)
    if how is None:
        return None
    method = method_of(how)
    group = _group_size(how)
    shared = [] if group is None else ["groups of", str(group)]
    bits = _bits(how)
    if bits is not None:
        return " ".join([method, str(bits), "bits", *shared])
    return " ".join([method, *(name for name in _types(how) if name.endswith("Config")), *shared])


def bytes_a_weight(asked: str | None, config: Any) -> float | None:
    """Bytes of one weight of a quantised layer; None for a target that is not quantised.

    Args:
        asked: the value of `target.quantization`; in both of them a weight takes a byte, as torchao lays them out
            for every device.
    """
    how = entry_of(config)
    if asked is not None:
        return 1.0
    if how is None:
        return None
    bits = _bits(how)
    return 1.0 if bits is None else bits / 8


def entry_of(config: Any) -> dict[str, Any] | None:
    """A config's entry on quantisation as a table; None where it has none."""
    found = getattr(config, KEY, None) or getattr(config.get_text_config(decoder=True), KEY, None)
    if not found:
        return None
    return dict(found) if isinstance(found, dict) else dict(found.to_dict())


def method_of(how: Any) -> str:
    """The name of the quantiser in such an entry."""
    if not isinstance(how, dict):
        return f"{how!r:.40}"  # a word is no table, not even a known one
    method = how.get("quant_method")
    if method is None and any(how.get(f"load_in_{bits}bit") for bits in (4, 8)):
        return "bitsandbytes"  # its first checkpoints named no method
    return str(getattr(method, "value", method))


def plain_parts(weight: Tensor) -> list[Tensor]:
    """The plain tensors that a weight of a class of its own, such as torchao's, consists of; a cut one is itself."""
    from .cut import held_part

    if not hasattr(weight, "__tensor_flatten__") or held_part(weight) is not weight:
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(weight, name))]


def linear(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of a model by name."""
    from torch import nn

    return ((name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear))


def _check_machine(path: str, method: str, how: dict[str, Any]) -> None:
    """Ask `transformers` whether a checkpoint's quantiser runs here."""
    from transformers.quantizers.auto import AutoHfQuantizer

    quantiser: Any = AutoHfQuantizer.from_config(dict(how), pre_quantized=True)
    try:
        quantiser.validate_environment(device_map=None)
    except (ImportError, RuntimeError) as error:
        raise EnvironmentFailure(
            f"{path!r} is quantised by {method}, which does not run here: {str(error).strip().splitlines()[0]}"
        ) from error
    if getattr(quantiser.quantization_config, "dequantize", False) and not how.get("dequantize"):
        raise EnvironmentFailure(
            f"{path!r} is quantised by {method}, which this machine's device cannot compute: it would be read as "
            "bf16, another model than the one that is served. Expected a GPU with fp8 (capability 8.9 or higher); or "
            "take the unquantised model"
        )


def _bits(how: dict[str, Any]) -> int | None:
    """Bits of a weight, where the quantiser names them."""
    named = (how.get("bits"), how.get("w_bit"), *(n for n in (4, 8) if how.get(f"load_in_{n}bit")))
    return next((each for each in named if isinstance(each, int)), None)


def _group_size(how: Any) -> int | None:
    """Inputs that share a scale, at whatever depth the quantiser names them; None where it does not."""
    waiting = [how]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, dict):
            named = next((each[name] for name in ("group_size", "q_group_size") if each.get(name) is not None), None)
            if isinstance(named, int) and named > 0:  # -1: a whole row
                return named
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return None


def _types(how: Any) -> list[str]:
    """What a config of torchao names, from the outside in."""
    found: list[str] = []
    waiting = [how]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, dict):
            if "_type" in each:
                found.append(str(each["_type"]))
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return found
