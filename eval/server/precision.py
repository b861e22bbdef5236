"""How precisely a server computes: its log-probabilities beside the target's, and beside a rounding of known size.

A server in bf16 writes other tokens than the target in fp32 where two are close, and that is no fault. So
the size of its rounding is measured, and what rounding of that size would do is computed. But it has to
be rounding: log-probabilities that are several times further away than bf16's are other weights.
Read next: `audit.py`.

Shapes: M tokens of all answers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...decoding.backbone.backbone import Backbone
from ...decoding.sampling import Warper
from ..measure.metrics import Floats
from .answers import Judgeable

_FEW = 8  # answers that the target itself is rounded on
_MOST_OF = 0.95  # of the log-probabilities that there are
Text = tuple[Sequence[int], Sequence[int]]
"""A prompt, and what was written behind it."""
LIMIT = 4.0
"""So many times further away than the target's own rounding, root mean square, is no rounding."""


@dataclass(frozen=True)
class Precision:
    """Differences of log-probabilities of emitted tokens, in nats."""

    tokens: int
    """That the server gave log-probabilities of; 0: it gives none."""
    of: str
    """What its log-probabilities are of: `raw logits`, `logits over the temperature`, or `what the filters leave`."""
    rms: float | None
    """Root mean square of server less target."""
    largest: float | None
    rounding_rms: float
    """The same for the target in bf16, or in fp32 if it is held in 16 bits, less itself."""
    rounding_largest: float

    @property
    def sigma(self) -> float:
        """The rounding to reckon with, root mean square: the measured one, or else that of 16 bits."""
        return self.rounding_rms if self.rms is None else self.rms

    @property
    def is_rounding(self) -> bool:
        """Whether the server's difference can be one."""
        return self.rms is None or self.rms <= LIMIT * max(self.rounding_rms, 1e-5)


def precision_of(
    target: Backbone,
    greedy: Sequence[Judgeable],
    sampled: Sequence[Judgeable],
    warper: Warper,
    texts: Sequence[Text] = (),
) -> tuple[Precision, list[float]]:
    """The precision of a server, and the differences that near-ties are explained by.

    A server gives log-probabilities before or behind the temperature and the filters, and does not say which: of
    what it sampled the nearest is taken. Those that are all zero are none: a greedy token's behind T = 0, or what a
    gateway fills in.

    Args:
        texts: of the target itself, to measure its own rounding on where no answer has tokens.
    """
    some = [*greedy, *sampled[: max(_FEW, len(greedy))]]
    own = [_own(target, each) for each in some]
    known: list[Text] = [(each.prompt, each.tokens) for each in some if each.tokens]
    known = known or list(texts)
    rounded = _rounding(target, known[:_FEW])
    of_greedy_M = _differences(some[: len(greedy)], own[: len(greedy)])
    drawn = some[len(greedy) :]
    kinds = {"raw logits": _differences(drawn, own[len(greedy) :])}
    if warper.temperature != 1:
        over = Warper(warper.temperature)
        kinds["logits over the temperature"] = _differences(drawn, [_own(target, e, over) for e in drawn])
    if warper.top_k or warper.top_p < 1 or warper.min_p:
        kinds["what the filters leave"] = _differences(drawn, [_own(target, e, warper) for e in drawn])
    enough = _MOST_OF * max(map(len, kinds.values()))  # rounding moves a token across the edge of a filter
    name = min(kinds, key=lambda each: (len(kinds[each]) < enough, _rms(kinds[each])))
    seen_M = np.concatenate([of_greedy_M, kinds[name]])
    precision = Precision(
        len(seen_M),
        name,
        _rms(seen_M) if len(seen_M) else None,
        float(np.abs(seen_M).max()) if len(seen_M) else None,
        _rms(rounded),
        float(np.abs(rounded).max(initial=0.0)),
    )
    # what is no rounding explains no near-tie: those of 16 bits alone are excused then
    return precision, (seen_M if len(seen_M) and precision.is_rounding else rounded).tolist()


@torch.inference_mode()
def _own(target: Backbone, each: Judgeable, warper: Warper | None = None) -> Floats:
    """Log-probabilities of the answer's tokens, of the raw logits or as warped, [tokens] in fp64."""
    if not each.tokens:
        return np.zeros(0)
    ids = torch.tensor([[*each.prompt, *each.tokens]], device=target.device)
    logits = target.model(ids, use_cache=False).logits[0, len(each.prompt) - 1 : -1]
    log_p = logits.double().log_softmax(-1) if warper is None else warper(logits.float()).double().log()
    return log_p.gather(1, ids[0, len(each.prompt) :, None])[:, 0].cpu().numpy()


def _differences(some: Sequence[Judgeable], own: Sequence[Floats]) -> Floats:
    """Server less target, where the server says something; what the filters leave out has no log-probability."""
    told = [each.answer.logprobs or [] for each in some]
    if not any(value for values in told for value in values):
        return np.zeros(0)
    found = [
        value - mine
        for values, mine_M in zip(told, own, strict=True)
        for value, mine in zip(values, mine_M, strict=False)
        if value is not None and np.isfinite(mine)
    ]
    return np.array(found)


@torch.inference_mode()
def _rounding(target: Backbone, texts: Sequence[Text]) -> Floats:
    """What the other width of number would change in the target itself."""
    wide = next(target.model.parameters()).dtype == torch.float32
    other: torch.nn.Module = copy.deepcopy(target.model)
    other.to(torch.bfloat16 if wide else torch.float32)
    found = []
    for prompt, tokens in texts:
        ids_1S = torch.tensor([[*prompt, *tokens]], device=target.device)
        own_M1 = ids_1S[0, len(prompt) :, None]
        log_p = [
            model(ids_1S, use_cache=False).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1).gather(1, own_M1)
            for model in (target.model, other)
        ]
        found.append((log_p[1] - log_p[0])[:, 0].cpu().numpy())
    return np.concatenate(found) if found else np.zeros(0)


def _rms(differences_M: Floats) -> float:
    return float(np.sqrt(np.mean(differences_M**2))) if len(differences_M) else 0.0
