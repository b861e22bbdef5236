"""Losses of methods that draft several tokens in one pass, over targets that cap, scale or shift their logits.

Each is made anew of whole logits: those of the target by the model's own forward pass, those of the draft by the
product and what the family does behind it, written down here. Read next: `../test_shaped_targets.py`, the other
methods, and how such targets decode.

Shapes: R rows, S tokens of a row, A anchors, K drafts of a block, P comparisons, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY
from draftsmith.drafters.projection import Projection, Shaping
from draftsmith.trainers.block.masked_chains import drawn
from draftsmith.trainers.block.pard import PardStudent, PardTeacher
from draftsmith.trainers.method_config import BlockConfig, DFlash2Config, DSparkConfig, MtpConfig, PeagleConfig
from draftsmith.trainers.packed.passes import hidden_states
from helpers.models.method_objectives import build
from helpers.models.shaped_targets import (
    FAMILIES,
    OBJECTIVE,
    S,
    assert_same_gradients,
    divergence,
    shake,
    shaped,
    text,
)
from torch import Tensor

BEHIND: dict[str, Callable[[Tensor], Tensor]] = {
    "gemma2": lambda x: 1.5 * torch.tanh(x / 1.5),
    "cohere": lambda x: 0.25 * x,
    "granite": lambda x: x / 4,
    "phi": lambda x: x,  # its bias is in the product
}
DRAFTS = 3
MASK = VOCABULARY - 1


class Drafted(NamedTuple):
    """Drafts at one depth, and how much each of them counts."""

    place_P: Tensor
    """Where the label stands in the row."""
    q_PV: Tensor
    share: float
    more: Tensor | float = 0.0
    """A loss beside the mix, summed over the drafts."""


def product(family: str, states: Tensor) -> Tensor:
    """Of states and the target's projection, with the bias that it may have."""
    head: Any = shaped(family).get_output_embeddings()
    return F.linear(states, head.weight, head.bias)


def mixed(family: str, parts: Iterator[Drafted]) -> tuple[Tensor, float]:
    """The recipe's mix over whole logits, and what the drafts count together."""
    batch = text()
    own_SV, ids_S = shaped(family)(batch["input_ids"]).logits[0], batch["input_ids"][0]
    total, counted = torch.zeros(()), 0.0
    for each in parts:
        label_P = ids_S[each.place_P]
        kl = divergence(own_SV[each.place_P - 1], each.q_PV)
        ce = F.cross_entropy(each.q_PV, label_P, reduction="sum")
        total = total + each.share * (kl + 0.5 * ce + each.more)
        counted += each.share * len(label_P)
    return total, counted


