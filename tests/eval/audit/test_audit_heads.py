"""The audit on every mode in which heads and feature drafters decode: all of them are lossless.

Each audit is three proofs: the method's enumeration over tables, the sampled tokens of the pair at
the temperature, and the greedy ones at temperature 0, with the batch's rows together.
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.block.trees import TreeShape
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.tree_choice import WrittenText, best_of_size, measure_ranks
from helpers.models.small_drafters import make_on_target

PROMPTS = [[n, n + 1, 2 * n % 61][: 1 + n % 3] for n in range(1, 20)]
SMALL_TREE: dict[str, Any] = {"top_k": 4, "nodes": 12}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "Medusa, default tree": ("medusa", {}),
    "Medusa, optimised tree": ("medusa", {"paths": "optimised"}),
    "Hydra, default tree": ("hydra", {}),
    "Hydra, optimised tree": ("hydra", {"paths": "optimised"}),
    "Hydra++, default tree": ("hydra++", {}),
    "Hydra++, optimised tree": ("hydra++", {"paths": "optimised"}),
    "BPD, merged": ("bpd", {}),
    "EAGLE-1, static tree": ("eagle", {}),
    "EAGLE-1, optimised tree": ("eagle", {"paths": "optimised"}),
    "EAGLE-1, chain": ("eagle", {"tree": "chain"}),
    "EAGLE-2, dynamic tree": ("eagle", {"tree": "dynamic", **SMALL_TREE}),
    "EAGLE-3, dynamic tree": ("eagle3", {"tree": "dynamic", **SMALL_TREE}),
    "EAGLE-3, chain": ("eagle3", {"tree": "chain"}),
    "EAGLE-3, static tree": ("eagle3", {}),
    "DFlash": ("dflash", {}),
    "DFlash, argmax": ("dflash", {"policy": "argmax"}),
    "DFlash, cooler behind the first": ("dflash", {"factors": (1.0, 0.3)}),
    "DSpark": ("dspark", {}),
    "DSpark, argmax": ("dspark", {"policy": "argmax"}),
    "DSpark, cut by confidence": ("dspark", {"least": 0.5}),
    "DFlash, tree": ("dflash", {"tree": TreeShape(9, 3)}),
    "DSpark, tree": ("dspark", {"tree": TreeShape(9, 3)}),
    "DFlash 2": ("dflash2", {}),
    "DFlash 2, argmax": ("dflash2", {"policy": "argmax"}),
    "DFlash 2, tree": ("dflash2", {"tree": TreeShape(9, 3)}),
    "MTP, chain": ("mtp", {"tree": "chain"}),
    "MTP, dynamic tree": ("mtp", {"tree": "dynamic", **SMALL_TREE}),
    "P-EAGLE": ("peagle", {}),
    "P-EAGLE, argmax": ("peagle", {"policy": "argmax"}),
}
# every kind of proposal once for every day; the whole table is behind `make test-all`
EVERY_DAY = {
    (mode, 1.0, 4)
    for mode in (
        "Medusa, default tree",
        "Hydra++, optimised tree",
        "BPD, merged",
        "EAGLE-1, static tree",
        "EAGLE-2, dynamic tree",
        "EAGLE-3, chain",
        "DFlash, cooler behind the first",
        "DFlash 2",
        "DSpark, cut by confidence",
        "DSpark, tree",
    )
}
BY_CHANCE = ("DFlash, argmax", "DFlash 2, argmax", "DSpark, argmax")
"""Modes whose untrained drafts are never right: of these the text alone is shown."""
TABLE = [(mode, temperature, batch) for mode in MODES for temperature in (0.6, 1.0) for batch in (1, 4)]


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def drafter_of(mode: str, target: Backbone) -> Any:
    family, settings = MODES[mode]
    if settings.get("paths") != "optimised":
        return make_on_target(family, target, noise=0.02, **settings)
    prompts = [[n, 3 * n % 61, 7] for n in range(20, 26)]  # not those that are audited
    answers = autoregressive(target, prompts, warper=Warper(1.0), max_new_tokens=20).tokens
    texts = [WrittenText(*pair) for pair in zip(prompts, answers, strict=True)]
    drafter = make_on_target(family, target, noise=0.02)
    ranks = measure_ranks(target, drafter, texts, depth=4, ranks=8)
    paths = best_of_size(drafter, ranks, 12).paths
    assert 3 < len(paths) < 12
    return make_on_target(family, target, noise=0.02, paths=paths)


def config(temperature: float, batch: int) -> AuditConfig:
    return AuditConfig(
        tokens=500, sequences=20_000, temperature=temperature, batch=batch, prompts=batch, max_new_tokens=40
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("mode", "temperature", "batch"),
    [row if row in EVERY_DAY else pytest.param(*row, marks=pytest.mark.slow) for row in TABLE],
)
def test_every_mode_is_lossless(mode: str, temperature: float, batch: int, target: Backbone) -> None:
    drafter = drafter_of(mode, target)
    report = audit(target, drafter, PROMPTS, config(temperature, batch))
    assert report.verdict == "lossless", report.text()
    assert report.rosenblatt.tokens >= 500
    assert report.replay.argmax == report.replay.tokens > 0
    # and it has something to be lossless about
    done = generate(target, drafter, PROMPTS[:4], warper=Warper(temperature), max_new_tokens=30)
    assert mode in BY_CHANCE or any("draft" in row for row in done.origin)


LOSSY = [
    "Medusa, default tree",
    "Hydra, default tree",
    "Hydra++, default tree",
    "BPD, merged",
    "EAGLE-1, static tree",
    "EAGLE-2, dynamic tree",
    "EAGLE-3, dynamic tree",
    "EAGLE-3, chain",
]


@pytest.mark.parametrize("mode", [m if m == LOSSY[0] else pytest.param(m, marks=pytest.mark.slow) for m in LOSSY])
def test_typical_acceptance_reports_how_far_it_is_off(mode: str, target: Backbone) -> None:
    """Its distance in the verdict's place; the same mode without it is lossless, above."""
    report = audit(target, drafter_of(mode, target), PROMPTS, config(0.8, 4), rule="lossy-typical")
    assert report.verdict == "lossy"
    assert report.distance is not None
    assert report.distance > 0.03
    assert f"(lossy-typical, distance {report.distance:.3f})" in report.text()
    assert report.enumeration is not None
    assert report.enumeration.p_value < 1e-9
