"""The engine's promises: exact at T=0, EOS and length exact, rows independent, cache as prefilled."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, make_drafter, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.graphs import RecordedUniforms
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import Tree, chain
from draftsmith.drafters.extras.lookahead import Lookahead
from draftsmith.drafters.lookup.function import CallableDrafter
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.pard import Pard
from draftsmith.errors import RequestError
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

make_target_once = cache(lambda: make_target("qwen3"))
make_drafter_once = cache(lambda length: make_drafter(make_target_once(), noise=0.01, draft_length=length))

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13, 14, 15]]
GREEDY = Warper(0.0)


@pytest.mark.parametrize(
    ("architecture", "length", "noise"),
    [
        ("qwen3", 1, 0.05),
        ("qwen3", 2, 1.0),
        ("qwen3", 5, 0.0),
        ("llama", 1, 1.0),
        ("llama", 2, 0.0),
        ("llama", 5, 0.05),
    ],
)
def test_greedy_output_is_the_targets_own(architecture: str, length: int, noise: float) -> None:
    target = make_target(architecture)
    drafter = make_drafter(target, noise=noise, draft_length=length)
    own = generate(target, drafter, PROMPTS, warper=GREEDY, max_new_tokens=40)
    base = autoregressive(target, PROMPTS, warper=GREEDY, max_new_tokens=40)
    assert own.tokens == base.tokens
    for prompt, tokens in zip(PROMPTS, own.tokens):
        theirs = target.model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)
        assert tokens == theirs[0, len(prompt) :].tolist()
    if noise == 0.0:
        assert own.target_calls <= -(-39 // (length + 1))


@pytest.mark.parametrize("warper", [GREEDY, Warper(1.0), Warper(0.7, top_k=9, top_p=0.9)])
def test_a_row_alone_writes_what_it_writes_in_a_batch(target, drafter, warper: Warper) -> None:
    together = generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=30, seed=4)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, drafter, [prompt], warper=warper, max_new_tokens=30, seed=4, requests=[row])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.origin[0] == together.origin[row]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 6), st.sampled_from([0.0, 1.0]))
def test_nothing_after_eos_and_never_too_long(eos: int, limit: int, length: int, temperature: float) -> None:
    target = make_target_once()
    drafter = make_drafter_once(length)
    warper = Warper(temperature)
    done = generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=limit, eos_ids=[eos], seed=eos)
    free = generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=limit, seed=eos)
    for tokens, unbounded, origin in zip(done.tokens, free.tokens, done.origin):
        assert 1 <= len(tokens) <= limit
        assert eos not in tokens[:-1]
        # EOS cuts the text and changes nothing before it
        assert tokens == unbounded[: len(tokens)]
        assert len(tokens) == limit or tokens[-1] == eos
        assert len(origin) == len(tokens)
        assert origin[0] == "prefill"
    assert done.steps.kept_TB.sum(0).tolist() == [len(tokens) - 1 for tokens in done.tokens]


def test_the_log_counts_what_was_emitted(target, drafter) -> None:
    done = generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=33, seed=2)
    log = done.steps
    whole = log.running_TB & ~log.truncated_TB
    assert (log.kept_TB[whole] == log.accepted_TB[whole] + 1).all()
    drafted = [origin.count("draft") for origin in done.origin]
    assert all(((log.kept_TB - 1) * whole).sum(0) <= drafted)


@pytest.mark.parametrize("warper", [GREEDY, Warper(1.0)])
def test_the_last_token_of_a_step_is_a_bonus_or_a_correction(target, drafter, warper: Warper) -> None:
    """Of a chain that always has its whole length: a bonus behind all of it, else a correction."""
    done = generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=60, eos_ids=[5], seed=6)
    log, origin = done.steps, [["prefill"] for _ in PROMPTS]
    for step, row in zip(*log.running_TB.nonzero(), strict=True):
        accepted = int(log.accepted_TB[step, row])
        last = "bonus" if accepted == drafter.draft_length else "correction"
        origin[row] += [*["draft"] * accepted, last][: log.kept_TB[step, row]]
    assert done.origin == origin
    assert {"bonus", "correction"} <= {each for row in origin for each in row}


def test_where_nothing_was_drafted_nothing_is_corrected(target) -> None:
    """Tokens that stand nowhere in the text cannot be looked up; such a step emits a bonus alone."""
    done = generate(target, PromptLookup(draft_length=3), PROMPTS, warper=Warper(1.0), max_new_tokens=30)
    running = done.steps.running_TB
    nothing = running & ~done.steps.tested_TBD.any(2)
    assert 0 < nothing.sum() < running.sum()
    for row, origin in enumerate(done.origin):
        ends = [at for at, each in enumerate(origin) if each in ("bonus", "correction")]
        for end, step in zip(ends, running[:, row].nonzero()[0]):
            if nothing[step, row]:
                assert origin[end] == "bonus"
                assert origin[end - 1] != "draft"


def commit_pattern(target: Backbone, tree: Tree, path: list[int], seed: int) -> None:
    """Verify a tree, keep a path, and compare the next logits with a fresh prefill."""
    g = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, 61, (n,), generator=g).tolist() for n in (5, 9)]
    kv_cache = KVCache(2, 60)
    with torch.inference_mode():
        target.prefill(prompts, kv_cache)
        lengths = torch.tensor([5, 9])
        tokens = torch.randint(0, 61, (2, len(tree)), generator=g)
        target.forward(tokens, lengths, tree, kv_cache)
        kv_cache.commit(lengths, torch.tensor([path + [-1] * (tree.depth - len(path))] * 2))
        lengths = lengths + 1 + len(path)
        probe = torch.tensor([[7], [8]])
        got = target.forward(probe, lengths, chain(0), kv_cache)[:, 0]
        for row in range(2):
            kept = [*prompts[row], *(int(tokens[row, node]) for node in (0, *path))]
            fresh = target.prefill([[*kept, int(probe[row, 0])]], KVCache(1, 60))
            torch.testing.assert_close(got[row], fresh[0], atol=2e-5, rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_cache_after_a_commit_equals_a_fresh_prefill(data: st.DataObject) -> None:
    target = make_target_once()
    size = data.draw(st.integers(1, 7))
    tree = Tree((-1, *(data.draw(st.integers(0, node)) for node in range(size))))
    path: list[int] = []
    at = 0
    while tree.children[at] and data.draw(st.booleans()):
        at = data.draw(st.sampled_from(tree.children[at]))
        path.append(at)
    commit_pattern(target, tree, path, data.draw(st.integers(0, 1000)))


@pytest.mark.parametrize("fork", [False, True])
def test_the_cache_after_a_deep_path_equals_a_fresh_prefill(fork: bool) -> None:
    """Every node of a path of eight has the position of its depth, with siblings beside it and without."""
    tree = Tree((-1, *(node for node in range(0, 16, 2) for _ in range(2)))) if fork else chain(8)
    path = [node for node in range(1, len(tree)) if not fork or node % 2 == 0]
    assert len(path) == tree.depth == 8
    commit_pattern(make_target_once(), tree, path, seed=5)


def test_the_draft_distribution_while_decoding_is_the_one_of_training(target, drafter) -> None:
    """Teacher-forced logits of the draft equal those that q was made from."""
    from draftsmith.drafters.model.draft_model import DraftModel

    seen: list[tuple[list[int], torch.Tensor]] = []

    class Recorder(DraftModel):
        def _logits(self, tokens, start, at=None):
            logits = super()._logits(tokens, start, at)
            end = int(start[0]) + tokens.shape[1] - 1
            text = self._history.tokens_BL[0, : end + 1].tolist()
            text[end - tokens.shape[1] + 1 :] = tokens[0].tolist()
            # drafted tokens are not history yet: take them from what was fed in this step
            self._fed = (*getattr(self, "_fed", ()), (int(start[0]), tokens[0].tolist()))
            for begin, fed in self._fed:
                for offset, token in enumerate(fed):
                    if begin + offset <= end:
                        text[begin + offset] = token
            seen.append((text, logits[0].clone()))
            return logits

    recorder = Recorder(drafter.backbone, drafter.vocabulary, draft_length=4)
    generate(target, recorder, PROMPTS[:1], warper=Warper(1.0), max_new_tokens=24)
    assert len(seen) > 12
    for text, logits in seen:
        forced = drafter.module(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(logits, forced, atol=2e-5, rtol=1e-4)


def test_bad_requests_are_named(target, drafter) -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        generate(target, drafter, [[1], []], warper=GREEDY, max_new_tokens=4)
    with pytest.raises(RequestError, match="need 264 positions; the target random has 256"):
        generate(target, drafter, [[1] * 200], warper=GREEDY, max_new_tokens=60)
    with pytest.raises(RequestError, match="a prompt has the token id 61, and the embedding"):
        generate(target, drafter, [[1, 61]], warper=GREEDY, max_new_tokens=4)
    with pytest.raises(RequestError, match="the lossless rule is 'greedy-match'"):
        generate(target, drafter, [[1]], warper=GREEDY, max_new_tokens=4, rule="rejection")


P = [5, 6, 7, 5, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": [0]}, "requests holds 1 numbers; expected one number of at least 0 for each of the 2 prompts"),
        ({"requests": [0, 1, 2]}, "requests holds 3 numbers"),
        ({"requests": [0, -1]}, "requests holds -1"),
        ({"requests": [0, 2**64]}, "requests holds 18446744073709551616"),
        ({"requests": 5}, "requests is 5; expected one number"),
        ({"prompts": P}, r"prompts is \[5, 6, 7, 5, 6\].*put a single prompt into a list"),
        ({"prompts": "abc"}, "prompts is 'abc'; expected a list of prompts"),
        ({"prompts": torch.tensor([P])}, r"prompts is a Tensor of shape \[1, 5\]; .*without padding"),
        ({"prompts": np.array([P])}, r"prompts is a ndarray of shape \[1, 5\]"),
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": [P, "abc"]}, "prompt number 2 of 2 is 'abc'; expected token ids"),
        ({"prompts": ["abc", P]}, "prompt number 1 of 2 is 'abc'; expected token ids"),
        ({"prompts": [[5, -3]]}, "prompt number 1 of 1 holds -3; expected token ids"),
        ({"prompts": [[5.5]]}, "prompt number 1 of 1 holds 5.5; expected token ids"),
        ({"prompts": [[P]]}, r"prompt number 1 of 1 holds \[5, 6, 7, 5, 6\]; expected token ids"),
        ({"prompts": [torch.tensor([0.5])]}, "prompt number 1 of 1 holds 0.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected a whole number of at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; expected a whole number"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8'; expected a whole number"),
        ({"seed": 1.5}, "seed is 1.5; expected a whole number"),
        ({"eos_ids": 5}, "eos_ids is 5; expected a list"),
        ({"eos_ids": None}, r"eos_ids is None; expected a list .* \[\] for none"),
        ({"eos_ids": ["</s>"]}, "eos_ids holds '</s>'; expected a list"),
    ],
)
def test_what_is_no_request_is_named(target: Backbone, change: dict, message: str) -> None:
    asked: dict[str, Any] = {"prompts": [P, P], "warper": Warper(1.0), "max_new_tokens": 4} | change
    with pytest.raises(RequestError, match=message):
        generate(target, PromptLookup(), **asked)
    with pytest.raises(RequestError, match=message):
        autoregressive(target, **asked)


@pytest.mark.parametrize("rows", [tuple, torch.tensor, np.array])
def test_rows_of_ids_may_be_any_sequence(target: Backbone, rows: Any) -> None:
    asked = {"warper": GREEDY, "max_new_tokens": np.int64(20)}
    told = generate(target, PromptLookup(), [rows([9]), rows(P)], eos_ids=torch.tensor([3]), **asked)
    assert told.tokens == autoregressive(target, [[9], P], eos_ids=[3], **asked).tokens


@pytest.mark.parametrize("drafter", [None, "runs/x/drafter", PromptLookup])
def test_what_is_no_drafter_is_named(target: Backbone, drafter: Any) -> None:
    with pytest.raises(RequestError, match=r"the drafter is .*; expected one that is made: load_drafter"):
        generate(target, drafter, [P], warper=GREEDY, max_new_tokens=4)


def test_state_that_cannot_be_rolled_back_is_refused_by_name() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(RequestError, match="Mamba"):
        Backbone(mamba, name="s")


@cache
def learned_positions() -> Backbone:
    """A target that has an embedding of each of 48 positions, and of no other."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    return Backbone(GPT2LMHeadModel(config).eval(), name="learned positions")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["copies", "drafts", "drafts in one pass"])
