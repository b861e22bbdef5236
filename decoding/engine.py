"""The decoder: propose, verify, accept, commit; and the autoregressive baseline in the same engine.

Guarantees: no token after EOS, never more than `max_new_tokens`, a row does not depend on the
other rows, and the KV cache after a step equals a fresh prefill of the same tokens. A step never
waits for the device. Read next: `rules/choice.py` for the rules, `request.py` for what is refused, `rows.py` for
what ends a row, `steps.py` for what is recorded, `graphs.py` for replaying steps on CUDA.

Shapes: B rows, N nodes of the tree, D depths, V vocabulary, E tokens that a step can emit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backbone.backbone import Backbone, Seen
from .backbone.kv_cache import KVCache
from .devices import Spent
from .graphs import RecordedUniforms, Recordings, Replayed, recordings_for
from .proposal import Bounded, Committed, FeatureProposer, Proposal, Proposer, Remembering, check_proposal
from .random import Uniforms, salted
from .request import Asked, asked_for, check_drafter
from .rows import DelayedRead, Rows, overwrite
from .rules.acceptance import Outcome, Rule
from .rules.choice import rule_for
from .sampling import Warper, draw
from .steps import BONUS, PREFILL, StepLog
from .tree.tree import chain

Watch = Callable[[list[list[int]], list[list[str]]], None]
"""Is given the tokens and their origin, row by row, as far as they are written."""


@dataclass
class Generation:
    """What was written, and how.

    Attributes:
        tokens: emitted ids of every row, EOS included, at most `max_new_tokens`.
        origin: for each of them `prefill`, `draft`, `correction` or `bonus`.
        steps: what every step tested, accepted and emitted.
        target_calls: verify calls (or one-token calls), the prefill not counted.
        draft_steps: forward passes of the drafter.
        recording_seconds: time in which steps were recorded as CUDA graphs, no part of `decode_seconds`.
        propose_seconds: time of drafting, on CUDA the device's.
        nodes: tokens verified by all calls together, per row.
    """

    tokens: list[list[int]]
    origin: list[list[str]]
    steps: StepLog
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    target_calls: int = 0
    draft_steps: int = 0
    propose_seconds: float = 0.0
    nodes: int = 0
    recording_seconds: float = 0.0


@torch.inference_mode()
def generate(
    target: Backbone,
    drafter: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    warper: Warper,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    seed: int = 0,
    requests: Sequence[int] | None = None,
    rule: Rule | str | None = None,
    uniforms: Uniforms | None = None,
    static: bool | None = None,
    graphs: bool | None = None,
    watch: Watch | None = None,
) -> Generation:
    """Speculative decoding of a batch of prompts.

    Args:
        prompts: token ids of every row, at least one each: a list of lists, as tokenizer(texts).input_ids gives them.
            A tensor is refused, for the padding that its rows may have would be read as text.
        warper: the distribution that is decoded, for target and draft alike.
        eos_ids: ids that end a row; none by default.
        seed, requests: row b draws from stream (seed, requests[b]), b itself by default; behind a drafter that
            remembers earlier calls, from one of this call alone (`proposal.Remembering`). One number for each prompt.
        rule: None for the rule that is lossless for the proposal's `sampling`; a rule's name to insist on
            it; or a function, with which the audit injects a bug.
        uniforms: the random numbers themselves, in place of `seed` and `requests`.
        static: fixed shapes, and a host that sees one step late that all rows have ended; by default only on CUDA.
        graphs: replay drafting and verifying as CUDA graphs. By default on CUDA, where shapes are fixed and nothing
            decides on the host (what does is said once), for answers that are not short (`graphs.LEAST_TOKENS`);
            True insists.
        watch: called after the prefill and every step, for text that is shown as it is written; the host
            then waits for the device at every step.

    Raises:
        RequestError: a prompt, a number or a drafter that is none (`request.py`), too long a request, a rule that
            is not lossless here, or graphs where there is no CUDA or the host takes part in a step.
    """
    check_drafter(drafter)
    asked = asked_for(
        target,
        prompts,
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        seed=seed,
        requests=requests,
        draft_length=drafter.draft_length,
    )
    static = target.device.type == "cuda" if static is None else static
    if isinstance(drafter, Bounded):
        drafter.hold_to(target.vocabulary)
    uniforms = uniforms or _streams(asked, drafter, target.device)
    kv_cache = _kv_cache(asked, drafter.nodes, static=static)
    start = time.perf_counter()
    layers = drafter.layers if isinstance(drafter, FeatureProposer) else ()
    features: list[Tensor] = []
    first_BV = target.prefill(asked.prompts, kv_cache, layers=layers, features=features)
    rows = _begin(first_BV, asked, warper, uniforms)
    _ready(drafter, asked, features, static=static)
    recordings = recordings_for(graphs, target, static=static, tokens=asked.max_new_tokens, drafter=drafter, rule=rule)
    step = _Step(_Speculation(target, drafter, kv_cache, rows, warper, uniforms, rule), recordings)
    done_prefill = time.perf_counter()
    watched = _Watched(watch, lambda _: step.log.origins())
    calls = _until_done(rows, step, DelayedRead(static), watched)
    log, answers = step.log.cut(calls), rows.answers()
    target.check_alike(answers)
    return Generation(
        answers,
        log.origins(),
        log,
        done_prefill - start,
        time.perf_counter() - done_prefill - watched.seconds - step.recording_seconds,
        calls,
        calls * drafter.draft_steps,
        step.propose_seconds,
        step.nodes,
        step.recording_seconds,
    )


@torch.inference_mode()
def autoregressive(
    target: Backbone,
    prompts: Sequence[Sequence[int]],
    *,
    warper: Warper,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    seed: int = 0,
    requests: Sequence[int] | None = None,
    static: bool | None = None,
    graphs: bool | None = None,
    pad_to: int = 1,
    watch: Watch | None = None,
) -> Generation:
    """The baseline: one token per call, same KV cache, same warper, same per-row random streams.

    `pad_to` > 1 computes that many nodes in every call and uses the first: the shapes are then
    those of a verify call, and so is every rounding. `watch` is as for `generate`.
    """
    asked = asked_for(target, prompts, max_new_tokens=max_new_tokens, eos_ids=eos_ids, seed=seed, requests=requests)
    static = target.device.type == "cuda" if static is None else static
    uniforms = Uniforms(asked.seed, asked.requests, target.device)
    kv_cache = _kv_cache(asked, pad_to, static=static)
    start = time.perf_counter()
    first_BV = target.prefill(asked.prompts, kv_cache)
    rows = _begin(first_BV, asked, warper, uniforms)
    one_B = torch.ones_like(rows.last_B)
    held = RecordedUniforms(uniforms)

    def verify() -> None:
        tokens_BN = rows.last_B[:, None].expand(-1, pad_to)
        logits_BNV = target.forward(tokens_BN, rows.lengths_B, chain(pad_to - 1), kv_cache)
        token_B = _sample(logits_BNV[:, 0], warper, held)
        running_B = ~rows.done_B
        rows.lengths_B += running_B
        rows.emit(token_B[:, None], one_B * running_B)
        overwrite(rows.last_B, running_B, token_B)

    recordings = recordings_for(graphs, target, static=static, tokens=asked.max_new_tokens)
    step: Callable[[], object] = Replayed(verify, held, recordings) if recordings else verify
    done_prefill = time.perf_counter()
    watched = _Watched(watch, _undrafted)
    calls = _until_done(rows, step, DelayedRead(static), watched)
    recorded = recordings.seconds if recordings else 0.0
    seconds = time.perf_counter() - done_prefill - watched.seconds - recorded
    tokens, log = rows.answers(), StepLog(len(asked.prompts), 0, asked.max_new_tokens)
    target.check_alike(tokens)
    return Generation(
        tokens, _undrafted(tokens), log, done_prefill - start, seconds, calls, recording_seconds=recorded
    )


def _streams(asked: Asked, drafter: Proposer, device: torch.device) -> Uniforms:
    """The rows' random numbers; behind a drafter that remembers, of this call alone."""
    salt = drafter.salt() if isinstance(drafter, Remembering) else 0
    return Uniforms(salted(asked.seed, salt), asked.requests, device)


