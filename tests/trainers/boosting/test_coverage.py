"""What an SSM covers, against decoding and against definitions written out by hand."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, make_drafter
from draftsmith.data.generate.continuations import Continuations
from draftsmith.data.rows.packed import PackedRows
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.projection import Projection
from draftsmith.trainers.boosting import coverage
from draftsmith.trainers.boosting.coverage_pass import COVERAGE, measure_matches, record_coverage, stored_matches
from draftsmith.trainers.labels import labelled
from draftsmith.trainers.losses.weighted_rows import WeightedRows
from draftsmith.trainers.method_config import BoostConfig
from draftsmith.trainers.packed.passes import hidden_states
from helpers.runs.damaged_files import KINDS, damage
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

PROMPT, LENGTH = 5, 9


def config(**values) -> BoostConfig:
    return BoostConfig(**{"match_tokens": 0, **values})


ALONE: Any = SimpleNamespace(
    device=torch.device("cpu"), process_index=0, num_processes=1, is_main_process=True, wait_for_everyone=lambda: None
)


@pytest.fixture(scope="module")
def samples(target: Backbone) -> PackedRows:
    """Prompts and the target's greedy continuations of different lengths, padded."""
    g = torch.Generator().manual_seed(3)
    prompts = torch.randint(VOCABULARY, (12, PROMPT), generator=g).tolist()
    made = autoregressive(target, prompts, warper=Warper(0.0), max_new_tokens=LENGTH).tokens
    ids = np.zeros((12, PROMPT + LENGTH), dtype=np.int32)
    labels, documents = np.zeros_like(ids, dtype=bool), np.full_like(ids, -1)
    for row, (prompt, answer) in enumerate(zip(prompts, made, strict=True)):
        answer = answer[: LENGTH - row % 4]
        end = PROMPT + len(answer)
        ids[row, :end], labels[row, PROMPT:end], documents[row, :end] = [*prompt, *answer], True, 0
    return PackedRows(ids, labels, documents, "samples")


def teacher_forced(model, rows: PackedRows) -> Tensor:
    """[R, S] by one forward pass, as `coverage_pass.py` does it."""
    batch = rows.batch(range(len(rows)))
    hidden_PH, label_P = labelled(hidden_states(model, batch), batch)
    found = torch.zeros_like(batch["loss_mask"])
    projection = Projection.of(model)
    found[:, 1:][batch["loss_mask"][:, 1:]] = coverage.matched(hidden_PH, projection, label_P, 7)
    return found


def test_one_forward_pass_says_what_decoding_would(target: Backbone, samples: PackedRows) -> None:
    """From every position: the SSM's own greedy tokens agree with the text exactly so far."""
    draft = make_drafter(target, noise=0.05).backbone
    label_RS = torch.tensor(samples.in_loss_RS)
    with torch.no_grad():
        run_RS = coverage.runs(teacher_forced(draft.model, samples), label_RS)
    seen = set()
    for row, at in label_RS.nonzero().tolist():
        text = samples.ids_RS[row][: label_RS[row].nonzero()[-1] + 1].tolist()
        made = autoregressive(draft, [text[:at]], warper=Warper(0.0), max_new_tokens=LENGTH)
        continuation = made.tokens[0][: len(text) - at]
        agreed = next((n for n, word in enumerate(continuation) if word != text[at + n]), len(continuation))
        assert run_RS[row, at] == agreed
        seen.add(agreed)
    assert len(seen) > 3, "the SSM must be right sometimes, and not always"
    assert not run_RS[~label_RS].any()


# ---- definitions ------------------------------------------------------------------------------

MATCHED = [[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0]]
LABELS = [[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0]]  # the second sample is shorter


def case() -> tuple[Tensor, Tensor]:
    return torch.tensor(MATCHED).bool(), torch.tensor(LABELS).bool()