def test_a_row_that_has_ended_asks_for_no_position_beyond_its_request(
    kind: str, static: bool, temperature: float
) -> None:
    """It is verified again while others run; prompt, answer and draft together fill the context."""
    target, K = learned_positions(), 8
    own = make_drafter(target, noise=0.0).backbone
    drafter = {
        "copies": lambda: PromptLookup(draft_length=K),
        "drafts": lambda: DraftModel(own, target.vocabulary, draft_length=K),
        "drafts in one pass": lambda: Pard(own, target.vocabulary, mask=60, draft_length=K),
    }[kind]()
    prompts = [[1, 2, 3, 1, 2, 3, 1], [9, 4, 9, 4, 9], [4, 5]]
    common = {"warper": Warper(temperature), "max_new_tokens": target.context - K - 7}
    together = generate(target, drafter, prompts, static=static, **common)
    assert [len(each) for each in together.tokens] == 3 * [common["max_new_tokens"]]
    if not temperature:
        assert together.tokens == autoregressive(target, prompts, **common).tokens


@pytest.mark.parametrize("kind", [DraftModel, Pard])
def test_a_token_that_the_draft_has_no_row_for_is_read_as_another(kind: Any) -> None:
    """A wider target emits padding rows of its head now and then, by chance, above temperature 0."""
    target, more = make_wide(), {"mask": VOCABULARY - 1} if kind is Pard else {}
    drafter = kind(make_drafter(make_target("qwen3")).backbone, target.vocabulary, **more)
    done = generate(target, drafter, [[1, 2, 3], [4]], warper=Warper(1.0), max_new_tokens=60, seed=1)
    assert max(map(max, done.tokens)) >= VOCABULARY  # or the test would show nothing
    assert not any(token >= VOCABULARY - len(more) and at == "draft" for token, at in pairs_of(done))


