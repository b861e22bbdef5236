"""The measures against hand counts, and the flag for degenerate text."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.data.loops import in_loop
from draftsmith.decoding.engine import generate
from draftsmith.decoding.rules.acceptance import Outcome
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.steps import StepLog
from draftsmith.eval.measure.metrics import Counts, Degeneracy, acceptance, counts_of, degeneracy, ratio, tau_gain


def counts(steps: int, emitted: int, tested: list[int], passed: list[int]) -> Counts:
    return Counts(steps, emitted, 0, np.array(tested, float), np.array(passed, float), np.array(passed, float))


def test_measures_by_hand() -> None:
    # two requests, draft length 2: accepted per step (2, 0, 1) and (2, 2)
    result = acceptance([counts(3, 6, [3, 2], [2, 1]), counts(2, 6, [2, 2], [2, 2])])
    assert result.tau.value == 12 / 5
    assert result.tau_macro.value == (6 / 3 + 6 / 2) / 2
    assert result.alpha.value == 7 / 9
    assert [each.value for each in result.n_alpha] == [4 / 5, 3 / 4]
    assert result.n_alpha_counts == [5, 4]


def test_the_gain_is_of_the_same_requests_resampled_together() -> None:
    """Each request gains half a token a step, however unlike they are: so does every resample."""
    uneven = [counts(4, 4 * n, [4], [2]) for n in (1, 2, 6)]
    more = [counts(4, 4 * n + 2, [4], [2]) for n in (1, 2, 6)]
    gain = tau_gain(more, uneven)
    assert gain.to_list() == pytest.approx([0.5] * 3)
    assert tau_gain(uneven, more).to_list() == pytest.approx([-0.5] * 3)
    # apart, neither interval leaves the other out
    assert acceptance(uneven).tau.high > acceptance(more).tau.value > acceptance(more).tau.low
    one, other = [counts(4, 12, [4], [2]), counts(1, 1, [1], [0])], [counts(2, 4, [2], [1]), counts(2, 2, [2], [0])]
    found = tau_gain(one, other)
    assert found.value == pytest.approx(13 / 5 - 6 / 4)
    assert (found.low, found.high) == (pytest.approx(0.0), pytest.approx(1.1))  # of the second alone: 1 - 1


def test_a_gain_that_nothing_is_known_of() -> None:
    assert tau_gain([counts(0, 0, [0], [0])], [counts(1, 2, [1], [1])]).to_list() == [None] * 3
    assert tau_gain([counts(1, 2, [1], [1])], [counts(1, 1, [1], [0])]).to_list() == [1.0, None, None]


def outcome(accepted_B: torch.Tensor, depth: int) -> Outcome:
    """A step of a chain that accepts so many tokens; no token matters here."""
    place_D = torch.arange(depth)
    passed_BD = place_D < accepted_B[:, None]
    return Outcome(
        accepted_B,
        torch.where(passed_BD, place_D + 1, -1),
        torch.zeros_like(accepted_B),
        place_D <= accepted_B[:, None],
        passed_BD.float(),
    )


def test_counts_of_a_log_made_by_hand() -> None:
    """Draft length 2, 6 tokens: the prefill's, 3, 1 and a last one of which nobody knows how long it is."""
    log = StepLog(1, 2, limit=6)
    for accepted, kept in ((2, 3), (0, 1), (1, 1)):
        log.add(outcome(torch.tensor([accepted]), 2), torch.tensor([kept]))
    # begun behind 1, 4 and 5 tokens: the first alone has room for 3 more
    (result,) = counts_of(log)
    assert (result.steps, result.emitted, result.truncated) == (1, 3, 2)
    assert result.tested_D.tolist() == result.passed_D.tolist() == result.alpha_hat_D.tolist() == [1, 1]
    # with more room the second counts too, and the third: its one token is the answer's end (EOS)
    log.limit = 8
    (result,) = counts_of(log)
    assert (result.steps, result.emitted, result.truncated) == (3, 5, 0)
    assert (result.tested_D.tolist(), result.passed_D.tolist()) == ([3, 1], [2, 1])
    assert acceptance([result]).tau.value == 5 / 3


def simulated(alpha: float, depth: int, limit: int, rows: int, eos: float = 0.0) -> StepLog:
    """Rows whose drafted tokens are accepted with probability alpha, each by itself; a token ends its row by `eos`."""
    g = torch.Generator().manual_seed(0)
    log = StepLog(rows, depth, limit)
    written_B = torch.ones(rows, dtype=torch.long)
    running_B = written_B < limit
    while running_B.any():
        accepted_B = (torch.rand(rows, depth, generator=g) < alpha).long().cumprod(1).sum(1)
        until_eos_B = 1 + (torch.rand(rows, depth + 1, generator=g) >= eos).long().cumprod(1).sum(1)
        kept_B = torch.stack([accepted_B + 1, until_eos_B, limit - written_B]).amin(0) * running_B
        log.add(outcome(accepted_B, depth), kept_B)
        written_B += kept_B
        running_B = running_B & (until_eos_B > accepted_B + 1) & (written_B < limit)
    return log


def together(rows: Sequence[Counts], size: int = 100) -> list[Counts]:
    """So many requests as one: every ratio is the same, and its bootstrap is quick."""
    names = [each.name for each in fields(Counts)]
    return [
        Counts(*(sum(getattr(each, name) for each in rows[at : at + size]) for name in names))
        for at in range(0, len(rows), size)
    ]


