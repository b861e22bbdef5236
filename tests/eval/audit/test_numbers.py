"""The audit's numbers worked out by hand: levels, distances, powers, streams, and what its texts count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.audit import determinism, enumeration, scores
from draftsmith.eval.audit.audit import AuditReport, _sampled, failures_of
from draftsmith.eval.audit.determinism import _Findings, _invariance, _Probe, _Written
from draftsmith.eval.audit.determinism_result import Determinism, Invariance, Setting
from draftsmith.eval.audit.enumeration import WARPERS, _expected_distance, enumerate_decoding, survey
from draftsmith.eval.audit.plants import PLANTS
from draftsmith.eval.audit.replay import histogram_of
from draftsmith.eval.audit.rosenblatt import judge, serial_statistic
from draftsmith.eval.audit.scores import LEARNED, ScoreSums, ScoreTest, noncentrality
from draftsmith.eval.audit.toys import Toy
from draftsmith.eval.config import AuditConfig


@pytest.mark.parametrize(("mean_p", "fails"), [(1.8e-4, True), (1.83e-4, False)])
def test_a_second_failure_is_held_to_what_is_left(mean_p: float, fails: bool) -> None:
    """Of 0.8 the histogram has 0.25: 0.001 * 0.1 / 0.55 = 1.82e-4 for the mean; of all tests it were 1.25e-4."""
    judged: Any = SimpleNamespace(histogram_p=1e-4, mean_p=mean_p, serial_p=0.4)
    greedy: Any = SimpleNamespace(bugs=0, near_tie_p=1.0)
    found = failures_of(SimpleNamespace(p_value=0.3), judged, greedy)  # type: ignore[arg-type]
    assert found == ["histogram of the real pair, p = 0.0001", *["mean of the real pair, p = 0.00018"] * fails]


@pytest.mark.parametrize(
    ("verdict", "pair", "counted", "distance"),
    [
        ("lossy", 0.1, (0.5, 0.2), 0.3),
        ("lossy", 0.4, (0.5, 0.2), 0.4),
        ("lossy", 0.1, (0.2, 0.5), 0.1),
        ("lossy", 0.1, None, 0.1),
        ("lossless", 0.1, (0.5, 0.2), None),
    ],
)
def test_a_distance_is_the_larger_of_both_proofs(
    verdict: Any, pair: float, counted: tuple[float, float] | None, distance: float | None
) -> None:
    seen: Any = None if counted is None else SimpleNamespace(total_variation=counted[0], noise=counted[1])
    judged: Any = SimpleNamespace(distance=pair)
    nothing: Any = None
    report = AuditReport(verdict, "draftsmith", None, None, 0.8, seen, judged, nothing, nothing, [])
    assert report.distance == (None if distance is None else pytest.approx(distance))


@pytest.mark.parametrize(("tokens", "numbers"), [(10, [0, 1]), (11, [0, 1, 2, 3])])
def test_tokens_behind_the_prefills_are_the_evidence(tokens: int, numbers: list[int]) -> None:
    """Two answers of six tokens are ten; prompts are asked in turn."""
    asked: list[int] = []

    def write(ids: Any, some: list[int], _warper: Warper) -> list[list[int]]:
        asked.extend(some)
        return [[1] * 6 for _ in ids]

    config: Any = SimpleNamespace(tokens=tokens, batch=2)
    prompts, answers = _sampled([[5], [6], [7]], config, write, Warper(1.0))
    assert asked == numbers
    assert prompts == [[5], [6], [7], [5]][: len(numbers)]
    assert len(answers) == len(numbers)


def test_blocks_of_sequences_draw_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, int]] = []
    real = enumeration.SharedStream

    def stream(seed: int, rows: int, device: Any) -> Any:
        drawn.append((seed, rows))
        return real(seed, rows, device)

    monkeypatch.setattr(enumeration, "_BLOCK", 10)
    monkeypatch.setattr(enumeration, "SharedStream", stream)
    toy = Toy.of("draft-model", 1)
    how: Any = {"rule": None, "sequences": 25, "warper": Warper(0.7), "level": 1e-3, "length": 2}
    assert enumerate_decoding(toy.target, toy.proposer, seed=3, **how).sequences == 25
    assert drawn == [(3_000_009, 10), (3_000_010, 10), (3_000_011, 5)]


@pytest.mark.parametrize(
    ("share", "missed", "passed"),
    [(2.0, None, True), (2.0, 0, False), (2.0, -1, False), (1.01, None, True), (1.0, None, False)],
)
def test_a_survey_passes_where_all_are_right_and_all_plants_caught(
    share: float, missed: int | None, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two methods with six warpers each share the false alarm of one in a thousand."""
    level = 1e-3 / (2 * 6)
    seen = {name: 0.5 * level for name in PLANTS}
    if missed is not None:
        seen[list(PLANTS)[missed]] = level
    line = {"p_value": share * level, "rows_alone": True}
    monkeypatch.setattr(enumeration, "_line", lambda name, shown, *_: {"method": name, "warper": shown, **line})
    monkeypatch.setattr(enumeration, "_planted", lambda name, *_: {"plant": name, "p_value": seen[name]})
    monkeypatch.setattr(enumeration, "_lossy", lambda rule, *_: {"rule": rule})
    made = survey(AuditConfig(), ["a", "b"])
    assert made["level"] == pytest.approx(level)
    assert len(made["exact"]) == 2 * len(WARPERS)
    assert made["passed"] is passed


