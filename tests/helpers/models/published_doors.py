"""What a recipe says to go on from each published drafter of `published_forms.py`, and what each is exported as.

Read next: `tests/drafters/published/test_goes_on.py`; `tests/drafters/published/test_table.py`, which holds the page
to these.
"""

from __future__ import annotations

from typing import Any

from draftsmith.trainers.method_config import (
    BlockConfig,
    DFlash2Config,
    DSparkConfig,
    Eagle3Config,
    MedusaConfig,
    PeagleConfig,
)
from helpers.models.published_forms import FORMS, VOCABULARY, WORDS

Sections = dict[str, Any]
ALL, SOME = VOCABULARY, len(WORDS)


def eagle3(layers: tuple[int, int, int] = (2, 4, 5), vocabulary: int = SOME, **chosen: Any) -> tuple[str, Sections]:
    return "eagle3", {"eagle3": Eagle3Config(layers=layers, vocabulary=vocabulary, **chosen)}


def peagle(decoder_layers: int) -> tuple[str, Sections]:
    return "peagle", {"peagle": PeagleConfig(layers=(2, 4, 5), vocabulary=SOME, decoder_layers=decoder_layers)}


def block(
    method: str, layers: tuple[int, ...], *, mask_token: int | None, decoder_layers: int = 2, **own: Any
) -> tuple[str, Sections]:
    sizes = {"size": 4, "decoder_layers": decoder_layers, "layers": layers, "mask_token": mask_token}
    return method, {"block": BlockConfig(**sizes, causal=own.pop("causal", False)), **own}


def heads(method: str, **sizes: Any) -> tuple[str, Sections]:
    return method, {"medusa": MedusaConfig(heads=3, **sizes)}


TRAINED: dict[str, tuple[str, Sections]] = {
    "EAGLE-1, with a bias": ("eagle", {}),
    "EAGLE-3, SpecForge": eagle3((1, 3, 6)),
    "EAGLE-3, the target's head": eagle3(vocabulary=ALL),
    "EAGLE-3, ids in place of offsets": eagle3(),
    "EAGLE-3, speculators": eagle3((1, 4, 6)),
    "EAGLE-3.1, speculators": eagle3(feature_norms=True),
    "EAGLE-3, norms of states alone": eagle3(feature_norms=True),
    "EAGLE-3, a norm of what is fed back alone": eagle3(),
    "EAGLE-3, a layer of Qwen3": eagle3(),
    "P-EAGLE, native": peagle(3),
    "P-EAGLE, speculators": peagle(2),
    "P-EAGLE, layers of Qwen3": peagle(2),
    "DFlash, z-lab": block("dflash", (2, 5, 7), mask_token=60),
    "DFlash, windows": block("dflash", (2, 5, 7), mask_token=60),
    "DFlash, speculators": block("dflash", (2, 5), mask_token=None, decoder_layers=1, causal=True),
    "DSpark, DeepSpec": block("dspark", (2, 5), mask_token=None, dspark=DSparkConfig(rank=6, confidence=1.0)),
    "DFlash 2, z-lab": block("dflash2", (2, 5), mask_token=60, dflash2=DFlash2Config(rank=6, candidates=5, group=8)),
    "Medusa, FasterDecoding": heads("medusa", layers=2),
    "Medusa, vLLM": heads("medusa", vocabulary=SOME),
    "Hydra, its authors": heads("hydra", layers=3, as_published=True),
    "Hydra++, its authors": heads("hydra", layers=3, as_published=True, prefix=True),
    "MTP, speculators": ("mtp", {}),
    "MTP, MiMo": ("mtp", {}),
    "MTP, EXAONE-MoE": ("mtp", {}),
}
"""All but those with an embedding of their own, which is not trained."""

EXPORTED = {form: "vllm" for form in FORMS} | {
    "EAGLE-1, with a bias": "sglang",
    "EAGLE-3, speculators": "speculators",
    "EAGLE-3, a layer of Qwen3": "speculators",
    "Hydra, its authors": "hydra",
    "Hydra++, its authors": "hydra",
}
del EXPORTED["P-EAGLE, layers of Qwen3"]
"""All but what no form holds: norms of query and key in P-EAGLE; `REFUSED` of `test_read_back.py` has the others."""
