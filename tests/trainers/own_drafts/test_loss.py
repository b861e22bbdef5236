"""What own drafts count in the loss: against every draft that there is, and beside rows of text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.projection import Projection
from draftsmith.errors import RequestError
from draftsmith.trainers.config import LoopConfig, ObjectiveConfig
from draftsmith.trainers.losses.chunked import ChunkedLoss, Teacher
from draftsmith.trainers.losses.mix import Mix
from draftsmith.trainers.losses.pace import reached
from draftsmith.trainers.method_config import Eagle3Config, RolloutsConfig
from draftsmith.trainers.own_drafts.drawing import Drawing, counted, judged
from draftsmith.trainers.own_drafts.objective import OwnDrafts, at_rows
from draftsmith.trainers.own_drafts.places import AT, UNIFORM, DraftPlaces
from draftsmith.trainers.student.drafted import Drafted
from helpers.models.method_objectives import build
from helpers.own_drafts import CASES, Noted, drafted_for, made, rows, trained_on
from torch import Tensor, nn

V, J = 4, 3
LENGTH_LOSS = ObjectiveConfig(kl=0.0, tv=1.0, positions="accepted", from_kl_share=0.0)


def table(seed: int) -> Tensor:
    """Logits of the next token behind every draft prefix of up to J - 1 tokens, [prefixes, V]."""
    return 1.5 * torch.randn(sum(V**j for j in range(J)), V, generator=torch.Generator().manual_seed(seed))


def place(prefix: tuple[int, ...]) -> int:
    """Which row of `table` a prefix has."""
    return sum(V**j for j in range(len(prefix))) + sum(token * V**at for at, token in enumerate(prefix))


def expected_length(q: Tensor, p: Tensor) -> Tensor:
    """How many drafts are kept, over all drafts: sum over prefixes of prod min(p, q)."""
    kept = torch.minimum(p.softmax(-1), q.softmax(-1))
    length = q.new_zeros(())
    for depth in range(1, J + 1):
        for path in itertools.product(range(V), repeat=depth):
            reach = q.new_ones(())
            for j, token in enumerate(path):
                reach = reach * kept[place(path[:j]), token]
            length = length + reach
    return length


def every_draft(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All drafts of J tokens: rows of the tables, the tokens, how likely each is drawn, p and q of every token."""
    paths = list(itertools.product(range(V), repeat=J))
    rows_XJ = torch.tensor([[place(path[:j]) for j in range(J)] for path in paths])
    token_XJ = torch.tensor(paths)
    p_XJ, q_XJ = (each.softmax(-1)[rows_XJ].gather(2, token_XJ[..., None])[..., 0] for each in (p, q))
    return rows_XJ, token_XJ, q_XJ.prod(1), p_XJ, q_XJ


def test_weights_are_how_often_decoding_gets_there() -> None:
    """Over all drafts the mean of what is kept is the expected accepted length."""
    q, p = table(1), table(2)
    _, _, drawn_X, p_XJ, q_XJ = every_draft(q, p)
    kept_XJ = (p_XJ / q_XJ).clamp_max(1)
    weight_XJ, _ = reached(kept_XJ, kept_XJ, torch.ones_like(kept_XJ, dtype=torch.bool), 0.0)
    mean = ((weight_XJ * kept_XJ).sum(1) * drawn_X).sum()
    torch.testing.assert_close(mean, expected_length(q, p))


def test_the_gradient_is_that_of_the_accepted_length() -> None:
    """The loss along own drafts, averaged over all drafts as they are drawn, against enumeration; a text's terms."""
    q, p = table(1).requires_grad_(), table(2)
    (wanted,) = torch.autograd.grad(-expected_length(q, p), q)
    rows_XJ, token_XJ, drawn_X, p_XJ, q_XJ = (each.detach() for each in every_draft(q, p))
    known_XJ = torch.ones_like(p_XJ, dtype=torch.bool)
    kept_XJ = (p_XJ / q_XJ).clamp_max(1)
    weight_XJ, gain_XJ = reached(kept_XJ, kept_XJ, known_XJ, 0.0)
    share_XJ2 = torch.stack((weight_XJ, gain_XJ * (p_XJ / q_XJ).clamp_min(1)), -1) * drawn_X[:, None, None]
    head = nn.Linear(V, V, bias=False)  # of states that are logits
    with torch.no_grad():
        head.weight.copy_(torch.eye(V))
    head.requires_grad_(False)
    chunked = ChunkedLoss(head, Mix.of(LENGTH_LOSS), chunk=16)
    teacher = Teacher(p[rows_XJ.flatten()], Projection(head.weight))
    loss, _ = chunked(q[rows_XJ.flatten()], token_XJ.flatten(), teacher, share_XJ2.flatten(0, 1))
    (found,) = torch.autograd.grad(loss, q)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mtp", "dspark"])
