"""EAGLE's objectives against versions that go through documents one by one; and that they learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_target
from draftsmith.data.rows.packed import Document, pack
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.eagle.family import load_eagle
from draftsmith.drafters.eagle.proposer import Eagle, Eagle3
from draftsmith.errors import RequestError
from draftsmith.trainers import eagle3
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.eagle import EagleObjective
from draftsmith.trainers.labels import has_label
from draftsmith.trainers.loop.sums import COMPARED, COUNT
from draftsmith.trainers.losses.chunked import SharedTeacher
from draftsmith.trainers.method_config import Eagle3Config, EagleConfig
from draftsmith.trainers.student import fused
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.method_objectives import build
from torch import Tensor

# two rows: documents of 5, 1 and 4 tokens and no padding; of 2 and 6 tokens and padding
LENGTHS = [[5, 1, 4], [2, 6]]
WIDTH = 10
NAMES = ["loss", "ce", "alpha", "agreement", "feature"]
NAMES_3 = ["loss", "ce", "alpha", "agreement", "covered_labels", "covered_mass", "alpha_2", "alpha_3"]
WORDS = [word for word in range(61) if word % 3 != 1]
Objective = EagleObjective | eagle3.Eagle3Objective


@pytest.fixture(scope="module")
def target() -> Backbone:
    backbone = make_target("qwen3")
    with torch.no_grad():
        backbone.model.model.norm.weight.mul_(3)
    return backbone


def goal_for(target: Backbone, seed: int = 0, chunk: int = 256, **settings) -> EagleObjective:
    torch.manual_seed(seed)
    config = EagleConfig(**settings)
    objective = ObjectiveConfig(chunk=chunk)
    return build("eagle", target.model, eagle=config, objective=objective)


@pytest.fixture
def rows() -> dict[str, Tensor]:
    """Packed rows with a loss mask that has holes, and never the first token of a document."""
    g = torch.Generator().manual_seed(2)
    documents, positions = torch.full((2, WIDTH), -1), torch.zeros(2, WIDTH, dtype=torch.long)
    number = 0
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            documents[row, at : at + length] = number
            positions[row, at : at + length] = torch.arange(length)
            at, number = at + length, number + 1
    mask = (torch.rand(2, WIDTH, generator=g) < 0.8) & (positions > 0) & (documents >= 0)
    return {
        "input_ids": torch.randint(0, 61, (2, WIDTH), generator=g),
        "loss_mask": mask,
        "positions": positions,
        "documents": documents,
    }


def share(rows: dict[str, Tensor], row: int, j: int) -> float:
    """Labels of a row for each one of which pass j can speak: terms are means over what is spoken of."""
    message, labels = 0, int(rows["loss_mask"][row].sum())
    lengths = LENGTHS[row]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for end, length in zip(ends, lengths):
        message += int(rows["loss_mask"][row, min(end, end - length + 2 + j) : end].sum())
    assert 0 < message < labels
    return labels / message


def by_hand(goal: EagleObjective, target: Backbone, rows: dict[str, Tensor]) -> dict[str, float]:
    """Sums of all terms, every document alone and every position by itself."""
    net, model = goal.draft(), target.model
    head, embed = model.get_output_embeddings(), model.get_input_embeddings()
    sums = dict.fromkeys(NAMES, 0.0)
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            ids = rows["input_ids"][row, at : at + length]
            counts = rows["loss_mask"][row, at : at + length].tolist()
            at += length
            if length < 3:
                continue  # nothing can be said of a third token
            f = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
            out = net(f[None, :-1], embed(ids[None, 1:]), torch.arange(length - 1)[None], None)[0]
            for t in range(length - 2):
                if not counts[t + 2]:
                    continue
                feature = F.smooth_l1_loss(out[t], f[t + 1])
                p, q = head(f[t + 1]).softmax(-1), head(out[t]).softmax(-1)
                ce = -(p * q.log()).sum()
                found = {
                    "loss": goal.module._config.feature * feature + goal.module._config.ce * ce,
                    "feature": feature * share(rows, row, 0),
                    "ce": ce * share(rows, row, 0),
                    "alpha": torch.minimum(p, q).sum() * share(rows, row, 0),
                    "agreement": float(p.argmax() == q.argmax()) * share(rows, row, 0),
                }
                sums = {name: value + float(torch.as_tensor(found[name]).detach()) for name, value in sums.items()}
    return sums


def less_counts(terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums alone, each of which but the loss has a count beside it."""
    sums = {name: value for name, value in terms.items() if not name.startswith((COUNT, COMPARED))}
    counts = {name for name in terms if name.startswith(COUNT)}
    assert counts == {COUNT + name for name in sums if name != "loss"}
    return sums


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_loss_and_terms_are_those_of_documents_alone(chunk: int, target: Backbone, rows: dict[str, Tensor]) -> None:
    goal = goal_for(target, chunk=chunk, feature=0.7, ce=0.4, noise=0.0)
    loss, terms = goal.module(rows, goal.prepare(rows))
    wanted = by_hand(goal, target, rows)
    terms = less_counts(terms)
    assert list(terms) == NAMES
    assert float(loss.detach()) == pytest.approx(wanted["loss"], rel=1e-5)
    for name, value in terms.items():
        assert float(value) == pytest.approx(wanted[name], rel=1e-5), name


