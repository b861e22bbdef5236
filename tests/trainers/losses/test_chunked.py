"""The chunked loss against the plain computation that holds every logit."""

import pytest
import torch
import torch.nn.functional as F
from draftsmith.drafters.projection import Projection, Shaping
from draftsmith.trainers.config import chunk_of
from draftsmith.trainers.losses.chunked import Added, ChunkedLoss, Teacher, _parts, cross_entropy
from draftsmith.trainers.losses.mix import Mix, Passed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

P, H, H_TARGET, V = 37, 16, 24, 101


def setting(seed: int = 0) -> tuple[nn.Linear, Tensor, Tensor, Teacher]:
    g = torch.Generator().manual_seed(seed)
    head = nn.Linear(H, V, bias=False)
    nn.init.normal_(head.weight, generator=g)
    hidden = torch.randn(P, H, generator=g).requires_grad_()
    label = torch.randint(0, V, (P,), generator=g)
    teacher = Teacher(torch.randn(P, H_TARGET, generator=g), Projection(torch.randn(V, H_TARGET, generator=g)))
    return head, hidden, label, teacher


def plain_distillation(
    head: nn.Linear, hidden: Tensor, label: Tensor, teacher: Teacher, kl: float, ce: float, t: float
) -> Tensor:
    draft = head(hidden)
    target = teacher.hidden_PH @ teacher.projection.weight_VH.T
    p, log_p = (target / t).softmax(-1), (target / t).log_softmax(-1)
    divergence = (p * (log_p - (draft / t).log_softmax(-1))).sum()
    return kl * divergence + ce * F.cross_entropy(draft, label, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 8, P, 1000])
@pytest.mark.parametrize(("kl", "ce", "t"), [(1.0, 0.0, 1.0), (0.7, 0.3, 2.0), (0.0, 1.0, 1.0)])
def test_chunks_give_the_loss_and_gradients_of_the_whole(chunk: int, kl: float, ce: float, t: float) -> None:
    head, hidden, label, teacher = setting()
    whole = plain_distillation(head, hidden, label, teacher, kl, ce, t)
    expected = torch.autograd.grad(whole / P, [hidden, head.weight])
    loss, terms = ChunkedLoss(head, Mix(kl, ce, t), chunk=chunk)(hidden, label, teacher)
    got = torch.autograd.grad(loss / P, [hidden, head.weight])
    torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-4)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert set(terms) == {"loss", "kl", "ce", "alpha"}


def test_cross_entropy_is_the_one_of_torch() -> None:
    head, hidden, label, _ = setting(1)
    loss, _ = ChunkedLoss(head, cross_entropy, chunk=5)(hidden, label)
    torch.testing.assert_close(loss, F.cross_entropy(head(hidden), label, reduction="sum"))


def test_reported_alpha_is_the_overlap_of_the_two_distributions() -> None:
    head, hidden, label, teacher = setting(2)
    _, terms = ChunkedLoss(head, Mix(1.0, 0.0), chunk=10)(hidden, label, teacher)
    p = (teacher.hidden_PH @ teacher.projection.weight_VH.T).softmax(-1)
    q = head(hidden).softmax(-1)
    torch.testing.assert_close(terms["alpha"], torch.minimum(p, q).sum().detach())


def test_rows_beyond_the_tokenizer_are_left_out_and_get_no_gradient() -> None:
    head, hidden, label, teacher = setting(3)
    rows = 90
    label = label % rows
    loss, _ = ChunkedLoss(head, Mix(1.0, 0.5), chunk=9, rows=rows)(hidden, label, teacher)
    (grad,) = torch.autograd.grad(loss, [head.weight])
    assert torch.equal(grad[rows:], torch.zeros_like(grad[rows:]))
    cut = Teacher(teacher.hidden_PH, teacher.projection.rows(slice(rows)))
    short = nn.Linear(H, rows, bias=False)
    short.weight.data.copy_(head.weight[:rows])
    expected = plain_distillation(short, hidden, label, cut, 1.0, 0.5, 1.0)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)


def test_no_label_gives_a_zero_that_still_reaches_the_weights() -> None:
    head, hidden, label, teacher = setting(4)
    loss, terms = ChunkedLoss(head, cross_entropy, chunk=8)(hidden[:0], label[:0])
    loss.backward()
    assert loss.item() == 0
    assert terms == {}
    assert head.weight.grad is not None


def test_full_logits_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, label, teacher = setting(5)
    sizes: list[int] = []

    def spy(draft: Tensor, target: Tensor | None, labels: Tensor) -> dict[str, Tensor]:
        sizes.append(len(draft))
        return Mix(1.0, 0.0)(draft, target, labels)

    ChunkedLoss(head, spy, chunk=8)(hidden, label, teacher)
    assert max(sizes) == 8
    assert sum(sizes) == P


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 1100))
def test_parts_cover_everything_in_few_sizes(count: int, chunk: int) -> None:
    """Each size that occurs is a compiled kernel in memory on a CPU."""
    parts = list(_parts(count, chunk))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
    sizes = {part.stop - part.start for part in parts}
    assert all(size == chunk or (size < chunk and size & (size - 1) == 0) for size in sizes)


