"""Random numbers per row: exactly the generator's own stream, however it is taken."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from draftsmith.decoding.random import FOR_TRAINING, Uniforms, salt_of, salted
from hypothesis import given, settings
from hypothesis import strategies as st

REQUESTS = [3, 0, 2**40]


def plain(seed: int, request: int, count: int) -> list[float]:
    """The stream of a request, straight from the generator."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, request], dtype=np.uint64))).random(count).tolist()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([1, 5, 9, 300, 511, 512, 513, 700, 1500]), min_size=4, max_size=9))
def test_a_stream_taken_in_pieces_is_the_generators(counts: list[int]) -> None:
    """Across several blocks, and through pieces longer than a block: no number twice, none left out."""
    uniforms = Uniforms(7, REQUESTS, "cpu")
    got_BX = torch.cat([uniforms.take(count) for count in counts], 1)
    assert got_BX.dtype == torch.float64
    for request, row in zip(REQUESTS, got_BX.tolist(), strict=True):
        assert row == plain(7, request, sum(counts))


@pytest.mark.parametrize("seed", [0, 7, -1])
def test_what_a_row_draws_depends_on_seed_and_request_alone(seed: int) -> None:
    together = Uniforms(seed, REQUESTS, "cpu").take(40)
    for row, request in enumerate(REQUESTS):
        assert torch.equal(together[row], Uniforms(seed, [request], "cpu").take(40)[0])
    assert len(together.unique()) == together.numel()


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_neighbouring_seeds_have_streams_of_their_own(seed: int) -> None:
    """From 2**63 on too; a negative seed is the number that its bits are."""
    own = Uniforms(seed, [0, 1], "cpu").take(8)
    assert not torch.equal(own, Uniforms(seed - 1, [0, 1], "cpu").take(8))
    assert torch.equal(own, Uniforms(seed - 2**64, [0, 1], "cpu").take(8))
    assert own[0].tolist() == plain(seed, 0, 8)


def test_salted_seeds_share_no_stream_with_any_seed() -> None:
    """Without a salt the seed is its own; with one, no seed near it and no other salt has its streams."""
    assert salted(7, 0) == 7
    made = {salted(seed, salt) for seed in range(-2, 40) for salt in (1, 2, 3, 2**63)}
    assert len(made) == 42 * 4
    assert not made & set(range(-1000, 1000))
    assert all(abs(one - two) > 1000 for one, two in pairwise(sorted(made)))
    assert all(0 <= each < 2**64 for each in made)
    plain, own = (Uniforms(seed, range(4), "cpu").take(300) for seed in (0, salted(0, FOR_TRAINING)))
    assert not set(plain.ravel().tolist()) & set(own.ravel().tolist())


def test_a_salt_is_of_its_parts_and_where_they_part() -> None:
    parts = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc"), (b"c", b"ab"), ()]
    salts = [salt_of(*each) for each in parts]
    assert len(set(salts)) == len(parts)
    assert all(salts)
    assert salt_of(b"ab", b"c") == salts[0]
