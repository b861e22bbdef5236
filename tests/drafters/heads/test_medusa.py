"""Medusa's heads decode as they are trained, output is the target's own, checkpoints fit or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Committed, DraftSampling, FeatureProposer
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.search import expected_tokens
from draftsmith.drafters.heads.medusa import Medusa, MedusaHeads, default_paths, load_medusa
from draftsmith.drafters.projection import Projection
from draftsmith.errors import RequestError
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.heads import last_states_of
from draftsmith.trainers.labels import has_label
from draftsmith.trainers.method_config import MedusaConfig
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.method_objectives import build
from helpers.models.small_drafters import WatchedMedusa, change_target_of
from torch import Tensor, nn

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3]]
WORDS = ["abc def ghi jkl mno pqr\n"] * 5
GREEDY, SAMPLED = Warper(0.0), Warper(1.0)


def shake(module: nn.Module, noise: float) -> None:
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=g))


def make_medusa(target: Backbone, *, noise: float = 0.05, layers: int = 1, shared: bool = False, **tree) -> Medusa:
    """Heads that are no longer the target's own projection, and still accept something."""
    heads = MedusaHeads.for_target(target.model, heads=4, layers=layers, shared_head=shared)
    shake(heads, noise)
    return Medusa(heads.requires_grad_(False), target, **tree)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
@torch.inference_mode()
def test_new_heads_are_the_targets_own(target: Backbone, layers: int, shared: bool) -> None:
    """Zero weights in the residual blocks, and the target's projection: bit for bit."""
    heads = MedusaHeads.for_target(target.model, heads=3, layers=layers, shared_head=shared)
    head = target.model.get_output_embeddings()
    hidden = torch.randn(2, 5, heads.config.hidden)
    found = heads.logits(heads(hidden), Projection(head.weight))
    assert found.shape == (2, 5, 3, VOCABULARY)
    for k in range(3):
        assert torch.equal(found[:, :, k], head(hidden))


def test_a_shared_head_is_not_among_the_weights(target: Backbone) -> None:
    own = MedusaHeads.for_target(target.model, heads=2)
    shared = MedusaHeads.for_target(target.model, heads=2, shared_head=True)
    names = {
        "blocks.0.layers.0.weight",
        "blocks.0.layers.0.bias",
        "blocks.1.layers.0.weight",
        "blocks.1.layers.0.bias",
    }
    assert shared.state_dict().keys() == names
    assert own.state_dict().keys() == names | {"lm_heads.0.weight", "lm_heads.1.weight"}
    target_weight = target.model.get_output_embeddings().weight
    assert all(p.data_ptr() != target_weight.data_ptr() for p in own.parameters())


def packed(texts: list[list[int]]) -> dict[str, Tensor]:
    """All texts in one row, every token a label but the first of each."""
    return {
        "input_ids": torch.tensor([[token for text in texts for token in text]]),
        "loss_mask": torch.tensor([[at > 0 for text in texts for at in range(len(text))]]),
        "positions": torch.tensor([[at for text in texts for at in range(len(text))]]),
        "documents": torch.tensor([[n for n, text in enumerate(texts) for _ in text]]),
    }


def trained_on(drafter: Medusa, texts: list[list[int]]) -> list[dict[tuple[int, int], Tensor]]:
    """Logits that the training objective sees of each head, by text and position in it."""
    goal = build(
        "medusa",
        drafter._target.model,
        medusa=MedusaConfig(heads=4, shared_head=drafter.heads.config.shared_head),
        objective=ObjectiveConfig(kl=0, ce=1),
    )
    goal.draft().load_state_dict(drafter.heads.state_dict())
    batch = packed(texts)
    seen: list[Tensor] = []

    def spy(logits: Tensor, _target: Tensor | None, label: Tensor) -> dict[str, Tensor]:
        seen.append(logits.detach())
        return {"loss": logits.sum(-1), "top1": label.float()}

    for chunked in (*goal.module.losses, *goal.module._frozen):
        chunked.loss = spy
    found = []
    hidden_RSH = goal.prepare(batch).hidden_RSH
    for k in range(1, 5):
        seen.clear()
        goal.module.head(k, batch, hidden_RSH, last_states_of(hidden_RSH))
        places = has_label(batch, k + 1)[0].nonzero()[:, 0].tolist()
        keys = [(int(batch["documents"][0, t]), int(batch["positions"][0, t])) for t in places]
        found.append(dict(zip(keys, torch.cat(seen), strict=True)))
    return found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("static", [False, True])
