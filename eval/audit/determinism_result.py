"""What the determinism probe compares and found, as data and as text.

Read next: `determinism.py`, which fills it in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from ...storage.formats import DETERMINISM


@dataclass(frozen=True)
class Setting:
    """One way to compute the same answers."""

    dtype: str
    batch: int
    static: bool
    """Every call sees all slots of the KV cache, most of them masked."""
    width: int
    """Nodes of a call: of a padded baseline, or of speculation that drafts one less."""
    speculative: bool

    def __str__(self) -> str:
        how = "speculative" if self.speculative else "plain"
        kv_cache = "static" if self.static else "growing"
        return f"{how}, {self.dtype}, batch {self.batch}, {kv_cache} KV cache, width {self.width}"


@dataclass(frozen=True)
class Compared:
    """The answers of a setting against the reference of its dtype, each up to where it parts."""

    setting: Setting
    identical: int
    near_ties: int
    bugs: int


@dataclass(frozen=True)
class Invariance:
    """Speculation against the baseline of its verify width, over all batches and widths."""

    dtype: str
    static: bool
    tokens: int
    """Tokens compared: of each pair of answers up to where they part, that token included."""
    same_tokens: int
    same_logits: int
    """Tokens in front of which all logits are the same to the bit."""

    @property
    def complete(self) -> bool:
        """Whether nothing differs, not even a last bit."""
        return self.tokens == self.same_tokens == self.same_logits


@dataclass(frozen=True)
class Determinism:
    """What the probe found. A reference is batch 1, one node per call, in a growing KV cache."""

    prompts: int
    tokens: int
    """Tokens of the references of all dtypes."""
    settings: list[Compared]
    identical: int
    near_ties: int
    bugs: int
    noise: dict[str, float]
    """By dtype, the largest difference of a logit between forwards of one node and of several, or
    the dtype's own spacing where that is larger."""
    margins_at_divergences: list[tuple[str, int]]
    """Gap between the reference's two largest logits where an answer parts from it."""
    margins: list[tuple[str, int]]
    """The same gap at every token of the references."""
    first_bug: str | None
    shape_invariant: bool
    """Whether the padded baseline in a static KV cache is speculation's twin to the bit."""
    invariance: list[Invariance]

    @property
    def passed(self) -> bool:
        """Whether rounding explains every difference."""
        return self.bugs == 0

    def to_dict(self) -> dict[str, Any]:
        """For `determinism.json`."""
        return {"format": DETERMINISM.number, "passed": self.passed, **asdict(self)}

    def text(self) -> str:
        """A short block for the terminal."""
        tested = [each.setting for each in self.settings]
        noise = ", ".join(f"{value:.2g} in {dtype}" for dtype, value in self.noise.items())
        lines = [
            f"determinism at T = 0: {'passed' if self.passed else 'FAILED'}",
            f"  {self.prompts} prompts in {len(tested)} settings: batch "
            f"{_listed(s.batch for s in tested)}; verify width {_listed(s.width for s in tested)};",
            f"  growing and static KV cache; {_listed(s.dtype for s in tested)}",
            f"  answers: {self.identical:,} identical, {self.near_ties:,} near-ties, {self.bugs:,} bugs",
            f"  noise: {noise}",
            f"  margins where answers part: {_counted(self.margins_at_divergences)}",
            f"  margins of all {self.tokens:,} tokens: {_counted(self.margins)}",
            f"  shape-invariant mode: {self._invariant()}",
        ]
        for each in self.invariance:
            lines.append(
                f"    {'static' if each.static else 'growing'} KV cache, {each.dtype}: "
                f"{each.same_logits:,} of {each.tokens:,} tokens "
                f"({each.tokens - each.same_tokens:,} differ themselves)"
            )
        if self.first_bug is not None:
            lines.append(f"  FAILED: {self.first_bug}")
        return "\n".join(fill(line, 80, subsequent_indent="    ") for line in lines)

    def _invariant(self) -> str:
        if not self.invariance:
            return "not tested, nothing was speculated at a width of 1"
        answer = "yes" if self.shape_invariant else "NO"
        return f"{answer}; logits alike to the bit, drafted and padded:"


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(str(each) for each in dict.fromkeys(values))


def _counted(histogram: Sequence[tuple[str, int]]) -> str:
    """The bins that hold something."""
    return "; ".join(f"{name}: {count:,}" for name, count in histogram if count) or "none"