def test_runs_and_windows_by_hand() -> None:
    matched_RS, label_RS = case()
    assert coverage.runs(matched_RS, label_RS).tolist() == [[0, 2, 1, 0, 1, 0], [0, 0, 2, 1, 0, 0]]
    assert coverage.windows(label_RS, 0).tolist() == [[0, 4, 3, 2, 1, 0], [0, 0, 2, 1, 0, 0]]
    assert coverage.windows(label_RS, 3).tolist() == [[0, 3, 3, 2, 1, 0], [0, 0, 2, 1, 0, 0]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # from each label to the end: 2 of 4, 1 of 3, none of 2, 1 of 1; the other sample is whole
        ({"unit": "span"}, [[0, 1 / 2, 1 / 3, 0, 1, 0], [0, 0, 1, 1, 0, 0]]),
        ({"unit": "span", "match_tokens": 2}, [[0, 1, 1 / 2, 0, 1, 0], [0, 0, 1, 1, 0, 0]]),
        ({"unit": "sample"}, [[0, 1 / 2, 1 / 2, 1 / 2, 1 / 2, 0], [0, 0, 1, 1, 0, 0]]),
        ({"unit": "sample", "match_tokens": 2}, [[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0]]),
    ],
)
def test_acceptance_by_hand(values: dict, expected: list) -> None:
    found = coverage.acceptance(*case(), config(**values))
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float32))


def test_weights_by_hand() -> None:
    _, label_RS = case()
    first = torch.tensor([[0, 1, 0.5, 0, 1, 0], [0, 0, 0.25, 1, 0, 0]])
    second = torch.tensor([[0, 1, 1, 0, 0, 0], [0, 0, 0.5, 0, 0, 0]])
    both = [first, second]
    one = {"unit": "span", "match_tokens": 1}
    hard = coverage.weights(both, label_RS, config(weights="hard", **one))
    assert hard.tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]]
    # in spans of two a label stands in its own and in the one before it
    hard = coverage.weights(both, label_RS, config(weights="hard", unit="span", match_tokens=2))
    assert hard.tolist() == [[0, 0, 0, 1 / 2, 1 / 2, 0], [0, 0, 1, 1 / 2, 0, 0]]
    whole = coverage.weights(both, label_RS, config(weights="hard", unit="span"))
    expected = torch.tensor([[0, 0, 0, 1 / 3, 1 / 4, 0], [0, 0, 1, 1 / 2, 0, 0]])
    assert torch.allclose(whole, expected)
    soft = coverage.weights(both, label_RS, config(weights="soft", soft=2.0, **one))
    powers = torch.tensor([[0, 4, 3, 0, 2, 0], [0, 0, 1.5, 2, 0, 0]])
    assert torch.allclose(soft, (-powers).exp() * label_RS)
    for unit in ("span", "sample"):
        none = config(weights="none", unit=unit, match_tokens=3)
        assert torch.equal(coverage.weights(both, label_RS, none), label_RS.float())
    assert torch.equal(coverage.weights([], label_RS, config()), label_RS.float())
    assert coverage.left_share(both, label_RS) == pytest.approx(2 / 6)
    assert coverage.left_share([], label_RS) == 1


def test_union_length_by_hand() -> None:
    """Drafts of two from the four places that have room for two."""
    matched_RS, label_RS = case()
    other_RS = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()
    assert coverage.union_length([matched_RS], label_RS, 2) == pytest.approx((2 + 1 + 0 + 2) / 4)
    both = coverage.union_length([matched_RS, other_RS], label_RS, 2)
    assert both == pytest.approx((2 + 1 + 2 + 2) / 4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_against_loops(data: st.DataObject) -> None:
    """Random samples: every definition as a loop over positions."""
    R, S = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 8))
    label = []
    for _ in range(R):
        begin = data.draw(st.integers(1, S - 1))
        end = data.draw(st.integers(begin + 1, S))
        label.append([begin <= s < end for s in range(S)])
    label_RS = torch.tensor(label)
    teacher_forced_KRS = [
        torch.tensor([[data.draw(st.booleans()) for _ in range(S)] for _ in range(R)]) for _ in range(2)
    ]
    m, unit = data.draw(st.integers(0, 4)), data.draw(st.sampled_from(["sample", "span"]))
    chosen = config(unit=unit, match_tokens=m, weights="soft", soft=0.7)
    accepted = [coverage.acceptance(each, label_RS, chosen) for each in teacher_forced_KRS]
    found = coverage.weights(accepted, label_RS, chosen)
    for r in range(R):
        places = [s for s in range(S) if label[r][s]]
        worth = {}
        for begin in places[:1] if unit == "sample" else places:
            stretch = [place for place in places if place >= begin][: m or None]
            exponent = 0.0
            for each in teacher_forced_KRS:
                hits = 0
                while hits < len(stretch) and each[r, stretch[hits]]:
                    hits += 1
                exponent += hits / len(stretch)
            worth[tuple(places if unit == "sample" else stretch)] = math.exp(-0.7 * exponent)
        for s in range(S):
            mine = [value for stretch, value in worth.items() if s in stretch]
            expected = sum(mine) / len(mine) if mine else 0
            assert float(found[r, s]) == pytest.approx(expected, rel=1e-5)


