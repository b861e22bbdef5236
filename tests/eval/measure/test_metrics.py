"""The measures against hand counts, and the flag for degenerate text."""

import numpy as np
import pytest
from conftest import make_drafter, make_target
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.measure.degeneracy import degeneracy, in_loop
from draftsmith.eval.measure.metrics import Counts, acceptance, counts_of, difference, ratio


def counts(steps: int, emitted: int, tested: list[int], passed: list[int]) -> Counts:
    return Counts(steps, emitted, 0, np.array(tested, float), np.array(passed, float), np.array(passed, float))


def test_measures_by_hand() -> None:
    # two requests, draft length 2: accepted per step (2, 0, 1) and (2, 2)
    found = acceptance([counts(3, 6, [3, 2], [2, 1]), counts(2, 6, [2, 2], [2, 2])])
    assert found.tau.value == 12 / 5
    assert found.tau_macro.value == (6 / 3 + 6 / 2) / 2
    assert found.alpha.value == 7 / 9
    assert [each.value for each in found.n_alpha] == [4 / 5, 3 / 4]
    assert found.n_alpha_counts == [5, 4]


def test_alpha_and_alpha_hat_estimate_the_same() -> None:
    target = make_target("qwen3")
    drafter = make_drafter(target, noise=0.05)
    prompts = [[n, n + 1] for n in range(1, 50)]
    log = generate(target, drafter, prompts, warper=Warper(1.0), max_new_tokens=60).steps
    found = acceptance(counts_of(log))
    assert abs(found.alpha.value - found.alpha_hat.value) < 0.03
    width = [each.high - each.low for each in (found.alpha, found.alpha_hat)]
    assert width[1] < width[0]


def test_the_bootstrap_interval_covers_and_shrinks() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(60):
        bottom = rng.integers(5, 20, 40).astype(float)
        top = rng.binomial(bottom.astype(int), 0.3).astype(float)
        found = ratio(top, bottom, seed=seed, resamples=400)
        hits += found.low <= 0.3 <= found.high
    assert hits >= 50


def test_a_paired_difference_forgets_what_both_sides_share() -> None:
    """Requests differ much more than the two sides do: unpaired intervals overlap, paired do not."""
    rng = np.random.default_rng(3)
    steps_R = rng.integers(20, 40, 40).astype(float)
    easy_R = rng.uniform(1, 4, 40)
    mine, other = ((easy_R + more) * steps_R for more in (0.2, 0.0))
    found = difference((mine, steps_R), (other, steps_R))
    assert found.value == pytest.approx(0.2)
    assert [found.low, found.high] == pytest.approx([0.2, 0.2])
    assert ratio(other, steps_R).high > ratio(mine, steps_R).low
    back = difference((other, steps_R), (mine, steps_R))
    assert back.to_list() == pytest.approx([-found.value, -found.high, -found.low])


def test_the_interval_of_a_difference_covers_it() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(60):
        bottom_R = rng.integers(20, 40, 40).astype(float)
        mine, other = (rng.binomial(bottom_R.astype(int), p).astype(float) for p in (0.5, 0.4))
        found = difference((mine, bottom_R), (other, bottom_R), seed=seed, resamples=400)
        hits += found.low <= 0.1 <= found.high
    assert 50 <= hits < 60


def test_nothing_measured_is_null_not_nan() -> None:
    assert ratio(np.zeros(3), np.zeros(3)).to_list() == [None, None, None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([7] * 20, 20),
        ([1, 2] * 10, 20),
        ([1, 2, 3, 4, 5, 6], 0),
        ([1, 2, 1, 2], 0),
        ([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 5], 9),
    ],
)
def test_loops_are_found_token_by_token(text: list[int], expected: int) -> None:
    assert sum(in_loop(text)) == expected


def test_the_the_the_is_flagged_and_text_is_not() -> None:
    assert degeneracy([[3, 4] + [7] * 60]).flagged
    rng = np.random.default_rng(0)
    assert not degeneracy([rng.integers(0, 200, 80).tolist() for _ in range(4)]).flagged


def test_a_character_in_several_tokens_is_shown_once() -> None:
    from draftsmith.data.rows.tokenizer import train_tokenizer
    from draftsmith.eval.measure.evaluate import _or_null, _pieces

    class WithWords:
        tokenizer = train_tokenizer(["plain words\n"], 300)

    text = "a \U0001f40d b é"
    ids = WithWords.tokenizer(text)["input_ids"]
    pieces = _pieces(WithWords, ids)
    assert "".join(pieces) == text
    assert len(pieces) == len(ids)
    assert "\U0001f40d" in pieces
    assert _or_null(float("nan")) is None