def _ready(drafter: Proposer, asked: Asked, features: list[Tensor], *, static: bool) -> None:
    """Tell a drafter what is decoded, and the hidden states of the prompts where it reads some."""
    drafter.reset(asked.prompts, asked.max_new_tokens + drafter.draft_length + 1, static=static)
    if isinstance(drafter, FeatureProposer):
        drafter.begin(features)


def _undrafted(tokens: list[list[int]]) -> list[list[str]]:
    """The origin of tokens that nobody drafted."""
    return [[PREFILL, *[BONUS] * (len(row) - 1)] for row in tokens]


class _Speculation:
    """One step of speculative decoding, in the two halves that a graph may hold."""

    def __init__(
        self,
        target: Backbone,
        drafter: Proposer,
        kv_cache: KVCache,
        rows: Rows,
        warper: Warper,
        uniforms: Uniforms,
        rule: Rule | str | None,
    ) -> None:
        self._target, self._drafter, self._kv_cache, self.rows = target, drafter, kv_cache, rows
        self._warper, self._rule = warper, rule
        self._layers = drafter.layers if isinstance(drafter, FeatureProposer) else ()
        self.draws, self.coins = RecordedUniforms(uniforms), RecordedUniforms(uniforms)
        self.draft_length = drafter.draft_length

    def propose(self) -> Proposal:
        last_B, drafter, kinds = self.rows.last_B, self._drafter, self._target.vocabulary
        proposal = drafter.propose(last_B, self._warper, self.draws)
        reads = not self._kv_cache.static
        check_proposal(proposal, last_B, kinds, drafter, draws=not self._warper.greedy, reads=reads)
        return proposal

    def verify(self, proposal: Proposal) -> Outcome:
        rows, kv_cache = self.rows, self._kv_cache
        seen = self._target.see(proposal.tokens_BN, rows.lengths_B, proposal.tree, kv_cache, layers=self._layers)
        rule = self._rule
        chosen = rule if callable(rule) else rule_for(proposal, self._warper, rule)
        outcome = chosen(seen.logits_BNV, proposal, self._warper, self.coins)
        if not proposal.tree.is_chain:
            kv_cache.commit(rows.lengths_B, outcome.path_BD)
        self._drafter.observe(_advance(rows, proposal, outcome, seen))
        return outcome


