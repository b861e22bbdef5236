"""Recipe sections that evaluation and audit read. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..config import DIVIDES, Section

# the keys of decoding/rules/choice.py, which imports torch; a test compares them
RuleName = Literal[
    "greedy-match",
    "rejection",
    "sample-and-match",
    "recursive-rejection",
    "multi-step",
    "lossy-typical",
    "lossy-lenient",
    "lossy-topk-match",
    "lossy-close-match",
    "lossy-min-block",
]


class EvalConfig(Section):
    """How the trained drafter is measured."""

    prompts: str = "stdlib"
    """A file of prompts, `stdlib`, or sets by name with commas between: NAME, NAME@REVISION or NAME=FILE."""
    second_prompts: str | None = None
    """Other prompts on which acceptance is measured too, to see whether it agrees: `stdlib-second`, a file
    or sets by name. Tuning reads none of them."""
    limit: int | None = Field(24, ge=1)
    """Prompts used, of each set; empty uses all, of a set by name as many as papers take."""
    prompt_tokens: int = Field(128, ge=1)
    """Longest prompt; a longer text keeps its end, a longer chat is left out and counted."""
    max_new_tokens: int = Field(96, ge=2)
    """Tokens written per prompt at most."""
    temperatures: list[Annotated[float, Field(ge=0), DIVIDES]] = Field([0.0, 1.0], min_length=1)
    """One row of results per temperature; 0 is greedy."""
    top_k: int = Field(0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the likeliest tokens up to this mass."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens below this share of the likeliest one's probability."""
    draft_length: int = Field(4, ge=1, le=1_000)
    """Drafted tokens per target call."""
    rule: RuleName | None = None
    """Acceptance rule by name; empty takes the lossless one, `lossy-…` changes the output."""
    sweep: list[Annotated[int, Field(ge=1, le=1_000)]] = [1, 2, 3, 4, 5, 6, 7, 8]
    """Draft lengths of the K sweep; an empty list leaves it out."""
    sweep_prompts: int = Field(8, ge=1)
    """Prompts of the K sweep, the first ones of the set."""
    batch: int = Field(1, ge=1)
    """Prompts decoded together."""
    repeats: int = Field(2, ge=1)
    """Interleaved timing rounds of baseline and drafter."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of sampling and of the bootstrap."""


class AuditConfig(Section):
    """How much evidence the losslessness audit collects."""

    tokens: int = Field(42_000, ge=500)
    """Tokens judged on the real pair; 42,000 see a bias along p - q of 0.02 (total variation)."""
    sequences: int = Field(2_000_000, ge=10_000)
    """Sampled sequences of the enumeration proof on a tiny vocabulary."""
    temperature: Annotated[float, Field(gt=0), DIVIDES] = 0.8
    """Temperature of the sampling proofs; at 1 an un-warped bonus token could not be seen."""
    top_k: int = Field(0, ge=0)
    """Top-k of the sampling proofs on the real pair."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Top-p of the sampling proofs on the real pair."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Min-p of the sampling proofs on the real pair."""
    draft_length: int = Field(4, ge=1, le=1_000)
    """Drafted tokens per target call."""
    max_new_tokens: int = Field(96, ge=8)
    """Tokens written per request of the real-pair proofs."""
    batch: int = Field(32, ge=1)
    """Rows decoded together in the Rosenblatt test."""
    prompts: int = Field(24, ge=1)
    """Prompts of the greedy replay."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of every draw of the audit."""