def make_wide() -> Backbone:
    """A target whose output projection has rows that are no token's."""
    torch.manual_seed(0)
    sizes = ModelConfig(architecture="llama", layers=1, hidden=48, heads=2, kv_heads=1, max_positions=256)
    return Backbone(fresh_model(sizes, vocabulary=VOCABULARY + 3, eos=None).eval(), name="wide")


def pairs_of(done: Any) -> list[tuple[int, str]]:
    return [pair for tokens, origin in zip(done.tokens, done.origin) for pair in zip(tokens, origin)]


@pytest.mark.parametrize("extra", [-3, 5])
def test_padding_rows_of_a_draft_head_are_never_drafted(target, extra: int) -> None:
    from draftsmith.drafters.model.draft_model import fit_vocabulary

    logits = torch.randn(2, target.vocabulary + extra)
    fitted = fit_vocabulary(logits, target.vocabulary)
    assert fitted.shape[-1] == target.vocabulary
    distribution = Warper(1.0)(fitted)
    if extra < 0:
        assert torch.equal(distribution[:, extra:], torch.zeros(2, -extra))


class _NoWaiting(TorchDispatchMode):
    """Refuses what makes a host wait for its device, or shapes depend on values."""

    # `tolist` is seen by its `resolve_conj`
    waits = ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal", "resolve_conj")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name.removeprefix("aten::") in self.waits:
            raise AssertionError(f"the step waits for the device: {function._schema.name}")
        return function(*args, **(kwargs or {}))


