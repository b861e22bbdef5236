"""Hydra and Hydra++ decode as they are trained, node by node; output is the target's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Committed, DraftSampling, FeatureProposer, Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.export import Served, ServedTarget
from draftsmith.drafters.heads.family import hydra as hydra_export
from draftsmith.drafters.heads.hydra import Hydra, HydraHeads, HydraPlus, PrefixLayer, hydra_on, load_hydra
from draftsmith.drafters.heads.medusa import Medusa, MedusaHeads, load_medusa
from draftsmith.drafters.projection import Projection
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.hydra import check_recipe
from draftsmith.trainers.method_config import MedusaConfig
from draftsmith.trainers.packed.masks import document_mask
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.method_objectives import build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3]]
WORDS = ["abc def ghi jkl mno pqr\n"] * 5
GREEDY, SAMPLED = Warper(0.0), Warper(1.0)
# siblings that are expanded after some that are not, and ranks that are not all taken
ODD = [[0], [2], [2, 1], [2, 0], [0, 3], [2, 0, 1], [0, 3, 0], [0, 3, 0, 2], [1]]


def make_hydra(
    target: Backbone,
    *,
    noise: float = 0.05,
    layers: int = 1,
    shared: bool = False,
    prefix: bool = False,
    published: bool = False,
    **tree,
) -> Hydra:
    """Heads that are no longer the target's own projection, and still accept something."""
    sizes = {"heads": 4, "layers": layers, "shared_head": shared, "prefix": prefix, "as_published": published}
    heads = HydraHeads.for_target(target.model, **sizes)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=g))
    return hydra_on(heads.requires_grad_(False), target, **tree)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("layers", "prefix", "published"), [(1, False, False), (3, False, False), (4, True, False), (2, False, True)]
)
def test_new_heads_are_the_targets_own(target: Backbone, layers: int, prefix: bool, published: bool) -> None:
    """Whatever tokens they are shown; so they draft what new Medusa heads draft."""
    heads = HydraHeads.for_target(target.model, heads=3, layers=layers, prefix=prefix, as_published=published)
    head = target.model.get_output_embeddings()
    hidden, embeds = torch.randn(2, 5, 32), list(torch.randn(3, 2, 5, 32))
    if prefix:
        assert torch.equal(heads.prefix(hidden, torch.arange(5).expand(2, -1), None), hidden)
    found = heads.logits(heads(hidden, embeds), Projection(head.weight))
    for k in range(3):
        assert torch.equal(found[:, :, k], head(hidden))
    hydra = hydra_on(heads, target, paths=[[0], [1], [0, 1], [1, 0]])
    medusa = Medusa(MedusaHeads.for_target(target.model, heads=3), target, paths=[[0], [1], [0, 1], [1, 0]])
    for drafter in (hydra, medusa):
        drafter.reset([[1] * 5] * 2, 8)
        drafter.begin([hidden[0], hidden[1]])
    first, second = (
        each.propose(torch.tensor([3, 4]), SAMPLED, Uniforms(0, [0, 1], "cpu")) for each in (hydra, medusa)
    )
    assert torch.equal(first.tokens_BN, second.tokens_BN)
    assert first.tree == second.tree


class Watched:
    """A Hydra that keeps, for every proposal, each row's text up to the root, the proposal and all logits met."""

    def reset(self, prompts, room, *, static=False):  # noqa: ANN001, ANN201
        super().reset(prompts, room, static=static)
        self.texts = [list(prompt) for prompt in prompts]
        self.roots: list[int] = []
        self.accepted = 0
        self.met: list[tuple[list[list[int]], Proposal, list[Tensor]]] = []

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        self._levels_met: list[Tensor] = []
        proposal = super().propose(last_B, warper, uniforms)
        self.roots = last_B.tolist()
        self.met.append(([list(text) for text in self.texts], proposal, self._levels_met))
        return proposal

    def logits(self, depth: int, given_BKF: Tensor) -> Tensor:
        found = super().logits(depth, given_BKF)
        self._levels_met.append(found)
        return found

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        for row, count in enumerate(committed.count_B.tolist()):
            if count:
                accepted = committed.tokens_BE[row, : count - 1].tolist()
                self.texts[row] += [self.roots[row], *accepted]
                self.accepted += len(accepted)


