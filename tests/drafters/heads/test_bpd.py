"""Blocks: the layer by hand, calls counted with perfect outputs, parity, losslessness, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import DraftSampling, FeatureProposer
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.heads.bpd import Bpd, BpdHeads, BpdShape, load_bpd
from draftsmith.drafters.heads.medusa import load_medusa
from draftsmith.drafters.projection import Projection
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.heads import last_states_of
from draftsmith.trainers.labels import has_label
from draftsmith.trainers.method_config import BpdConfig
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.method_objectives import build
from helpers.models.small_drafters import WatchedBpd
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3]]
WORDS = ["abc def ghi jkl mno pqr\n"] * 5
GREEDY, SAMPLED = Warper(0.0), Warper(1.0)
K = 3
# a tree that meets the text often, whatever the target says
WIDE = [[0, 0, 0], [0, 0], *([rank] for rank in range(12))]


def make_bpd(target: Backbone, *, noise: float = 0.05, **tree) -> Bpd:
    """Outputs that are no longer the target's own, and still accept something."""
    torch.manual_seed(0)
    heads = BpdHeads.for_target(target.model, block=K + 1, inner=8)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(noise * torch.randn(parameter.shape))
    return Bpd(heads.requires_grad_(False), target, **tree)


@torch.inference_mode()
def test_the_layer_by_hand() -> None:
    """k = 3, d_h = 2, d = 2: six inner units, two outputs that add to the state."""
    heads = BpdHeads(BpdShape(block=3, inner=2, hidden=2, vocabulary=5))
    sizes = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}
    assert sizes == {"first.weight": (6, 2), "first.bias": (6,), "second.weight": (4, 6), "second.bias": (4,)}
    heads.first.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1], [1, 1], [1, -1]]))
    heads.first.bias.copy_(torch.tensor([0.0, 0, 0, 0, -1, 2]))
    heads.second.weight.copy_(torch.arange(24.0).view(4, 6))
    heads.second.bias.copy_(torch.tensor([0.5, 0, -0.5, 1]))
    # of h = (2, -3) the inner layer keeps 2, 3 (of -y) and 7 (of x - y + 2)
    inner = [2.0, 0, 0, 3, 0, 7]
    rows = [[sum(w * x for w, x in zip(range(6 * r, 6 * r + 6), inner, strict=True))] for r in range(4)]
    state = torch.tensor([2.0, -3.0])
    expected = state + torch.tensor(rows).view(2, 2) + torch.tensor([[0.5, 0], [-0.5, 1]])
    assert torch.equal(heads(state), expected)
    assert heads(torch.randn(4, 5, 2)).shape == (4, 5, 2, 2)
    for k in (1, 2):
        assert torch.equal(heads.head(k, state), expected[k - 1])
    assert heads.head(0, state) is state
    projection = torch.randn(5, 2)
    torch.testing.assert_close(heads.logits(expected, Projection(projection)), expected @ projection.T)


@torch.inference_mode()
def test_new_outputs_are_the_targets_own(target: Backbone) -> None:
    heads = BpdHeads.for_target(target.model, block=4)
    assert (heads.config.inner, heads.config.heads) == (32, 3)
    head, hidden = target.model.get_output_embeddings(), torch.randn(2, 5, 32)
    found = heads.logits(heads(hidden), Projection(head.weight))
    assert found.shape == (2, 5, 3, VOCABULARY)
    for k in range(3):
        assert torch.equal(found[:, :, k], head(hidden))
    weight = head.weight.data_ptr()
    assert all(p.data_ptr() != weight for p in heads.parameters())


FOLLOWS = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))  # the token behind each


