"""Losses over the vocabulary that never hold all logits at once.

With V = 151,936 the fp32 logits of 2,048 positions weigh 1.2 GB, and a plain distillation loss
keeps about six such tensors. Here positions go through in chunks: logits, loss and the gradient
with respect to the logits of one chunk are made, folded into the gradients of the hidden states
and of the head, and dropped (the idea of Liger's fused linear cross-entropy, Hsu et al. 2024).
A method's mathematics is one pure function of a chunk (`TokenLoss`). Read next: `mix.py`, what may
be minimised; `distill.py`.

Shapes: P labelled positions, C positions of a chunk, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .divergences import forward_kl
from .mix import Mix
from .mix import cross_entropy as label_entropy

# (draft logits [C, V] fp32, target logits [C, V] fp32 or None, label ids [C]) -> named losses [C]
# The first entry is what is minimised; the others are only reported. A family may put more about a
# position beside its label, [C, 2]: whatever the module is given as labels comes in chunks. And it
# may have a teacher that says something else than logits.
TokenLoss = Callable[[Tensor, Any, Tensor], dict[str, Tensor]]


def cross_entropy(logits_CV: Tensor, _target: Tensor | None, label_C: Tensor) -> dict[str, Tensor]:
    """-log q(label), in nats."""
    ce_C = label_entropy(logits_CV, label_C)
    return {"loss": ce_C, "ce": ce_C.detach()}


@dataclass(frozen=True)
class Distillation(Mix):
    """A mix of terms over the target's whole vocabulary; as `Distillation(kl, ce, temperature)` the
    forward KL of Hinton et al. 2015 and the cross-entropy on the text's own token.

    It reports `kl` and `ce` whatever is minimised, every other term that is, and `alpha`,
    sum_v min(p, q): the acceptance rate of sampling at temperature 1 (Leviathan et al. 2023,
    theorem 3.5), the quantity that distillation is for, with the target's distribution as it is. Where that
    distribution is cut to its likeliest tokens, `cut_mass` is what that leaves out.
    """

    def __call__(self, draft_CV: Tensor, target_CV: Tensor | None, label_C: Tensor) -> dict[str, Tensor]:
        if target_CV is None:
            raise ValueError("distillation needs the target's logits")
        distributions = self.distributions(draft_CV, self.soften(target_CV))
        terms = self.terms(distributions, draft_CV, label_C)
        loss_C = self.total(terms)
        with torch.no_grad():
            if "kl" not in terms:
                terms["kl"] = forward_kl(distributions.log_p_CU, distributions.log_q_CU)
            if "ce" not in terms:
                terms["ce"] = label_entropy(draft_CV, label_C)
            alpha_C = torch.minimum(draft_CV.softmax(-1), target_CV.softmax(-1)).sum(-1)
            if self.teacher_top_k is not None:
                terms["cut_mass"] = self.cut_mass(target_CV)
        reported = {name: term.detach() for name, term in terms.items()}
        return {"loss": loss_C, **reported, "alpha": alpha_C}


class ChunkedLoss(nn.Module):
    """The head and the loss in one: hidden states in, sum of losses out.

    It is a module with the head's weight as its own parameter, so that whatever shards
    parameters gathers it here as for any other layer.
    """

    weight: nn.Parameter
    loss: TokenLoss
    chunk: int
    rows: int

    def __init__(self, head: nn.Linear, loss: TokenLoss, *, chunk: int, rows: int | None = None) -> None:
        """`rows`: how many of the head's rows are compared, all of them unless it is padded."""
        super().__init__()
        if head.bias is not None:
            raise ValueError("the chunked loss takes an output projection without a bias")
        self.weight = head.weight
        self.loss = loss
        self.chunk = chunk
        self.rows = len(head.weight) if rows is None else rows

    def forward(
        self,
        hidden_PH: Tensor,
        label_P: Tensor,
        teacher: Teacher | None = None,
        share_P: Tensor | None = None,
        *,
        only_said: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the loss over P positions (a scalar with a gradient) and the sums of all terms.

        No labelled position at all (P = 0, a micro-batch of prompts alone) gives zero and no terms.

        Args:
            hidden_PH: what the head reads.
            label_P: labels, or what else the loss takes in their place.
            teacher: the target, where the loss compares with it.
            share_P: how much each position counts in the sum that is minimised; terms are reported
                without it.
            only_said: give q(label) [P] in place of the sum, without a gradient and without terms;
                what `pace.py` asks for before the loss. Through this door because only a module's
                forward pass sees weights that are sharded.
        """
        weight_VH = self.weight[: self.rows]
        if only_said:
            return _said(hidden_PH, weight_VH, label_P, self.chunk), {}
        if len(hidden_PH) == 0:
            return (hidden_PH.sum() + self.weight.sum()) * 0.0, {}
        names: list[str] = []
        sums = _ChunkedSum.apply(hidden_PH, weight_VH, label_P, teacher, share_P, self.loss, self.chunk, names)
        return sums[0], dict(zip(names, sums[1], strict=True))


@dataclass(frozen=True)
class Teacher:
    """The frozen target's last hidden states and head: its logits are made chunk by chunk."""

    hidden_PH: Tensor
    weight_VH: Tensor

    def says(self, part: slice, vocabulary: int) -> Any:
        """fp32 logits [C, V] of some positions, cut to the rows that have a token."""
        return self.logits(part)[:, :vocabulary]

    def logits(self, part: slice) -> Tensor:
        """fp32 logits [C, V] over all rows of the head."""
        return F.linear(self.hidden_PH[part], self.weight_VH).float()


@dataclass(frozen=True)
class SharedTeacher(Teacher):
    """A target that several comparisons ask about one position, and that answers once.

    `hidden_PH` has every position once. Comparisons come in the order of the positions, so that
    those of a chunk are about few of them.
    """

    at_P: Tensor
    """Which of the positions each comparison is with, ascending."""
    host_P: Tensor
    """The same where Python can look without waiting for a GPU."""

    @classmethod
    def of(cls, states_NH: Tensor, weight_VH: Tensor, at_P: Tensor, **more: Any) -> Self:
        """Of comparisons with the states of numbers `at_P`, which ascend."""
        asked_M, at_P = at_P.unique(return_inverse=True)
        return cls(states_NH[asked_M], weight_VH, at_P, at_P.cpu(), **more)

    def says(self, part: slice, vocabulary: int) -> Any:
        first, last = self.host_P[part.start], self.host_P[part.stop - 1]
        # few sizes, as every new one is another kernel (`_parts`)
        size = 1 << int(last - first).bit_length()
        start = max(0, min(int(first), len(self.hidden_PH) - size))
        said = self.read(self.logits(slice(start, start + size)), vocabulary)
        here_C = self.at_P[part] - start
        return said[here_C] if isinstance(said, Tensor) else type(said)(*(t[here_C] for t in said))

    def read(self, logits_XV: Tensor, vocabulary: int) -> Any:
        """What of some positions' logits the loss asks for: a tensor, or a NamedTuple of them."""
        return logits_XV[:, :vocabulary]


class _ChunkedSum(torch.autograd.Function):
    """Sum over chunks, with the gradients made in the forward pass while the logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        label_P: Tensor,
        teacher: Teacher | None,
        share_P: Tensor | None,
        loss: TokenLoss,
        chunk: int,
        names: list[str],
    ) -> tuple[Tensor, Tensor]:
        compute = _compute_dtype(hidden_PH)
        weight = weight_VH.to(compute)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        wanted = wants_hidden or wants_weight
        hidden_grad = torch.empty_like(hidden_PH) if wants_hidden else None
        weight_grad = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight else None
        totals: Tensor | None = None
        with torch.autocast(hidden_PH.device.type, enabled=False):
            for part in _parts(len(hidden_PH), chunk):
                hidden_CH = hidden_PH[part].to(compute)
                logits_CV = F.linear(hidden_CH, weight).float()
                said = teacher.says(part, len(weight)) if teacher is not None else None
                share_C = None if share_P is None else share_P[part]
                made, terms, grad_CV = _terms(loss, logits_CV, said, label_P[part], share_C, wanted)
                del logits_CV, said
                names[:] = list(terms)
                sums = torch.stack([term.sum(dtype=torch.float32) for term in (made, *terms.values())])
                totals = sums if totals is None else totals + sums
                if grad_CV is None:
                    continue
                grad_CV = grad_CV.to(compute)
                if hidden_grad is not None:
                    hidden_grad[part] = grad_CV @ weight
                if weight_grad is not None:  # a frozen head needs none
                    _add_product(weight_grad, grad_CV, hidden_CH)
        assert totals is not None  # P > 0
        ctx.save_for_backward(hidden_grad, weight_grad)
        made, reported = totals[0].clone(), totals[1:].clone()
        ctx.mark_non_differentiable(reported)
        return made, reported

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0]
        return (
            None if hidden_grad is None else hidden_grad.mul_(scale.to(hidden_grad.dtype)),
            None if weight_grad is None else weight_grad.mul_(scale),
            None,
            None,
            None,
            None,
            None,
            None,
        )


def _parts(count: int, chunk: int) -> Iterator[slice]:
    """Chunks, and what is left over in powers of two.

    The number of labels differs from batch to batch, and on a CPU every new shape of a product
    stays in memory as a compiled kernel; so there must be few shapes (7 GB were seen otherwise).
    """
    at = 0
    while at < count:
        size = chunk if count - at >= chunk else 1 << ((count - at).bit_length() - 1)
        yield slice(at, at + size)
        at += size


def _terms(
    loss: TokenLoss, logits_CV: Tensor, said: Any, label_C: Tensor, share_C: Tensor | None, wanted: bool
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """What is minimised, the loss's terms and, when wanted, the gradient of the first.

    The gradient is with respect to the logits.
    """
    with torch.set_grad_enabled(wanted):
        terms = loss(logits_CV.requires_grad_(wanted), said, label_C)
        made_C = next(iter(terms.values()))
        made_C = made_C if share_C is None else made_C * share_C
        grad_CV = torch.autograd.grad(made_C.sum(), logits_CV)[0] if wanted else None
    return made_C.detach(), {name: term.detach() for name, term in terms.items()}, grad_CV


@torch.no_grad()
def _said(hidden_PH: Tensor, weight_VH: Tensor, label_P: Tensor, chunk: int) -> Tensor:
    """q(label), fp32 [P], a chunk of logits at a time; 0 for a label that is none (below 0)."""
    compute = _compute_dtype(hidden_PH)
    said_P = torch.zeros(len(hidden_PH), device=hidden_PH.device)
    with torch.autocast(hidden_PH.device.type, enabled=False):
        weight = weight_VH.to(compute)
        for part in _parts(len(hidden_PH), chunk):
            logits_CV = F.linear(hidden_PH[part].to(compute), weight).float()
            label_C1 = label_P[part].clamp_min(0)[:, None]
            log_q_C = logits_CV.gather(-1, label_C1).squeeze(-1) - logits_CV.logsumexp(-1)
            said_P[part] = log_q_C.exp() * (label_P[part] >= 0)
    return said_P


def _add_product(into_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    """into += grad^T hidden, summed over chunks in fp32."""
    if grad_CV.dtype == into_VH.dtype:
        into_VH.addmm_(grad_CV.T, hidden_CH)
    else:
        into_VH.add_(grad_CV.T @ hidden_CH)


def _compute_dtype(hidden_PH: Tensor) -> torch.dtype:
    device = hidden_PH.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden_PH.dtype
