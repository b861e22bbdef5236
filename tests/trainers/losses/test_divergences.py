"""Every divergence against its definition in fp64, its gradient, its identities, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from draftsmith.trainers.losses import divergences as d
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

BETA, ETA, TOKENS, SIBLINGS = 0.3, 3.0, 3, 3
ROWS = 4
Of = Callable[[Tensor, Tensor], Tensor]

OURS: dict[str, Of] = {
    "forward_kl": d.forward_kl,
    "reverse_kl": d.reverse_kl,
    "jsd": lambda log_p, log_q: d.jsd(log_p, log_q, BETA),
    "total_variation": d.total_variation,
    "lk_alpha": d.lk_alpha,
    "total_variation of siblings": lambda log_p, log_q: d.total_variation(log_p, log_q, SIBLINGS),
    "lk_alpha of siblings": lambda log_p, log_q: d.lk_alpha(log_p, log_q, SIBLINGS),
    "lk_lambda": lambda log_p, log_q: d.lk_lambda(d.forward_kl(log_p, log_q), d.total_variation(log_p, log_q), ETA),
    "soft_cross_entropy": lambda log_p, log_q: d.surprises(log_p.exp(), log_q).sum(-1),
    "top_k": lambda log_p, log_q: d.top_k_cross_entropy(log_p.exp(), log_q, TOKENS),
}


def plogratio(a: list[float], b: list[float]) -> float:
    """sum a log(a / b), where a token without a adds nothing."""
    return math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)


def by_definition(name: str, p: list[float], q: list[float]) -> float:
    """One position in plain Python."""
    alpha = math.fsum(map(min, p, q))
    if name == "forward_kl":
        return plogratio(p, q)
    if name == "reverse_kl":
        return plogratio(q, p)
    if name == "jsd":
        mean = [BETA * x + (1 - BETA) * y for x, y in zip(p, q, strict=True)]
        return BETA * plogratio(p, mean) + (1 - BETA) * plogratio(q, mean)
    if name == "total_variation":
        return math.fsum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2
    if name == "lk_alpha":
        return -math.log(alpha)
    if name.endswith("siblings"):
        # 1 - (1 - y)^k without taking what is small from 1: the draw that is it first
        first = (math.fsum(y * (1 - y) ** n for n in range(SIBLINGS)) for y in q)
        among = math.fsum(map(min, p, first))
        return 1 - among if name.startswith("total") else -math.log(among)
    if name == "lk_lambda":
        share = math.exp(-ETA * alpha)
        return share * plogratio(p, q) + (1 - share) * (1 - alpha)
    kept = range(len(p))
    if name == "top_k":
        kept = sorted(kept, key=lambda v: -p[v])[:TOKENS]
    return -math.fsum(p[v] * math.log(q[v]) for v in kept if p[v] > 0)


def naive(name: str, p: Tensor, q: Tensor) -> Tensor:
    """The same in fp64 tensors without care, for gradients; no token is ruled out here."""
    alpha = torch.minimum(p, q).sum(-1)
    kl, variation = (p * (p / q).log()).sum(-1), (p - q).abs().sum(-1) / 2
    among = torch.minimum(p, sum(q * (1 - q) ** n for n in range(SIBLINGS))).sum(-1)
    if name == "jsd":
        mean = BETA * p + (1 - BETA) * q
        return (BETA * p * (p / mean).log() + (1 - BETA) * q * (q / mean).log()).sum(-1)
    if name == "lk_lambda":
        share = (-ETA * alpha).exp().detach()
        return share * kl + (1 - share) * variation
    if name == "top_k":
        best = p.topk(min(TOKENS, p.shape[-1])).indices
        return -(p * q.log()).gather(-1, best).sum(-1)
    return {
        "forward_kl": kl,
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "total_variation": variation,
        "lk_alpha": -alpha.log(),
        "total_variation of siblings": 1 - among,
        "lk_alpha of siblings": -among.log(),
        "soft_cross_entropy": -(p * q.log()).sum(-1),
    }[name]


@st.composite
def logits(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Of target and draft [ROWS, V] fp32, and which tokens both rule out."""
    V = draw(st.integers(2, 24))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    scale = draw(st.sampled_from([0.1, 1.0, 6.0]))
    target, draft = (scale * torch.randn(ROWS, V, generator=g) for _ in range(2))
    if draw(st.booleans()):  # one token that has nearly all, another one for each
        target[:, 0] += 40
        draft[:, -1] += 40
    out = torch.rand(ROWS, V, generator=g) < draw(st.sampled_from([0.0, 0.4]))
    out[:, [0, -1]] = False
    return target, draft, out