def test_hass_trains_on_what_drafting_meets(target: Backbone, rows: dict[str, Tensor]) -> None:
    """Three passes, every one made from the start for every position; own features are detached."""
    settings = {"feature": 0.7, "ce": 0.4, "top_k": 0.3, "top_k_tokens": 5, "passes": 3}
    goal = goal_for(target, noise=0.0, chunk=5, **settings)
    loss, terms = goal.module(rows, goal.prepare(rows))
    net, model = goal.draft(), target.model
    head, embed = model.get_output_embeddings(), model.get_input_embeddings()
    wanted = torch.zeros(())
    alphas = [0.0, 0.0, 0.0]
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            ids = rows["input_ids"][row, at : at + length]
            counts = rows["loss_mask"][row, at : at + length].tolist()
            at += length
            f = model(ids[None], output_hidden_states=True).hidden_states[-1]
            for t in range(length - 1):
                hidden = f[:, : t + 1]
                for j in range(min(3, length - 2 - t)):
                    S = t + 1 + j
                    out = net(hidden, embed(ids[None, 1 : S + 1]), torch.arange(S)[None], None)
                    hidden = torch.cat([hidden, out[:, -1:].detach()], 1)
                    if not counts[t + 2 + j]:
                        continue
                    true = f[0, t + 1 + j]
                    p, q = head(true).softmax(-1), head(out[0, -1]).softmax(-1)
                    best = p.topk(5).indices
                    wanted = wanted + 0.7 * F.smooth_l1_loss(out[0, -1], true)
                    wanted = wanted - 0.4 * (p * q.log()).sum() - 0.3 * (p * q.log())[best].sum()
                    alphas[j] += float(torch.minimum(p, q).sum().detach()) * share(rows, row, j)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    found = [float(terms[name]) for name in ("alpha", "alpha_2", "alpha_3")]
    assert found == pytest.approx(alphas, rel=1e-4)
    loss.backward()
    own = {name: p.grad.clone() for name, p in net.named_parameters()}
    goal.module.zero_grad()
    wanted.backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(own[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("ahead", [2, 3])
def test_positions_that_count(ahead: int, rows: dict[str, Tensor]) -> None:
    found = has_label(rows, ahead)
    wanted = [
        [
            bool(rows["loss_mask"][row, t + ahead])
            and int(rows["documents"][row, t]) == int(rows["documents"][row, t + ahead])
            for t in range(WIDTH - ahead)
        ]
        for row in range(2)
    ]
    assert found.tolist() == wanted
    assert found.any()


def test_gradients_are_those_of_the_plain_loss(target: Backbone, rows: dict[str, Tensor]) -> None:
    """Through chunks or through all logits at once."""
    goal = goal_for(target, chunk=3, feature=0.7, ce=0.4, noise=0.0)
    goal.module(rows, goal.prepare(rows))[0].backward()
    found = {name: p.grad.clone() for name, p in goal.draft().named_parameters()}
    goal.module.zero_grad()
    teacher_output = goal.prepare(rows)
    same = rows["documents"][:, :, None] == rows["documents"][:, None]
    mask = (same & torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril())[:, None]
    out = goal.draft()(teacher_output.hidden_RSH, teacher_output.embeds_RSH, rows["positions"], mask)
    counts = has_label(rows, 2)
    guess, true = out[:, :-2][counts], teacher_output.hidden_RSH[:, 1:-1][counts]
    head = target.model.get_output_embeddings()
    ce = -(head(true).softmax(-1) * head(guess).log_softmax(-1)).sum()
    (0.7 * F.smooth_l1_loss(guess, true, reduction="none").mean(-1).sum() + 0.4 * ce).backward()
    for name, parameter in goal.draft().named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_noise_is_uniform_and_for_training_alone(target: Backbone) -> None:
    goal = goal_for(target, noise=0.1)
    features = torch.randn(2, 40, 32)
    shaken = goal.module._noisy(features) - features
    assert 0.095 < float(shaken.abs().max()) <= 0.1 + 1e-6
    assert float(shaken.std()) == pytest.approx(0.1 / 3**0.5, rel=0.1)
    goal.module.eval()
    assert torch.equal(goal.module._noisy(features), features)


def test_only_the_drafter_is_trained_saved_and_wrapped(target: Backbone, rows: dict[str, Tensor]) -> None:
    goal = goal_for(target)
    goal.module(rows, goal.prepare(rows))[0].backward()
    own = {id(p) for p in goal.draft().parameters()}
    assert {id(p) for p in goal.module.parameters()} == own
    assert not own & {id(p) for p in target.model.parameters()}
    assert all(p.grad is None for p in target.model.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in goal.module.parameters())


def test_a_batch_without_labels_gives_zero(target: Backbone, rows: dict[str, Tensor]) -> None:
    goal = goal_for(target)
    rows["loss_mask"] = torch.zeros_like(rows["loss_mask"])
    loss, terms = goal.module(rows, goal.prepare(rows))
    loss.backward()
    assert float(loss.detach()) == 0
    assert terms == {}


def test_impossible_objectives_are_refused(target: Backbone) -> None:
    with pytest.raises(RequestError, match="nothing would be learnt"):
        goal_for(target, feature=0.0, ce=0.0)


def answers(target: Backbone, rows: int, length: int) -> dict[str, Tensor]:
    """The target's own greedy texts behind one random token each."""
    g = torch.Generator().manual_seed(3)
    first = torch.randint(0, 61, (rows, 2), generator=g)
    how = {"warper": Warper(0.5), "max_new_tokens": length - 2}
    found = autoregressive(target, first.tolist(), **how).tokens
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[:, 0] = False
    return {
        "input_ids": torch.cat([first, torch.tensor(found)], 1),
        "loss_mask": mask,
        "positions": torch.arange(length).expand(rows, -1),
        "documents": torch.zeros(rows, length, dtype=torch.long),
    }


def measured(goal: Objective, rows: dict[str, Tensor]) -> dict[str, float]:
    goal.module.eval()
    with torch.no_grad():
        _, terms = goal.module(rows, goal.prepare(rows))
    goal.module.train()
    return {name: float(value) / int(has_label(rows, 2).sum()) for name, value in terms.items()}


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_a_few_dozen_steps_teach(family: str, target: Backbone) -> None:
    """On held-out texts: the loss falls, agreement and what is really accepted rise."""
    data = answers(target, 40, 40)
    held_out = {name: t[32:] for name, t in data.items()}
    goal = goal_for(target, ce=1.0) if family == "eagle" else goal_3_for(target)
    before = measured(goal, held_out)
    prompts = held_out["input_ids"][:, :6].tolist()

    def teacher_forced() -> float:
        """Share of the tokens of greedy decoding that had been drafted."""
        make = Eagle if family == "eagle" else Eagle3
        drafter = make(goal.draft().eval(), target, tree="chain", draft_length=3)
        done = generate(target, drafter, prompts, warper=Warper(0.0), max_new_tokens=30)
        return sum(done.origin, []).count("draft") / sum(map(len, done.tokens))

    before["foreseen"] = teacher_forced()
    optimizer = torch.optim.AdamW(goal.module.parameters(), lr=5e-3, betas=(0.9, 0.95))
    g = torch.Generator().manual_seed(4)
    for _ in range(60):
        chosen = torch.randint(0, 32, (8,), generator=g)
        rows = {name: t[chosen] for name, t in data.items()}
        loss, _ = goal.module(rows, goal.prepare(rows))
        (loss / int(has_label(rows, 2).sum())).backward()
        torch.nn.utils.clip_grad_norm_(goal.module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = measured(goal, held_out)
    assert after["loss"] < 0.9 * before["loss"]
    assert after["ce"] < before["ce"]
    assert after["alpha"] > before["alpha"] + 0.1
    assert after["agreement"] > before["agreement"] + 0.3
    assert teacher_forced() > before["foreseen"] + 0.1
    if family == "eagle":
        assert after["feature"] < before["feature"]
    else:
        assert after["alpha_3"] > before["alpha_3"] + 0.1


def test_export_is_a_drafter_that_loads(tmp_path: Path, rows: dict[str, Tensor]) -> None:
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    goal = build("eagle", target.model, saver(target, "eagle"))
    goal.export(tmp_path / "drafter")
    loaded = load_eagle(tmp_path / "drafter", target)
    teacher_output, positions = goal.prepare(rows), rows["positions"]
    one, two = (
        net(teacher_output.hidden_RSH, teacher_output.embeds_RSH, positions, None)
        for net in (goal.draft(), loaded.module)
    )
    assert torch.equal(one, two)


# ---- EAGLE-3 ------------------------------------------------------------------------------


def goal_3_for(target: Backbone, seed: int = 0, chunk: int = 256, **settings) -> eagle3.Eagle3Objective:
    torch.manual_seed(seed)
    config = Eagle3Config(**{"passes": 3, "layers": (0, 1, 2)} | settings)
    objective = ObjectiveConfig(chunk=chunk)
    return build("eagle3", target.model, ids=WORDS, eagle3=config, objective=objective)


def by_hand_3(goal: eagle3.Eagle3Objective, target: Backbone, rows: dict[str, Tensor]) -> dict:
    """Sums of all terms: each document alone, each position drafted from as decoding would."""
    net, model = goal.draft(), target.model
    head, embed = model.get_output_embeddings(), model.get_input_embeddings()
    sums: dict[str, Tensor] = {name: torch.zeros(()) for name in NAMES_3}
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            ids = rows["input_ids"][row, at : at + length]
            counts = rows["loss_mask"][row, at : at + length].tolist()
            at += length
            states = model(ids[None], output_hidden_states=True).hidden_states
            fused = net.fuse(torch.cat(states[:3], -1))
            for t in range(length - 1):
                hidden = fused[:, : t + 1]
                for j in range(min(3, length - 2 - t)):
                    S = t + 1 + j
                    out = net(hidden, embed(ids[None, 1 : S + 1]), torch.arange(S)[None], None)
                    hidden = torch.cat([hidden, out[:, -1:]], 1)
                    if not counts[t + 2 + j]:
                        continue
                    p = head(states[-1][0, t + 1 + j]).softmax(-1)
                    q = net.lm_head(net.norm(out[0, -1])).softmax(-1)
                    short = p[WORDS] / p[WORDS].sum()
                    ce = -(short * q.log()).sum() * (int(p.argmax()) in WORDS)
                    sums["loss"] = sums["loss"] + 0.7**j * ce
                    alpha = torch.minimum(p[WORDS], q).sum()
                    sums["alpha" if j == 0 else f"alpha_{j + 1}"] += alpha.detach() * share(rows, row, j)
                    if j == 0:
                        sums["ce"] += ce.detach() * share(rows, row, 0)
                        sums["agreement"] += float(p.argmax() == WORDS[q.argmax()]) * share(rows, row, 0)
                        sums["covered_labels"] += (int(ids[t + 2]) in WORDS) * share(rows, row, 0)
                        sums["covered_mass"] += p[WORDS].sum().detach() * share(rows, row, 0)
    return sums


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_every_pass_is_what_drafting_would_compute(chunk: int, target: Backbone, rows: dict[str, Tensor]) -> None:
    """Loss, terms and gradients, against passes made from the start for every position."""
    goal = goal_3_for(target, chunk=chunk, decay=0.7)
    loss, terms = goal.module(rows, goal.prepare(rows))
    wanted = by_hand_3(goal, target, rows)
    terms = less_counts(terms)
    assert list(terms) == NAMES_3
    for name, value in terms.items():
        assert float(value) == pytest.approx(float(wanted[name].detach()), rel=1e-4), name
    loss.backward()
    found = {name: p.grad.clone() for name, p in goal.draft().named_parameters()}
    goal.module.zero_grad()
    wanted["loss"].backward()
    for name, parameter in goal.draft().named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["hass", "eagle3"])
def test_the_target_is_asked_once_for_all_passes(
    method: str, target: Backbone, rows: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its projection sees every position about once, whatever the number of passes."""
    asked: list[int] = []
    real = SharedTeacher.logits

    def spy(teacher: SharedTeacher, part: slice) -> Tensor:
        asked.append(part.stop - part.start)
        return real(teacher, part)

    monkeypatch.setattr(SharedTeacher, "logits", spy)
    goal = goal_for(target, passes=3) if method == "hass" else goal_3_for(target, passes=3)
    goal.module(rows, goal.prepare(rows))
    labels = int(rows["loss_mask"].sum())
    # three passes, the last chunks padded to a power of two and meeting at a position
    assert 0 < sum(asked) <= 2 * labels


def test_the_head_begins_as_the_targets(target: Backbone) -> None:
    goal = goal_3_for(target)
    own, theirs = goal.draft().lm_head.weight, target.model.get_output_embeddings().weight
    assert torch.equal(own, theirs[WORDS])
    assert own.requires_grad
    assert not theirs.requires_grad
    frozen = {id(p) for p in target.model.parameters()}
    assert not frozen & {id(p) for p in goal.module.parameters()}


def test_frequent_tokens_are_counted_among_labels() -> None:
    documents = [
        Document(np.array(ids, dtype=np.int32), np.array(ids) != 9)
        for ids in ([9, 9, 9, 9, 3], [7, 7, 5, 3, 3], [1, 9])
    ]
    rows = pack(documents, 6, pad=0, fingerprint="")
    assert fused.frequent_tokens(rows, 2) == [3, 7]
    # 1 and 5 once each; what is no label at all fills up from below
    assert fused.frequent_tokens(rows, 3) == [1, 3, 7]
    assert fused.frequent_tokens(rows, 5) == [0, 1, 3, 5, 7]


def test_layers_that_the_target_lacks_are_refused(target: Backbone) -> None:
    with pytest.raises(RequestError, match="expected hidden states from 0"):
        goal_3_for(target, layers=(0, 1, 3))


def test_too_short_rows_give_zero(target: Backbone, rows: dict[str, Tensor]) -> None:
    """No pass has a label; and rows shorter than the passes are no error."""
    goal = goal_3_for(target, passes=7)
    short = {name: t[:, :4] for name, t in rows.items()}
    loss, _ = goal.module(short, goal.prepare(short))
    assert torch.isfinite(loss)
    short["loss_mask"] = torch.zeros_like(short["loss_mask"])
    loss, terms = goal.module(short, goal.prepare(short))
    loss.backward()
    assert (float(loss.detach()), terms) == (0, {})


@pytest.mark.parametrize("layers", [(0, 1, 1), (0, 0, 2), (1, 0, 2)])
def test_states_that_engines_would_hand_out_otherwise_are_refused(layers: tuple[int, int, int]) -> None:
    """They take a repeated one once, and all of them low to high."""
    with pytest.raises(RequestError, match="three different hidden states, low to high"):
        fused.chosen_layers(Eagle3Config(layers=layers).layers, make_target("qwen3").model)


def test_export_of_eagle_3_is_a_drafter_that_loads(tmp_path: Path) -> None:
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    config = Eagle3Config(layers=(0, 1, 2))
    goal = build("eagle3", target.model, saver(target, "eagle3"), ids=WORDS, eagle3=config)
    goal.export(tmp_path / "drafter")
    loaded = load_eagle(tmp_path / "drafter", target, tree="dynamic", top_k=4, nodes=12)
    assert isinstance(loaded, Eagle3)
    assert loaded.layers == (0, 1, 2)
    assert loaded.module.ids_U.tolist() == WORDS
    for name, tensor in goal.draft().state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], tensor), name
