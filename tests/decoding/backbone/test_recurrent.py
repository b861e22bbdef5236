"""Recurrent layers: states after any pattern of verify calls and commits equal those of a fresh prefill.

That each family's prompt, tree and text are those of `transformers` is tested with the others, in
`test_families.py`.
"""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from conftest import VOCABULARY, make_drafter
from draftsmith.benchmarks.common.random_models import RECURRENT
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import AnyTree, RowTrees, Tree, chain
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from helpers.models.random_models import keep_states_after_rejections, own_text, random_model, ready
from helpers.models.small_drafters import FAMILIES, make_on_target
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

GREEDY = Warper(0.0)
KINDS = ("lfm2", "qwen3_next", "falcon_h1", pytest.param("kimi_linear", marks=pytest.mark.slow))
"""A convolution alone, a gated delta rule, Mamba-2 beside attention in one layer, Kimi's delta attention."""
CHEAP = ("lfm2", "lfm3", "qwen3_next", "falcon_h1", "kimi_linear")
EVERY = [each if each in CHEAP else pytest.param(each, marks=pytest.mark.slow) for each in RECURRENT]
ROLLBACK = 6
PROMPTS = [[7, 3, 50, 9, 22], [4, 5, 60, 7, 8, 31, 10, 11, 12]]


@lru_cache
def pair(family: str) -> tuple[Backbone, PreTrainedModel]:
    """The target, and the same weights as `transformers` runs them."""
    model = random_model(family, **RECURRENT[family])
    return ready(model), model


def ids(count: int, g: torch.Generator) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=g).tolist()


@st.composite
def trees(draw: st.DrawFn) -> tuple[AnyTree, list[list[int]]]:
    """A tree of at most `ROLLBACK` nodes, and a path down from the root for each of two rows."""
    kind = draw(st.sampled_from(["chain", "tree", "rows"]))
    nodes = draw(st.integers(1, ROLLBACK))
    parents = [[-1, *(draw(st.integers(0, n - 1)) for n in range(1, nodes))] for _ in range(2)]
    if kind == "chain":
        tree: AnyTree = chain(nodes - 1)
        parents = [list(range(-1, nodes - 1))] * 2
    elif kind == "tree":
        tree = Tree(tuple(parents[0]))
        parents = [parents[0]] * 2
    else:
        tree = RowTrees(torch.tensor(parents), depth=nodes - 1, width=max(nodes - 1, 1))
    paths = []
    for each in parents:
        node, path = draw(st.integers(0, nodes - 1)), []
        while node > 0:
            path.insert(0, node)
            node = each[node]
        paths.append(path)
    return tree, paths


def after_calls(target: Backbone, calls, seed: int, *, static: bool) -> tuple[list[list[int]], KVCache]:
    """Two rows after verify calls and commits: their texts, and the KV cache."""
    g = torch.Generator().manual_seed(seed)
    texts = [ids(1 + int(torch.randint(0, 7, (), generator=g)), g) for _ in range(2)]
    kv_cache = KVCache(2, 80, static=static, rollback=ROLLBACK)
    target.prefill(texts, kv_cache)
    for tree, paths in calls:
        lengths_B = torch.tensor([len(text) for text in texts])
        tokens_BN = torch.randint(0, VOCABULARY, (2, len(tree)), generator=g)
        target.forward(tokens_BN, lengths_B, tree, kv_cache)
        if not tree.is_chain:
            depth = max(1, *map(len, paths))
            path_BD = torch.tensor([path + [-1] * (depth - len(path)) for path in paths])
            kv_cache.commit(lengths_B, path_BD)
        for row, path in enumerate(paths):
            texts[row] += [int(tokens_BN[row, node]) for node in (0, *path)]
    return texts, kv_cache