class WatchedHydra(Watched, Hydra):
    pass


class WatchedHydraPlus(Watched, HydraPlus):
    pass


def trained_on(drafter: Hydra, text: list[int], k: int) -> Tensor:
    """Logits of head k at the last place where the objective trains it on `text`."""
    shape = drafter.heads.config
    goal = build(
        "hydra",
        drafter._target.model,
        medusa=MedusaConfig(
            shared_head=shape.shared_head, layers=2, prefix=shape.prefix is not None, as_published=shape.as_published
        ),
        objective=ObjectiveConfig(kl=0, ce=1),
    )
    goal.draft().load_state_dict(drafter.heads.state_dict())
    ids = torch.tensor([[*[7, 8, 9], *text]])  # packed behind another document
    documents = torch.tensor([[0, 0, 0] + [1] * len(text)])
    batch = {
        "input_ids": ids,
        "documents": documents,
        "loss_mask": torch.zeros_like(ids) == 0,
        "positions": torch.tensor([[0, 1, 2, *range(len(text))]]),
    }
    seen: list[Tensor] = []

    def spy(logits: Tensor, _target: Tensor | None, label: Tensor) -> dict[str, Tensor]:
        seen.append(logits.detach())
        return {"loss": logits.sum(-1), "top1": label.float()}

    for chunked in (*goal.module.losses, *goal.module._frozen):
        chunked.loss = spy
    one_head, last = goal.module.head, []

    def head(number: int, *given) -> tuple:  # noqa: ANN002
        done = one_head(number, *given)
        last.extend([seen[-1][-1]] if number == k else [])
        return done

    goal.module.head = head
    with torch.no_grad():
        goal.module(batch, goal.prepare(batch))
    return last[0]


@pytest.mark.parametrize(
    ("prefix", "shared", "published"),
    [(False, False, False), (False, True, False), (True, False, False), (False, False, True), (True, False, True)],
)
@pytest.mark.parametrize(("architecture", "static"), [("qwen3", False), ("llama", True)])
def test_training_and_decoding_see_the_same_logits(
    architecture: str, shared: bool, static: bool, prefix: bool, published: bool
) -> None:
    """Every expanded node = the training objective on the text with that node's path behind it."""
    target = make_target(architecture)
    noise = 0.02 if published else 0.1  # which shifts every logit too
    base = make_hydra(target, noise=noise, layers=2, shared=shared, prefix=prefix, published=published)
    kind = WatchedHydraPlus if prefix else WatchedHydra
    drafter = kind(base.heads, target, paths=ODD)
    generate(target, drafter, PROMPTS, warper=SAMPLED, max_new_tokens=9, static=static)
    compared = 0
    for texts, proposal, levels in drafter.met[:3]:
        tree = proposal.tree
        for depth, logits_BKV in enumerate(levels):
            inner = [n for n, own in enumerate(tree.children) if own and tree.depths[n] == depth]
            assert logits_BKV.shape[1] == len(inner)
            for row, text in enumerate(texts):
                for place, node in enumerate(inner):
                    path: list[int] = []
                    while node >= 0:
                        path.insert(0, int(proposal.tokens_BN[row, node]))
                        node = tree.parents[node]
                    # the last token is any label: head `depth + 1` then stands at the text's end
                    expected = trained_on(drafter, [*text, *path, 0], depth + 1)
                    torch.testing.assert_close(logits_BKV[row, place], expected, atol=1e-5, rtol=1e-5)
                    compared += 1
    assert compared >= 3 * 3 * 6
    assert drafter.accepted > 0


