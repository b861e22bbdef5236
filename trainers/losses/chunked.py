"""Losses over the vocabulary that never hold all logits at once.

With V = 151,936 the fp32 logits of 2,048 positions weigh 1.2 GB, and a plain distillation loss
keeps about six such tensors. Here positions go through in chunks: logits, loss and the gradient
with respect to the logits of one chunk are made, folded into the gradients of the hidden states
and of the head, and dropped (the idea of Liger's fused linear cross-entropy, Hsu et al. 2024). What a
model does behind its product (a bias, a scale, a cap) is part of it (`drafters/projection.py`).
A method's mathematics is one pure function of a chunk (`TokenLoss`). Read next: `mix.py`, what may
be minimised; `distill.py`.

Shapes: P labelled positions, C positions of a chunk, V vocabulary, H hidden size, R rank of a second product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...decoding.backbone.stacked import laid_out, product
from ...decoding.on_host import distinct, on_host, sent
from ...drafters.layers.draft_vocabulary import ids_of
from ...drafters.layers.static import StaticParts, as_it_is
from ...drafters.projection import PLAIN, Projection, Shaping
from ..config import chunk_of
from .buckets import behind, lengthened
from .mix import Passed, label_kept
from .mix import cross_entropy as label_entropy

_PAYS = 4
"""Chunks from which on another layout of the head's weight is made for them."""

# (draft logits [C, V] fp32, target logits [C, V] fp32 or None, label ids [C]) -> named losses [C]
# The first entry is minimised, the others are only reported. A family may add a column to the
# labels, [C, 2]: whatever the module is given as labels is cut into chunks. And a `Teacher` of its
# own may give the loss something else than logits.
TokenLoss = Callable[[Tensor, Any, Tensor], dict[str, Tensor]]


def cross_entropy(logits_CV: Tensor, _target: Tensor | None, label_C: Tensor) -> dict[str, Tensor]:
    """-log q(label), in nats."""
    ce_C = label_entropy(logits_CV, label_C)
    return {"loss": ce_C, "ce": ce_C.detach()}


class Added(NamedTuple):
    """A second product beside the head's, of something else than hidden states (`drafters/block/dspark.py`)."""

    given_PR: Tensor
    weight_VR: Tensor

    def part(self, part: slice, dtype: torch.dtype) -> Tensor:
        """fp32 [C, V] of some positions; the product is made in `dtype`."""
        return F.linear(self.given_PR[part].to(dtype), self.weight_VR.to(dtype)).float()


class PositionTerm(NamedTuple):
    """A term of the loss that is wanted of every position, without a gradient."""

    name: str
    parts: list[Tensor]
    """Chunk by chunk, in the order of the positions."""