def check_next_logits(target: Backbone, texts: list[list[int]], kv_cache: KVCache) -> None:
    lengths_B = torch.tensor([len(text) for text in texts])
    found_BV = target.forward(torch.tensor([[7], [8]]), lengths_B, chain(0), kv_cache)[:, 0]
    for row, probe in enumerate((7, 8)):
        fresh_1V = target.prefill([[*texts[row], probe]], KVCache(1, 80))
        torch.testing.assert_close(found_BV[row], fresh_1V[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", EVERY)
@settings(deadline=None, max_examples=15)
@given(calls=st.lists(trees(), min_size=1, max_size=5), seed=st.integers(0, 99), static=st.booleans())
def test_after_any_calls_the_state_is_that_of_a_fresh_prefill(family: str, calls, seed: int, static: bool) -> None:
    target, _ = pair(family)
    with torch.inference_mode():
        check_next_logits(target, *after_calls(target, calls, seed, static=static))


@pytest.mark.parametrize("family", EVERY)
@torch.inference_mode()
def test_a_state_that_is_not_rolled_back_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a forward begins at the newest state, whatever was accepted."""
    target, _ = pair(family)
    calls = [(chain(3), [[1], []])]
    check_next_logits(target, *after_calls(target, calls, 0, static=False))
    keep_states_after_rejections(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check_next_logits(target, *after_calls(target, calls, 0, static=False))


@torch.inference_mode()
def test_a_rollback_beyond_what_is_kept_is_no_silent_error() -> None:
    target, _ = pair("lfm2")
    kv_cache = KVCache(1, 40, rollback=3)
    target.prefill([PROMPTS[0]], kv_cache)
    at_1 = torch.tensor([len(PROMPTS[0])])
    with pytest.raises(ValueError, match="4 nodes, and the KV cache keeps the states of 3"):
        target.forward(torch.tensor([[1, 2, 3, 4]]), at_1, chain(3), kv_cache)
    target.forward(torch.tensor([[1, 2, 3]]), at_1, chain(2), kv_cache)
    with pytest.raises(ValueError, match="rollback of more than 3"):
        target.forward(torch.tensor([[1]]), at_1 - 1, chain(0), kv_cache)


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
@torch.inference_mode()
def test_limits_of_time_steps_hold_for_every_token(family: str) -> None:
    """`transformers` leaves them out of a call of one token; here such a call continues the prompt's state."""
    model = copy.deepcopy(pair(family)[1])
    limited = [each for each in model.modules() if hasattr(each, "time_step_limit")]
    for each in limited:
        assert each.time_step_limit == (0.001, float("inf"))
        each.time_step_limit = (2.0, 3.0)
    target = ready(model)
    check_next_logits(target, *after_calls(target, [(Tree((-1, 0, 0)), [[2], []])], 0, static=False))
    wanted_V = pair(family)[1](torch.tensor([PROMPTS[1]])).logits[0, -1]
    assert not torch.allclose(target.prefill([PROMPTS[1]], KVCache(1, 20))[0], wanted_V, atol=1e-3)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_rows_of_different_lengths_do_not_see_each_other(family: str, static: bool) -> None:
    """Batches of one write the same text, by plain decoding, a draft model and lookups alike."""
    target, model = pair(family)
    prompts = [[5], *PROMPTS, [9, 9, 8, 9, 9, 8, 9, 9]]
    own = [own_text(model, prompt, 20) for prompt in prompts]
    base = autoregressive(target, prompts, warper=GREEDY, max_new_tokens=20, static=static)
    assert base.tokens == own
    for drafter in (make_drafter(target, noise=0.05), PromptLookup(draft_length=3)):
        done = generate(target, drafter, prompts, warper=GREEDY, max_new_tokens=20, static=static)
        assert done.tokens == own


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafts", FAMILIES)
@pytest.mark.parametrize("family", KINDS)
def test_heads_and_feature_drafters_write_the_targets_own_text(family: str, drafts: str) -> None:
    """Static trees of heads and of EAGLE, on the target's hidden states."""
    target, model = pair(family)
    own = [own_text(model, prompt, 16) for prompt in PROMPTS]
    done = generate(target, make_on_target(drafts, target), PROMPTS, warper=GREEDY, max_new_tokens=16)
    assert done.tokens == own
    # blocks that were never trained are right too seldom
    assert drafts in ("bpd", "dflash", "dflash2", "dspark", "peagle") or "draft" in sum(done.origin, [])


@pytest.mark.parametrize("family", RECURRENT)
def test_the_functions_of_transformers_are_in_their_place_again(family: str) -> None:
    target, _ = pair(family)
    modeling = target._recurrence._modeling
    before = [dict(vars(each)) for each in modeling]
    kv_cache = KVCache(1, 20, rollback=2)
    with torch.inference_mode():
        target.prefill([[1, 2, 3]], kv_cache)
        with pytest.raises(IndexError):
            target.forward(torch.tensor([[VOCABULARY]]), torch.tensor([3]), chain(0), kv_cache)
        target.forward(torch.tensor([[1, 2]]), torch.tensor([3]), Tree((-1, 0)), kv_cache)
    assert before == [dict(vars(each)) for each in modeling]
