"""EAGLE decodes with the module that was trained: the same distributions, the same output, the same cache."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Committed, DraftSampling, Proposal
from draftsmith.decoding.random import SharedStream, Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.build import dynamic_tree
from draftsmith.drafters.eagle.family import load_eagle
from draftsmith.drafters.eagle.net import EagleNet
from draftsmith.drafters.eagle.net3 import Eagle3Net, fused_layers
from draftsmith.drafters.eagle.proposer import EAGLE_1_TREE, Eagle, Eagle3
from draftsmith.drafters.folder import save_heads
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.errors import RequestError
from draftsmith.trainers.eagle import EagleObjective
from draftsmith.trainers.eagle3 import Eagle3Objective
from draftsmith.trainers.method_config import Eagle3Config, EagleConfig
from helpers.models.method_objectives import build
from helpers.models.small_drafters import change_target_of
from scipy import stats
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11], [1, 2, 3]]
KINDS = ["chain", "static", "dynamic"]
SMALL = {"top_k": 4, "nodes": 14}
PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0)]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CLOSER = {"rtol": 1e-5, "atol": 1e-5}
DEPTH = 4
WORDS = [word for word in range(61) if word % 3 != 1]  # those that EAGLE-3 drafts
WARPERS = [Warper(1.0), Warper(0.7, top_p=0.9)]
AnyNet = EagleNet | Eagle3Net


@pytest.fixture(scope="module")
def target() -> Backbone:
    """A random target that prefers some tokens clearly."""
    backbone = make_target("qwen3")
    with torch.no_grad():
        backbone.model.model.norm.weight.mul_(3)
    return backbone


def goal_for(family: str, target: Backbone) -> EagleObjective | Eagle3Objective:
    torch.manual_seed(0)
    if family == "eagle":
        return build("eagle", target.model, eagle=EagleConfig(ce=1.0))
    config = Eagle3Config(passes=DEPTH, layers=(0, 1, 2))
    return build("eagle3", target.model, ids=WORDS, eagle3=config)


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def net(request: pytest.FixtureRequest, target: Backbone) -> AnyNet:
    """Trained for a second on the target's own answers: right sometimes, not always."""
    goal = goal_for(request.param, target)
    texts = [
        [*prompt, *tokens]
        for prompt in PROMPTS
        for tokens in autoregressive(target, [prompt], warper=Warper(0.0), max_new_tokens=40 - len(prompt)).tokens
    ]
    rows = {
        "input_ids": torch.tensor(texts),
        "loss_mask": torch.ones(3, 40, dtype=torch.bool),
        "positions": torch.arange(40).expand(3, -1),
        "documents": torch.zeros(3, 40, dtype=torch.long),
    }
    optimizer = torch.optim.AdamW(goal.module.parameters(), lr=5e-3)
    for _ in range(30):
        goal.module(rows, goal.prepare(rows))[0].backward()
        torch.nn.utils.clip_grad_norm_(goal.module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    trained = goal.draft().eval().requires_grad_(False)
    assert isinstance(trained, EagleNet | Eagle3Net)
    return trained


class Watched:
    """An EAGLE that keeps the text of every row in front of each proposal, the proposal and the KV cache's keys."""

    def reset(self, prompts, room, *, static=False):  # noqa: ANN001, ANN201
        super().reset(prompts, room, static=static)
        self.texts = [list(prompt) for prompt in prompts]
        self.seen: list[tuple[list[list[int]], Proposal, Tensor]] = []

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        self.last = last_B.tolist()
        texts = [[*text, last] for text, last in zip(self.texts, self.last, strict=True)]
        self.seen.append((texts, proposal, self._kv_cache._keys[0].clone()))
        return proposal

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        for row, count in enumerate(committed.count_B.tolist()):
            if count:
                self.texts[row] += [self.last[row], *committed.tokens_BE[row, : count - 1].tolist()]


class WatchedEagle(Watched, Eagle):
    pass


class WatchedEagle3(Watched, Eagle3):
    pass


def watched(net: AnyNet, target: Backbone, kind: str, **settings) -> WatchedEagle | WatchedEagle3:
    settings = {"tree": kind, "paths": PATHS, "draft_length": DEPTH} | SMALL | settings
    if isinstance(net, EagleNet):
        return WatchedEagle(net, target, **settings)
    return WatchedEagle3(net, target, **settings)


def features_of(net: AnyNet, target: Backbone, text: list[int]) -> Tensor:
    """What `transformers` says are the hidden states of every token but the last. [1, S, F]."""
    states = target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    layers = (-1,) if isinstance(net, EagleNet) else (0, 1, 2)
    return torch.cat([states[layer] for layer in layers], -1)


def logits_of(net: AnyNet, target: Backbone, hidden: Tensor) -> Tensor:
    """Through the target's head, or the drafter's own and nothing for the tokens that it lacks."""
    if isinstance(net, EagleNet):
        return target.model.get_output_embeddings()(hidden)
    logits = torch.full((*hidden.shape[:-1], 61), -torch.inf)
    logits[..., WORDS] = net.lm_head(net.norm(hidden))
    return logits


def unrolled(net: AnyNet, target: Backbone, text: list[int], path: list[int]) -> Tensor:
    """Logits behind the text and behind every token of the path, each pass from the start. [D, V]."""
    hidden, tokens, found = net.fuse(features_of(net, target, text)), list(text[1:]), []
    for token in [None, *path]:
        if token is not None:
            tokens.append(token)
        embeds = target.model.get_input_embeddings()(torch.tensor([tokens]))
        out = net(hidden, embeds, torch.arange(len(tokens))[None], None)
        found.append(logits_of(net, target, out[0, -1]))
        hidden = torch.cat([hidden, out[:, -1:]], 1)
    return torch.stack(found)


def path_to(proposal: Proposal, row: int, node: int) -> list[int]:
    """Tokens from the root's child down to a node."""
    parents = proposal.tree.on(torch.device("cpu")).parents_BN.expand(row + 1, -1)[row].tolist()
    path: list[int] = []
    while node > 0:
        path.insert(0, int(proposal.tokens_BN[row, node]))
        node = parents[node]
    return path


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("warper", WARPERS, ids=str)
@pytest.mark.parametrize("kind", ["chain", "static"])
@torch.inference_mode()
def test_every_declared_distribution_is_that_of_an_unrolled_network(
    kind: str, warper: Warper, static: bool, net: AnyNet, target: Backbone
) -> None:
    # so deep that a drafted pair stands behind two drafted ones
    drafter = watched(net, target, kind, paths=[*PATHS, (0, 1, 0, 0)])
    generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=12, static=static)
    assert len(drafter.seen) > 2
    for texts, proposal, _ in drafter.seen:
        assert proposal.q_BNV is not None
        inner = [node for node, own in enumerate(drafter.tree.children) if own]
        for row, text in enumerate(texts):
            for node in inner:
                probs_V = warper(unrolled(net, target, text, path_to(proposal, row, node))[-1])
                torch.testing.assert_close(proposal.q_BNV[row, node], probs_V, **CLOSE)