def test_training_and_decoding_see_the_same_logits(architecture: str, shared: bool, static: bool) -> None:
    """Every head at every step = the training objective at the same place, in a batch and packed."""
    target = make_target(architecture)
    base = make_medusa(target, noise=0.2, shared=shared)
    drafter = WatchedMedusa(base.heads, target)
    done = generate(target, drafter, PROMPTS, warper=SAMPLED, max_new_tokens=24, static=static)
    texts = [prompt + row for prompt, row in zip(PROMPTS, done.tokens, strict=True)]
    trained, compared = trained_on(drafter, texts), 0
    for lengths, logits_BKV in drafter.met:
        for row, length in enumerate(lengths):
            for k in range(4):
                expected = trained[k].get((row, length - 1))
                if expected is not None:
                    torch.testing.assert_close(logits_BKV[row, k], expected, atol=1e-5, rtol=1e-5)
                    compared += 1
    assert compared > 60
    assert drafter.accepted > 0


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("paths", [None, [[0]], [[0], [1], [0, 0], [1, 0], [0, 0, 0], [0, 1]]])
def test_greedy_output_is_the_targets_own(
    target: Backbone, static: bool, noise: float, paths: list[list[int]] | None
) -> None:
    drafter = make_medusa(target, noise=noise, paths=paths)
    how = {"warper": GREEDY, "max_new_tokens": 30, "eos_ids": (17,)}
    own = generate(target, drafter, PROMPTS, static=static, **how)
    assert own.tokens == autoregressive(target, PROMPTS, **how).tokens
    if noise < 0.1:
        assert any("draft" in row for row in own.origin)


def test_a_row_does_not_depend_on_the_others(target: Backbone) -> None:
    drafter = make_medusa(target)
    how = {"warper": SAMPLED, "max_new_tokens": 24, "seed": 3}
    together = generate(target, drafter, PROMPTS, **how)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, drafter, [prompt], requests=[row], **how)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.origin[0] == together.origin[row]


def test_static_steps_write_the_same(target: Backbone) -> None:
    drafter = make_medusa(target)
    how = {"warper": SAMPLED, "max_new_tokens": 24, "seed": 3}
    one = generate(target, drafter, PROMPTS, static=False, **how)
    two = generate(target, drafter, PROMPTS, static=True, **how)
    assert one.tokens == two.tokens


@torch.inference_mode()
def test_the_state_is_that_of_the_last_accepted_node(target: Backbone) -> None:
    drafter = make_medusa(target)
    H = drafter.heads.config.hidden
    drafter.begin([torch.zeros(3, H), torch.zeros(1, H), torch.zeros(2, H)])
    kept = drafter._hidden_BH
    features = torch.arange(3 * drafter.nodes).view(3, -1, 1).expand(-1, -1, H).float()
    path = torch.tensor([[-1, -1, -1, -1], [2, 6, -1, -1], [1, 5, 11, 15]])
    drafter.observe(Committed(path, path[:, 0], path, features, features))
    assert drafter._hidden_BH is kept  # a graph reads it where it was
    assert (kept[:, 0] - features[:, 0, 0]).tolist() == [0, 6, 15]


def test_what_the_engine_is_told(target: Backbone) -> None:
    drafter = make_medusa(target)
    assert isinstance(drafter, FeatureProposer)
    assert (drafter.draft_length, drafter.nodes, drafter.draft_steps) == (4, 20, 1)
    drafter = make_medusa(target, paths=[[0], [1], [0, 0]])
    assert (drafter.draft_length, drafter.nodes) == (2, 4)
    drafter.begin([torch.randn(2, drafter.heads.config.hidden)])
    proposal = drafter.propose(torch.tensor([3]), SAMPLED, Uniforms(0, [0], "cpu"))
    assert proposal.sampling is DraftSampling.POINT_MASS
    best = drafter.logits().topk(2).indices[0]
    assert proposal.tokens_BN[0].tolist() == [3, *best[0].tolist(), int(best[1, 0])]


