"""The decoder: propose, verify, accept, commit; and the autoregressive baseline in the same engine.

Guarantees: no token after EOS, never more than `max_new_tokens`, a row does not depend on the
other rows, and the KV arena after a step equals a fresh prefill of the same tokens.
Read next: `acceptance.py` for the rules, `steps.py` for what is recorded.

Shapes: B rows, N nodes of the tree, V vocabulary, E tokens that a step can emit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import RequestError
from .acceptance import Outcome, Rule, rule_for
from .arena import KVArena
from .backbone import Backbone
from .proposal import Committed, Proposal, Proposer
from .random import Uniforms
from .sampling import Warper, draw
from .steps import StepLog
from .tree import chain


@dataclass
class Generation:
    """What was written, and how.

    Attributes:
        tokens: emitted ids of every row, EOS included, at most `max_new_tokens`.
        origin: for each of them `prefill`, `draft`, `correction` or `bonus`.
        steps: what every step tested, accepted and emitted.
        target_calls: verify calls (or one-token calls), the prefill not counted.
        draft_steps: forward passes of the drafter.
    """

    tokens: list[list[int]]
    origin: list[list[str]]
    steps: StepLog
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    target_calls: int = 0
    draft_steps: int = 0


@dataclass
class _Rows:
    """Per-row state of a running batch."""

    lengths_B: Tensor  # tokens in the arena
    last_B: Tensor  # emitted, not yet in the arena
    limit: int
    eos_ids: frozenset[int]
    tokens: list[list[int]] = field(default_factory=list)
    origin: list[list[str]] = field(default_factory=list)
    done: list[bool] = field(default_factory=list)

    def emit(self, row: int, tokens: Sequence[int], origin: Sequence[str]) -> int:
        """Append up to EOS and the limit; return how many were kept."""
        kept = 0
        for token, source in zip(tokens, origin, strict=True):
            self.tokens[row].append(token)
            self.origin[row].append(source)
            kept += 1
            if token in self.eos_ids or len(self.tokens[row]) >= self.limit:
                self.done[row] = True
                break
        return kept


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
) -> Generation:
    """Speculative decoding of a batch of prompts.

    Args:
        prompts: token ids of every row, at least one each.
        warper: the law that is decoded, for target and draft alike.
        eos_ids: ids that end a row; none by default.
        seed, requests: row b draws from stream (seed, requests[b]), b itself by default.
        rule: None for the lossless rule of the proposal's law, a rule's name to insist on it, or
            a function, as the audit does to plant a bug.

    Raises:
        RequestError: an empty prompt, too long a request, or a rule that is not lossless here.
    """
    numbers = range(len(prompts)) if requests is None else requests
    uniforms = Uniforms(seed, list(numbers), target.device)
    depth = drafter.draft_length
    _check(target, prompts, max_new_tokens, depth)
    arena = KVArena(len(prompts), _room(prompts, max_new_tokens, depth))
    start = time.perf_counter()
    rows = _begin(target, arena, prompts, warper, uniforms, max_new_tokens, eos_ids)
    drafter.reset(prompts, max_new_tokens + depth + 1)
    done_prefill = time.perf_counter()
    log = StepLog(len(prompts), depth)
    calls = 0
    while not all(rows.done):
        proposal = drafter.propose(rows.last_B, warper, uniforms)
        logits_BNV = target.forward(proposal.tokens_BN, rows.lengths_B, proposal.tree, arena)
        chosen = rule if callable(rule) else rule_for(proposal, warper, rule)
        outcome = chosen(logits_BNV, proposal, warper, uniforms)
        drafter.observe(_commit(rows, arena, proposal, outcome, log))
        calls += 1
    return Generation(
        rows.tokens, rows.origin, log, done_prefill - start,
        time.perf_counter() - done_prefill, calls, calls * depth,
    )  # fmt: skip


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
) -> Generation:
    """The baseline: one token per call, same arena, same warper, same per-row random streams."""
    numbers = range(len(prompts)) if requests is None else requests
    uniforms = Uniforms(seed, list(numbers), target.device)
    _check(target, prompts, max_new_tokens, 0)
    arena = KVArena(len(prompts), _room(prompts, max_new_tokens, 0))
    start = time.perf_counter()
    rows = _begin(target, arena, prompts, warper, uniforms, max_new_tokens, eos_ids)
    done_prefill = time.perf_counter()
    calls = 0
    while not all(rows.done):
        logits_B1V = target.forward(rows.last_B[:, None], rows.lengths_B, chain(0), arena)
        rows.last_B = _sample(logits_B1V[:, -1], warper, uniforms)
        rows.lengths_B = rows.lengths_B + 1
        for row, token in enumerate(rows.last_B.tolist()):
            if not rows.done[row]:
                rows.emit(row, [token], ["bonus"])
        calls += 1
    return Generation(
        rows.tokens, rows.origin, StepLog(len(prompts), 0), done_prefill - start,
        time.perf_counter() - done_prefill, calls, 0,
    )  # fmt: skip


def _begin(
    target: Backbone, arena: KVArena, prompts: Sequence[Sequence[int]], warper: Warper,
    uniforms: Uniforms, limit: int, eos_ids: Sequence[int],
) -> _Rows:  # fmt: skip
    """Prefill, and the first token of every row."""
    last_B = _sample(target.prefill(prompts, arena), warper, uniforms)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    count = len(prompts)
    rows = _Rows(lengths_B, last_B, limit, frozenset(eos_ids))
    rows.tokens, rows.origin = [[] for _ in range(count)], [[] for _ in range(count)]
    rows.done = [False] * count
    for row, token in enumerate(last_B.tolist()):
        rows.emit(row, [token], ["prefill"])
    return rows


def _sample(logits_BV: Tensor, warper: Warper, uniforms: Uniforms) -> Tensor:
    if warper.greedy:
        return logits_BV.argmax(-1)
    return draw(warper(logits_BV), uniforms.take(1)[:, 0])


def _commit(
    rows: _Rows, arena: KVArena, proposal: Proposal, outcome: Outcome, log: StepLog
) -> Committed:
    """Keep the accepted nodes in the arena, emit their tokens and the extra one."""
    if not proposal.tree.is_chain:
        arena.commit(rows.lengths_B, outcome.path_BD)
    tokens_BE = _emitted(proposal, outcome)
    running = torch.tensor([not done for done in rows.done], device=tokens_BE.device)
    count_B = (outcome.accepted_B + 1) * running
    kept = _emit(rows, tokens_BE, outcome)
    log.add(outcome, kept, running)
    # a row that has ended stands still: its length and its last token stay what they are
    rows.lengths_B = rows.lengths_B + count_B
    rows.last_B = torch.where(running, outcome.extra_B, rows.last_B)
    return Committed(tokens_BE, count_B)


def _emitted(proposal: Proposal, outcome: Outcome) -> Tensor:
    """Accepted tokens, then the extra one, then garbage. [B, D + 1]."""
    path_BD = outcome.path_BD.clamp_min(0)
    drafted_BD = proposal.tokens_BN.gather(1, path_BD)
    tokens_BE = torch.cat([drafted_BD, outcome.extra_B[:, None]], 1)
    return tokens_BE.scatter(1, outcome.accepted_B[:, None], outcome.extra_B[:, None])


def _emit(rows: _Rows, tokens_BE: Tensor, outcome: Outcome) -> list[int]:
    kept = []
    accepted = outcome.accepted_B.tolist()
    depth = outcome.path_BD.shape[1]
    for row, tokens in enumerate(tokens_BE.tolist()):
        if rows.done[row]:
            kept.append(0)
            continue
        count = accepted[row]
        last = "bonus" if count == depth else "correction"
        kept.append(rows.emit(row, tokens[: count + 1], ["draft"] * count + [last]))
    return kept


def _room(prompts: Sequence[Sequence[int]], max_new_tokens: int, depth: int) -> int:
    """Slots of the arena: the longest request, and a tree that may be written behind its end."""
    return max(map(len, prompts)) + max_new_tokens + 8 * (depth + 1)


def _check(
    target: Backbone, prompts: Sequence[Sequence[int]], max_new_tokens: int, depth: int
) -> None:
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise RequestError("a prompt is empty; every prompt needs at least one token")
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    longest = max(map(len, prompts)) + max_new_tokens + depth
    if longest > target.context:
        raise RequestError(
            f"the longest prompt ({max(map(len, prompts))} tokens), max_new_tokens "
            f"({max_new_tokens}) and the draft length ({depth}) need {longest} positions; the "
            f"target {target.name} has {target.context}. Shorten the prompt or the answer"
        )
