"""Every way to draft beside a small target, on the target's device, and which of them Python takes part in.

Read next: `tests/helpers/models/small_drafters.py`, which makes those that ride on a target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conftest import VOCABULARY, make_drafter
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.block.trees import TreeShape
from draftsmith.drafters.extras.adaptive import AdaptiveDraft
from draftsmith.drafters.extras.llma import Llma
from draftsmith.drafters.extras.lookahead import Lookahead
from draftsmith.drafters.extras.ngram import Ngram, NgramTable
from draftsmith.drafters.extras.rest import Rest
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.lookup.function import CallableDrafter
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.model.early_exit import EarlyExit, first_layers
from draftsmith.drafters.model.ensemble import join
from draftsmith.drafters.model.pard import Pard
from draftsmith.drafters.suffix.hybrid import beside
from draftsmith.drafters.suffix.proposer import SuffixDecoding
from draftsmith.eval.audit.toys import MemoryStore
from helpers.models.small_drafters import make_on_target

PROMPTS = [[5, 9, 2, 33, 7, 9, 2], [11, 4]]
Make = Callable[[Backbone], Any]
DYNAMIC = {"tree": "dynamic", "top_k": 3, "nodes": 6, "draft_length": 2}


def _on_target(family: str, **settings: Any) -> Make:
    return lambda target: make_on_target(family, target, **settings)


def _early_exit(target: Backbone) -> EarlyExit:
    return EarlyExit(first_layers(target, 1), target.vocabulary)


def _adaptive(target: Backbone) -> AdaptiveDraft:
    return AdaptiveDraft(make_drafter(target).backbone, target.vocabulary, longest=4)


def _suffix(target: Backbone, **settings: Any) -> SuffixDecoding:
    return SuffixDecoding(draft_length=3, device=target.device, **settings)


def _ngram(target: Backbone) -> Ngram:
    table = NgramTable.count([PROMPTS[0] * 4], order=3, vocabulary=VOCABULARY)
    return Ngram(table, device=target.device)


PROPOSERS: dict[str, Make] = {
    **{name: _on_target(name) for name, family in FAMILIES.items() if family.build},
    "eagle chain": _on_target("eagle", tree="chain"),
    "eagle dynamic": _on_target("eagle", **DYNAMIC),
    "eagle3 dynamic": _on_target("eagle3", **DYNAMIC),
    "mtp dynamic": _on_target("mtp", **DYNAMIC),
    **{f"{name} tree": _on_target(name, tree=TreeShape(6, 2)) for name in ("dflash", "dflash2", "dspark")},
    **{f"{name} cut": _on_target(name, least=0.3) for name in ("dflash", "dflash2", "dspark")},
    "draft_model": make_drafter,
    "pard": lambda target: Pard(make_drafter(target).backbone, target.vocabulary, mask=VOCABULARY - 1),
    "ensemble": lambda target: join([make_drafter(target, noise=noise) for noise in (0.02, 0.05)]),
    "early_exit": _early_exit,
    "adaptive-draft": _adaptive,
    "prompt-lookup": lambda target: PromptLookup(draft_length=3, device=target.device),
    "ngram": _ngram,
    "llma": lambda target: Llma([PROMPTS[0]], draft_length=3, device=target.device),
    "rest": lambda target: Rest(MemoryStore(), nodes=6, longest=2, shortest=1, draft_length=2, device=target.device),
    "suffix": _suffix,
    "suffix tree": lambda target: _suffix(target, nodes=5, factor=2.0),
    "suffix-hybrid": lambda target: beside(make_drafter(target), _suffix(target)),
    "suffix-hybrid static": lambda target: beside(make_on_target("eagle", target), _suffix(target)),
    "lookahead": lambda target: Lookahead(window=2, ngram=3, guesses=2, pool=4, device=target.device),
    "function": lambda target: CallableDrafter(lambda text: [text[-1], text[0]], draft_length=2, device=target.device),
}
ELSEWHERE = {"quantised", "intersection", "retokenised"}
"""A copy in fewer bits is torchao's own kind of tensor; the others draft among the audit's toys."""
ON_THE_HOST = {"adaptive-draft", "rest", "suffix", "suffix tree", "suffix-hybrid", "suffix-hybrid static", "function"}
"""Proposers of which Python decides in every step what they draft; all others are replayed."""
REPLAYED = [name for name in PROPOSERS if name not in ON_THE_HOST]