class _Step:
    """Runs a step's halves, or their recordings, and keeps its log.

    Nothing that it holds refers to it: what a request has taken, the KV cache with it, is free when it ends.
    """

    def __init__(self, halves: _Speculation, recordings: Recordings | None) -> None:
        self._rows, self._recordings = halves.rows, recordings
        self.log = StepLog(len(halves.rows.last_B), halves.draft_length, halves.rows.limit)
        self.log.replayed = recordings is not None
        self.nodes, self._drafting, self._recorded_drafting = 0, Spent(halves.rows.last_B.device), 0.0
        self._propose: Callable[[], Proposal] = halves.propose
        self._verify: Callable[[Proposal], Outcome] = halves.verify
        if recordings is not None:
            self._propose = Replayed(halves.propose, halves.draws, recordings)
            self._verify = Replayed(halves.verify, halves.coins, recordings)

    @property
    def recording_seconds(self) -> float:
        return self._recordings.seconds if self._recordings else 0.0

    @property
    def propose_seconds(self) -> float:
        return self._drafting.seconds - self._recorded_drafting

    def __call__(self) -> None:
        recorded = self.recording_seconds
        with self._drafting.part():
            proposal = self._propose()
        self._recorded_drafting += self.recording_seconds - recorded
        self.nodes += len(proposal.tree)
        outcome = self._verify(proposal)
        self.log.add(outcome, self._rows.kept_B)