@pytest.mark.parametrize("name", OURS)
@settings(max_examples=25, deadline=None)
@given(logits())
def test_values_and_gradients(name: str, given: tuple[Tensor, Tensor, Tensor]) -> None:
    """fp32 against fp64; tokens that both rule out change nothing and get no gradient."""
    target, draft, out = given
    low = float("-inf")
    log_ratio = torch.sub(*(each.double().masked_fill(out, low).log_softmax(-1) for each in (target, draft)))
    assume(float(log_ratio[~out].abs().min()) > 1e-5)  # at p = q, min(p, q) has no gradient
    p, q = (each.double().masked_fill(out, low).softmax(-1) for each in (target, draft))
    assume(float((p / (1 - (1 - q) ** SIBLINGS)).log()[~out].abs().min()) > 1e-5)
    ours_q = draft.masked_fill(out, low).requires_grad_()
    log_p = target.masked_fill(out, low).log_softmax(-1)
    ours = OURS[name](log_p, ours_q.log_softmax(-1))
    (gradient,) = torch.autograd.grad(ours.sum(), ours_q)
    assert ours.dtype == torch.float32
    for row in range(ROWS):
        kept = ~out[row]
        p = target[row, kept].double().softmax(-1)
        plain_q = draft[row, kept].double().requires_grad_()
        value = by_definition(name, p.tolist(), plain_q.detach().softmax(-1).tolist())
        assert float(ours[row].detach()) == pytest.approx(value, rel=2e-5, abs=2e-5)
        plain = naive(name, p, plain_q.softmax(-1))
        assert float(plain.detach()) == pytest.approx(value, rel=1e-9, abs=1e-9)
        (wanted,) = torch.autograd.grad(plain, plain_q)
        torch.testing.assert_close(gradient[row, kept].double(), wanted, rtol=1e-3, atol=2e-5)
        assert torch.equal(gradient[row, ~kept], torch.zeros(int(out[row].sum())))


@pytest.mark.parametrize("name", sorted(set(OURS) - {"lk_lambda"}))  # whose weight has no gradient
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_finite_differences(name: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    log_p, draft = (torch.randn(ROWS, 7, generator=g, dtype=torch.float64) for _ in range(2))
    log_p = log_p.log_softmax(-1)
    assert torch.autograd.gradcheck(lambda x: OURS[name](log_p, x.log_softmax(-1)), draft.requires_grad_())


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("who", ["draft", "target"])
def test_tokens_that_one_alone_rules_out_break_nothing(name: str, who: str) -> None:
    """No NaN, in the value or in the gradient; what is bounded stays within its bounds."""
    g = torch.Generator().manual_seed(1)
    both = {each: torch.randn(2, 6, generator=g) for each in ("target", "draft")}
    both[who][:, 2] = float("-inf")
    both["draft"].requires_grad_()
    log_p, log_q = both["target"].log_softmax(-1), both["draft"].log_softmax(-1)
    ours = OURS[name](log_p, log_q)
    (gradient,) = torch.autograd.grad(ours.sum(), both["draft"])
    assert not ours.isnan().any()
    assert gradient.isfinite().all()
    if name == "jsd" or name.startswith("total_variation"):
        p, q = log_p.double().exp().tolist(), log_q.double().exp().detach().tolist()
        wanted = [by_definition(name, *each) for each in zip(p, q, strict=True)]
        assert ours.tolist() == pytest.approx(wanted, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 10_000))
def test_no_rule_keeps_one_of_several_draws_more_often(V: int, siblings: int, seed: int) -> None:
    """The best rule of all, by linear programming: which token is said behind which draws, so often as the target says
    it. With one draw, and where the target is certain, it is reached."""
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(V, generator=g, dtype=torch.float64).mul(2).softmax(-1) for _ in range(2))
    if seed % 3 == 0:
        p = torch.eye(V, dtype=torch.float64)[seed % V]
    drafts = list(product(range(V), repeat=siblings))
    cells = [(draft, x) for draft in drafts for x in range(V)]
    said = [[float(x == v) for _, x in cells] for v in range(V)]
    behind = [[float(each == draft) for each, _ in cells] for draft in drafts]
    often = [math.prod(float(q[x]) for x in draft) for draft in drafts]
    kept = [-float(x in draft) for draft, x in cells]
    # the last of what the target says follows from the others; its presolve takes rounding in sums for a contradiction
    equal = {"A_eq": said[1:] + behind, "b_eq": [*p.tolist()[1:], *often]}
    best = -linprog(kept, **equal, options={"presolve": False}).fun
    ours = float(d.overlap(p.log(), q.log(), siblings))
    assert ours >= best - 1e-9
    assert ours <= 1 + 1e-9
    if siblings == 1 or seed % 3 == 0:
        assert ours == pytest.approx(best, abs=1e-9)


def test_distributions_without_a_common_token() -> None:
    """Acceptance 0: the bounded ones are at their bound, and -log alpha is large, not infinite."""
    p = torch.tensor([[0.0, float("-inf")]])
    draft = torch.tensor([[float("-inf"), 1.0]]).requires_grad_()
    q = draft.detach().log_softmax(-1)
    assert float(d.overlap(p, q)) == 0
    assert float(d.total_variation(p, q)) == 1
    assert float(d.jsd(p, q, 0.5)) == pytest.approx(math.log(2))
    assert 1000 < float(d.lk_alpha(p, q)) < float("inf")
    (gradient,) = torch.autograd.grad(d.lk_alpha(p, draft.log_softmax(-1)).sum(), draft)
    assert gradient.isfinite().all()