class ChunkedLoss(StaticParts):
    """The head and the loss in one: hidden states in, sum of losses out.

    It is a module with the head's weight as its own parameter, so that whatever shards
    parameters gathers it here as for any other layer. The loss of a chunk goes through `static`, in few sizes of it,
    unless `added`, `keep` or a gain of labels is given.
    """

    weight: Tensor
    bias: Tensor | None
    loss: TokenLoss
    chunk: int
    rows: int

    def __init__(
        self,
        head: nn.Linear,
        loss: TokenLoss,
        *,
        chunk: int | None,
        rows: int | None = None,
        shaping: Shaping = PLAIN,
        over: nn.Module | None = None,
    ) -> None:
        """`rows`: how many of the head's rows are compared, all of them unless it is padded.

        `chunk`: of the recipe; None follows the vocabulary. `shaping`: what becomes of the head's product before it is
        a logit. `over`: the drafter whose draft vocabulary says which rows are compared, if it has one.
        """
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias
        self.shaping = shaping
        self.loss = loss
        self.chunk = chunk_of(chunk, len(head.weight))
        self.rows = len(head.weight) if rows is None else rows
        # in a tuple it is no part of this module; its ids move with it
        self._over = (over,)

    @property
    def projection(self) -> Projection:
        """How the rows that are compared make logits."""
        ids_U = ids_of(self._over[0])
        return self.whole if ids_U is None else self.whole.rows(ids_U)

    @property
    def whole(self) -> Projection:
        """The same of all rows that have a token."""
        return Projection(self.weight, self.bias, self.shaping).rows(slice(self.rows))

    def forward(
        self,
        hidden_PH: Tensor,
        label_P: Tensor,
        teacher: Teacher | None = None,
        share_P: Tensor | None = None,
        *,
        added: Added | None = None,
        loss: TokenLoss | None = None,
        only: Passed | None = None,
        keep: PositionTerm | None = None,
        report_weight_P: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the loss over P positions (a scalar with a gradient) and the sums of all terms.

        No labelled position at all (P = 0, a micro-batch of prompts alone) gives zero and no terms.

        Args:
            hidden_PH: what the head reads.
            label_P: labels, or what else the loss takes in their place.
            teacher: the target, where the loss compares with it.
            share_P: how much each position counts in the sum that is minimised; terms are reported
                without it. [P, 2]: and how much is gained where its label is kept (`mix.label_kept`).
            report_weight_P: how much each position counts in the sums that are reported; default: 1.
            added: a product that is added to the head's, before the shaping.
            loss: another one than the module's own, for this call alone.
            only: return how likely each draft is accepted instead of the sum, without a gradient and without
                terms, as `pace.py` needs before the loss (`Passed`). A flag of forward(), because ZeRO-3
                gathers weights only inside a module's forward.
            keep: a term that is wanted position by position too; nothing is kept where there are none.
        """
        projection = self.projection
        if only is not None:
            return _passed(hidden_PH, projection, added, label_P, self.chunk, teacher, only), {}
        if len(hidden_PH) == 0:
            unused = [hidden_PH, *self.parameters(), *(added or ())]
            return torch.stack([each.sum() for each in unused]).sum() * 0.0, {}
        names: list[str] = []
        chosen = self.loss if loss is None else loss
        weight_VH, bias_V, shaping = projection.weight_VH, projection.bias_V, projection.shaping
        if self.static is not as_it_is and (share_P is None or share_P.ndim == 1):
            assert added is None and keep is None  # noqa: PT018 - of methods that compile nothing
            longer = lengthened(hidden_PH, label_P, teacher, share_P, report_weight_P, self.chunk)
            hidden_PH, label_P, teacher, share_P, report_weight_P = longer
            chosen, shaping = partial(self.static("the loss of a chunk", shaped), chosen, shaping), PLAIN
        given_PR, weight_VR = added or (None, None)
        sums = _ChunkedSum.apply(
            *(hidden_PH, weight_VH, bias_V, given_PR, weight_VR),
            *(shaping, label_P, teacher, share_P, chosen, self.chunk, names, keep, report_weight_P),
        )
        return sums[0], dict(zip(names, sums[1], strict=True))


def shaped(loss: TokenLoss, shaping: Shaping, product_CV: Tensor, outputs: Any, label_C: Tensor) -> dict[str, Tensor]:
    """What a loss makes of the head's product."""
    return loss(shaping(product_CV), outputs, label_C)


@dataclass(frozen=True)
class Teacher:
    """The frozen target's last hidden states and head: its logits are made chunk by chunk."""

    hidden_PH: Tensor
    projection: Projection
    cut: Callable[[Tensor], Any] | None = field(default=None, kw_only=True)
    """Of a draft vocabulary: what a loss over it needs of the target's logits [C, V] (`OfTarget`)."""

    def outputs(self, part: slice, vocabulary: int) -> Any:
        """What the loss needs of some positions."""
        return self.select(self.logits(part), vocabulary)

    def select(self, logits_CV: Tensor, vocabulary: int) -> Any:
        """fp32 logits cut to the rows that have a token; over a draft vocabulary a NamedTuple of tensors."""
        return logits_CV[:, :vocabulary] if self.cut is None else self.cut(logits_CV)

    def logits(self, part: slice) -> Tensor:
        """fp32 logits [C, V] over all rows of the head."""
        return self.projection.logits(self.hidden_PH[part])

    def lengthened(self, more: int) -> Self:
        """The same with so many positions behind, which mean nothing."""
        return replace(self, hidden_PH=behind(self.hidden_PH, more))


@dataclass(frozen=True)
class SharedTeacher(Teacher):
    """A teacher whose logits are made once for all comparisons with the same position.

    `hidden_PH` has every position once. Comparisons are sorted by position, so that those of a
    chunk are with few positions.
    """

    at_P: Tensor
    """Which of the positions each comparison is with, ascending."""
    host_P: Tensor
    """The same where Python can look without waiting for a GPU."""

    @classmethod
    def of(cls, states_NH: Tensor, projection: Projection, at_P: Tensor, **more: Any) -> Self:
        """For comparisons with rows `at_P`, ascending, of `states_NH`."""
        asked_M, host_P = distinct(on_host(at_P))
        device = states_NH.device
        return cls(states_NH[sent(asked_M, device)], projection, sent(host_P, device), host_P, **more)

    def outputs(self, part: slice, vocabulary: int) -> Any:
        first, last = self.host_P[part.start], self.host_P[part.stop - 1]
        # few sizes, as every new one is another kernel (`_parts`)
        size = 1 << int(last - first).bit_length()
        start = max(0, min(int(first), len(self.hidden_PH) - size))
        outputs = self.select(self.logits(slice(start, start + size)), vocabulary)
        here_C = self.at_P[part] - start
        if isinstance(outputs, Tensor):
            return outputs.index_select(0, here_C)
        # `index_select`, because indexing by a tensor takes longer on a CPU
        return type(outputs)(*(None if each is None else each.index_select(0, here_C) for each in outputs))

    def lengthened(self, more: int) -> Self:
        """More comparisons with the last position."""
        at_P, host_P = (torch.cat((each, each[-1:].expand(more))) for each in (self.at_P, self.host_P))
        return replace(self, at_P=at_P, host_P=host_P)


class _ChunkedSum(torch.autograd.Function):
    """Sum over chunks, with the gradients made in the forward pass while the logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        given_PR: Tensor | None,
        weight_VR: Tensor | None,
        shaping: Shaping,
        label_P: Tensor,
        teacher: Teacher | None,
        share_P: Tensor | None,
        loss: TokenLoss,
        chunk: int,
        names: list[str],
        keep: PositionTerm | None,
        report_weight_P: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        compute = compute_dtype(hidden_PH)
        weight, bias = weight_VH.to(compute), None if bias_V is None else bias_V.to(compute)
        wants_hidden, wants_weight, wants_bias, *wants_added = ctx.needs_input_grad[:5]
        wanted = any(ctx.needs_input_grad[:5])
        added = None if given_PR is None or weight_VR is None else Added(given_PR, weight_VR.to(compute))
        hidden_grad = torch.empty_like(hidden_PH) if wants_hidden else None
        weight_grad = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight else None
        bias_grad = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and wants_bias else None
        given_grad = torch.empty_like(given_PR) if given_PR is not None and wants_added[0] else None
        low_grad = (
            torch.zeros_like(weight_VR, dtype=torch.float32) if weight_VR is not None and wants_added[1] else None
        )
        totals: Tensor | None = None
        multiplied = _Product(weight, bias, chunk, len(hidden_PH))
        with torch.autocast(hidden_PH.device.type, enabled=False):
            for part in _parts(len(hidden_PH), chunk):
                hidden_CH = hidden_PH[part].to(compute)
                product_CV = multiplied(hidden_CH).float()
                if added is not None:
                    product_CV += added.part(part, compute)
                outputs = teacher.outputs(part, len(weight)) if teacher is not None else None
                share_C = None if share_P is None else share_P[part]
                loss_C, terms, grad_CV = _terms(loss, shaping, product_CV, outputs, label_P[part], share_C, wanted)
                del product_CV, outputs
                names[:] = list(terms)
                if keep is not None:
                    keep.parts.append(terms[keep.name])
                if report_weight_P is not None:
                    terms = {name: term * report_weight_P[part] for name, term in terms.items()}
                sums = torch.stack([term.sum(dtype=torch.float32) for term in (loss_C, *terms.values())])
                totals = sums if totals is None else totals + sums
                if grad_CV is None:
                    continue
                grad_CV = grad_CV.to(compute)
                if hidden_grad is not None:
                    hidden_grad[part] = grad_CV @ weight
                if weight_grad is not None:  # a frozen head needs none
                    _add_product(weight_grad, grad_CV, hidden_CH)
                if bias_grad is not None:
                    bias_grad += grad_CV.sum(0, dtype=torch.float32)
                if added is not None and given_grad is not None:
                    given_grad[part] = grad_CV @ added.weight_VR
                if added is not None and low_grad is not None:
                    _add_product(low_grad, grad_CV, added.given_PR[part].to(compute))
        assert totals is not None  # P > 0
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad, given_grad, low_grad)
        minimised, reported = totals[0].clone(), totals[1:].clone()
        ctx.mark_non_differentiable(reported)
        return minimised, reported

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        made = (None if each is None else each.mul_(scale.to(each.dtype)) for each in ctx.saved_tensors)
        return (*made, *[None] * 9)


class _Product:
    """The head's product of chunk after chunk: on a CPU by a copy of its weight that oneDNN reads faster, where the
    chunks are so many that the copy pays."""

    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None, chunk: int, positions: int) -> None:
        self._weight_VH, self._bias_V, self._chunk = weight_VH, bias_V, chunk
        self._packed = laid_out(weight_VH, chunk) if positions >= _PAYS * chunk else None

    def __call__(self, hidden_CH: Tensor) -> Tensor:
        if self._packed is None or len(hidden_CH) != self._chunk:
            return F.linear(hidden_CH, self._weight_VH, self._bias_V)
        return product(hidden_CH, self._packed, self._bias_V)


def _parts(count: int, chunk: int) -> Iterator[slice]:
    """Chunks, and the remainder in powers of two.

    The number of labels differs from batch to batch, and on a CPU every new shape of a product
    stays in memory as a compiled kernel; so there must be few shapes (7 GB were seen otherwise).
    """
    at = 0
    while at < count:
        size = chunk if count - at >= chunk else 1 << ((count - at).bit_length() - 1)
        yield slice(at, at + size)
        at += size


def _terms(
    loss: TokenLoss,
    shaping: Shaping,
    product_CV: Tensor,
    outputs: Any,
    label_C: Tensor,
    share_C: Tensor | None,
    wanted: bool,
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """The loss, its terms and, when wanted, the gradient of the loss with respect to the head's product."""
    with torch.set_grad_enabled(wanted):
        terms = loss(shaping(product_CV.requires_grad_(wanted)), outputs, label_C)
        loss_C = next(iter(terms.values()))
        if share_C is not None and share_C.ndim == 2:
            share_C, gain_C = share_C.unbind(1)
            loss_C = loss_C * share_C - gain_C * label_kept(shaping(product_CV), outputs, label_of(label_C))
        elif share_C is not None:
            loss_C = loss_C * share_C
        grad_CV = torch.autograd.grad(loss_C.sum(), product_CV)[0] if wanted else None
    return loss_C.detach(), {name: term.detach() for name, term in terms.items()}, grad_CV


@torch.no_grad()
def _passed(
    hidden_PH: Tensor,
    projection: Projection,
    added: Added | None,
    label_P: Tensor,
    chunk: int,
    teacher: Teacher | None,
    asked: Passed,
) -> Tensor:
    """What is asked of every draft, fp32 [P], or [P, 2] of `kept`, a chunk of logits at a time."""
    compute = compute_dtype(hidden_PH)
    passed_P = torch.zeros(len(hidden_PH), *([2] if asked.what == "kept" else []), device=hidden_PH.device)
    with torch.autocast(hidden_PH.device.type, enabled=False):
        projection = projection.in_dtype(compute)
        for part in _parts(len(hidden_PH), chunk):
            product_CV = replace(projection, shaping=PLAIN).logits(hidden_PH[part])
            if added is not None:
                product_CV += added.part(part, compute)
            logits_CV = projection.shaping(product_CV)
            outputs = None if teacher is None else teacher.outputs(part, logits_CV.shape[-1])
            passed_P[part] = asked(logits_CV, outputs, label_P[part])
    return passed_P


def label_of(label_C: Tensor) -> Tensor:
    """The text's own tokens, of labels that may have further columns."""
    return label_C if label_C.ndim == 1 else label_C[:, 0]


def _add_product(into_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    """into += grad^T hidden, summed over chunks in fp32."""
    if grad_CV.dtype == into_VH.dtype:
        into_VH.addmm_(grad_CV.T, hidden_CH)
    else:
        into_VH.add_(grad_CV.T @ hidden_CH)


def compute_dtype(hidden_PH: Tensor) -> torch.dtype:
    """In which precision products are made: that of an autocast around, or of the states."""
    device = hidden_PH.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden_PH.dtype