class _Steady:
    """A drafter under which every step but the first runs without waiting."""

    def __init__(self, drafter: Any) -> None:
        self.inner, self.steps, self.mode = drafter, 0, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, *args: Any) -> Any:
        self.steps += 1
        if self.steps > 1:
            self.mode = _NoWaiting()
            self.mode.__enter__()
        return self.inner.propose(*args)

    def observe(self, committed: Any) -> None:
        self.inner.observe(committed)
        self.leave()

    def leave(self) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None


@pytest.mark.parametrize("kind", ["chain", "lookahead", "lookup"])
@pytest.mark.parametrize("warper", [GREEDY, Warper(0.8, top_k=9, top_p=0.9)])
def test_a_steady_step_never_waits_for_the_device(target, kind: str, warper: Warper) -> None:
    drafter = {
        "chain": lambda: make_drafter(target),
        "lookahead": lambda: Lookahead(window=3, ngram=3, guesses=2),
        "lookup": lambda: PromptLookup(draft_length=4),
    }[kind]()
    steady = _Steady(drafter)
    common = {"warper": warper, "max_new_tokens": 24, "eos_ids": [3], "seed": 1}
    done = generate(target, steady, PROMPTS, static=True, **common)
    assert steady.steps > 2
    assert done.tokens == generate(target, drafter, PROMPTS, **common).tokens
    waiting = _Steady(drafter)
    with pytest.raises(AssertionError, match="waits for the device"):
        generate(target, waiting, PROMPTS, static=False, **common)
    waiting.leave()