def perfect(block: int, *, off: int = 0) -> tuple[Backbone, Bpd]:
    """A transformer whose layers add nothing: tokens follow each other, and outputs that know it.

    The hidden state is the token's own unit vector, the projection of row v the vector of the
    token that v follows; so output i has to move a unit vector i - 1 tokens on. With `off` it says
    another token, so many ids away.
    """
    from draftsmith.trainers.config import ModelConfig
    from draftsmith.trainers.student.architecture import fresh_model

    H = 64
    sizes = ModelConfig(
        architecture="llama", layers=1, hidden=H, heads=2, kv_heads=1, head_size=16, max_positions=256, tied=False
    )
    model = fresh_model(sizes, vocabulary=VOCABULARY, eos=None).eval()
    heads = BpdHeads.for_target(model, block=block, inner=H)
    units = torch.eye(H)[:VOCABULARY]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.get_input_embeddings().weight.copy_(units)
        model.get_output_embeddings().weight[FOLLOWS] = units
        for parameter in heads.parameters():
            parameter.zero_()
        heads.first.weight[:H] = torch.eye(H)
        at = torch.arange(VOCABULARY)
        for k in range(1, block):
            at = FOLLOWS[at]  # column v: away from v, to the token k places on
            # what the projection turns into the id `off` away from the right one
            says = torch.where(FOLLOWS[at] + off < VOCABULARY, FOLLOWS[at] + off, FOLLOWS[at] - off)
            move = torch.zeros(H, H)
            move[:VOCABULARY, :VOCABULARY] = units[FOLLOWS.argsort()[says], :VOCABULARY].T
            heads.second.weight[(k - 1) * H : k * H, :H] = move - torch.eye(H)
    target = Backbone(model, name="follows")
    return target, Bpd(heads.requires_grad_(False), target)