def test_a_run_has_these_weights(name: str, target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach and gain of every draft, which is its own label; without the accepted length the target's likeliest is."""
    noted = Noted(monkeypatch)
    loss, _ = trained_on(made(name, target, objective=LENGTH_LOSS.model_copy(update={"tv": 0.5})), rows())
    drafted: Drafted = noted.drafted
    p_XJV = Projection.of(target.model).logits(drafted.states_XTH[:, :-1]).softmax(-1)
    ratio_XJ = p_XJV.gather(2, drafted.token_XT[:, 1:, None])[..., 0] / noted.q_XJ
    weight_XJ, gain_XJ = reached(drafted.kept_XJ, drafted.kept_XJ, drafted.known_XJ, 0.0)
    assert not torch.equal(weight_XJ, gain_XJ)
    scale_X1 = drafted.share_XJ[:, :1, 0]
    torch.testing.assert_close(drafted.share_XJ[..., 0], scale_X1 * weight_XJ)
    gain_XJ = 0.5 * scale_X1 * gain_XJ * ratio_XJ.clamp_min(1)
    torch.testing.assert_close(drafted.share_XJ[..., 1], gain_XJ, rtol=1e-4, atol=1e-5)
    assert torch.equal(drafted.label_XJ, drafted.token_XT[:, 1:])
    assert bool(torch.isfinite(loss))
    trained_on(made(name, target), rows())
    states_XJH = noted.drafted.states_XTH[:, :-1]
    assert torch.equal(noted.drafted.label_XJ, Projection.of(target.model).logits(states_XJH).argmax(-1))


def test_drafts_are_drawn_from_q_and_judged_by_p() -> None:
    """A hand-made case: logits by the token in front, three places, and what the target says of each."""
    logits_VU = torch.tensor([[2.0, 0.0, -1.0], [0.0, 3.0, 0.5], [1.0, 1.0, 1.0]])
    asked: list[tuple[list[int], int]] = []

    def by_token(_hidden: Tensor, before: Tensor, j: int) -> Tensor:
        asked.append((before.tolist(), j))
        return logits_VU[before]

    uniform = torch.tensor([[0.5, 0.1], [0.9999, 0.5], [0.0, 0.4]])
    draw = Drawing(by_token, Warper(1.0), torch.tensor([0, 1, 2]), uniform, chunk=2)
    hidden = torch.zeros(3, 1)
    q = logits_VU.softmax(-1)
    assert draw(hidden).tolist() == [0, 2, 0]
    assert draw(hidden).tolist() == [0, 1, 0]
    assert asked == [([0, 1], 0), ([2], 0), ([0, 2], 1), ([0], 1)]
    assert draw.token_XT.tolist() == [[0, 0, 0], [1, 2, 1], [2, 0, 0]]
    wanted = torch.stack((q[[0, 1, 2], [0, 2, 0]], q[[0, 2, 0], [0, 1, 0]]), 1)
    torch.testing.assert_close(draw.q_XJ, wanted)
    few = Drawing(by_token, Warper(0.0), torch.tensor([0, 1]), uniform[:2], ids_U=torch.tensor([2, 1, 0]), chunk=9)
    assert few(hidden[:2]).tolist() == [2, 1]
    assert few.q_XJ.tolist() == [[1.0], [1.0]]
    projection = Projection(logits_VU.T.contiguous())
    said = judged(torch.eye(3), torch.tensor([1, 1, 2]), projection, Warper(1.0), 2)
    torch.testing.assert_close(said.p_P, q[[0, 1, 2], [1, 1, 2]])
    assert said.best_P.tolist() == [0, 1, 0]
    greedy = judged(torch.eye(3), torch.tensor([1, 1, 0]), projection, Warper(0.0), 2)
    assert greedy.p_P.tolist() == [0.0, 1.0, 1.0]


def test_nothing_counts_behind_the_end_of_a_text() -> None:
    """An end may be drafted, and be the root."""
    found = counted(torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8], [5, 6, 7, 9], [9, 6, 7, 8]]), torch.tensor([9]))
    assert found.tolist() == [[True] * 3, [True, False, False], [True] * 3, [False] * 3]