@pytest.mark.parametrize("warper", WARPERS, ids=str)
@torch.inference_mode()
def test_training_and_decoding_see_the_same_distributions(warper: Warper, net: AnyNet, target: Backbone) -> None:
    """What a chain declares = what training's forward says of the same texts, packed into one row.

    All passes are compared, each with the drafted tokens in the place of the text's: EAGLE-1's
    network has the later ones as HASS. Logits too, in which tokens of no probability count.
    """
    drafter = watched(net, target, "chain")
    generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=16)
    assert len(drafter.seen) > 3
    goal = goal_for("eagle" if isinstance(net, EagleNet) else "eagle3", target)
    for texts, proposal, _ in drafter.seen:
        drafted = proposal.tokens_BN[:, 1:].tolist()
        rows = packed([text + more for text, more in zip(texts, drafted, strict=True)])
        teacher_output = goal.prepare(rows)
        features = teacher_output.hidden_RSH if isinstance(net, EagleNet) else teacher_output.fused_RSF
        outputs = net.unroll(
            net.fuse(features), teacher_output.embeds_RSH, rows["positions"], rows["documents"], DEPTH
        )
        # the last pair of a text ends with its last token: it stands at the last but one
        ends = torch.tensor([len(text) + DEPTH for text in texts]).cumsum(0) - 2 - DEPTH
        assert proposal.q_BNV is not None
        for depth, out in enumerate(outputs):
            logits_BV = logits_of(net, target, out[0, ends])
            both = zip(texts, drafted, strict=True)
            alone = [unrolled(net, target, text, more[:depth])[-1] for text, more in both]
            torch.testing.assert_close(logits_BV, torch.stack(alone), **CLOSER)
            torch.testing.assert_close(proposal.q_BNV[:, depth], warper(logits_BV), **CLOSER)


