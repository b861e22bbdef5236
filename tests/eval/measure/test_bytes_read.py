"""Bytes that a proposal reads, against the weights that products really met."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_target
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.projection import Projection
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.speed import bytes_of
from helpers.models.small_drafters import FAMILIES, make_on_target
from torch import nn
from torch.overrides import TorchFunctionMode


class Products(TorchFunctionMode):
    """Adds up the bytes of the weights of linear layers while it is open."""

    result = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        if func is nn.functional.linear:
            self.result += args[1].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_proposal_reads_what_it_says(family: str) -> None:
    target = make_target("qwen3")
    drafter = make_on_target(family, target)
    spy, proposals = Products(), 0
    propose = drafter.propose

    def watched(*args: Any) -> Any:
        nonlocal proposals
        proposals += 1
        with spy:
            return propose(*args)

    drafter.propose = watched
    generate(target, drafter, [[5, 9, 11, 3]], warper=Warper(0.0), max_new_tokens=9)
    linears = [each for module in drafter.weights_read for each in module.modules() if isinstance(each, nn.Linear)]
    assert spy.result == proposals * sum(each.weight.nbytes for each in linears)
    arm = Arm(family, drafter)
    rest = arm.proposal_bytes - sum(each.weight.nbytes for each in linears)
    assert 0 <= rest < 0.1 * arm.proposal_bytes, "norms and biases"


def test_a_shared_projection_is_the_targets_and_counts() -> None:
    """BPD's outputs are read by the target's projection, all in one product."""
    target = make_target("qwen3")
    drafter = make_on_target("bpd", target)
    arm, head = Arm("bpd", drafter), target.model.get_output_embeddings()
    assert arm.proposal_bytes == arm.draft_bytes + head.weight.nbytes
    assert bytes_of(head) == head.weight.nbytes
    hidden = torch.randn(2, drafter.heads.config.heads, head.weight.shape[1])
    together = drafter.heads.logits(hidden, Projection(head.weight))
    for k in range(hidden.shape[1]):
        torch.testing.assert_close(together[:, k], hidden[:, k] @ head.weight.T)
