"""The determinism probe: does a T = 0 answer change with the shape in which it is computed?

The same prompts are decoded in batches, beside longer prompts, padded, speculatively and in other
dtypes. A kernel adds up in another order for another shape, so a near-tie may fall the other way;
a difference larger than what rounding explains is a bug. Then the shape-invariant mode: a baseline
padded to the verify width in a static KV cache should be speculation's twin, to the bit of its logits.
Read next: `determinism_result.py`, what is found; `replay.py`, which holds what was emitted
against the argmax; docs/audit.md.

Shapes: N nodes of a call, V vocabulary, S tokens of a text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ...decoding.backbone.backbone import Backbone, Seen
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.engine import autoregressive, generate
from ...decoding.proposal import Proposal, Proposer
from ...decoding.random import Uniforms
from ...decoding.rules.acceptance import Outcome
from ...decoding.rules.choice import rule_for
from ...decoding.sampling import Warper
from ...decoding.tree.tree import AnyTree
from ...errors import RequestError
from .determinism_result import Compared, Determinism, Invariance, Setting
from .replay import histogram_of, one_by_one

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watched(Backbone):
    """A target that remembers, for every node of every call, a fingerprint of its logits."""

    def __init__(self, target: Backbone) -> None:
        super().__init__(target.model, name=target.name, revision=target.revision)
        self._target = target
        self._prints: list[Tensor] = []  # [B, N] of every call, the prefill first
        self._kept: list[Tensor] = []  # [B, D] of every speculative call, -1 behind the path

    def prefill(self, prompts: Sequence[Sequence[int]], kv_cache: KVCache, **features: Any) -> Tensor:
        """The target's own, remembered."""
        logits_BV = self._target.prefill(prompts, kv_cache, **features)
        self._prints.append(fingerprints(logits_BV[:, None]))
        return logits_BV

    def see(self, tokens_BN: Tensor, lengths_B: Tensor, tree: AnyTree, kv_cache: KVCache, **how: Any) -> Seen:
        """The target's own, remembered."""
        seen = self._target.see(tokens_BN, lengths_B, tree, kv_cache, **how)
        self._prints.append(fingerprints(seen.logits_BNV))
        return seen

    def rule(self, logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
        """The lossless rule, and a note of the nodes that it kept."""
        outcome = rule_for(proposal, warper)(logits_BNV, proposal, warper, uniforms)
        self._kept.append(outcome.path_BD.clone())
        return outcome

    def deciding(self, answers: Sequence[Sequence[int]]) -> list[list[int]]:
        """The fingerprint in front of every token: of the root, and of each node that was kept."""
        prefill, *calls = (print_BN.tolist() for print_BN in self._prints)
        kept = [path_BD.tolist() for path_BD in self._kept] or [[[]] * len(answers)] * len(calls)
        fingerprints = []
        for row, answer in enumerate(answers):
            prints = list(prefill[row])
            for print_BN, path_BD in zip(calls, kept, strict=True):
                prints += [print_BN[row][n] for n in (0, *path_BD[row]) if n >= 0]
            # a row that has ended is still computed
            fingerprints.append(prints[: len(answer)])
        return fingerprints


def fingerprints(logits: Tensor) -> Tensor:
    """64 bits for every row of logits [..., V], equal only if all bits are; int64 [...]."""
    bits = logits.contiguous().view(_BITS[logits.element_size()]).long()
    # a sum modulo 2**64, with a random odd factor for every position
    return (bits * _factors(logits.shape[-1], logits.device)).sum(-1)


@lru_cache(maxsize=8)
def _factors(vocabulary: int, device: torch.device) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (vocabulary,), generator=g).mul(2).add(1).to(device)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GREEDY = Warper(0.0)


class Resizable(Proposer, Protocol):
    """A drafter that drafts as far as it is told."""

    draft_length: int