def packed(texts: list[list[int]]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([[token for text in texts for token in text]]),
        "positions": torch.tensor([[at for text in texts for at in range(len(text))]]),
        "documents": torch.tensor([[n for n, text in enumerate(texts) for _ in text]]),
    }


@pytest.mark.parametrize("static", [False, True])
@torch.inference_mode()
def test_the_dynamic_tree_is_that_of_unrolled_paths(static: bool, net: AnyNet, target: Backbone) -> None:
    drafter = watched(net, target, "dynamic")
    generate(target, drafter, PROMPTS, warper=Warper(0.0), max_new_tokens=12, static=static)
    assert len(drafter.seen) > 2
    for texts, proposal, _ in drafter.seen:
        for row, text in enumerate(texts):
            tokens_N, parents_N = grown(net, target, text)
            assert proposal.tokens_BN[row].tolist() == tokens_N
            nodes = proposal.tree.on(torch.device("cpu"))
            assert nodes.parents_BN[row].tolist() == parents_N


def grown(net: AnyNet, target: Backbone, text: list[int]) -> tuple[list[int], list[int]]:
    """The dynamic tree of one row, every distribution computed over its whole path from the start."""
    paths: list[list[int]] = [[]]

    def best(among: list[list[int]]) -> tuple[Tensor, Tensor]:
        logits = torch.stack([unrolled(net, target, text, path)[-1] for path in among])
        found = logits.log_softmax(-1).topk(SMALL["top_k"])
        return found.values[None], found.indices[None]

    def expand(tokens: Tensor, parents: Tensor, _level: int) -> tuple[Tensor, Tensor]:
        above = parents[0].tolist()
        paths[:] = [[*paths[p], t] for t, p in zip(tokens[0].tolist(), above, strict=True)]
        return best(paths)

    logp, first = best(paths)
    tokens_BN, tree = dynamic_tree(torch.tensor(text[-1:]), (logp[:, 0], first[:, 0]), expand, depth=DEPTH, **SMALL)
    return tokens_BN[0].tolist(), tree.parents_BN[0].tolist()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_cache_is_that_of_a_fresh_run_over_true_features(
    kind: str, static: bool, net: AnyNet, target: Backbone
) -> None:
    """Whatever was accepted in whatever row: keys of all true pairs, and nothing of guessed ones."""
    drafter = watched(net, target, kind)
    done = generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=16, static=static)
    assert {"draft", "correction"} <= set(sum(done.origin, []))
    for texts, _, keys_BGLD in drafter.seen:
        for row, text in enumerate(texts):
            embeds = target.model.get_input_embeddings()(torch.tensor([text[1:]]))
            features = features_of(net, target, text)
            _, read = net.enter(net.fuse(features), embeds)
            turn = net.rotary(torch.arange(len(text) - 1)[None])
            wanted = net.attention.project(read, turn).key_BGND[0]
            torch.testing.assert_close(keys_BGLD[row, :, : len(text) - 1], wanted, **CLOSE)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_trained", [False, True])
def test_greedy_output_is_the_targets_own(
    is_trained: bool, kind: str, static: bool, net: AnyNet, target: Backbone
) -> None:
    torch.manual_seed(1)
    chosen = net if is_trained else type(net)(net.config).eval()
    drafter = watched(chosen, target, kind)
    own = generate(target, drafter, PROMPTS, warper=Warper(0.0), max_new_tokens=24, static=static)
    base = autoregressive(target, PROMPTS, warper=Warper(0.0), max_new_tokens=24)
    assert own.tokens == base.tokens
    if is_trained:
        assert own.target_calls < 20
        assert {"draft", "correction"} <= set(sum(own.origin, []))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_and_fixed_shapes_draw_the_same(kind: str, net: AnyNet, target: Backbone) -> None:
    drafter = watched(net, target, kind)
    how = {"warper": Warper(1.0), "max_new_tokens": 20, "seed": 4, "eos_ids": [17]}
    batch = generate(target, drafter, PROMPTS, **how)
    assert generate(target, drafter, PROMPTS, **how, static=True).tokens == batch.tokens
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, drafter, [prompt], **how, requests=[row])
        assert alone.tokens == [batch.tokens[row]]
        assert alone.origin == [batch.origin[row]]