def test_a_late_host_changes_nothing_but_its_own_knowledge(target, drafter) -> None:
    common = {"warper": Warper(1.0), "max_new_tokens": 20, "eos_ids": [5, 9], "seed": 3}
    early = generate(target, drafter, PROMPTS, static=False, **common)
    late = generate(target, drafter, PROMPTS, static=True, **common)
    assert late.tokens == early.tokens
    assert late.origin == early.origin
    assert late.target_calls == early.target_calls
    assert (late.steps.kept_TB == early.steps.kept_TB).all()
    base = {**common, "static": True}
    assert autoregressive(target, PROMPTS, **base).tokens == (autoregressive(target, PROMPTS, **common).tokens)


def test_graphs_need_cuda(target, drafter) -> None:
    if target.device.type == "cuda":
        pytest.skip("there is a GPU")
    with pytest.raises(RequestError, match="CUDA graphs were asked for, and the target is on cpu"):
        generate(target, drafter, PROMPTS, warper=GREEDY, max_new_tokens=4, graphs=True)


def test_graphs_hold_no_choice_of_the_host(target) -> None:
    """A step that is replayed would verify the draft that it was recorded with."""
    drafter = CallableDrafter(lambda tokens: tokens[-2:], draft_length=2)
    with pytest.raises(RequestError, match="CallableDrafter decides on the host"):
        generate(target, drafter, PROMPTS, warper=GREEDY, max_new_tokens=4, graphs=True)


def test_a_held_block_hands_out_every_number_once() -> None:
    """As under a graph: the step reads one address, the numbers there are always new."""
    held = RecordedUniforms(Uniforms(0, range(2), "cpu"))
    plain = Uniforms(0, range(2), "cpu")
    seen, places = [], set()
    for step in range(6):
        if step == 2:
            held.hold()
        else:
            held.restart()
        first, second = held.take(2), held.take(3)
        seen.append(torch.cat([first, second], 1).clone())
        if step >= 2:
            places.add((first.data_ptr(), second.data_ptr()))
    assert len(places) == 1
    assert torch.equal(torch.cat(seen, 1), plain.take(30))


class _Listener(PromptLookup):
    """A drafter that asks for hidden states and keeps what it gets."""

    layers = (1, -1)

    def begin(self, features: list[torch.Tensor]) -> None:
        self.prompts, self.kept = list(features), []

    def observe(self, committed: Any) -> None:
        super().observe(committed)
        self.kept.append(committed)


@pytest.mark.parametrize("lean", [True, False])
def test_a_drafter_gets_the_hidden_states_that_it_asks_for(lean: bool) -> None:
    """Those of prompt and accepted tokens equal a plain forward's over the same text."""
    from draftsmith.decoding.backbone.attention import use_grouped_attention

    target = make_target("qwen3")
    use_grouped_attention(target.model)
    target.__dict__["_is_lean"] = lean
    listener = _Listener(draft_length=3)
    done = generate(target, listener, PROMPTS, warper=GREEDY, max_new_tokens=16)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, done.tokens)):
        ids = torch.tensor([[*prompt, *answer]])
        states = target.model(ids, output_hidden_states=True).hidden_states
        expected = torch.cat([states[1], states[-1]], -1)[0]
        torch.testing.assert_close(listener.prompts[row], expected[: len(prompt)])
        at = len(prompt)
        for step in listener.kept:
            count = int(step.count_B[row])
            nodes = [0, *step.path_BD[row, : max(0, count - 1)].tolist()][:count]
            got = step.features_BNF[row, nodes]
            inside = max(0, min(count, len(expected) - at))  # the last step may go beyond the limit
            torch.testing.assert_close(got[:inside], expected[at : at + inside], atol=1e-5, rtol=1e-4)
            at += count
        # all tokens were compared but perhaps the last, which no step had to read
        assert at >= len(expected) - 1