def probe_determinism(
    target: Backbone,
    drafter: Resizable,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batches: Sequence[int] = (1, 4),
    verify_widths: Sequence[int] = (1, 2, 5, 9),
    dtypes: Sequence[str] = ("float32",),
) -> Determinism:
    """Decode the prompts in every setting and class every difference.

    A difference is a near-tie if the reference's own logit of the other token is at most twice the
    noise below its largest, and a bug otherwise; only the first of an answer counts, as behind it
    the texts differ.

    Args:
        prompts: token ids; those of different lengths, side by side, test the padding.
        batches: rows decoded together; a last batch is filled up with the first prompts.
        verify_widths: nodes of a call; above 1 they are also speculated, drafting one less.
        dtypes: of the target's weights, cast on a copy; differences between dtypes are none.

    Raises:
        RequestError: no prompt, no answer, a batch or width below 1, or an unknown dtype.
    """
    _check(prompts, batches, verify_widths, dtypes)
    usual, findings = drafter.draft_length, _Findings()
    try:
        for dtype in dtypes:
            probe = _Probe(_cast(target, dtype), drafter, prompts, max_new_tokens, dtype)
            probe.run(batches, verify_widths, findings)
    finally:
        drafter.draft_length = usual
    invariance = [each for each in findings.invariance if each.tokens]
    counts = findings.settings
    return Determinism(
        prompts=len(prompts),
        tokens=len(findings.margins),
        settings=counts,
        identical=sum(each.identical for each in counts),
        near_ties=sum(each.near_ties for each in counts),
        bugs=sum(each.bugs for each in counts),
        noise=findings.noise,
        margins_at_divergences=histogram_of(findings.parted),
        margins=histogram_of(findings.margins),
        first_bug=findings.first_bug,
        # without a width to speculate with nothing was shown
        shape_invariant=bool(invariance) and all(e.complete for e in invariance if e.static),
        invariance=invariance,
    )


@dataclass
class _Findings:
    """What the dtypes add to."""

    settings: list[Compared] = field(default_factory=list)
    noise: dict[str, float] = field(default_factory=dict)
    margins: list[float] = field(default_factory=list)
    parted: list[float] = field(default_factory=list)
    first_bug: str | None = None
    invariance: list[Invariance] = field(default_factory=list)


@dataclass(frozen=True)
class _Written:
    """The answers of a setting, and of every token the fingerprint of the logits it came from."""

    tokens: list[list[int]]
    prints: list[list[int]]


class _Probe:
    """All settings of one dtype."""

    def __init__(
        self, target: Backbone, drafter: Resizable, prompts: Sequence[Sequence[int]], limit: int, dtype: str
    ) -> None:
        self._target, self._drafter, self._prompts = target, drafter, prompts
        self._limit, self._dtype = limit, dtype
        self._references = self._write(Setting(dtype, 1, False, 1, False)).tokens

    @torch.inference_mode()
    def run(self, batches: Sequence[int], widths: Sequence[int], findings: _Findings) -> None:
        """Every setting against the reference, and speculation against its padded twin."""
        for prompt, answer in zip(self._prompts, self._references, strict=True):
            top = one_by_one(self._target, prompt, answer).topk(2, dim=-1).values
            findings.margins += (top[:, 0] - top[:, 1]).tolist()
        # a call computes as many rows as batch times width; the same number in one row of text
        blocks = {b * w for b, w in product(batches, widths)} - {1} or {2}
        findings.noise[self._dtype] = max(
            rounding_noise(self._target, prompt, answer, sorted(blocks))
            for prompt, answer in zip(self._prompts, self._references, strict=True)
        )
        for static in (False, True):
            pairs = []
            for batch, width in product(batches, widths):
                plain = self._compared(Setting(self._dtype, batch, static, width, False), findings)
                if width > 1:
                    own = self._compared(Setting(self._dtype, batch, static, width, True), findings)
                    pairs.append((plain, own))
            findings.invariance.append(_invariance(self._dtype, static, pairs))

    def _compared(self, setting: Setting, findings: _Findings) -> _Written:
        written = self._write(setting)
        counts = {"identical": 0, "near": 0, "bug": 0}
        noise = findings.noise[self._dtype]
        pairs = zip(self._references, written.tokens, strict=True)
        for number, (reference, answer) in enumerate(pairs):
            at = first_difference(reference, answer)
            if at is None:
                counts["identical"] += 1
                continue
            # the same calls as those of the reference: its own logits once more
            logits_V = one_by_one(self._target, self._prompts[number], reference[: at + 1])[at]
            best, second = logits_V.topk(2).values.tolist()
            gap = best - float(logits_V[answer[at]])
            findings.parted.append(best - second)
            # either logit may be off by the noise, in opposite directions
            kind = "near" if gap <= 2 * noise else "bug"
            counts[kind] += 1
            if kind == "bug" and findings.first_bug is None:
                findings.first_bug = (
                    f"{setting}: prompt {number}, token {at} is {answer[at]} and not "
                    f"{reference[at]}, {gap:.3g} below it against noise {noise:.3g}"
                )
        findings.settings.append(Compared(setting, counts["identical"], counts["near"], counts["bug"]))
        return written

    def _write(self, setting: Setting) -> _Written:
        """Decode all prompts, batch by batch."""
        self._drafter.draft_length = max(setting.width - 1, 1)
        tokens: list[list[int]] = []
        prints: list[list[int]] = []
        for rows, new in _filled(len(self._prompts), setting.batch):
            ids = [self._prompts[row] for row in rows]
            written = self._batch(ids, setting)
            tokens += written.tokens[:new]
            prints += written.prints[:new]
        return _Written(tokens, prints)

    def _batch(self, ids: list[Sequence[int]], setting: Setting) -> _Written:
        watched = Watched(self._target)
        common: dict[str, Any] = {"warper": _GREEDY, "max_new_tokens": self._limit, "static": setting.static}
        common["graphs"] = False  # a target that takes notes takes none in a replay
        if setting.speculative:
            done = generate(watched, self._drafter, ids, rule=watched.rule, **common)
        else:
            done = autoregressive(watched, ids, pad_to=setting.width, **common)
        return _Written(done.tokens, watched.deciding(done.tokens))