@pytest.mark.parametrize("kind", ["chain", "static"])
@pytest.mark.parametrize("warper", [Warper(1.0), Warper(1.0, top_k=2)], ids=str)
@torch.inference_mode()
def test_tokens_follow_the_distribution_that_is_declared(
    kind: str, warper: Warper, net: AnyNet, target: Backbone
) -> None:
    """Integral transforms under the declared distribution, siblings without the earlier ones, are uniform."""
    rows = 400
    drafter = watched(net, target, kind, draft_length=3)
    drafter.reset([PROMPTS[0]] * rows, 20)
    drafter.begin([features_of(net, target, [*PROMPTS[0], 0])[0]] * rows)
    last_B = torch.full((rows,), 8)
    proposal = drafter.propose(last_B, warper, SharedStream(3, rows))
    assert proposal.sampling is (DraftSampling.IID if kind == "chain" else DraftSampling.WITHOUT_REPLACEMENT)
    assert proposal.q_BNV is not None
    g = torch.Generator().manual_seed(9)
    found = []
    for node, children in enumerate(drafter.tree.children):
        probs_BV = proposal.q_BNV[:, node].double()
        for child in children:
            there_B = probs_BV.sum(1) > 0
            if proposal.present_BN is not None:
                assert torch.equal(proposal.present_BN[:, child], there_B)
            probs_BV = probs_BV / probs_BV.sum(1, keepdim=True).clamp_min(1e-30)
            token_B1 = proposal.tokens_BN[:, child, None]
            mass_B = probs_BV.gather(1, token_B1)[:, 0]
            assert (mass_B[there_B] > 0).all()
            below_B = probs_BV.cumsum(1).gather(1, token_B1)[:, 0] - mass_B
            spread_B = torch.rand(rows, generator=g, dtype=torch.float64)
            found.append((below_B + spread_B * mass_B)[there_B])
            probs_BV = probs_BV.scatter(1, token_B1, 0.0)
    transforms = torch.cat(found)
    assert len(transforms) >= 3 * rows
    assert stats.kstest(transforms.numpy(), "uniform").pvalue > 1e-3
    if kind == "static" and warper.top_k:
        # of two tokens with a probability a third cannot be drawn
        assert proposal.present_BN is not None
        assert not proposal.present_BN[:, 3].any()


@pytest.mark.parametrize("kind", ["chain", "static"])
@pytest.mark.parametrize("warper", [Warper(0.0), Warper(1.0)], ids=str)
def test_argmax_is_a_point_mass(kind: str, warper: Warper, net: AnyNet, target: Backbone) -> None:
    policy = "argmax" if warper.temperature else "sample"
    drafter = watched(net, target, kind, policy=policy)
    generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=6)
    for texts, proposal, _ in drafter.seen:
        assert proposal.sampling is DraftSampling.POINT_MASS
        for row, text in enumerate(texts):
            best = unrolled(net, target, text, [])[-1].topk(3).indices.tolist()
            own = drafter.tree.children[0]
            assert proposal.tokens_BN[row, list(own)].tolist() == best[: len(own)]


def test_the_published_tree_is_the_default(net: AnyNet, target: Backbone) -> None:
    drafter = type(watched(net, target, "chain"))(net, target, tree="static")
    assert (drafter.nodes, drafter.draft_length, drafter.draft_steps) == (26, 5, 5)
    assert len(EAGLE_1_TREE) == 25
    done = generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=12)
    assert all(len(tokens) == 12 for tokens in done.tokens)


@torch.inference_mode()
def test_no_more_nodes_are_made_room_for_than_the_dynamic_tree_has(net: AnyNet, target: Backbone) -> None:
    """A mask of 100,000 x 100,000 would not fit; the text is that of all nodes there are."""
    sizes: dict = {"tree": "dynamic", "draft_length": 3, "top_k": 4}
    kind, found = Eagle if isinstance(net, EagleNet) else Eagle3, []
    for nodes in (100_000, 1 + 4 + 2 * 4**2):
        drafter = kind(net, target, nodes=nodes, **sizes)
        assert drafter.nodes == 37
        found.append(generate(target, drafter, PROMPTS, warper=Warper(0.0), max_new_tokens=12))
    assert found[0].tokens == found[1].tokens