def test_the_prefix_layer_is_a_layer_of_llama(target: Backbone) -> None:
    """transformers' own, with the same weights, over two packed texts."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    layer = make_hydra(target, noise=0.2, prefix=True).heads.prefix
    assert isinstance(layer, PrefixLayer)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=target.model.config.intermediate_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=1,
        rms_norm_eps=target.model.config.rms_norm_eps,
        attn_implementation="eager",
        rope_parameters=target.model.config.rope_parameters,
    )
    theirs = LlamaDecoderLayer(config, 0)
    theirs.load_state_dict(layer.state_dict())
    hidden = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(4))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    documents = torch.tensor([[0] * 4 + [1] * 5])
    mask = document_mask(documents)
    expected = theirs(
        hidden,
        position_embeddings=LlamaRotaryEmbedding(config)(hidden, positions),
        attention_mask=torch.zeros(mask.shape).masked_fill(~mask, -1e30),
    )
    for own in (layer(hidden, positions, mask), layer(hidden, positions, documents_BN=documents)):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
@torch.inference_mode()
def test_the_prefix_layer_reads_true_states_alone(target: Backbone, static: bool) -> None:
    """Behind every step its keys are those of a layer that reads the committed text at once."""
    drafter = WatchedHydraPlus(make_hydra(target, prefix=True).heads, target)
    compared = []

    def observe(committed: Committed) -> None:
        WatchedHydraPlus.observe(drafter, committed)
        for row, text in enumerate(drafter.texts):
            known = int(drafter._states._known_B[row])
            states = target.model.get_decoder()(input_ids=torch.tensor([text])).last_hidden_state
            layer = drafter.heads.prefix
            positions = torch.arange(known)[None]
            expected = layer.self_attn.project(layer.input_layernorm(states[:, :known]), layer.rotary(positions))
            keys = drafter._states.kv_cache._keys[0][row, :, :known]
            torch.testing.assert_close(keys, expected.key_BGND[0], rtol=1e-4, atol=1e-5)
            compared.append(known - len(PROMPTS[row]))

    object.__setattr__(drafter, "observe", observe)
    generate(target, drafter, PROMPTS, warper=SAMPLED, max_new_tokens=16, static=static)
    assert max(compared) > 8
    assert drafter.accepted > 3


@torch.inference_mode()
@pytest.mark.parametrize("paths", [None, ODD, [[0]], [[0], [0, 0], [0, 0, 0]]])
def test_every_node_takes_its_rank_behind_its_path(target: Backbone, paths: list[list[int]] | None) -> None:
    """The tree against one forward pass per path."""
    drafter = make_hydra(target, noise=0.3, paths=paths)
    drafter.begin([torch.randn(4, 32, generator=torch.Generator().manual_seed(3)) for _ in "ab"])
    proposal = drafter.propose(torch.tensor([3, 50]), SAMPLED, Uniforms(0, [0, 1], "cpu"))
    assert proposal.sampling is DraftSampling.POINT_MASS
    tree, ranks = proposal.tree, drafter._choices.ranks
    embed, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    for row in range(2):
        for node in range(1, len(tree)):
            path, at = [], tree.parents[node]
            while at >= 0:
                path.insert(0, int(proposal.tokens_BN[row, at]))
                at = tree.parents[at]
            embeds = [embed(torch.tensor(token)) for token in path]
            embeds += [torch.zeros(32)] * (4 - len(path))  # heads further down see more than known
            logits = drafter.heads.logits(drafter.heads(drafter._hidden_BH[row], embeds), Projection(head.weight))[
                len(path) - 1
            ]
            best = logits.topk(ranks[node] + 1).indices[-1]
            assert int(proposal.tokens_BN[row, node]) == int(best)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
@pytest.mark.parametrize(("paths", "prefix"), [(None, False), ([[0]], False), (ODD, False), (None, True), (ODD, True)])
def test_greedy_output_is_the_targets_own(
    target: Backbone, static: bool, noise: float, paths: list[list[int]] | None, prefix: bool
) -> None:
    drafter = make_hydra(target, noise=noise, paths=paths, prefix=prefix)
    how = {"warper": GREEDY, "max_new_tokens": 30, "eos_ids": (17,)}
    own = generate(target, drafter, PROMPTS, static=static, **how)
    assert own.tokens == autoregressive(target, PROMPTS, **how).tokens
    if noise < 0.1:
        assert any("draft" in row for row in own.origin)


@pytest.mark.parametrize("prefix", [False, True])
def test_a_row_does_not_depend_on_the_others(target: Backbone, prefix: bool) -> None:
    drafter = make_hydra(target, prefix=prefix)
    how = {"warper": SAMPLED, "max_new_tokens": 24, "seed": 3}
    together = generate(target, drafter, PROMPTS, **how)
    assert together.tokens == generate(target, drafter, PROMPTS, static=True, **how).tokens
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, drafter, [prompt], requests=[row], **how)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.origin[0] == together.origin[row]


class NoWaiting(TorchDispatchMode):
    """Refuses what makes a host wait for its device: values read, sizes by values, copies to it."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "lift_fresh")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        name = function._schema.name.removeprefix("aten::")
        assert name not in self.WAITS, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", [Medusa, Hydra])