@pytest.mark.parametrize(("alpha", "depth"), [(0.8, 8), (0.45, 4), (0.95, 3)])
def test_tau_of_a_geometric_truth(alpha: float, depth: int) -> None:
    """Answers of 64 tokens: leaving out the steps that the limit cut made 4.200 of the first one's 4.329."""
    result = acceptance(together(counts_of(simulated(alpha, depth, limit=64, rows=20_000))))
    assert result.tau.value == pytest.approx((1 - alpha ** (depth + 1)) / (1 - alpha), rel=0.004)
    assert result.alpha.value == pytest.approx(alpha, abs=0.003)
    assert [each.value for each in result.n_alpha] == pytest.approx([alpha] * depth, abs=0.012)


def test_an_answer_that_ends_counts_to_its_end() -> None:
    """Every call of it and every token; positions behind EOS are no trials."""
    log = simulated(0.8, 8, limit=10_000, rows=4_000, eos=0.1)
    result = acceptance(together(counts_of(log)))
    calls, tokens = log.running_TB.sum(), log.kept_TB.sum()
    assert log.truncated_TB.any(0).mean() > 0.4
    assert result.tau.value == tokens / calls
    assert result.truncated_steps == 0
    assert result.alpha.value == pytest.approx(0.8, abs=0.005)
    assert [each.value for each in result.n_alpha[:5]] == pytest.approx([0.8] * 5, abs=0.02)


@pytest.mark.parametrize("eos_ids", [(), (3, 9, 17)])
def test_the_decoders_log_counts_by_where_a_step_begins(eos_ids: tuple[int, ...]) -> None:
    target = make_target("qwen3")
    drafter = make_drafter(target, noise=0.01, draft_length=5)
    prompts = [[n, n + 1] for n in range(1, 40)]
    done = generate(target, drafter, prompts, warper=Warper(1.0), max_new_tokens=24, eos_ids=eos_ids)
    log = done.steps
    cut_TB = log.counted_TB & log.truncated_TB
    for row, tokens in enumerate(done.tokens):
        begun = 1
        for step in np.flatnonzero(log.running_TB[:, row]):
            assert log.counted_TB[step, row] == (begun + 5 + 1 <= 24)
            begun += log.kept_TB[step, row]
            # what counts is cut by EOS alone, and not behind it
            assert not cut_TB[step, row] or (begun == len(tokens) and tokens[-1] in eos_ids)
    assert bool(eos_ids) == cut_TB.any()
    assert (log.passed_TBD.sum(-1) <= log.kept_TB).all()
    assert sum(each.steps + each.truncated for each in counts_of(log)) == log.running_TB.sum()


def test_alpha_and_alpha_hat_estimate_the_same() -> None:
    target = make_target("qwen3")
    drafter = make_drafter(target, noise=0.05)
    prompts = [[n, n + 1] for n in range(1, 50)]
    log = generate(target, drafter, prompts, warper=Warper(1.0), max_new_tokens=60).steps
    result = acceptance(counts_of(log))
    assert abs(result.alpha.value - result.alpha_hat.value) < 0.03
    width = [each.high - each.low for each in (result.alpha, result.alpha_hat)]
    assert width[1] < width[0]


def test_the_bootstrap_interval_covers_and_not_always() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(60):
        bottom = rng.integers(5, 20, 40).astype(float)
        top = rng.binomial(bottom.astype(int), 0.3).astype(float)
        result = ratio(top, bottom, seed=seed, resamples=400)
        hits += result.low <= 0.3 <= result.high
    assert 50 <= hits < 60


def test_the_interval_is_as_wide_as_the_error_and_as_steady_as_its_resamples() -> None:
    """Against the standard error of a ratio (delta method); requests differ tenfold in length."""
    rng = np.random.default_rng(2)
    bottom_R = rng.integers(5, 50, 400).astype(float)
    top_R = rng.binomial(bottom_R.astype(int), 0.3).astype(float)
    widths = {}
    for count in (100, 400):
        top, bottom = top_R[:count], bottom_R[:count]
        result = [ratio(top, bottom, seed=seed) for seed in range(8)]
        error = np.sqrt(((top - result[0].value * bottom) ** 2).sum()) / bottom.sum()
        widths[count] = float(np.mean([each.high - each.low for each in result]))
        assert widths[count] == pytest.approx(2 * 1.96 * error, rel=0.1)
        # ends of 2,000 resamples move by some 0.06 errors from seed to seed, ends of 30 by 0.5
        assert np.std([each.low for each in result]) < 0.15 * error
        assert np.std([each.high for each in result]) < 0.15 * error
    assert widths[400] == pytest.approx(widths[100] / 2, rel=0.2)


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
    from draftsmith.eval.measure.evaluate import _or_null
    from draftsmith.eval.report.pieces import pieces_of

    tokenizer = train_tokenizer(["plain words\n"], 300)
    text = "a \U0001f40d b é"
    ids = tokenizer(text)["input_ids"]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert len(pieces) == len(ids)
    assert "\U0001f40d" in pieces
    assert _or_null(float("nan")) is None


@pytest.mark.parametrize(
    ("distinct", "loops", "flagged"),
    [(0.25, 0.0, False), (0.249, 0.0, True), (1.0, 0.5, False), (1.0, 0.501, True), (0.25, 0.5, False)],
)
def test_text_at_a_limit_is_not_flagged(distinct: float, loops: float, flagged: bool) -> None:
    assert Degeneracy(distinct, loops).flagged is flagged