def test_impossible_drafts_are_refused(net: AnyNet, target: Backbone) -> None:
    with pytest.raises(RequestError, match="no tree of EAGLE is called 'star'"):
        watched(net, target, "star")
    with pytest.raises(RequestError, match="proposes nothing"):
        watched(net, target, "chain", draft_length=0)
    words = 61 if isinstance(net, EagleNet) else len(WORDS)
    with pytest.raises(RequestError, match=f"would have 62 children; expected 1 to {words}"):
        watched(net, target, "dynamic", top_k=62)


def test_names_are_those_that_servers_load(net: AnyNet) -> None:
    """No bias, no embedding; EAGLE-1 has no norm in front of the layer and no head of its own."""
    layer = "layers.0" if isinstance(net, EagleNet) else "midlayer"
    attention = {f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"}
    inner = {f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    others = {"fc.weight", f"{layer}.post_attention_layernorm.weight"}
    if isinstance(net, Eagle3Net):
        others |= {f"{layer}.{name}.weight" for name in ("input_layernorm", "hidden_norm")}
        others |= {"norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(net.state_dict()) == attention | inner | others


def test_positions_are_llamas_in_every_precision(net: AnyNet, target: Backbone) -> None:
    """Half-precision weights must not round the frequencies: far positions would be wrong."""
    rotary = target.model.model.rotary_emb
    far = torch.tensor([[0, 1, 255, 4095, 100_000]])
    wanted = rotary(torch.zeros(1, dtype=torch.float32), far)
    for dtype in (torch.float32, torch.bfloat16):
        found = copy.deepcopy(net).to(dtype).rotary(far)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine[:, 0], theirs, atol=1e-6, rtol=0)


def test_the_draft_vocabulary_is_an_offset(target: Backbone) -> None:
    net = goal_for("eagle3", target).draft()
    assert isinstance(net, Eagle3Net)
    assert [at + int(offset) for at, offset in enumerate(net.d2t)] == WORDS == net.ids_U.tolist()
    assert net.t2d.nonzero()[:, 0].tolist() == WORDS
    assert (net.d2t.dtype, net.t2d.dtype) == (torch.int64, torch.bool)


def test_fused_layers_are_those_of_serving_engines() -> None:
    assert fused_layers(32) == (2, 16, 29)
    assert fused_layers(7) == (2, 3, 4)
    for count in range(2, 7):
        layers = fused_layers(count)
        assert list(layers) == sorted(set(layers))
        assert layers[-1] <= count
    with pytest.raises(RequestError, match="a target of 1 layer has 2 hidden states"):
        fused_layers(1)


@pytest.fixture
def saved(tmp_path: Path, net: AnyNet) -> tuple[Backbone, Path]:
    """A target with a tokenizer, and the drafter saved for it."""
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    folder = tmp_path / "drafter"
    family = "eagle" if isinstance(net, EagleNet) else "eagle3"
    save_heads(net, folder, target, family=family, settings=asdict(net.config))
    return target, folder


def test_a_saved_drafter_drafts_the_same(saved: tuple[Backbone, Path], net: AnyNet) -> None:
    target, folder = saved
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    loaded = load_eagle(folder, target, tree="static", paths=PATHS)
    for name, tensor in net.state_dict().items():
        assert loaded.module.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(loaded.module.state_dict()[name], tensor), name
    how = {"warper": Warper(1.0), "max_new_tokens": 12, "seed": 3}
    one = generate(target, watched(net, target, "static"), PROMPTS, **how)
    two = generate(target, loaded, PROMPTS, **how)
    assert (one.tokens, one.origin) == (two.tokens, two.origin)


@pytest.mark.parametrize("field", ["tokenizer", "vocabulary", "hidden_size"])
def test_another_target_is_refused_by_field(field: str, saved: tuple[Backbone, Path]) -> None:
    target, folder = saved
    change_target_of(folder, field)
    with pytest.raises(RequestError, match=f"with {field}"):
        load_eagle(folder, target)


def test_another_family_is_refused(saved: tuple[Backbone, Path]) -> None:
    target, folder = saved
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["draftsmith"]["family"] = DraftModel.family
    path.write_text(json.dumps(config))
    with pytest.raises(RequestError, match="family 'draft_model'; expected 'eagle' or 'eagle3'"):
        load_eagle(folder, target)
    config["draftsmith"] |= {"family": "eagle", "settings": {"hidden": 32}}
    path.write_text(json.dumps(config))
    with pytest.raises(RequestError, match="does not hold the sizes of an eagle network"):
        load_eagle(folder, target)
