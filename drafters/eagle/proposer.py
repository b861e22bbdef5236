"""EAGLE: a drafter of features, on a chain, on a static tree or on one grown by confidence.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077) drafts a chain or a static tree, EAGLE-2 (2406.16858)
grows the tree where the same network is confident; EAGLE-3 (2503.01840) has another network and
decodes alike. The drafter keeps keys and values of its own layer: after every verification they
are computed again from the target's true states of what was accepted; drafting continues from there
with its own guesses. Read next: `layers/true_states.py`, those states; `eagle/net.py` and
`eagle/net3.py`, the networks.

Shapes: B rows, E tokens that a step can emit, S tokens of a prompt, F numbers of the target's
features, H hidden size, N nodes of the proposal, D depths, V vocabulary, K nodes expanded at once,
C children of a node, X nodes drafted so far, T slots in view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hidden_states import LAST
from ...decoding.proposal import Committed, DraftSampling, Proposal, pick
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper, draw
from ...decoding.tree.build import dynamic_tree, most_nodes, tree_of_paths
from ...decoding.tree.tree import chain, tree_mask
from ...errors import RequestError
from ..layers.draft_vocabulary import DraftHead, common, head_of_target, ids_of
from ..layers.true_states import TrueStates
from ..model.chains import chain_of
from ..temperatures import Policy, at_depth, samples
from .levels import draw_level, levels_of
from .net import PairNet
from .net3 import Eagle3Net

MOST_DRAFTED = 1_000_000
"""Tokens that a dynamic tree may draft before the best are chosen."""
TreeKind = Literal["chain", "static", "dynamic"]

EAGLE_1_TREE: tuple[tuple[int, ...], ...] = (
    (0,),
    (1,),
    (2,),
    (3,),
    (0, 0),
    (0, 1),
    (0, 2),
    (1, 0),
    (1, 1),
    (2, 0),
    (2, 1),
    (3, 0),
    (0, 0, 0),
    (0, 0, 1),
    (0, 0, 2),
    (0, 1, 0),
    (0, 1, 1),
    (0, 2, 0),
    (0, 2, 1),
    (1, 0, 0),
    (0, 0, 0, 0),
    (0, 0, 0, 1),
    (0, 0, 0, 2),
    (0, 0, 0, 0, 0),
    (0, 0, 0, 0, 1),
)
"""The 25 candidates of the published EAGLE-1 (`mc_sim_7b_63` there)."""


class Eagle:
    """Drafts from the target's features, a chain or a tree as `tree` says.

    `chain`: one token after another. `static`: a tree of a fixed shape. In both, tokens at
    temperature > 0 are drawn from the drafter's warped distribution, which is the proposal's q, siblings
    without replacement; at temperature 0, or with policy `argmax`, they are its likeliest ones.
    `dynamic`: a tree of the likeliest paths, a point mass at every temperature.
    """

    family = "eagle"
    net: PairNet
    replayable = True
    skips = False
    """Whether steps may be left to another drafter, by `skip`."""
    layers: Sequence[int] = (LAST,)

    def __init__(
        self,
        net: PairNet,
        target: Backbone,
        *,
        tree: TreeKind = "chain",
        draft_length: int = 4,
        policy: Policy = "sample",
        factors: Sequence[float] = (),
        paths: Sequence[Sequence[int]] = EAGLE_1_TREE,
        top_k: int = 10,
        nodes: int = 61,
        ids: Sequence[int] | None = None,
    ) -> None:
        """`draft_length`: depth of a chain or dynamic tree; `paths` is the static tree; `factors` as of `at_depth`.

        `top_k` nodes of the dynamic tree are expanded at once, and `nodes`, the root included,
        are kept, or all where it generates no more. `ids`: draft these tokens alone, of those that the network can.
        """
        self.net, self._target, self.kind, self.policy, self.factors = net, target, tree, policy, tuple(factors)
        if self.factors and tree == "dynamic":
            raise RequestError(
                f"drafter.temperature_factors are {list(factors)}, and a dynamic tree draws nothing; leave them "
                "out, or set --drafter.eagle.tree chain"
            )
        self._choose_tree(tree, draft_length, paths, nodes)
        self._top_k = top_k
        self.head = self._head_over(ids)
        width = top_k if tree == "dynamic" else self.tree.width
        if not 1 <= width <= self.head.draftable:
            raise RequestError(
                f"a node would have {width} children; expected 1 to "
                f"{self.head.draftable}, the tokens that can be drafted"
            )
        if tree == "dynamic":
            self.nodes = min(nodes, _generated(draft_length, top_k))  # more would be computed and always be absent
        self._embed: Any = target.model.get_input_embeddings()

    def _choose_tree(self, kind: str, draft_length: int, paths: Sequence[Sequence[int]], nodes: int) -> None:
        if kind not in get_args(TreeKind):
            raise RequestError(f"no tree of EAGLE is called {kind!r}; known: {', '.join(get_args(TreeKind))}")
        self.tree = tree_of_paths(paths).tree if kind == "static" else chain(draft_length)
        self.draft_length = self.tree.depth
        self.nodes = nodes if kind == "dynamic" else len(self.tree)
        if self.draft_length < 1 or self.nodes < 2:
            raise RequestError(
                f"a draft of depth {self.draft_length} with {self.nodes} nodes, the root included, "
                "proposes nothing; expected at least 1 and 2"
            )
        if kind == "dynamic":  # no node of a tree is deeper, nor has the KV cache slots for a longer path
            self.draft_length = min(self.draft_length, nodes - 1)

    @property
    def module(self) -> PairNet:
        """What is trained."""
        return self.net

    @property
    def draft_steps(self) -> int:
        """Forward passes per target call: after what was accepted, and one for every level."""
        return self.draft_length

    @property
    def weights_read(self) -> list[nn.Module]:
        """What a proposal reads: in every pass the network, and the target's projection."""
        return [self.net, self.head.layer] * self.draft_length

    def _head_over(self, ids: Sequence[int] | None) -> DraftHead:
        """The projection that drafts: the target's, of the tokens that can be drafted."""
        return head_of_target(self._target, common(ids_of(self.net), ids))

    @property
    def _most_written(self) -> int:
        """Slots of a row that a proposal may need behind the text."""
        drafted = self._top_k * self.draft_length if self.kind == "dynamic" else self.nodes
        return max(drafted, self.draft_length + 1)

    # ---- state ----------------------------------------------------------------------------

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        self._prompts = prompts
        self._states = TrueStates(
            prompts, room=room + self._most_written, depth=self.draft_length, device=self._target.device, static=static
        )
        self._kv_cache = self._states.kv_cache

    def begin(self, features: Sequence[Tensor]) -> None:
        """Write every pair of the prompts but the last, which waits for the first emitted token."""
        for row, features_1SF, positions_1S in self._states.begin(features):
            tokens_1S = torch.tensor([list(self._prompts[row][1:])], device=features_1SF.device)
            self._run(self.net.fuse(features_1SF), tokens_1S, positions_1S, None)

    def observe(self, committed: Committed) -> None:
        """Keep the true features of what was accepted, each with the token emitted after it."""
        self._states.observe(committed)

    def skip(self, last_B: Tensor) -> None:
        """In place of `propose`: read what is new up to `last_B`, and draft nothing."""
        self._catch_up(last_B)

    def _catch_up(self, last_B: Tensor) -> Tensor:
        """Write the pairs with true features; the guess [B, 1, H] after the last of them."""
        new = self._states.waiting(last_B)
        hidden_BEH = self.net.fuse(new.features_BEF)
        out_BEH = self._run(hidden_BEH, new.tokens_BE, new.positions_BE, new.mask)
        return pick(out_BEH, new.last_B1)

    def _run(self, hidden_BNH: Tensor, tokens_BN: Tensor, positions_BN: Tensor, mask: Tensor | None) -> Tensor:
        """The network over some pairs; the KV cache has been aimed."""
        return self.net(hidden_BNH, self._embed(tokens_BN), positions_BN, mask, self._kv_cache)

    def _read(self, hidden_BNH: Tensor) -> Tensor:
        """What the projection reads of an output, [B, N, H]."""
        return hidden_BNH

    def _logits(self, hidden_BNH: Tensor) -> Tensor:
        """Logits [B, N, V], fp32, over the target's vocabulary."""
        return self.head.logits(self._read(hidden_BNH))

    def _likeliest(self, hidden_BNH: Tensor) -> Tensor:
        """The token [B, N] of the largest logit, the lowest id among equals."""
        if self.head.ids_U is None:
            return self._logits(hidden_BNH).argmax(-1)
        return self.head.likeliest(self._read(hidden_BNH))

    def _drawn(self, hidden_B1H: Tensor, warper: Warper, random_B: Tensor) -> tuple[Tensor, Tensor]:
        """The distribution [B, V] of the next token, and a token [B] drawn from it."""
        if self.head.ids_U is None:
            q_BV = warper(self._logits(hidden_B1H)[:, 0])
            return q_BV, draw(q_BV, random_B)
        return self.head.drawn(self._read(hidden_B1H)[:, 0], warper, random_B)

    def teacher_forced(self, features_SF: Tensor, tokens_S: Tensor, depth: int) -> Iterator[Tensor]:
        """The network's logits along a known text, unrolled: `decoding.proposal.TeacherForced`."""
        X = len(tokens_S) - 1  # pairs of a state and the token after it
        positions_1X = torch.arange(X, device=tokens_S.device)[None]
        outputs = self.net.unroll(
            self.net.fuse(features_SF[None, :-1]),
            self._embed(tokens_S[None, 1:]),
            positions_1X,
            torch.zeros_like(positions_1X),
            min(depth, X - 1),
        )
        for j, out_1XH in enumerate(outputs):
            yield self._logits(out_1XH[:, : X - 1 - j])[0]

    # ---- drafting -------------------------------------------------------------------------

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draft after `last_B`."""
        frontier = _Frontier(self, self._catch_up(last_B), self._states.length_B)
        if self.kind == "dynamic":
            return self._dynamic(last_B, frontier)
        random_BX = uniforms.take(len(self.tree) - 1) if samples(warper, self.policy) else None
        if self.kind == "chain":
            return self._chain(last_B, frontier, warper, random_BX)
        return self._static(last_B, frontier, warper, random_BX)

    def _chain(self, last_B: Tensor, frontier: _Frontier, warper: Warper, random_BX: Tensor | None) -> Proposal:
        tokens, q = [last_B], []
        random = () if random_BX is None else random_BX.unbind(1)
        for k in range(self.draft_length):
            if k:
                frontier.follow(tokens[-1])
            if random_BX is None:
                tokens.append(self._likeliest(frontier.hidden_BKH)[:, 0])
                continue
            q_BV, token_B = self._drawn(frontier.hidden_BKH, at_depth(warper, self.factors, k), random[k])
            q.append(q_BV)
            tokens.append(token_B)
        return chain_of(tokens, q)

    def _static(self, last_B: Tensor, frontier: _Frontier, warper: Warper, random_BX: Tensor | None) -> Proposal:
        B, N = len(last_B), len(self.tree)
        tokens_BN = last_B[:, None].repeat(1, N)
        present_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        q_BNV: Tensor | None = None
        for number, level in enumerate(levels_of(self.tree, last_B.device)):
            if number:
                frontier.expand(tokens_BN[:, level.nodes_K], level.parents_K.expand(B, -1))
            logits_BKV = self._logits(frontier.hidden_BKH)
            if random_BX is None:
                likeliest_BKC = logits_BKV.topk(level.draw_KC.shape[1]).indices
                tokens_BN[:, level.children_X] = likeliest_BKC.flatten(1)[:, level.pick_X]
                continue
            probs_BKV = at_depth(warper, self.factors, number)(logits_BKV)
            q_BNV = probs_BKV.new_zeros(B, N, probs_BKV.shape[2]) if q_BNV is None else q_BNV
            q_BNV[:, level.nodes_K] = probs_BKV
            drawn_BX, present_BX = draw_level(probs_BKV, level, random_BX)
            tokens_BN[:, level.children_X] = drawn_BX
            present_BN[:, level.children_X] = present_BX
        if q_BNV is None:
            return Proposal(tokens_BN, self.tree, DraftSampling.POINT_MASS)
        return Proposal(tokens_BN, self.tree, DraftSampling.WITHOUT_REPLACEMENT, q_BNV, present_BN)

    def _dynamic(self, last_B: Tensor, frontier: _Frontier) -> Proposal:
        def likeliest() -> tuple[Tensor, Tensor]:
            # of the untempered distribution, as in EAGLE-2: sampling settings do not shape the tree
            top = self._logits(frontier.hidden_BKH).log_softmax(-1).topk(self._top_k)
            return top.values, top.indices

        def expand(tokens_BK: Tensor, parents_BK: Tensor, _level: int) -> tuple[Tensor, Tensor]:
            frontier.expand(tokens_BK, parents_BK)
            return likeliest()

        logp_B1K, first_B1K = likeliest()
        tokens_BN, tree = dynamic_tree(
            last_B,
            (logp_B1K[:, 0], first_B1K[:, 0]),
            expand,
            depth=self.draft_length,
            top_k=self._top_k,
            nodes=self.nodes,
        )
        return Proposal(tokens_BN, tree, DraftSampling.POINT_MASS)


class _Frontier:
    """The nodes expanded last: the guess after each, and which drafted pairs it sees.

    A node's pair is (the guess after its parent, its token); it sees all true pairs, and of the
    drafted ones those on its path. The root's own pair is a true one.
    """

    def __init__(self, drafter: Eagle, hidden_B1H: Tensor, start_B: Tensor) -> None:
        """`start_B`: true pairs of each row; drafted ones are written after them."""
        self._drafter, self._start_B, self._depth = drafter, start_B, 0
        self.hidden_BKH = hidden_B1H
        self._sees_BKX: Tensor | None = None

    def follow(self, token_B: Tensor) -> None:
        """Expand the only node of a chain: its pair sees whatever its row holds, which takes no mask of its own."""
        start_B = self._start_B + self._depth
        kv_cache = self._drafter._kv_cache
        slots = kv_cache.aim(start_B, 1)
        mask = tree_mask(chain(0).on(start_B.device), start_B, slots, ragged=kv_cache.ragged)
        self.hidden_BKH = self._drafter._run(self.hidden_BKH, token_B[:, None], start_B[:, None], mask)
        self._depth += 1

    def expand(self, tokens_BK: Tensor, parents_BK: Tensor) -> None:
        """Expand nodes of the next depth: their tokens, and the indices of their parents in this one."""
        B, K = tokens_BK.shape
        itself_BKK = torch.eye(K, dtype=torch.bool, device=tokens_BK.device).expand(B, -1, -1)
        before = 0 if self._sees_BKX is None else self._sees_BKX.shape[2]
        if self._sees_BKX is None:
            self._sees_BKX = itself_BKK
        else:
            self._sees_BKX = torch.cat([pick(self._sees_BKX, parents_BK), itself_BKK], 2)
        slots = self._drafter._kv_cache.aim(self._start_B + before, K)
        mask = _path_mask(self._sees_BKX, self._start_B, slots)
        positions_BK = (self._start_B + self._depth)[:, None].expand(-1, K)
        hidden_BKH = pick(self.hidden_BKH, parents_BK)
        self.hidden_BKH = self._drafter._run(hidden_BKH, tokens_BK, positions_BK, mask)
        self._depth += 1


def _path_mask(sees_BKX: Tensor, start_B: Tensor, slots: int) -> Tensor:
    """bool [B, 1, K, T]: all slots before `start_B`, and of the X after it those that are seen."""
    X = sees_BKX.shape[2]
    offset_BT = torch.arange(slots, device=start_B.device) - start_B[:, None]
    inside_BT = (offset_BT >= 0) & (offset_BT < X)
    at_BKT = offset_BT.clamp(0, X - 1)[:, None].expand(-1, sees_BKX.shape[1], -1)
    seen_BKT = sees_BKX.gather(2, at_BKT) & inside_BT[:, None]
    return (seen_BKT | (offset_BT < 0)[:, None])[:, None]


class Eagle3(Eagle):
    """Drafts with EAGLE-3's network: fused states of the target, a head over fewer tokens.

    q is zero for tokens outside the draft vocabulary; they come from the target alone.
    """

    family = "eagle3"
    net: Eagle3Net

    def __init__(self, net: Eagle3Net, target: Backbone, **settings: Any) -> None:
        """`settings`: those of `Eagle`."""
        super().__init__(net, target, **settings)
        self.layers = net.config.layers
        if net.config.own_embedding:
            self._embed = net.embed_tokens

    @property
    def weights_read(self) -> list[nn.Module]:
        """What a proposal reads: states are fused once, layer and own projection go K times."""
        net = self.net
        return [net.fc, *[net.midlayer, net.norm, self.head.layer] * self.draft_length]

    def _head_over(self, ids: Sequence[int] | None) -> DraftHead:
        """The network's own projection."""
        own_U, chosen = self.net.ids_U, None if ids is None else common(self.net.ids_U, ids)
        return DraftHead(self.net.lm_head, self._target.vocabulary, own=own_U, only=chosen)

    def _read(self, hidden_BNH: Tensor) -> Tensor:
        return self.net.head_input(hidden_BNH)


def _generated(depth: int, top_k: int) -> int:
    """Nodes that a dynamic tree generates; raises RequestError for more than any machine should draft per call."""
    count = most_nodes(depth, top_k)
    if count > MOST_DRAFTED:
        raise RequestError(
            f"a dynamic tree of depth {depth} that expands {top_k} nodes at once drafts {count:,} tokens per target "
            f"call; expected at most {MOST_DRAFTED:,}: lower drafter.eagle.top_k or eval.draft_length"
        )
    return count
