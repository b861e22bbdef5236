"""Drift of a tuned target: against brute force, and shown wherever results are."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, make_target
from draftsmith.data.rows.packed import Document, PackedRows, pack
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.identity import mark_tuned, shown_name
from draftsmith.eval.measure import drift as module
from draftsmith.eval.measure.drift import Drift, measure_drift
from draftsmith.eval.measure.metrics import Interval
from draftsmith.eval.report.report import write_report
from draftsmith.eval.report.results import schema
from draftsmith.eval.report.tables import show
from rich.console import Console

FOUND = Drift(
    "tiny-target",
    1234,
    Interval(0.0123, 0.0101, 0.0145),
    Interval(2.5, 2.4, 2.6),
    Interval(2.4567, 2.3, 2.6),
    Interval(0.95, 0.9, 1.0),
    {2: 0.0061, 20: 0.0215},
)


@pytest.fixture(scope="module")
def original() -> Backbone:
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def\n"] * 5, 300)
    return target


@pytest.fixture(scope="module")
def tuned(original: Backbone) -> Backbone:
    model = copy.deepcopy(original.model)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))
    return Backbone(model, name="runs/some/target")


def held_out(count: int = 9) -> PackedRows:
    """Documents of 2 to 30 tokens, some with a prompt that does not count, padded to 32."""
    rng = np.random.default_rng(0)
    documents = []
    for number in range(count):
        ids = rng.integers(0, VOCABULARY, int(rng.integers(2, 31))).astype(np.int32)
        in_loss = np.arange(len(ids)) >= (len(ids) // 2 if number % 3 == 0 else 0)
        documents.append(Document(ids, in_loss))
    return pack(documents, 32, pad=0, fingerprint="made")


def brute_force(original: Backbone, tuned: Backbone, rows: PackedRows) -> tuple[int, list[float]]:
    """Labels, and the means of KL, both losses and equal argmax, token by token from the models' own logits."""
    batch = rows.batch(range(len(rows)))
    sums, labels = torch.zeros(4, dtype=torch.float64), 0
    for r, t in batch["loss_mask"].nonzero().tolist():
        first = t - int(batch["positions"][r, t])
        ids, label = batch["input_ids"][r, first:t], batch["input_ids"][r, t]
        with torch.no_grad():
            p, q = (each.model(input_ids=ids[None]).logits[0, -1] for each in (original, tuned))
        p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        same = (p.argmax() == q.argmax()).double()
        sums += torch.stack([(p.exp() * (p - q)).sum(), F.nll_loss(p, label), F.nll_loss(q, label), same])
        labels += 1
    return labels, (sums / labels).tolist()


