"""The audit of targets with recurrent layers: passes, and catches a state that is not rolled back."""

import pytest
from conftest import make_drafter
from draftsmith.benchmarks.common.random_models import RECURRENT
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.audit.determinism import probe_determinism
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.speed import measure_costs
from helpers.models.random_models import keep_states_after_rejections, random_model, ready

PROMPTS = [[n, n + 1, 2 * n % 61] for n in range(1, 40)]
SMALL = AuditConfig(tokens=2000, sequences=10_000, max_new_tokens=40, prompts=4, batch=50, draft_length=3)


@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("falcon_h1", "kimi_linear", "lfm3"))]
)
def test_a_state_that_is_not_rolled_back_is_caught(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ready(random_model(family, **RECURRENT[family]))
    drafter = make_drafter(target, noise=0.05)
    right = audit(target, drafter, PROMPTS, SMALL)
    assert right.verdict == "lossless", right.text()
    keep_states_after_rejections(monkeypatch)
    wrong = audit(target, drafter, PROMPTS, SMALL)
    assert wrong.verdict == "NOT lossless"
    assert wrong.replay.bugs > 0


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "kimi_linear"])
def test_near_ties_are_told_from_bugs(family: str) -> None:
    """The rounding that excuses a difference is measured with the states of `transformers`' own cache."""
    target = ready(random_model(family, **RECURRENT[family]))
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    found = probe_determinism(
        target, make_drafter(target), prompts, max_new_tokens=8, batches=(1, 2), verify_widths=(1, 4)
    )
    assert found.passed, found.text()
    assert 0 < found.noise["float32"] < 1e-4


def test_the_cost_of_states_is_part_of_a_verify_call() -> None:
    """c_v is measured on calls that leave a state per node: as many one-token functions as nodes."""
    target = ready(random_model("falcon_h1", **RECURRENT["falcon_h1"]))
    (modeling,) = target._recurrence._modeling
    own, counts = modeling.mamba2_selective_state_update, []

    def counted(*given, **settings):
        counts.append(1)
        return own(*given, **settings)

    modeling.mamba2_selective_state_update = counted
    try:
        costs = measure_costs(target, None, [3], context=8, rounds=1)
    finally:
        modeling.mamba2_selective_state_update = own
    assert set(costs.c_v) == {3}
    assert len(counts) % (2 * (1 + 4)) == 0  # two layers, calls of one node and of four
    assert counts
