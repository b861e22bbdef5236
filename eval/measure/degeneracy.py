"""How degenerate a target's own text is: a target that writes "the the the" is easy to predict.

Any draft agrees with such a text, so its tau means nothing. Read next: `evaluate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...data.loops import in_loop

LOOP_LIMIT = 0.5
DISTINCT_LIMIT = 0.25


@dataclass(frozen=True)
class Degeneracy:
    """Measures over a set of texts, means over tokens."""

    distinct_2: float
    """Different bigrams / bigrams, inside each text (Li et al. 2016)."""
    loop_share: float
    """Share of tokens inside a stretch that repeats a period of up to 16 tokens 3 times."""

    @property
    def flagged(self) -> bool:
        """Whether tau on such text cannot be believed."""
        return self.loop_share > LOOP_LIMIT or self.distinct_2 < DISTINCT_LIMIT


def degeneracy(texts: Sequence[Sequence[int]]) -> Degeneracy:
    """Measure token sequences, as written by the target alone."""
    bigrams = distinct = looped = tokens = 0
    for text in texts:
        pairs = list(zip(text, text[1:]))
        bigrams += len(pairs)
        distinct += len(set(pairs))
        looped += sum(in_loop(text))
        tokens += len(text)
    return Degeneracy(distinct / bigrams if bigrams else 1.0, looped / tokens if tokens else 0.0)