def test_a_step_can_be_recorded(target: Backbone, family: type, shared: bool) -> None:
    """From the second step on nothing waits, and what is kept stays at its address."""
    heads = {Medusa: MedusaHeads, Hydra: HydraHeads}[family]
    drafter = family(heads.for_target(target.model, heads=4, shared_head=shared), target)
    assert drafter.replayable
    drafter.reset(PROMPTS[:2], 50, static=True)
    drafter.begin([torch.randn(5, 32), torch.randn(2, 32)])
    last, uniforms = torch.tensor([3, 50]), Uniforms(0, [0, 1], "cpu")
    first = drafter.propose(last, SAMPLED, uniforms)
    features = torch.randn(2, drafter.nodes, 32)
    path = torch.tensor([[1, 5, -1, -1], [-1, -1, -1, -1]])
    committed = Committed(first.tokens_BN[:, :5], path[:, 0], path, features, features)
    kept = drafter._hidden_BH.data_ptr()
    with NoWaiting():
        drafter.observe(committed)
        second = drafter.propose(last, SAMPLED, uniforms)
    assert drafter._hidden_BH.data_ptr() == kept
    assert torch.equal(drafter._hidden_BH, torch.stack([features[0, 5], features[1, 0]]))
    assert second.tokens_BN.shape == first.tokens_BN.shape
    assert second.tree is first.tree
    assert not torch.equal(second.tokens_BN, first.tokens_BN)


@torch.inference_mode()
def test_a_step_of_the_prefix_layer_can_be_recorded(target: Backbone) -> None:
    drafter = make_hydra(target, prefix=True)
    assert drafter.replayable
    drafter.reset(PROMPTS[:2], 50, static=True)
    drafter.begin([torch.randn(5, 32), torch.randn(2, 32)])
    last, uniforms = torch.tensor([3, 50]), Uniforms(0, [0, 1], "cpu")
    first = drafter.propose(last, SAMPLED, uniforms)
    features = torch.randn(2, drafter.nodes, 32)
    path = torch.tensor([[1, 5, -1, -1], [-1, -1, -1, -1]])
    committed = Committed(first.tokens_BN[:, :5], torch.tensor([3, 1]), path, features, features)
    kept = drafter._states._features_BEF
    with NoWaiting():
        drafter.observe(committed)
        second = drafter.propose(last, SAMPLED, uniforms)
    assert drafter._states._features_BEF is kept
    assert torch.equal(kept[0, :3], features[0, [0, 1, 5]])
    assert torch.equal(kept[1, 0], features[1, 0])
    assert drafter._states.length_B.tolist() == [5 + 3, 2 + 1]
    assert not torch.equal(second.tokens_BN, first.tokens_BN)