def _advance(rows: Rows, proposal: Proposal, outcome: Outcome, seen: Seen) -> Committed:
    """Emit the accepted tokens and the extra one; a row that has ended does not change."""
    tokens_BE = _emitted(proposal, outcome)
    running_B = ~rows.done_B
    rows.emit(tokens_BE, (outcome.accepted_B + 1) * running_B)
    # what is accepted behind a row's end belongs to no answer: no drafter learns it, and the row, which is verified
    # again while others run, stays within the positions that its request asks for
    count_B = rows.kept_B
    rows.lengths_B += count_B
    last_B1 = tokens_BE.gather(1, (count_B - 1).clamp_min(0)[:, None])
    overwrite(rows.last_B, running_B, last_B1[:, 0])
    return Committed(
        tokens_BE, count_B, outcome.path_BD, seen.logits_BNV, seen.features_BNF, is_chain=proposal.tree.is_chain
    )


def _emitted(proposal: Proposal, outcome: Outcome) -> Tensor:
    """Accepted tokens, then the extra one, then garbage. [B, D + 1]."""
    if proposal.tree.is_chain:
        drafted_BD = proposal.tokens_BN[:, 1:]
    else:
        drafted_BD = proposal.tokens_BN.gather(1, outcome.path_BD.clamp_min(0))
    extra_B1 = outcome.extra_B[:, None]
    return torch.cat([drafted_BD, extra_B1], 1).scatter_(1, outcome.accepted_B[:, None], extra_B1)


class _Watched:
    """Shows rows to a watcher, if there is one, and knows how long that took: it is no part of decoding."""

    def __init__(self, watch: Watch | None, origins: Callable[[list[list[int]]], list[list[str]]]) -> None:
        self._watch, self._origins, self.seconds = watch, origins, 0.0

    def __call__(self, rows: Rows) -> None:
        if self._watch is not None:
            start = time.perf_counter()
            tokens = rows.answers()
            self._watch(tokens, self._origins(tokens))
            self.seconds += time.perf_counter() - start


def _until_done(rows: Rows, step: Callable[[], object], all_done: DelayedRead, watched: _Watched) -> int:
    """Step until all rows have ended; returns how many steps had a row that was still running."""
    calls = 0
    while True:
        watched(rows)
        ended = all_done.read(rows.done_B.all())
        if ended is not None and bool(ended):
            # a host that sees this late has stepped once more, with no row running
            return calls - all_done.delay if calls else 0
        step()
        calls += 1


def _begin(logits_BV: Tensor, asked: Asked, warper: Warper, uniforms: Uniforms) -> Rows:
    """The rows after their prefill, each with its first token."""
    first_B = _sample(logits_BV, warper, uniforms)
    lengths = [len(prompt) for prompt in asked.prompts]
    rows = Rows(lengths, asked.max_new_tokens, asked.eos_ids, logits_BV.device)
    rows.begin(first_B)
    return rows


def _sample(logits_BV: Tensor, warper: Warper, uniforms: Uniforms) -> Tensor:
    if warper.greedy:
        return logits_BV.argmax(-1)
    return draw(warper(logits_BV), uniforms.take(1)[:, 0])


def _kv_cache(asked: Asked, nodes: int, *, static: bool) -> KVCache:
    """Slots for the longest request, and a tree that may be written after its end."""
    room = max(map(len, asked.prompts)) + asked.max_new_tokens + 2 * nodes
    return KVCache(len(asked.prompts), room, static=static, rollback=nodes)