@pytest.mark.parametrize("name", CASES)
def test_a_row_counts_as_many_first_drafts_as_it_has_labels(
    name: str, target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its places, and however the other rows share a forward pass; reach falls from depth to depth."""
    noted, batch = Noted(monkeypatch), rows()
    goal = made(name, target)
    _, terms = trained_on(goal, batch)
    drafted: Drafted = noted.drafted
    first_R = torch.zeros(2).index_add_(0, noted.places.row_X, drafted.share_XJ[:, 0])
    labels_R = batch["loss_mask"].sum(1)[terms["rows"]]
    torch.testing.assert_close(first_R, labels_R * FIRST.get(name, 1.0))
    ratio_XJ = drafted.share_XJ / drafted.share_XJ[:, :1]
    torch.testing.assert_close(ratio_XJ[:, 1:], drafted.kept_XJ[:, :-1].cumprod(1))


# what the first draft of a text counts by the shipped losses: the others 1
FIRST = {
    "mtp": 1 / (1 + 0.6 + 0.36),
    "medusa": 0.8,
    "hydra": 0.8,
    "hydra++": 0.8,
    **dict.fromkeys(("dflash", "dspark", "dflash2"), 1 / (1 + 0.8 + 0.64)),
}


@pytest.mark.parametrize("positions", ["accepted", "on-policy"])
@pytest.mark.parametrize("name", ["mtp", "eagle3", "dflash"])
def test_where_the_length_is_learnt_a_first_draft_counts_once(
    name: str, positions: Any, target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, batch = Noted(monkeypatch), rows()
    own = {"eagle3": {"eagle3": Eagle3Config(passes=3, vocabulary=40, ce=0.0)}}.get(name, {})
    _, terms = trained_on(
        made(name, target, objective=LENGTH_LOSS.model_copy(update={"positions": positions}), **own), batch
    )
    first_R = torch.zeros(2).index_add_(0, noted.places.row_X, noted.drafted.share_XJ[:, 0, 0])
    torch.testing.assert_close(first_R, batch["loss_mask"].sum(1)[terms["rows"]].float())


def test_a_floor_reaches_far_drafts(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    trained_on(made("mtp", target, objective=LENGTH_LOSS.model_copy(update={"pace_floor": 0.5})), rows())
    share_XJ, kept_XJ = noted.drafted.share_XJ[..., 0], noted.drafted.kept_XJ
    torch.testing.assert_close(share_XJ[:, 1] / share_XJ[:, 0], 0.5 + 0.5 * kept_XJ[:, 0])


@pytest.mark.parametrize("name", CASES)
def test_rows_of_text_are_learnt_as_ever_and_micro_batches_change_nothing(name: str, target: Backbone) -> None:
    """A batch of both kinds is the sum of its rows one by one, those of text as without rollouts; gradients too."""
    batch, goal = rows(), made(name, target)
    plain = made(name, target, rollouts={"share": 0.0})
    assert plain.rollouts is None
    assert not isinstance(plain.module, OwnDrafts)
    plain.module.load_state_dict(goal.module.student.state_dict())
    loss, terms = trained_on(goal, batch)
    (rewritten,) = goal.rollouts.rewrite([batch], range(4), 0, 7)
    mine = torch.autograd.grad(loss, list(goal.draft().parameters()), allow_unused=True)
    parts = []
    for r in range(4):
        row = at_rows(rewritten, torch.tensor([r]))
        if r in terms["rows"]:
            assert (row[AT] >= 0).all()
            parts.append(goal.module(row, goal.prepare(row))[0])
            continue
        parts.append(goal.module(row, goal.prepare(row))[0])
        text = {each: tensor for each, tensor in row.items() if each not in (AT, UNIFORM)}
        torch.testing.assert_close(parts[-1], plain.module(text, plain.prepare(text))[0])
    torch.testing.assert_close(loss, torch.stack(parts).sum(), rtol=1e-4, atol=1e-4)
    theirs = torch.autograd.grad(torch.stack(parts).sum(), list(goal.draft().parameters()), allow_unused=True)
    for one, other in zip(mine, theirs, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert 0 <= float(terms["own_length"]) / 10 <= 3
    assert sum(one is not None and bool(one.any()) for one in mine) > 2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["mtp", "eagle3", "medusa"])
def test_a_draft_is_kept_as_often_as_both_say(
    name: str, temperature: float, target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """min(1, p / q) of each drawn token, by what the target says at the state in front of it; the mean is reported."""
    noted = Noted(monkeypatch)
    _, terms = trained_on(made(name, target, rollouts={"temperature": temperature}), rows())
    drafted: Drafted = noted.drafted
    p_XJV = (Projection.of(target.model).logits(drafted.states_XTH[:, :-1]) / temperature).softmax(-1)
    p_XJ = p_XJV.gather(2, drafted.token_XT[:, 1:, None])[..., 0]
    torch.testing.assert_close(drafted.kept_XJ, (p_XJ / noted.q_XJ).clamp_max(1), rtol=1e-4, atol=1e-6)
    kept_J = drafted.kept_XJ.cumprod(1).sum(0)
    for j in range(3):
        torch.testing.assert_close(terms[f"own_kept_{j + 1}"], kept_J[j])
    torch.testing.assert_close(terms["own_length"], kept_J.sum())
    assert float(terms["labels of own_length"]) == len(p_XJ)


@pytest.mark.parametrize("name", ["mtp", "medusa", "dflash"])
def test_own_drafts_are_compared_with_what_the_target_says_behind_them(name: str, target: Backbone) -> None:
    """Forward KL by hand: at every draft between the network's distribution and the target's, as often as reached."""
    goal, batch = made(name, target, objective=ObjectiveConfig(kl=1.0, ce=0.0), rollouts={"share": 1.0}), rows()
    student = goal.module.student
    seen: list[tuple[Tensor, Drafted]] = []
    along = student.loss_along
    student.loss_along = lambda hidden, drafted, given: (
        seen.append((hidden, drafted)),
        along(hidden, drafted, given),
    )[1]
    loss, _ = trained_on(goal, batch)
    ((found, drafted),) = seen
    if name == "medusa":
        found = torch.stack([student.medusa.head(k, each) for k, each in enumerate(found, 1)], 1)
    projection = Projection.of(target.model)
    logits = [student.draft_logits(each, drafted.token_XT[:, j], j) for j, each in enumerate(found.unbind(1))]
    log_q = torch.stack(logits, 1).log_softmax(-1)
    log_p = projection.logits(drafted.states_XTH[:, :-1]).log_softmax(-1)
    kl_XJ = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(loss, (kl_XJ * drafted.share_XJ).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_gradients_come_in_the_order_of_a_row_of_text(name: str, target: Backbone) -> None:
    """DeepSpeed adds gradients up over processes in the order in which they come: it has to be one for both kinds."""
    goal, batch = made(name, target), rows()
    (rewritten,) = goal.rollouts.rewrite([batch], range(4), 0, 7)
    names = {parameter: own for own, parameter in goal.module.named_parameters() if parameter.requires_grad}
    order: list[str] = []
    for parameter in names:
        parameter.register_post_accumulate_grad_hook(lambda found: order.append(names[found]))
    found = []
    first = int(drafted_for(rewritten)[0])
    other = next(row for row in range(4) if row not in drafted_for(rewritten))
    for chosen in ([other], [first], [other, first]):  # of text, drafted for, both
        one = at_rows(rewritten, torch.tensor(chosen))
        goal.module(one, goal.prepare(one))[0].backward()
        found.append(order.copy())
        order.clear()
    nothing = at_rows(batch, torch.tensor([0])) | {"loss_mask": torch.zeros(1, rows()["input_ids"].shape[1]).bool()}
    goal.module(nothing, goal.prepare(nothing))[0].backward()
    assert found[0] == found[1] == found[2] == order, "a row of a prompt alone too"
    assert len(found[0]) > 2


@pytest.mark.parametrize("name", CASES)
def test_mixed_precision(name: str, target: Backbone) -> None:
    """Under autocast, as a run in bf16: about the loss of fp32, whose random numbers draw nearly the same."""
    goal, batch = made(name, target), rows()
    wanted, _ = trained_on(goal, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = trained_on(goal, batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=0.2)


def test_places_follow_from_the_step_and_the_row() -> None:
    """Labels of a row's own, other ones at another step, the same in another process; no number is used twice."""
    config, batch = RolloutsConfig(share=0.5, places=30), rows(6)
    batch["loss_mask"] = (batch["positions"] >= 1) & (batch["documents"] >= 0)  # the second document's beginning too
    every = DraftPlaces(config.model_copy(update={"share": 1.0}), 4, 6)
    at_R = [every.rewrite([batch], range(6), step, 11 + step)[0][AT] for step in (0, 1)]
    assert not any(torch.equal(*each) for each in zip(*at_R, strict=True))
    write = DraftPlaces(config, 4, 6)
    (whole,) = write.rewrite([batch], range(6), 0, 11)
    (other,) = write.rewrite([batch], range(6), 1, 12)
    chosen = drafted_for(whole).tolist()
    assert len(chosen) == len(drafted_for(other)) == 3
    assert not torch.equal(whole[AT], other[AT])
    for r in chosen:
        (mine,) = write.rewrite([at_rows(batch, torch.tensor([r]))], [r], 0, 11)
        assert torch.equal(mine[AT][0], whole[AT][r])
        assert torch.equal(mine[UNIFORM][0], whole[UNIFORM][r])
        at = whole[AT][r][whole[AT][r] >= 0]
        assert at.unique().tolist() == at.tolist(), "each once, in the order of the text"
        assert batch["loss_mask"][r, at + 2].all()
        assert torch.equal(batch["documents"][r, at + 2], batch["documents"][r, at]), "a pair is of one document"
    drawn = torch.cat([whole[UNIFORM][chosen].flatten(), other[UNIFORM][drafted_for(other)].flatten()])
    assert len(drawn.unique()) == len(drawn)
    two = write.rewrite([at_rows(batch, torch.arange(2)), at_rows(batch, torch.arange(2, 6))], range(6), 0, 11)
    assert [row for each in two for row in each[AT].tolist() if row and row[0] >= 0] == whole[AT][chosen].tolist()


def test_no_process_drafts_for_all_of_them() -> None:
    """Rows are drawn for every step: of two processes each drafts for about half of them, of four too."""
    write = DraftPlaces(RolloutsConfig(share=0.5), 2, 8)
    chosen = [row for step in range(200) for row in write._rows(step)]
    assert len(chosen) == 800
    for world in (2, 4):
        counts = [sum(row % world == rank for row in chosen) for rank in range(world)]
        assert min(counts) > 0.8 * 800 / world


def test_a_row_with_fewer_places_and_one_without() -> None:
    """Two labels are two places at most, and no more are made room for; a row of prompts alone stays one of text."""
    batch = rows(2)
    batch["loss_mask"] = batch["loss_mask"].clone()
    batch["loss_mask"][0] = False
    batch["loss_mask"][1] = False
    batch["loss_mask"][1, 10:12] = True
    (found,) = DraftPlaces(RolloutsConfig(share=1.0, places=4), 2, 2).rewrite([batch], range(2), 0, 1)
    assert found[AT].tolist() == [[-1] * 2, [8, 9]]
    ends = [int(batch["input_ids"][1, 9])]  # the root of the first of them
    (found,) = DraftPlaces(RolloutsConfig(share=1.0, places=4), 2, 2, ends).rewrite([batch], range(2), 0, 1)
    assert found[AT].tolist() == [[-1], [9]]


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "loop.compile is on": ("eagle3", {"loop": LoopConfig(compile=True)}),
    "loop.context_parallel is 2": ("eagle3", {"loop": LoopConfig(context_parallel=2)}),
    "features.source is cache": ("mtp", {"features": {"source": "cache"}}),
    "target.sharding": ("mtp", {"target": {"sharding": "fully_shard"}}),
    "rows have 4,096 tokens": ("medusa", {"data": {"sequence_length": 4096}}),
    "objective.siblings weighs": ("mtp", {"objective": LENGTH_LOSS.model_copy(update={"siblings": 2})}),
    "block.weigh weighs": ("dflash", {"block": {"size": 4, "weigh": "blocks"}}),
    "one draft behind a place is trained .eagle.passes": ("eagle", {}),
    "less than one of loop.batch_rows = 4": (
        "mtp",
        {"rollouts": {"share": 0.1}, "loop": LoopConfig(batch_rows=4, micro_rows=4)},
    ),
    "3 drafts behind rows of 255 tokens do not fit the target's context of 256": (
        "mtp",
        {"data": {"sequence_length": 255}},
    ),
    "method medusa draws none": ("medusa", {"objective": LENGTH_LOSS}),
    "rollouts.temperature, which is 0, to 1": (
        "mtp",
        {"objective": LENGTH_LOSS, "rollouts": {"share": 0.5, "temperature": 0.0}},
    ),
    "objective.ce would have": ("mtp", {"objective": LENGTH_LOSS.model_copy(update={"ce": 0.5})}),
    "which the selector would have for its label": ("dflash2", {"objective": LENGTH_LOSS, "block": {"size": 4}}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused(words: str, target: Backbone) -> None:
    method, sections = REFUSED[words]
    with pytest.raises(RequestError, match=words):
        build(method, target.model, **({"rollouts": {"share": 0.5}} | sections))