@pytest.mark.parametrize("frozen", [(), ("bias",), ("weight", "hidden")])
@settings(deadline=None)
@given(scale=st.sampled_from([1.0, 0.0625, 3.0]), cap=st.sampled_from([None, 2.0, 30.0]), biased=st.booleans())
def test_a_bias_a_scale_and_a_cap(frozen: tuple[str, ...], scale: float, cap: float | None, biased: bool) -> None:
    """Loss and gradients of head, bias and states, the teacher's logits made alike."""
    head, hidden, label, teacher = setting(6)
    if biased:
        head.bias = nn.Parameter(torch.linspace(-1, 1, V))
    given = {"hidden": hidden, "weight": head.weight} | ({"bias": head.bias} if biased else {})
    for name in frozen:
        if name in given:
            given.pop(name).requires_grad_(False)
    shaping = Shaping(scale, cap)
    their_bias = torch.linspace(2, -2, V)
    teacher = Teacher(teacher.hidden_PH, Projection(teacher.projection.weight_VH, their_bias, shaping))

    def logits(states: Tensor, weight: Tensor, bias: Tensor | float) -> Tensor:
        x = scale * (states @ weight.T + bias)
        return x if cap is None else cap * (x / cap).tanh()

    draft = logits(hidden, head.weight, head.bias if biased else 0.0)
    target = logits(teacher.hidden_PH, teacher.projection.weight_VH, their_bias)
    p, log_p = target.softmax(-1), target.log_softmax(-1)
    ce = F.cross_entropy(draft, label, reduction="sum")
    whole = 0.7 * (p * (log_p - draft.log_softmax(-1))).sum() + 0.3 * ce
    loss, terms = ChunkedLoss(head, Mix(0.7, 0.3), chunk=8, shaping=shaping)(hidden, label, teacher)
    torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(terms["alpha"], torch.minimum(p, draft.softmax(-1)).sum().detach())
    if given:
        wanted = torch.autograd.grad(whole, list(given.values()))
        for ours, theirs in zip(torch.autograd.grad(loss, list(given.values())), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    q_P, _ = ChunkedLoss(head, Mix(1.0, 0.0), chunk=5, shaping=shaping)(hidden, label, only=Passed("label_q"))
    torch.testing.assert_close(q_P, draft.softmax(-1).gather(-1, label[:, None])[:, 0].detach())


@pytest.mark.parametrize("chunk", [3, 64])
def test_a_second_product_is_added_to_the_head_s(chunk: int) -> None:
    """Loss, gradients of both sides of it, and q of the labels, as a plain sum of products has them."""
    torch.manual_seed(0)
    P, R, H, V = 11, 3, 8, 17
    head = nn.Linear(H, V, bias=False).requires_grad_(False)
    hidden, given, low = (torch.randn(*shape, requires_grad=True) for shape in ((P, H), (P, R), (V, R)))
    label, share = torch.randint(0, V, (P,)), torch.rand(P)
    shaping, added = Shaping(scale=0.5, cap=4.0), Added(given, low)
    module = ChunkedLoss(head, cross_entropy, chunk=chunk, shaping=shaping)
    loss, _ = module(hidden, label, None, share, added=added)
    logits = shaping(head(hidden) + given @ low.T)
    wanted = (F.cross_entropy(logits, label, reduction="none") * share).sum()
    torch.testing.assert_close(loss, wanted)
    leaves = (hidden, given, low)
    for mine, plain in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)
    q_P, _ = module(hidden, label, added=added, only=Passed("label_q"))
    torch.testing.assert_close(q_P, logits.softmax(-1)[range(P), label].detach())
    nothing, terms = module(hidden[:0], label[:0], added=Added(given[:0], low))
    assert (float(nothing.detach()), terms) == (0.0, {})
    assert not torch.autograd.grad(nothing, low)[0].any()


@pytest.mark.parametrize(
    ("vocabulary", "positions"), [(4096, 256), (49_152, 256), (65_536, 256), (65_537, 128), (262_144, 64)]
)
def test_a_chunk_follows_the_vocabulary_unless_it_is_named(vocabulary: int, positions: int) -> None:
    """At most 2^24 logits exist at a time."""
    assert chunk_of(None, vocabulary) == positions
    assert chunk_of(1000, vocabulary) == 1000
    with torch.device("meta"):
        assert ChunkedLoss(nn.Linear(8, vocabulary), cross_entropy, chunk=None).chunk == positions