def test_the_default_tree() -> None:
    assert len(default_paths(4, 20)) == 19
    assert max(map(len, default_paths(4, 20))) == 4
    assert max(map(len, default_paths(2, 64))) == 2
    table = 0.6 * 0.8 ** torch.arange(4.0)[:, None] * 0.3 ** torch.arange(8.0)
    chain = [[0] * depth for depth in range(1, 5)]
    assert expected_tokens(default_paths(4, 20), table.numpy()) > 1.4 * expected_tokens(chain, table.numpy())


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0, 0], [0, 0, 0], [0] * 4, [0] * 5], "depth 5"),
        ([[0], [VOCABULARY]], "at most 61 candidates"),
        ([[0, 0]], "needs its prefix"),
        ([], "depth 0"),
    ],
)
def test_a_tree_that_the_heads_cannot_fill_is_refused(target: Backbone, paths: list[list[int]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_medusa(target, paths=paths)


def test_heads_of_their_own_begin_with_the_scale_and_without_the_bias() -> None:
    model = make_target("qwen3").model
    model.set_output_embeddings(nn.Linear(32, VOCABULARY, bias=True))
    model.config.logit_scale = 0.25
    heads = MedusaHeads.for_target(model, heads=2)
    assert set(heads.lm_heads.state_dict()) == {"0.weight", "1.weight"}
    torch.testing.assert_close(heads.lm_heads[1].weight, 0.25 * model.get_output_embeddings().weight)


@pytest.fixture(params=[False, True], ids=["own", "shared"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Backbone, Medusa, Path]:
    """A target with a tokenizer, a drafter for it, and the drafter saved."""
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(WORDS, 300)
    drafter = make_medusa(target, shared=request.param, layers=2)
    saver(target, "medusa")(drafter.module, tmp_path / "drafter")
    return target, drafter, tmp_path / "drafter"


def test_a_saved_drafter_drafts_the_same(pair: tuple[Backbone, Medusa, Path]) -> None:
    target, drafter, folder = pair
    loaded = load_medusa(folder, target)
    assert loaded.heads.config == drafter.heads.config
    for name, tensor in drafter.heads.state_dict().items():
        assert torch.equal(loaded.heads.state_dict()[name], tensor)
    how = {"warper": SAMPLED, "max_new_tokens": 20, "seed": 3}
    one, two = generate(target, drafter, PROMPTS, **how), generate(target, loaded, PROMPTS, **how)
    assert one.tokens == two.tokens
    assert one.origin == two.origin
    assert load_medusa(folder, target, nodes=7).nodes == 7
    assert load_medusa(folder, target, paths=[[0], [0, 0]]).draft_length == 2


def test_heads_of_a_half_precision_target(pair: tuple[Backbone, Medusa, Path]) -> None:
    """They are loaded in the target's precision, and fp32 heads take its hidden states too."""
    target, drafter, folder = pair
    target.model.to(torch.bfloat16)
    loaded = load_medusa(folder, target)
    assert loaded.heads.dtype == torch.bfloat16
    for each in (loaded, drafter):
        own = generate(target, each, PROMPTS, warper=GREEDY, max_new_tokens=8)
        assert [len(row) for row in own.tokens] == [8, 8, 8]


@pytest.mark.parametrize("field", ["tokenizer", "vocabulary", "hidden_size"])
def test_another_target_is_refused_by_field(field: str, pair: tuple[Backbone, Medusa, Path]) -> None:
    target, _, folder = pair
    change_target_of(folder, field)
    with pytest.raises(RequestError, match=f"with {field}"):
        load_medusa(folder, target)


def test_another_family_and_other_weights_are_refused(pair: tuple[Backbone, Medusa, Path]) -> None:
    target, _, folder = pair
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["draftsmith"]["settings"]["layers"] = 1
    path.write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"does not hold the weights"):
        load_medusa(folder, target)
    config["draftsmith"]["family"] = "oracle"
    path.write_text(json.dumps(config))
    with pytest.raises(RequestError, match="family 'oracle'; expected 'medusa'"):
        load_medusa(folder, target)