def test_what_the_engine_is_told(target: Backbone) -> None:
    drafter = make_hydra(target)
    assert isinstance(drafter, FeatureProposer)
    assert (drafter.draft_length, drafter.nodes, drafter.draft_steps) == (4, 20, 4)
    assert make_hydra(target, prefix=True).draft_steps == 5
    with pytest.raises(RequestError, match="depth 5"):
        make_hydra(target, paths=[[0] * depth for depth in range(1, 6)])
    with pytest.raises(RequestError, match="at most 61 candidates"):
        make_hydra(target, paths=[[0], [VOCABULARY]])


@pytest.fixture(params=["own", "shared", "prefix"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Backbone, Hydra, Path]:
    """A target with a tokenizer, a drafter for it, and the drafter saved."""
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(WORDS, 300)
    sort = request.param
    drafter = make_hydra(target, shared=sort == "shared", prefix=sort == "prefix", layers=2)
    saver(target, drafter.family)(drafter.module, tmp_path / "drafter")
    return target, drafter, tmp_path / "drafter"


def test_a_saved_drafter_drafts_the_same(pair: tuple[Backbone, Hydra, Path]) -> None:
    target, drafter, folder = pair
    loaded = load_drafter(folder, target)
    assert type(loaded) is type(drafter)
    assert loaded.heads.config == drafter.heads.config
    how = {"warper": SAMPLED, "max_new_tokens": 20, "seed": 3}
    one, two = generate(target, drafter, PROMPTS, **how), generate(target, loaded, PROMPTS, **how)
    assert one.tokens == two.tokens
    assert one.origin == two.origin
    assert load_hydra(folder, target, nodes=7).nodes == 7
    target.model.to(torch.bfloat16)
    for each in (load_hydra(folder, target), drafter):
        own = generate(target, each, PROMPTS, warper=GREEDY, max_new_tokens=8)
        assert [len(row) for row in own.tokens] == [8, 8, 8]


def test_another_target_or_family_is_refused(pair: tuple[Backbone, Hydra, Path]) -> None:
    target, _, folder = pair
    with pytest.raises(RequestError, match=r"family 'hydra(\+\+)?'; expected 'medusa'"):
        load_medusa(folder, target)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    settings = config["draftsmith"]["settings"]
    config["draftsmith"]["settings"] = settings | {"heds": 4}
    path.write_text(json.dumps(config))
    with pytest.raises(RequestError, match="does not hold the sizes of Hydra heads.*heds"):
        load_hydra(folder, target)
    config["draftsmith"]["settings"] = settings
    config["draftsmith"]["target"]["tokenizer"] = "0" * 64
    path.write_text(json.dumps(config))
    with pytest.raises(RequestError, match="with tokenizer"):
        load_hydra(folder, target)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"as_published": False}, "has a linear map, biases and a norm that these heads lack"),
        ({"layers": 3}, "head 1 has 2 blocks behind its first that differ"),
        ({"ids": [3, 5, 8]}, "reads no draft vocabulary"),
    ],
)
def test_what_the_authors_code_cannot_hold_is_refused(chosen: dict[str, Any], says: str, target: Backbone) -> None:
    heads = HydraHeads.for_target(target.model, **({"heads": 2, "as_published": True} | chosen))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter))
    served = ServedTarget.of("org/target", target.model.config)
    with pytest.raises(RequestError, match=says):
        hydra_export(heads, served, Served(None, tokens=1))


def test_heads_as_published_have_projections_of_their_own() -> None:
    recipe = Recipe(method="hydra", medusa=MedusaConfig(as_published=True, shared_head=True))
    with pytest.raises(RequestError, match=r"medusa\.as_published is on, .* beside medusa\.shared_head"):
        check_recipe(recipe)
