"""How a model makes logits of its last hidden states, as one record: product, bias, scale and cap.

Training never makes a model's logits through its own forward pass: losses in chunks and drafters that ride on a
target compute them here. Families differ in what stands behind the product: a bias (Phi, GPT-J), a factor (Cohere,
Granite), a cap (Gemma 2). The config says which; one row through the model's own forward pass says whether that is
all. Read next: `trainers/losses/chunked.py`; `heads/medusa.py`.

Shapes: N tokens of the probe row, V vocabulary, H hidden size, X any number of leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.backbone.hidden_states import decoder_of
from ..errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# entries of a config: the product is multiplied by the first, divided by the second, capped at the third
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_MULTIPLIES = ("hyperclovax",)  # model types whose `logits_scaling` is a factor
_PROBED = 8  # tokens of the probe row
_ROUNDING = 4  # last bits of the largest logit; one forward pass gives both sides


@dataclass(frozen=True)
class Shaping:
    """What a model does to its logits behind the product: cap * tanh(scale * x / cap)."""

    scale: float = 1.0
    cap: float | None = None
    """None: without the hyperbolic tangent."""

    def __call__(self, product: Tensor) -> Tensor:
        """Logits of any shape from the product of states and projection; differentiable."""
        scaled = product if self.scale == 1 else product * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)

    @classmethod
    def of(cls, model: Any) -> Shaping:
        """What the config of a causal LM of `transformers` names."""
        return cls.named(model.config.get_text_config(decoder=True))

    @classmethod
    def named(cls, config: Any) -> Self:
        """What the config names, of the text alone."""
        scale = 1.0
        for name in (*_FACTORS, *_DIVISORS):
            value = getattr(config, name, None)
            if value is not None:
                divides = name in _DIVISORS and config.model_type not in _MULTIPLIES
                scale *= 1 / float(value) if divides else float(value)
        caps = [float(value) for name in _CAPS if (value := getattr(config, name, None)) is not None]
        return cls(scale, min(caps, default=None))


PLAIN = Shaping()
"""The product and nothing more."""


@dataclass(frozen=True)
class Projection:
    """The map from last hidden states to logits; its tensors are the model's own, not copies."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    shaping: Shaping = PLAIN

    @classmethod
    def of(cls, model: Any) -> Self:
        """That of a causal LM of `transformers`, as `check_logits` holds it to be."""
        head = model.get_output_embeddings()
        return cls(head.weight, getattr(head, "bias", None), Shaping.of(model))

    def logits(self, hidden_XH: Tensor) -> Tensor:
        """fp32 [..., V] of states in any precision; the product is made in that of the weight."""
        return self.shaping(self.product(hidden_XH).float())

    def product(self, hidden_XH: Tensor) -> Tensor:
        """The same before what stands behind the product, in the weight's precision."""
        return F.linear(hidden_XH.to(self.weight_VH.dtype), self.weight_VH, self.bias_V)

    def rows(self, index: slice | Tensor) -> Self:
        """The same for a part of the vocabulary."""
        bias_V = None if self.bias_V is None else self.bias_V[index]
        return replace(self, weight_VH=self.weight_VH[index], bias_V=bias_V)

    def in_dtype(self, dtype: torch.dtype) -> Self:
        """The same with a product in that precision."""
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        return replace(self, weight_VH=self.weight_VH.to(dtype), bias_V=bias_V)


def scaled_weight(model: Any) -> Tensor:
    """The weight [V, H] that new projections of a drafter's own begin with: the target's, its scale within.

    Its bias and its cap stay out: such a projection is a product alone, as serving engines read it. The cap
    keeps the order of the tokens.
    """
    projection = Projection.of(model)
    scale = projection.shaping.scale
    return projection.weight_VH if scale == 1 else projection.weight_VH * scale


def check_logits(model: PreTrainedModel, whose: str = "the target") -> None:
    """Raise RequestError where a causal LM makes its logits in another way than `Projection` does.

    One short row goes through it. The states that its head reads are changed on the way, to lengths from
    1/64 of their own to twice that: a cap hides what happens to large logits, and leaves small ones as they are.
    Weights that are only shapes, as in the pre-flight, pass.

    Args:
        whose: what the message calls the model, and where the recipe names it.
    """
    if model.get_output_embeddings().weight.is_meta:
        return
    found = _difference(model)
    if found is not None:
        raise RequestError(
            f"{whose} ({type(model).__name__}) changes its logits behind the output projection: {found}. Expected "
            "the projection of the last hidden state, with a bias, a factor or a cap that its config names: "
            "training, and drafters on hidden states, compute only that. Take another model; the decoder itself "
            "runs this one, with an independent draft model as it is or a method without training"
        )


@torch.no_grad()
def _difference(model: Any) -> str | None:
    """How far the model's logits are from the record's on one row; None if they are the same."""
    projection = Projection.of(model)
    hidden_NH, logits_NV = _probe(model)
    own_NV = projection.logits(hidden_NH)
    shared = min(own_NV.shape[-1], logits_NV.shape[-1])
    gap_N = (logits_NV[:, :shared].float() - own_NV[:, :shared]).abs().amax(-1)
    largest_N = own_NV[:, :shared].abs().amax(-1)
    worst = int((gap_N / largest_N.clamp_min(1e-30)).argmax())
    gap, largest = float(gap_N[worst]), float(largest_N[worst])
    if gap <= _ROUNDING * torch.finfo(hidden_NH.dtype).eps * largest:
        return None
    return f"on a row of {_PROBED} tokens they differ by up to {gap:.3g} from it, where the largest is {largest:.3g}"


@torch.no_grad()
def _probe(model: Any) -> tuple[Tensor, Tensor]:
    """Hidden states [N, H], and the logits [N, V] that one forward pass over one row makes of them."""
    seen: list[Tensor] = []

    def spread(_module: Any, _given: Any, out: Any) -> Any:
        hidden_1NH = out[0]
        lengths_N = 2.0 ** torch.linspace(-6, 1, hidden_1NH.shape[1], device=hidden_1NH.device)
        changed_1NH = (hidden_1NH * lengths_N[:, None]).to(hidden_1NH.dtype)
        seen.append(changed_1NH)
        if isinstance(out, tuple):
            return (changed_1NH, *out[1:])
        out["last_hidden_state"] = changed_1NH
        return out

    hook = decoder_of(model).register_forward_hook(spread)
    rows = model.get_input_embeddings().weight.shape[0]
    # spread over the vocabulary, without its ends, where the special tokens are
    tokens_N = torch.linspace(0, rows - 1, _PROBED + 2, device=model.device)[1:-1].long()
    try:
        logits_1NV = model(input_ids=tokens_N[None], use_cache=False).logits
    finally:
        hook.remove()
    return seen[-1][0], logits_1NV[0]