@torch.inference_mode()
def rounding_noise(target: Backbone, prompt: Sequence[int], answer: Sequence[int], blocks: Sequence[int]) -> float:
    """Largest difference of a logit between forwards of one node and of several over one text.

    The model's own, with a cache and masks of `transformers`: were ours wrong, the error would
    count as noise here and excuse itself. Never less than the spacing of the dtype at the largest
    logit, which a short text may happen not to show.
    """
    one_SV = _by_blocks(target, prompt, answer, 1)
    many = (_by_blocks(target, prompt, answer, block) for block in blocks)
    seen = max(float((many_SV - one_SV).abs().max()) for many_SV in many)
    return max(seen, torch.finfo(target.model.dtype).eps * float(one_SV.abs().max()))


def _by_blocks(target: Backbone, prompt: Sequence[int], answer: Sequence[int], block: int) -> Tensor:
    """Logits [S, V] in front of every token of the answer, `block` tokens per call."""
    cache = DynamicCache(config=target.model.config.get_text_config(decoder=True))
    parts = [list(prompt)]
    parts += [list(answer[at : at + block]) for at in range(0, len(answer) - 1, block)]
    logits = []
    for number, part in enumerate(parts):
        ids_1N = torch.tensor([part], device=target.device)
        out_NV = target.model(input_ids=ids_1N, past_key_values=cache, use_cache=True).logits[0]
        logits.append(out_NV if number else out_NV[-1:])
    return torch.cat(logits)[: len(answer)].float()


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers of the same length part; None if they do not."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((at for at, (a, b) in pairs if a != b), None)


def _invariance(dtype: str, static: bool, pairs: Iterable[tuple[_Written, _Written]]) -> Invariance:
    """Baseline and speculation of the same batch and width, token by token."""
    tokens = same_tokens = same_logits = 0
    for plain, own in pairs:
        for one, other, a, b in zip(plain.tokens, own.tokens, plain.prints, own.prints, strict=True):
            at = first_difference(one, other)
            compared = len(one) if at is None else at + 1
            tokens += compared
            same_tokens += compared - (at is not None)
            same_logits += sum(x == y for x, y in zip(a[:compared], b[:compared], strict=True))
    return Invariance(dtype, static, tokens, same_tokens, same_logits)


def _filled(prompts: int, batch: int) -> Iterator[tuple[list[int], int]]:
    """Rows of every batch, and how many of them are there for the first time."""
    for at in range(0, prompts, batch):
        yield [n % prompts for n in range(at, at + batch)], min(batch, prompts - at)


def _cast(target: Backbone, dtype: str) -> Backbone:
    """The target in that dtype; a copy where it has another."""
    if target.model.dtype == DTYPES[dtype]:
        return target
    model: Any = copy.deepcopy(target.model)
    cast = copy.copy(target)
    cast.model = model.to(DTYPES[dtype])
    return cast


def _check(
    prompts: Sequence[Sequence[int]], batches: Sequence[int], widths: Sequence[int], dtypes: Sequence[str]
) -> None:
    if not prompts:
        raise RequestError("the determinism probe has no prompt; it needs at least one")
    for name, values in (("batches", batches), ("verify widths", widths)):
        if not values or min(values) < 1:
            raise RequestError(f"{name} are {list(values)}; expected numbers from 1 on")
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown or not dtypes:
        raise RequestError(f"dtypes are {list(dtypes)}; expected some of {', '.join(DTYPES)}")
