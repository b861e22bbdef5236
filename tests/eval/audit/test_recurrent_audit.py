"""The audit of targets with recurrent layers: passes, and catches a state that is not rolled back."""

import pytest
from conftest import make_drafter
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig
from random_models import RECURRENT, keep_states_after_rejections, random_model, ready

PROMPTS = [[n, n + 1, 2 * n % 61] for n in range(1, 40)]
SMALL = AuditConfig(tokens=2000, sequences=10_000, max_new_tokens=40, prompts=4, batch=50, draft_length=3)


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1"])
def test_a_state_that_is_not_rolled_back_is_caught(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ready(random_model(family, **RECURRENT[family]))
    drafter = make_drafter(target, noise=0.05)
    right = audit(target, drafter, PROMPTS, SMALL)
    assert right.verdict == "lossless", right.text()
    keep_states_after_rejections(monkeypatch)
    wrong = audit(target, drafter, PROMPTS, SMALL)
    assert wrong.verdict == "NOT lossless"
    assert wrong.replay.bugs > 0