def test_an_acceptance_too_small_for_fp32_still_teaches() -> None:
    """Two certain distributions, 200 nats apart: e^-200 is 0 in fp32, its logarithm is not."""
    p = torch.tensor([[200.0, 0.0]]).log_softmax(-1)
    draft = torch.tensor([[0.0, 200.0]]).requires_grad_()
    loss = d.lk_alpha(p, draft.log_softmax(-1))
    assert float(loss.detach()) == pytest.approx(200 - math.log(2), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss.sum(), draft)
    assert gradient[0].tolist() == pytest.approx([-0.5, 0.5], abs=0.01)


@settings(max_examples=25, deadline=None)
@given(logits())
@example((torch.zeros(ROWS, 3), torch.zeros(ROWS, 3), torch.zeros(ROWS, 3, dtype=torch.bool)))
def test_identities(given: tuple[Tensor, Tensor, Tensor]) -> None:
    target, draft, out = given
    low = float("-inf")
    log_p, log_q = (x.masked_fill(out, low).log_softmax(-1) for x in (target, draft))
    p, q = log_p.exp(), log_q.exp()
    close = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(d.jsd(log_p, log_q, 0.5), d.jsd(log_q, log_p, 0.5), **close)
    assert float(d.jsd(log_p, log_q, 0.5).max()) <= math.log(2) + 1e-5
    alpha = d.overlap(log_p, log_q)
    torch.testing.assert_close(d.total_variation(log_p, log_q), 1 - alpha, **close)
    torch.testing.assert_close(1 - alpha, (p - q).abs().sum(-1) / 2, **close)
    torch.testing.assert_close(d.lk_alpha(log_p, log_q).neg().exp(), alpha, **close)
    entropy = d.surprises(p, log_p).sum(-1)
    kl = d.forward_kl(log_p, log_q)
    torch.testing.assert_close(d.surprises(p, log_q).sum(-1), kl + entropy, **close)
    torch.testing.assert_close(d.top_k_cross_entropy(p, log_q, 10_000), d.surprises(p, log_q).sum(-1), **close)
    torch.testing.assert_close(d.reverse_kl(log_p, log_q), d.forward_kl(log_q, log_p), **close)
    tv = d.total_variation(log_p, log_q)
    torch.testing.assert_close(d.lk_lambda(kl, tv, 0.0), kl, **close)
    torch.testing.assert_close(d.lk_lambda(kl * 0, tv * 0 + 0.5, 1e4), tv * 0 + 0.5, **close)


@pytest.mark.parametrize("name", OURS)
def test_equal_distributions_cost_nothing_but_entropy(name: str) -> None:
    g = torch.Generator().manual_seed(3)
    target = 3 * torch.randn(ROWS, 9, generator=g)
    target[:, 4] = float("-inf")
    log_p = target.log_softmax(-1)
    ours = OURS[name](log_p, log_p)
    wanted = torch.zeros(ROWS)
    if name in ("soft_cross_entropy", "top_k"):
        each = d.surprises(log_p.exp(), log_p)
        best = log_p.topk(TOKENS).indices
        wanted = (each if name == "soft_cross_entropy" else each.gather(-1, best)).sum(-1)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_lk_alpha_has_the_gradient_of_tv_divided_by_alpha(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    log_p = (2 * torch.randn(ROWS, 11, generator=g)).log_softmax(-1)
    draft = (2 * torch.randn(ROWS, 11, generator=g)).requires_grad_()
    log_q = draft.log_softmax(-1)
    (lk,) = torch.autograd.grad(d.lk_alpha(log_p, log_q).sum(), draft, retain_graph=True)
    (tv,) = torch.autograd.grad(d.total_variation(log_p, log_q).sum(), draft, retain_graph=True)
    alpha = d.overlap(log_p, log_q).detach()
    torch.testing.assert_close(lk, tv / alpha[:, None], rtol=1e-4, atol=1e-6)


def test_jsd_leads_from_one_kl_to_the_other() -> None:
    g = torch.Generator().manual_seed(5)
    log_p, log_q = (torch.randn(ROWS, 8, generator=g, dtype=torch.float64) for _ in range(2))
    log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    small = 1e-5
    close = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(d.jsd(log_p, log_q, small) / small, d.forward_kl(log_p, log_q), **close)
    torch.testing.assert_close(d.jsd(log_p, log_q, 1 - small) / small, d.reverse_kl(log_p, log_q), **close)


def test_mass_that_cannot_be_drafted_is_never_accepted() -> None:
    """p short of 0.3: a perfect draft of the rest reaches alpha 0.7, and TV stays at 0.3."""
    log_p = torch.tensor([[0.4, 0.2, 0.1]]).log()
    q = (log_p.exp() / 0.7).log()
    assert float(d.overlap(log_p, q)) == pytest.approx(0.7)
    assert float(d.total_variation(log_p, q)) == pytest.approx(0.3)
    assert float(d.lk_alpha(log_p, q)) == pytest.approx(-math.log(0.7))