def blocks(goal: Any, batch: dict[str, Tensor], teacher: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of every depth: what the projection reads, where the labels stand, the tokens in front of them."""
    at_RA, label_RAK, known_RAK = teacher.anchors
    out_RAKH = goal.draft().blocks(teacher.fused_RSF, batch["positions"], batch["documents"], teacher.roots_RAH, at_RA)
    for k in range(goal.draft().config.most):
        known_A = known_RAK[0, :, k]
        place_P = label_RAK[0, known_A, k]
        yield out_RAKH[0, known_A, k], place_P, batch["input_ids"][0, place_P - 1]


def dflash(family: str, goal: Any, batch: dict[str, Tensor], teacher: Any) -> Iterator[Drafted]:
    for k, (out_PH, place_P, _) in enumerate(blocks(goal, batch, teacher)):
        yield Drafted(place_P, BEHIND[family](product(family, out_PH)), 0.7**k)


def dspark(family: str, goal: Any, batch: dict[str, Tensor], teacher: Any) -> Iterator[Drafted]:
    """What the token in front says is added in front of the cap; the confidence learns the overlap."""
    net = goal.draft()
    own_SV = shaped(family)(batch["input_ids"]).logits[0]
    for k, (out_PH, place_P, front_P) in enumerate(blocks(goal, batch, teacher)):
        q_PV = BEHIND[family](product(family, out_PH) + net.markov_head(front_P))
        overlap_P = torch.minimum(q_PV.softmax(-1), own_SV[place_P - 1].softmax(-1)).sum(-1).detach()
        said_P = net.confidence(out_PH, front_P)
        doubt = F.binary_cross_entropy_with_logits(said_P, overlap_P, reduction="sum")
        yield Drafted(place_P, q_PV, 0.7**k, 0.6 * doubt)


def dflash2(family: str, goal: Any, batch: dict[str, Tensor], teacher: Any) -> Iterator[Drafted]:
    """The selector adds to the logits of the likeliest, behind the cap, and learns labels that are among them."""
    net, found = goal.draft(), 0
    for k, (out_PH, place_P, front_P) in enumerate(blocks(goal, batch, teacher)):
        q_PV, label_P = BEHIND[family](product(family, out_PH)), batch["input_ids"][0, place_P]
        said_PC, best_PC = q_PV.topk(net.config.candidates)
        score_PC = said_PC + net.candidate_selector(front_P, out_PH, best_PC)
        is_label_PC = best_PC == label_P[:, None]
        found += int(is_label_PC.sum())
        yield Drafted(place_P, q_PV, 0.7**k, -0.6 * score_PC.log_softmax(-1)[is_label_PC].sum())
    assert found > 3


def mtp(family: str, goal: Any, batch: dict[str, Tensor], teacher: Any) -> Iterator[Drafted]:
    """beta^j of the passes, which add up to 1; weights of a mean here, as blocks have them."""
    net = goal.draft()
    outputs = net.unroll(
        net.fuse(teacher.hidden_RSH), teacher.embeds_RSH, batch["positions"], batch["documents"], DRAFTS
    )
    for j, out_RSH in enumerate(outputs):
        place_P = torch.arange(2 + j, S)
        states_PH = net.head_input(out_RSH)[0, : len(place_P)]
        yield Drafted(place_P, BEHIND[family](product(family, states_PH)), 0.6**j)


def peagle(family: str, goal: Any, batch: dict[str, Tensor], teacher: Any) -> Iterator[Drafted]:
    """A head of its own, a product alone; the target's distribution is what is capped."""
    net, at_A = goal.draft(), torch.arange(S)
    counts = [S - 2 - d for d in range(1, DRAFTS)]
    outputs = net.drafts(
        net.fuse(teacher.fused_RSF), teacher.embeds_RSH, batch["positions"], batch["documents"], at_A[None], counts
    )
    own_SV = shaped(family)(batch["input_ids"]).logits[0]
    for d, out_RAH in enumerate(outputs):
        place_P = torch.arange(2 + d, S)
        q_PV = net.head(out_RAH)[0, : len(place_P)]
        soft = -(own_SV[place_P - 1].softmax(-1) * q_PV.log_softmax(-1)).sum()
        yield Drafted(place_P, q_PV, 0.7**d, soft)


BLOCK = BlockConfig(size=DRAFTS + 1, decoder_layers=1, anchors=S, decay=0.7, layers=(0, 1, 2))
DSPARK_BLOCK = BlockConfig(size=DRAFTS, decoder_layers=1, anchors=S, decay=0.7, layers=(0, 1, 2))
PASSES = MtpConfig(passes=DRAFTS, decay=0.6)
DEPTHS = PeagleConfig(depths=DRAFTS, kept=1.0, decoder_layers=1, decay=0.7, layers=(0, 1, 2))
# what is built, what the loss is made of again, and what all drafts together count in place of their number
METHODS: dict[str, tuple[dict[str, Any], Callable[..., Iterator[Drafted]], Callable[[float], float]]] = {
    "dflash": ({"block": BLOCK}, dflash, lambda counted: (S - 1) / counted),
    "dspark": (
        {"block": DSPARK_BLOCK, "dspark": DSparkConfig(rank=4, confidence=0.6)},
        dspark,
        lambda counted: (S - 1) / counted,
    ),
    "dflash2": (
        {"block": BLOCK, "dflash2": DFlash2Config(rank=4, candidates=20, weight=0.6, group=8)},
        dflash2,
        lambda counted: (S - 1) / counted,
    ),
    "mtp": ({"mtp": PASSES}, mtp, lambda _: 1 / sum(0.6**j for j in range(DRAFTS))),
    "peagle": ({"peagle": DEPTHS, "ids": range(VOCABULARY)}, peagle, lambda _: 1.0),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_whole_logits(family: str, method: str) -> None:
    sections, again, share = METHODS[method]
    torch.manual_seed(0)
    goal, batch = build(method, shaped(family), objective=OBJECTIVE, **sections), text()
    shake(goal.draft())
    loss, _ = goal.module.eval()(batch, teacher := goal.prepare(batch))
    total, counted = mixed(family, again(family, goal, batch, teacher))
    assert_same_gradients(loss, total * share(counted), goal.draft())


@pytest.mark.parametrize(("family", "other"), [("gemma2", "phi"), ("phi", "gemma2"), ("cohere", "gemma2")])
def test_a_pard_draft_learns_what_its_own_passes_say(family: str, other: str) -> None:
    """Behind every token of the text a pass of the draft's own over as many masks as it drafts."""
    target, draft, batch = shaped(family), copy.deepcopy(shaped(other)).requires_grad_(True), text()
    chains = drawn(batch, DRAFTS, 0, keep=1.0, least=1.0)
    with torch.no_grad():
        teacher = PardTeacher(hidden_states(target, batch), Projection.of(target), chains)
    student = PardStudent(draft, target, OBJECTIVE, drafts=DRAFTS, mask_id=MASK).eval()
    loss, _ = student(batch, teacher)

    def passes() -> Iterator[Drafted]:
        for at in range(S - 1):
            masks = torch.full((1, min(DRAFTS - 1, S - 2 - at)), MASK)
            ids_1N = torch.cat((batch["input_ids"][:, : at + 1], masks), 1)
            q_PV = draft(ids_1N).logits[0, at:]
            yield Drafted(torch.arange(at + 1, at + 1 + len(q_PV)), q_PV, 1.0)

    total, counted = mixed(family, passes())
    assert_same_gradients(loss, total * (S - 1) / counted, draft)


def with_a_cap() -> dict[str, Callable[[], None]]:
    """Every method over a capped target, or with a capped draft."""
    each: dict[str, Callable[[], None]] = {
        method: lambda method=method: test_the_loss_is_that_of_whole_logits("gemma2", method)  # type: ignore[misc]
        for method in METHODS
    }
    return each | {"pard": lambda: test_a_pard_draft_learns_what_its_own_passes_say("phi", "gemma2")}


@pytest.mark.parametrize("method", with_a_cap())
def test_a_cap_that_is_left_out_would_be_seen(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Shaping.of
    monkeypatch.setattr("draftsmith.drafters.projection.Shaping.of", lambda model: Shaping(whole(model).scale))
    monkeypatch.setattr("draftsmith.trainers.teacher.frozen.check_logits", lambda *_: None)
    with pytest.raises(AssertionError, match="not close"):
        with_a_cap()[method]()


@pytest.mark.parametrize("method", [each for each in with_a_cap() if each != "peagle"])  # its own head has none
def test_a_cap_without_its_gradient_would_be_seen(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is right, and what is learnt is not."""
    whole = Shaping.__call__

    def straight(self: Shaping, product: Tensor) -> Tensor:
        return product + (whole(self, product) - product).detach()

    monkeypatch.setattr(Shaping, "__call__", straight)
    with pytest.raises(AssertionError, match="not close"):
        with_a_cap()[method]()