@pytest.mark.parametrize(("block", "blocks"), [(2, 9), (4, 5), (5, 1), (8, 3)])
def test_m_tokens_take_m_over_k_and_one_calls(block: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the model itself, prefill included: predict and verify are one call."""
    target, drafter = perfect(block)
    calls = 0
    run = Backbone._run

    def counting(self: Backbone, *args, **kwargs):  # noqa: ANN202
        nonlocal calls
        calls += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Backbone, "_run", counting)
    m = block * blocks
    done = generate(target, drafter, [[7, 1]], warper=GREEDY, max_new_tokens=m)
    expected, at = [], 1
    for _ in range(m):
        at = int(FOLLOWS[at])
        expected.append(at)
    assert done.tokens == [expected]
    assert calls == m // block + 1
    assert done.target_calls == m // block
    assert done.origin[0].count("draft") == m - 1 - m // block + 1
    # with its own predictions apart, a block would take two calls; without any, every token one
    assert autoregressive(target, [[7, 1]], warper=GREEDY, max_new_tokens=m).tokens == [expected]
    assert calls == m // block + 1 + m


def packed(texts: list[list[int]], order: list[list[int]]) -> dict[str, Tensor]:
    """Rows of several texts each, padded; every token a label but the first of each."""
    width = max(sum(len(texts[n]) for n in row) for row in order)
    names = ("input_ids", "loss_mask", "positions", "documents")
    batch: dict[str, list[list]] = {name: [] for name in names}
    for row in order:
        filled = [(token, at > 0, at, n) for n in row for at, token in enumerate(texts[n])]
        filled += [(0, False, 0, -1)] * (width - len(filled))
        for name, column in zip(names, zip(*filled, strict=True), strict=True):
            batch[name].append(list(column))
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def trained_on(drafter: Bpd, batch: dict[str, Tensor], k: int) -> dict[tuple[int, int], Tensor]:
    """Logits that the training objective sees of head k, by text and position in it."""
    goal = build(
        "bpd",
        drafter._target.model,
        bpd=BpdConfig(block=K + 1, inner=8),
        objective=ObjectiveConfig(kl=0, ce=1, chunk=7),
    )
    goal.draft().load_state_dict(drafter.heads.state_dict())
    seen: list[Tensor] = []

    def spy(logits: Tensor, _target: Tensor | None, label: Tensor) -> dict[str, Tensor]:
        seen.append(logits.detach())
        return {"loss": logits.sum(-1), "top1": label.float()}

    goal.module._frozen[0].loss = spy
    hidden_RSH = goal.prepare(batch).hidden_RSH
    goal.module.head(k, batch, hidden_RSH, last_states_of(hidden_RSH))
    keys = [
        (int(batch["documents"][r, t]), int(batch["positions"][r, t]))
        for r, t in has_label(batch, k + 1).nonzero().tolist()
    ]
    return dict(zip(keys, torch.cat(seen), strict=True))


@pytest.mark.parametrize(("architecture", "static", "paths"), [("qwen3", False, None), ("llama", True, WIDE)])
@pytest.mark.parametrize("order", [[[0, 1, 2]], [[2, 0], [1]]])
def test_training_and_decoding_see_the_same_logits(
    architecture: str, static: bool, paths: list[list[int]] | None, order: list[list[int]]
) -> None:
    """Every output at every step = the training objective at that place, in packed rows and a batch."""
    target = make_target(architecture)
    drafter = WatchedBpd(make_bpd(target).heads, target, paths=paths)
    done = generate(target, drafter, PROMPTS, warper=SAMPLED, max_new_tokens=24, static=static)
    texts = [prompt + row for prompt, row in zip(PROMPTS, done.tokens, strict=True)]
    batch, compared = packed(texts, order), 0
    for k in range(1, K + 1):
        trained = trained_on(drafter, batch, k)
        for lengths, logits_BKV in drafter.met:
            for row, length in enumerate(lengths):
                expected = trained.get((row, length - 1))
                if expected is not None:
                    torch.testing.assert_close(logits_BKV[row, k - 1], expected, atol=1e-5, rtol=1e-5)
                    compared += 1
    assert compared > 60
    assert drafter.accepted > 0


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("paths", [None, [[0], [1], [0, 0], [1, 0], [0, 0, 0], [0, 1]]])
def test_greedy_output_is_the_targets_own(
    target: Backbone, static: bool, noise: float, paths: list[list[int]] | None
) -> None:
    """On its chain, and on a static tree, which it fills as Medusa does."""
    drafter = make_bpd(target, noise=noise, paths=paths)
    how = {"warper": GREEDY, "max_new_tokens": 30, "eos_ids": (17,)}
    own = generate(target, drafter, PROMPTS, static=static, **how)
    assert own.tokens == autoregressive(target, PROMPTS, **how).tokens
    if noise < 0.1:
        assert any("draft" in row for row in own.origin)


def test_sampled_output_is_the_targets_own(target: Backbone) -> None:
    """Sample-and-match takes one number per node: it only says what plain sampling would have said.

    The plain decoder is given, for every token, the very number that the block's walk used.
    """
    drafter = make_bpd(target)
    used: list[Tensor] = []

    class Noted(Uniforms):
        def take(self, count: int) -> Tensor:
            used.append(super().take(count))
            return used[-1]

    how = {"warper": Warper(0.8), "max_new_tokens": 40}
    for seed in range(3):
        used.clear()
        done = generate(target, drafter, [PROMPTS[0]], uniforms=Noted(seed, [0], torch.device("cpu")), **how)
        kept = done.steps.kept_TB[:, 0].tolist()
        numbers = [used[0][0, :1]]
        numbers += [each[0, :count] for each, count in zip(used[1:], kept, strict=True)]
        in_order = iter(torch.cat(numbers).tolist())
        cached_text, plain = list(PROMPTS[0]), []
        for _ in range(40):
            logits = target.model(input_ids=torch.tensor([cached_text])).logits[:, -1]
            p = Warper(0.8)(logits.detach())
            cdf = p[0].double().cumsum(0)
            plain.append(int((cdf / cdf[-1] <= next(in_order)).sum()))
            cached_text.append(plain[-1])
        assert done.tokens[0] == plain
        assert "draft" in done.origin[0]


def test_a_row_does_not_depend_on_the_others(target: Backbone) -> None:
    drafter = make_bpd(target)
    how = {"warper": SAMPLED, "max_new_tokens": 24, "seed": 3}
    together = generate(target, drafter, PROMPTS, **how)
    assert together.tokens == generate(target, drafter, PROMPTS, static=True, **how).tokens
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, drafter, [prompt], requests=[row], **how)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.origin[0] == together.origin[row]


@pytest.mark.parametrize("rule", ["lossy-topk-match", "lossy-min-block"])
def test_the_papers_lossy_rules_take_longer_blocks(target: Backbone, rule: str) -> None:
    drafter = make_bpd(target, noise=0.1)
    how = {"warper": GREEDY, "max_new_tokens": 40}
    prompts = [[first, 3] for first in range(0, 60, 6)]
    exact, lossy = (generate(target, drafter, prompts, rule=each, **how).steps for each in (None, rule))
    blocks = [each.kept_TB[each.running_TB & ~each.truncated_TB] for each in (exact, lossy)]
    assert blocks[1].mean() > blocks[0].mean() + 0.3
    assert blocks[0].min() == 1
    assert blocks[1].min() == 1 + (rule == "lossy-min-block")


def test_close_guesses_pass_by_the_papers_distance() -> None:
    """Outputs that are always off by one id are worth nothing but to this rule."""
    target, drafter = perfect(4, off=1)
    how = {"warper": GREEDY, "max_new_tokens": 20}
    exact = generate(target, drafter, [[7, 1]], **how)
    close = generate(target, drafter, [[7, 1]], rule="lossy-close-match", **how)
    # the guess behind a wrong token was made for the right one
    assert (exact.target_calls, close.target_calls) == (19, 10)
    assert close.tokens != exact.tokens


def test_what_the_engine_is_told(target: Backbone) -> None:
    drafter = make_bpd(target)
    assert isinstance(drafter, FeatureProposer)
    assert (drafter.draft_length, drafter.nodes, drafter.draft_steps) == (K, K + 1, 1)
    drafter.begin([torch.randn(2, 32)])
    proposal = drafter.propose(torch.tensor([3]), SAMPLED, Uniforms(0, [0], "cpu"))
    assert proposal.sampling is DraftSampling.POINT_MASS
    assert proposal.tree.is_chain
    assert proposal.tokens_BN[0].tolist() == [3, *drafter.logits()[0].argmax(-1).tolist()]
    with pytest.raises(RequestError, match="depth 4"):
        make_bpd(target, paths=[[0] * depth for depth in range(1, 5)])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Backbone, Bpd, Path]:
    """A target with a tokenizer, a drafter for it, and the drafter saved."""
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(WORDS, 300)
    drafter = make_bpd(target)
    saver(target, "bpd")(drafter.module, tmp_path / "drafter")
    return target, drafter, tmp_path / "drafter"


def test_a_saved_drafter_drafts_the_same(pair: tuple[Backbone, Bpd, Path]) -> None:
    target, drafter, folder = pair
    loaded = load_drafter(folder, target)
    assert isinstance(loaded, Bpd)
    assert loaded.heads.config == drafter.heads.config
    for name, tensor in drafter.heads.state_dict().items():
        assert torch.equal(loaded.heads.state_dict()[name], tensor)
    how = {"warper": SAMPLED, "max_new_tokens": 20, "seed": 3}
    one, two = generate(target, drafter, PROMPTS, **how), generate(target, loaded, PROMPTS, **how)
    assert (one.tokens, one.origin) == (two.tokens, two.origin)
    assert load_bpd(folder, target, paths=[[0], [1]]).draft_length == 1
    target.model.to(torch.bfloat16)
    for each in (load_bpd(folder, target), drafter):
        own = generate(target, each, PROMPTS, warper=GREEDY, max_new_tokens=8)
        assert [len(row) for row in own.tokens] == [8, 8, 8]


def test_another_family_or_target_is_refused(pair: tuple[Backbone, Bpd, Path]) -> None:
    target, _, folder = pair
    with pytest.raises(RequestError, match="family 'bpd'; expected 'medusa'"):
        load_medusa(folder, target)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"block": 4', '"block": 5'))
    with pytest.raises(RequestError, match="does not hold the weights"):
        load_bpd(folder, target)
    other = make_target("qwen3")
    other.tokenizer = train_tokenizer(["zyx wvu tsr\n"] * 5, 290)
    with pytest.raises(RequestError, match="with tokenizer"):
        load_bpd(folder, other)
