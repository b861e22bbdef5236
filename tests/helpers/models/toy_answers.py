"""Answers of four tokens by a target of three, and whether many of them have its exact distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
from draftsmith.decoding.engine import generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.audit.toy_models.table import tables
from scipy.stats import chisquare

_STRINGS = list(product(range(3), repeat=4))
_TARGET, _ = tables(1, vocabulary=3, device="cpu")


def answer_of(drafter: Proposer, seed: int) -> list[int]:
    """What the target writes behind [0] at temperature 1."""
    return generate(_TARGET.as_backbone(), drafter, [[0]], warper=Warper(1.0), max_new_tokens=4, seed=seed).tokens[0]


def p_of_answers(answers: Iterable[Sequence[int]]) -> float:
    """How likely answers are that differ at least so much from the target's exact distribution."""
    law_VV = Warper(1.0)(_TARGET.logits_VV).double().numpy()
    exact = np.array([law_VV[0, a] * law_VV[a, b] * law_VV[b, c] * law_VV[c, d] for a, b, c, d in _STRINGS])
    seen = Counter(map(tuple, answers))
    counts = np.array([seen[each] for each in _STRINGS])
    order = exact.argsort()[::-1]
    expected, counts = exact[order] * seen.total(), counts[order]
    tail = int((expected >= 5).sum())  # rare ones together, as chi-square asks
    expected, counts = (np.append(each[:tail], each[tail:].sum()) for each in (expected, counts))
    return float(chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)
