"""Refuses models whose logits are more than the projection of their last hidden state.

Training never makes a model's logits through its own forward pass: losses in chunks and drafters
that ride on a target multiply hidden states by the output projection's weight. Classes that add a
bias, cap their logits (Gemma 2) or scale them (Cohere, Granite) have another distribution than that.
Read next: `medusa.py`, `projection_of`; `trainers/losses/chunked.py`.

Shapes: N tokens of the probe row, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# entries of a config that change logits, each with the value that changes nothing
_SETTINGS = {"final_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}
_PROBED = 8  # tokens of the probe row
_ROUNDING = 4  # last bits of the largest logit; one forward pass gives both sides


def check_plain_logits(model: PreTrainedModel, whose: str = "the target") -> None:
    """Raise RequestError where a causal LM's logits are not `hidden @ weight.T` and nothing more.

    What its config says is read first; then one short row goes through it, which finds every class
    that does something else. Weights that are only shapes, as in the pre-flight, leave the config.

    Args:
        whose: what the message calls the model, and where the recipe names it.
    """
    difference = _by_config(model) or _by_measuring(model)
    if difference is not None:
        raise RequestError(
            f"{whose} ({type(model).__name__}) {difference}; expected logits that are the output "
            "projection of the last hidden state and nothing more: training, and drafters on "
            "hidden states, compute only that. Take another model; the decoder itself runs this "
            "one, with an independent draft model as it is or a method without training"
        )


def _by_config(model: Any) -> str | None:
    """How the logits differ from a projection by the model's parts and config; None if they do not."""
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        return "has an output projection that has a bias"
    config = model.config.get_text_config(decoder=True)
    for name, neutral in _SETTINGS.items():
        value = getattr(config, name, None)
        if value not in (None, neutral):
            return f"changes its logits after the projection: {name} is {value} in its config"
    return None


def _by_measuring(model: Any) -> str | None:
    """How far the model's logits are from the projection on one row; None if they are the same."""
    weight_VH = model.get_output_embeddings().weight
    if weight_VH.is_meta:
        return None
    hidden_NH, logits_NV = _probe(model)
    plain_NV = F.linear(hidden_NH.to(weight_VH.dtype), weight_VH.detach()).float()
    shared = min(plain_NV.shape[-1], logits_NV.shape[-1])
    gap = float((logits_NV[:, :shared].float() - plain_NV[:, :shared]).abs().max())
    largest = float(plain_NV.abs().max())
    if gap <= _ROUNDING * torch.finfo(hidden_NH.dtype).eps * largest:
        return None
    return (
        f"changes its logits after the projection: on a row of {_PROBED} tokens they differ from "
        f"it by up to {gap:.3g}, where the largest is {largest:.3g}"
    )


@torch.no_grad()
def _probe(model: Any) -> tuple[Tensor, Tensor]:
    """The last hidden states [N, H] and the logits [N, V] of one forward pass over one row."""
    seen: list[Tensor] = []
    decoder = model.get_decoder()
    hook = decoder.register_forward_hook(lambda _module, _given, out: seen.append(out[0]))
    rows = model.get_input_embeddings().weight.shape[0]
    # spread over the vocabulary, without its ends, where the special tokens are
    tokens_N = torch.linspace(0, rows - 1, _PROBED + 2, device=model.device)[1:-1].long()
    try:
        logits_1NV = model(input_ids=tokens_N[None], use_cache=False).logits
    finally:
        hook.remove()
    return seen[-1][0], logits_1NV[0]