@pytest.mark.parametrize("chunk", [3, 256])
def test_drift_is_the_plain_mean(
    original: Backbone, tuned: Backbone, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import draftsmith.eval.measure.drift as module

    monkeypatch.setattr(module, "_CHUNK", chunk)
    rows = held_out()
    assert len(rows) > 2
    result = measure_drift(original, tuned, rows, count=len(rows))
    labels, (kl, before, after, same) = brute_force(original, tuned, rows)
    assert (result.original, result.tokens) == ("random", labels)
    assert kl > 0.05
    assert result.kl.value == pytest.approx(kl, rel=1e-5)
    assert result.loss_original.value == pytest.approx(before, rel=1e-5)
    assert result.loss_tuned.value == pytest.approx(after, rel=1e-5)
    assert result.same.value == pytest.approx(same)
    assert 0 < same < 1
    assert result.kl.low < kl < result.kl.high


@torch.no_grad()
def test_states_are_those_of_transformers(original: Backbone, tuned: Backbone) -> None:
    """An early, a middle and a late one, and the last behind the norm; the mean over all tokens but padding."""
    rows = held_out()
    found = measure_drift(original, tuned, rows, count=len(rows)).states
    depth = original.model.config.num_hidden_layers
    assert set(found) == {min(2, depth - 1), depth // 2, max(depth - 3, 0), depth}
    batch, far, count = rows.batch(range(len(rows))), dict.fromkeys(found, 0.0), 0
    for r in range(len(rows)):
        for number in batch["documents"][r].unique():
            here = batch["documents"][r] == number
            if number < 0 or not batch["loss_mask"][r][here].any():
                continue
            ids = batch["input_ids"][r][here][None]
            own, moved = (m.model(ids, output_hidden_states=True).hidden_states for m in (original, tuned))
            count += ids.shape[1]
            for n in found:
                far[n] += float(((moved[n] - own[n]).norm(dim=-1) / own[n].norm(dim=-1)).sum())
    assert found == pytest.approx({n: total / count for n, total in far.items()}, rel=1e-5)
    assert measure_drift(original, original, rows, count=2).states == dict.fromkeys(found, 0.0)


def test_the_rows_that_are_read_are_a_sample(original: Backbone, tuned: Backbone) -> None:
    """Rows of 7 and of 11 tokens, 6 and 10 labels: one alone is the longer or the shorter, as the seed has it."""
    documents = [Document(np.arange(size, dtype=np.int32), np.ones(size, dtype=bool)) for size in (7, 11)]
    both, *alone = (pack(some, 11, pad=0, fingerprint="made") for some in (documents, documents[:1], documents[1:]))
    assert (len(both), *map(len, alone)) == (2, 1, 1)
    by_labels = {6: alone[0], 10: alone[1]}
    found = [measure_drift(original, tuned, both, count=1, seed=seed) for seed in range(8)]
    assert {each.tokens for each in found} == set(by_labels)
    for each in {each.tokens: each for each in found}.values():
        itself = measure_drift(original, tuned, by_labels[each.tokens], count=1)
        assert each.kl.value == pytest.approx(itself.kl.value, rel=1e-5)
        assert each.loss_tuned.value == pytest.approx(itself.loss_tuned.value, rel=1e-5)
        assert each.states == pytest.approx(itself.states, rel=1e-5)
    # and no row twice
    assert {measure_drift(original, tuned, both, count=2, seed=seed).tokens for seed in range(4)} == {16}


def test_no_change_is_no_drift(original: Backbone) -> None:
    result = measure_drift(original, original, held_out(), count=2, seed=3)
    assert result.kl.value == pytest.approx(0, abs=1e-7)
    assert result.loss_original == result.loss_tuned


def test_a_single_row_has_no_interval(original: Backbone, tuned: Backbone) -> None:
    result = measure_drift(original, tuned, held_out(), count=1).to_dict()
    assert result["kl"][0] > 0
    assert result["kl"][1:] == [None, None]
    definition = {**schema()["$defs"]["drift"], "$defs": schema()["$defs"]}
    jsonschema.validate(result, definition)


def test_a_tuned_target_says_so_by_its_name(tuned: Backbone) -> None:
    model = copy.deepcopy(tuned.model)
    assert shown_name(Backbone(model, name="runs/some/target")) == "target"
    mark_tuned(model, name="/somewhere/tiny-target/", identity="ab")
    assert shown_name(Backbone(model, name="runs/some/target")) == "tiny-target (tuned)"


def with_drift(measured: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    results = copy.deepcopy(measured[0])
    results["target"] |= {"name": "tiny-target (tuned)", "drift": FOUND.to_dict()}
    return results


def test_results_with_drift_fit_the_schema(measured) -> None:  # noqa: ANN001
    results = with_drift(measured)
    jsonschema.validate(results, schema())
    del results["target"]["drift"]["kl"]
    with pytest.raises(jsonschema.ValidationError, match="'kl' is a required"):
        jsonschema.validate(results, schema())


SAID = (
    "KL(tiny-target || tuned) is 0.0123 [0.0101, 0.0145] nats per token on 1,234 tokens of "
    "held-out text; the loss on them went from 2.5000 [2.4000, 2.6000] to 2.4567 [2.3000, 2.6000]; "
    "both have the same most probable token for 95% [90%, 100%] of them; its hidden states are away by "
    "0.61% of state 2, 2.15% of state 20"
)


def test_report_and_terminal_say_it(measured, run_folder: Path) -> None:  # noqa: ANN001
    results = with_drift(measured)
    (run_folder / "eval" / "results.json").write_text(json.dumps(results))
    page = write_report(run_folder).read_text()
    assert SAID in page
    assert "the audit compares with: lossless means the tuned target&#39;s own output" in page
    plain = (run_folder / "report.md").read_text().replace("\\", "")
    assert SAID in plain
    assert "# Drafter for tiny-target (tuned)" in plain
    shown = Console(file=io.StringIO(), width=80)
    show(results, shown)
    assert SAID in " ".join(shown.file.getvalue().split())  # type: ignore[attr-defined]


def test_a_frozen_target_is_not_said_to_be_tuned(measured, run_folder: Path) -> None:  # noqa: ANN001
    assert "tuned" not in write_report(run_folder).read_text()
    shown = Console(file=io.StringIO(), width=80)
    show(measured[0], shown)
    assert "drift" not in shown.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("depth", "states"), [(30, (2, 15, 27)), (8, (2, 4, 5)), (4, (1, 2)), (3, (0, 1, 2)), (1, (0,))]
)
def test_an_early_a_middle_and_a_late_state_are_looked_at(
    original: Backbone, depth: int, states: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that drafters read by default: 2, half of the layers, all but 3; each once, and the last one behind."""
    monkeypatch.setattr(module, "layer_count", lambda _model: depth)
    monkeypatch.setattr(module, "layers_of", lambda *_: ())
    assert module._read_numbers(original) == (*states, module.LAST)