# ---- rows -------------------------------------------------------------------------------------


def test_weighted_rows(samples: PackedRows) -> None:
    """Rows without a label left are gone; weights have a mean of 1 over what is left."""
    label_RS = torch.tensor(samples.in_loss_RS)
    weight_RS = label_RS.float()
    weight_RS[3] = 0
    weight_RS[4, : PROMPT + 2] = 0
    rows = WeightedRows(samples, weight_RS)
    assert len(rows) == 11
    batch = rows.batch([2, 3])
    assert torch.equal(batch["input_ids"], samples.batch([2, 4])["input_ids"])
    assert torch.equal(batch["loss_mask"], weight_RS[[2, 4]] > 0)
    assert "share" not in batch, "all that is left counts alike"
    weight_RS[5] *= 0.5
    rows = WeightedRows(samples, weight_RS)
    whole = rows.batch(list(range(len(rows))))
    assert float(whole["share"][whole["loss_mask"]].mean()) == pytest.approx(1)
    ratio = whole["share"][4][whole["loss_mask"][4]] / whole["share"][0][PROMPT]
    assert torch.allclose(ratio, torch.tensor(0.5))


def test_a_damaged_record_does_not_stop_the_next(tmp_path: Path) -> None:
    """A line that a kill cut short, or that is no record, leaves; the others stay."""
    path, whole = tmp_path / "metrics.jsonl", '{"kind": "probe", "step": 2, "tau": 1.5}'
    path.write_text(f'{whole}\n[1]\n{{"kind": "coverage", "step": 1, "cov')
    record_coverage(path, 1, {"covered": 0.5})
    assert path.read_text().splitlines() == [whole, '{"kind": "coverage", "step": 1, "covered": 0.5}']


def test_rows_beyond_the_vocabulary_foresee_nothing(target: Backbone, samples: PackedRows, tmp_path: Path) -> None:
    """A head may be padded; decoding never drafts what the target lacks."""
    draft: Any = make_drafter(target, noise=0.0).module
    given = Continuations(samples, samples)
    before = measure_matches(draft, given, tmp_path, ALONE, chunk=7, vocabulary=VOCABULARY)
    weight_VH = draft.get_output_embeddings().weight
    padded_VH = torch.cat([weight_VH, 9 * weight_VH])  # padding beats every positive logit
    draft.get_output_embeddings().weight = torch.nn.Parameter(padded_VH)
    after = measure_matches(draft, given, tmp_path, ALONE, chunk=7, vocabulary=VOCABULARY)
    assert before.train.any()
    assert torch.equal(after.train, before.train)


@pytest.mark.parametrize("kind", [*KINDS, "other names", "other shapes"])
def test_a_damaged_pass_is_done_again(
    kind: str, target: Backbone, samples: PackedRows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file counts as missing, the log names it, and the next pass puts a whole one there."""
    draft, path = make_drafter(target, noise=0.05).module, tmp_path / COVERAGE
    given = (draft, Continuations(samples, samples), tmp_path, ALONE)
    assert stored_matches(tmp_path) is None
    assert not caplog.messages, "a pass that is still to come is no damage"
    measured = measure_matches(*given, chunk=7, vocabulary=VOCABULARY)
    whole = path.read_bytes()
    if kind in KINDS:
        damage(path, kind)
    elif kind == "other names":
        save_file({"train": measured.train}, path)
    else:
        save_file({"train": measured.train, "validation": measured.validation[0]}, path)
    with caplog.at_level(logging.WARNING):
        assert stored_matches(tmp_path) is None
    [warning] = caplog.messages
    assert str(path) in warning
    measure_matches(*given, chunk=7, vocabulary=VOCABULARY)
    assert path.read_bytes() == whole
    again = stored_matches(tmp_path)
    assert again is not None
    assert all(torch.equal(*pair) for pair in zip(again, measured, strict=True))