def test_what_noise_alone_makes_of_a_distance() -> None:
    """A fair coin, a hundred times: each side is off by 0.05 root mean square, by 0.0399 on average, and half counts."""
    assert _expected_distance(np.array([0.5, 0.5]), 100) == pytest.approx(0.0398942, abs=1e-7)
    assert _expected_distance(np.array([1.0, 0.0]), 100) == 0.0


@pytest.mark.parametrize(("smallest", "p_value"), [(0.02, 0.06), (0.4, 1.0)])
def test_many_tests_share_one_level(smallest: float, p_value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tests the smallest p counts three times, and each has a third of the level."""
    sums = ScoreSums(7)
    summed = [ScoreTest("p, by all contexts", 1.0, 3, 0.5), ScoreTest("p, by position", 1.0, 4, 0.9)]
    monkeypatch.setattr(sums, "_summed", lambda: iter(summed))
    monkeypatch.setattr(sums, "_foreseen", lambda: iter([ScoreTest(f"{scores._EXCESS}, by x", 1.0, 1, smallest)]))
    found = sums.judge(0.03)
    assert found.p_value == pytest.approx(p_value)
    assert found.detectable == pytest.approx(noncentrality(4, 0.01) ** 0.5)
    assert found.worst.p_value == smallest


@pytest.mark.parametrize(("score", "p_value"), [(10.0, 0.158655), (-10.0, 0.841345)])
def test_an_excess_counts_where_it_comes_again(score: float, p_value: float) -> None:
    learned = scores._Learned(1)
    learned._score, learned._variance, learned._reach = score, 100.0, 1.0
    found = learned.test(f"{scores._EXCESS}, by {LEARNED[0]}")
    assert found is not None
    assert found.p_value == pytest.approx(p_value, abs=1e-6)


def test_the_mean_is_tested_on_both_sides() -> None:
    """Twelve numbers whose mean is 0.1 away from a half are 1.2 deviations away."""
    for middle in (0.6, 0.4):
        assert judge([np.full(12, middle)], 1e-3).mean_p == pytest.approx(0.230139, abs=1e-6)


def test_dependence_up_to_lag_five_by_hand() -> None:
    """Lags 1 to 5: of the waves 4/5 + 0 + 4/3 + 16/2 + 4, and of the line 3 squared at the last one."""
    u = np.array([1.0, 0.5, 0.5, 0.5, 0.5, 1.0])
    assert serial_statistic([u]) == pytest.approx(4 / 5 + 4 / 3 + 8 + 4 + 9)


def test_a_token_at_which_answers_part_is_compared() -> None:
    parted = (_Written([[1, 2, 3]], [[7, 8, 9]]), _Written([[1, 5, 3]], [[7, 0, 9]]))
    alike = (_Written([[4, 5]], [[1, 2]]), _Written([[4, 5]], [[1, 3]]))
    found = _invariance("fp32", True, [parted, alike])
    assert (found.tokens, found.same_tokens, found.same_logits) == (4, 3, 2)
    assert not found.complete


@pytest.mark.parametrize(("gap", "near"), [(0.0, 1), (0.19, 1), (0.21, 0)])
def test_a_near_tie_of_the_probe_is_within_twice_the_noise(
    gap: float, near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 1 was written, and the target's own is 2."""
    probe = object.__new__(_Probe)
    nothing: Any = None
    probe._target, probe._prompts, probe._references, probe._dtype = nothing, [[5]], [[2]], "fp32"
    monkeypatch.setattr(probe, "_write", lambda _setting: _Written([[1]], [[0]]), raising=False)
    monkeypatch.setattr(determinism, "one_by_one", lambda *_: torch.tensor([[0.0, 1 - gap, 1.0]]))
    found = _Findings(noise={"fp32": 0.1})
    probe._compared(Setting("fp32", 1, False, 1, False), found)
    (compared,) = found.settings
    assert (compared.identical, compared.near_ties, compared.bugs) == (0, near, 1 - near)
    assert found.parted == pytest.approx([gap], abs=1e-6)
    assert (found.first_bug is None) == bool(near)


def test_what_differs_itself_is_told_from_what_differs_in_a_bit() -> None:
    found = Determinism(1, 10, [], 0, 0, 0, {}, [], [], None, False, [Invariance("fp32", True, 10, 9, 7)])
    assert "static KV cache, fp32: 7 of 10 tokens (1 differ themselves)" in found.text()


def test_a_margin_at_an_edge_is_counted_above_it() -> None:
    found = dict(histogram_of([0.0, 1e-4, 0.5, 1.0]))
    assert found == {
        "0 to 0.0001": 1,
        "0.0001 to 0.001": 1,
        "0.001 to 0.01": 0,
        "0.01 to 0.1": 0,
        "0.1 to 1": 1,
        "1 to inf": 1,
    }
