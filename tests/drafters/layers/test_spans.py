"""Attention by spans of keys: that of one mask, its gradients too, and nothing that grows with the square."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from draftsmith.drafters.layers import spans
from draftsmith.drafters.layers.spans import Spans, starts
from helpers.operation_counts import Largest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

B, Q, G, D = 2, 4, 2, 8


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "BLOCK", 8)
        patch.setattr(spans, "_PIECE", 5)
        yield


def shared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention with a mask, of heads that share keys, as `Spans` wants it."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def seen_of(spans_N4: list[tuple[int, int, int, int]]) -> Tensor:
    return torch.tensor(spans_N4)[None, None]


def mask_of(seen_B1N4: Tensor, keys: int) -> Tensor:
    """bool [B, 1, N, S]: a plain function of one query and one key."""
    at_S = torch.arange(keys)
    first, last, other_first, other_last = (x[..., None] for x in seen_B1N4.unbind(-1))
    return ((at_S >= first) & (at_S <= last)) | ((at_S >= other_first) & (at_S <= other_last))


def inputs(queries: int, keys: int, rows: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((rows, Q, queries, D), (rows, G, keys, D), (rows, G, keys, D))
    return [torch.randn(shape, generator=g, requires_grad=True) for shape in shapes]


def with_gradients(attended_BNQD: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, attended_BNQD.numel()).view_as(attended_BNQD)
    return attended_BNQD.detach(), *torch.autograd.grad((attended_BNQD * weights).sum(), given)


def check(seen_B1N4: Tensor, keys: int) -> None:
    rows, _, queries, _ = seen_B1N4.shape
    given = inputs(queries, keys, rows)
    found = with_gradients(Spans(seen_B1N4).attend(*given, shared), given)
    expected = with_gradients(shared(*given, mask_of(seen_B1N4, keys)), given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@st.composite
def any_spans(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Of rows of queries, two spans each, in the front and in the back of the keys; one of them may be empty."""
    front, back, queries = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 20))
    rows = []
    for _ in range(B * queries):
        one = sorted(draw(st.tuples(*[st.integers(0, front - 1)] * 2)))
        other = sorted(draw(st.tuples(*[st.integers(front, front + back - 1)] * 2)))
        empty = draw(st.sampled_from(["none", "one", "other"]))
        rows.append((*((1, 0) if empty == "one" else one), *((1, 0) if empty == "other" else other)))
    return torch.tensor(rows).view(B, 1, queries, 4), front + back


@settings(deadline=None, max_examples=40)
@given(any_spans())
def test_it_is_attention_with_a_mask(drawn: tuple[Tensor, int]) -> None:
    check(*drawn)


def test_a_span_that_is_one_key_longer_would_be_seen() -> None:
    seen = seen_of([(t, t + 2, 20, 20 + t % 3) for t in range(17)])
    given = inputs(17, 23, 1)
    mask = mask_of(seen + torch.tensor([0, 1, 0, 0]), 23)
    assert float((Spans(seen).attend(*given, shared) - shared(*given, mask)).detach().abs().max()) > 1e-2


def test_only_keys_that_are_seen_are_read() -> None:
    """Documents behind each other: a block reads its own alone, and nothing of others makes a number of it."""
    seen = seen_of([(8 * (t // 8), t, 1, 0) for t in range(32)])
    lengths = []

    def noted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        lengths.append(key.shape[2])
        return shared(query, key, value, mask)

    with torch.no_grad():
        Spans(seen).attend(*inputs(32, 32, 1), noted)
    assert lengths == [8] * 4


def test_what_is_drawn_is_the_same_for_the_gradient() -> None:
    """With dropout in attention, a block that is computed again drops what it dropped: gradients of a line are it."""
    query, key, value = inputs(17, 23, 1)
    seen = seen_of([(0, 22, 1, 0)] * 17)

    def dropped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.5, enable_gqa=True).transpose(1, 2)

    def total(values: Tensor) -> Tensor:
        torch.manual_seed(0)
        return Spans(seen).attend(query.detach(), key.detach(), values, dropped, draws=True).sum()

    out = total(value)
    torch.manual_seed(1)
    (slope,) = torch.autograd.grad(out, value)
    # attention is linear in the values
    torch.testing.assert_close((slope * value).sum(), out, rtol=1e-4, atol=1e-4)


def test_documents_begin_where_numbers_change() -> None:
    numbers = torch.tensor([[0, 0, 1, 1, 1, -1], [3, 3, 3, 3, 0, 0]])
    assert starts(numbers).tolist() == [[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 4, 4]]


def test_nothing_grows_with_the_square() -> None:
    found = []
    for length in (128, 512):
        seen = seen_of([(0, t, 1, 0) for t in range(length)])
        given = inputs(length, length, 1)
        with Largest() as largest:
            with_gradients(Spans(seen).attend(*given, shared), given)
        found.append(largest.numbers)
    assert found[1] == 4 * found[0]
