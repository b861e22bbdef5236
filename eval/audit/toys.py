"""The toy of every drafter: its proposer over tables of three or four tokens, decoded by the real engine.

The distribution of a table is known in closed form, so that whole sequences can be counted against it
(`enumeration.py`). The models are small, and everything else is what decodes real text: the classes of
the proposers, trees, rules, engine and device. Trees of tables (`toy_models/trees.py`) stand beside
them, for rules and planted bugs. Read next: `toy_models/table.py`, `enumeration.py`, `enumeration.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ...data.datastore import Datastore
from ...decoding.proposal import DraftSampling, Proposer
from ...decoding.random import salt_of
from ...decoding.tree.tree import Tree
from ...drafters.block.trees import TreeShape
from ...drafters.extras.adaptive import AdaptiveDraft
from ...drafters.extras.llma import Llma
from ...drafters.extras.lookahead import Lookahead
from ...drafters.extras.ngram import Ngram, NgramTable
from ...drafters.extras.rest import Rest
from ...drafters.families import FAMILIES
from ...drafters.lookup.function import CallableDrafter
from ...drafters.lookup.prompt_lookup import PromptLookup
from ...drafters.model.draft_model import DraftModel
from ...drafters.model.ensemble import join
from ...drafters.model.pard import Pard
from ...drafters.record import function
from ...drafters.suffix.hybrid import beside
from ...drafters.suffix.proposer import SuffixDecoding
from ...drafters.vocabulary.foreign_draft import ForeignDraft, IntersectionDraft, RetokenisedDraft
from ...drafters.vocabulary.shared_tokens import Vocabulary, VocabularyPair
from ...errors import RequestError
from .toy_models.nets import SIBLINGS, bpd, dflash, dflash2, dspark, eagle, eagle3, hydra, medusa, mtp, peagle
from .toy_models.table import TableModel, tables
from .toy_models.trees import ConfidentTree, SampledTree, SeveralDrafts, TopTree

DOCUMENTS = [[0, 1, 0, 2, 2, 1], [2, 0, 0, 1, 2, 1, 1], [1, 0, 2, 0]]


class MemoryStore:
    """The look-up of a datastore, over documents in memory."""

    salt = salt_of(*map(bytes, DOCUMENTS))

    @staticmethod
    def trie(continuations: NDArray[np.int64], nodes: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the most frequent prefixes."""
        return _trie(continuations.tobytes(), continuations.shape, nodes)

    def longest_end(self, context: Sequence[int], *, longest: int, shortest: int) -> int:
        """Tokens of the longest end of the context that occurs with a token behind it; 0 if none does."""
        ends = range(min(longest, len(context)), shortest - 1, -1)
        return next((size for size in ends if len(_follow(tuple(context), size, size, 1, 1))), 0)

    def continuations(
        self, context: Sequence[int], *, longest: int, shortest: int, length: int, limit: int
    ) -> NDArray[np.int64]:
        """What follows the longest suffix that occurs, [M, length], -1 padded."""
        return _follow(tuple(context), longest, shortest, length, limit)


@lru_cache(maxsize=1024)
def _trie(data: bytes, shape: tuple[int, ...], nodes: int) -> tuple[list[int], list[int]]:
    return Datastore.trie(np.frombuffer(data, dtype=np.int64).reshape(shape), nodes)


@lru_cache(maxsize=1024)
def _follow(context: tuple[int, ...], longest: int, shortest: int, length: int, limit: int) -> NDArray[np.int64]:
    for size in range(min(longest, len(context)), shortest - 1, -1):
        wanted = list(context[-size:])
        continuations = [
            (text[at + size : at + size + length] + [-1] * length)[:length]
            for text in DOCUMENTS
            for at in range(len(text) - size)
            if text[at : at + size] == wanted
        ]
        if continuations:
            return np.array(continuations[:limit], dtype=np.int64)
    return np.empty((0, length), dtype=np.int64)


PROMPT = [0, 1, 2, 0, 2, 1, 1, 0]
# a drafter with a layer of its own reads prompts row by row, and this one without a pass
SHORT_PROMPT = PROMPT[-1:]
_FORK = Tree((-1, 0, 0, 1, 1, 2))
_PAIR = Tree((-1, 0, 1))
_FACTORS = (0.6, 1.5)  # of draft temperatures
_THREE = Tree((-1, 0, 0, 0, 2, 2, 2))


def _draft(kind: type[DraftModel], drafts: Sequence[TableModel], **settings: Any) -> Proposer:
    return kind(drafts[0].as_backbone(), drafts[0].vocabulary, **settings)


def _pard(drafts: Sequence[TableModel], **settings: Any) -> Proposer:
    """The last token of the table is the mask: the target may say it, and it is never drafted."""
    return Pard(drafts[0].as_backbone(), drafts[0].vocabulary, mask=drafts[0].vocabulary - 1, **settings)


def _ensemble(drafts: Sequence[TableModel], **settings: Any) -> Proposer:
    return join([cast(DraftModel, _draft(DraftModel, [d], **settings)) for d in drafts[:2]])


# the third token of each is a text that the other writes by two
_LETTERS = VocabularyPair(Vocabulary([b"a", b"b", b"ba"]), Vocabulary([b"a", b"b", b"ab"]))


def _foreign(kind: type[ForeignDraft], drafts: Sequence[TableModel], **how: Any) -> Proposer:
    return kind(drafts[0].as_backbone(), _LETTERS, drafts[0].vocabulary, draft_length=2, **how)


def _suffix(drafts: Sequence[TableModel], **settings: Any) -> Proposer:
    return SuffixDecoding(draft_length=2, depth=4, least=0.2, store=MemoryStore(), device=drafts[0].device, **settings)


def _hybrid(draft: Proposer, device: torch.device) -> Proposer:
    """The suffix index drafts deeper than the other, and is chosen now and then."""
    index = SuffixDecoding(draft_length=3, depth=5, factor=2.0, least=0.2, store=MemoryStore(), device=device)
    return beside(draft, index)


MakeToy = Callable[[TableModel, Sequence[TableModel]], Proposer]
"""Makes a proposer over tables: of a target, and of drafts that resemble it."""


@dataclass(frozen=True)
class ToyKind:
    """How a toy is made.

    Attributes:
        make: the proposer of a target and of drafts that resemble it.
        vocabulary: of the tables.
        length: tokens of a sequence that is counted.
        prompt: what stands in front of every sequence.
    """

    make: MakeToy
    vocabulary: int = 3
    length: int = 4
    prompt: Sequence[int] = tuple(PROMPT)


def _of_drafts(make: Callable[[Sequence[TableModel]], Proposer], **sizes: int) -> ToyKind:
    return ToyKind(lambda _target, drafts: make(drafts), **sizes)  # type: ignore[arg-type]


def _of_target(make: Callable[..., Proposer], *, vocabulary: int = 3, **settings: Any) -> ToyKind:
    return ToyKind(lambda target, _: make(target, **settings), vocabulary=vocabulary, prompt=SHORT_PROMPT)


def _eagles(family: str, make: Callable[..., Proposer]) -> dict[str, ToyKind]:
    kinds = {f"{family} {tree}": _of_target(make, tree=tree) for tree in ("chain", "static", "dynamic")}
    drawn: dict[str, dict[str, Any]] = {"argmax": {"policy": "argmax"}, "tempered": {"factors": _FACTORS}}
    return kinds | {
        f"{family} {tree} {name}": _of_target(make, tree=tree, **how)
        for tree in ("chain", "static")
        for name, how in drawn.items()
    }


def _blocks(family: str, make: Callable[..., Proposer], tree: TreeShape, *, least: float) -> dict[str, ToyKind]:
    """`least`: of the toys that are cut; such that of two drafts none, one and both are kept now and then."""
    drawn: dict[str, dict[str, Any]] = {"": {}, " argmax": {"policy": "argmax"}, " tempered": {"factors": _FACTORS}}
    cuts: dict[str, dict[str, Any]] = {"": {}, " cut": {"least": least}}
    chains = {
        f"{family}{cut}{name}": _of_target(make, **by, **how)
        for cut, by in cuts.items()
        for name, how in drawn.items()
    }
    return chains | {f"{family} tree": _of_target(make, tree=tree)}


TOYS: dict[str, ToyKind] = {
    "draft-model": _of_drafts(partial(_draft, DraftModel, draft_length=2)),
    "draft-model argmax": _of_drafts(partial(_draft, DraftModel, draft_length=2, policy="argmax")),
    "draft-model tempered": _of_drafts(partial(_draft, DraftModel, draft_length=2, factors=_FACTORS)),
    "draft-model, four deep": _of_drafts(partial(_draft, DraftModel, draft_length=4), length=6),
    "pard": _of_drafts(partial(_pard, draft_length=2)),
    "pard argmax": _of_drafts(partial(_pard, draft_length=2, policy="argmax")),
    "pard tempered": _of_drafts(partial(_pard, draft_length=2, factors=_FACTORS)),
    "intersection": _of_drafts(partial(_foreign, IntersectionDraft)),
    "intersection argmax": _of_drafts(partial(_foreign, IntersectionDraft, policy="argmax")),
    "intersection tempered": _of_drafts(partial(_foreign, IntersectionDraft, factors=_FACTORS)),
    "retokenised": _of_drafts(partial(_foreign, RetokenisedDraft)),
    "adaptive-draft": _of_drafts(partial(_draft, AdaptiveDraft, longest=3, cost=0.05)),
    "medusa": _of_target(medusa),
    "hydra": _of_target(hydra),
    "hydra++": _of_target(hydra, prefix=True),
    "bpd": _of_target(bpd),
    **_eagles("eagle", eagle),
    **_eagles("eagle3", eagle3),
    **_eagles("mtp", mtp),
    "peagle": _of_target(peagle),
    "peagle argmax": _of_target(peagle, policy="argmax"),
    "peagle tempered": _of_target(peagle, factors=_FACTORS),
    **_blocks("dflash", dflash, TreeShape(4, 2), least=0.38),
    **_blocks("dflash2", dflash2, TreeShape(6, 2), least=0.55),
    **_blocks("dspark", dspark, TreeShape(6, 2), least=0.45),
    "eagle static, three siblings": _of_target(eagle, vocabulary=4, tree="static", paths=SIBLINGS),
    "tree, without replacement": _of_drafts(lambda d: SampledTree(d[0], _FORK, DraftSampling.WITHOUT_REPLACEMENT)),
    "tree, three siblings": _of_drafts(
        lambda d: SampledTree(d[0], _THREE, DraftSampling.WITHOUT_REPLACEMENT), vocabulary=4
    ),
    "tree, independent draws": _of_drafts(lambda d: SampledTree(d[0], _FORK, DraftSampling.IID)),
    "tree, likeliest tokens": _of_drafts(lambda d: TopTree(d[0], _FORK)),
    "tree, by confidence": _of_drafts(lambda d: ConfidentTree(d[0])),
    "ensemble": _of_drafts(partial(_ensemble, draft_length=2)),
    "ensemble argmax": _of_drafts(partial(_ensemble, draft_length=2, policy="argmax")),
    "ensemble tempered": _of_drafts(partial(_ensemble, draft_length=2, factors=_FACTORS)),
    "several drafts, merged": _of_drafts(lambda d: SeveralDrafts(d, [_PAIR, _FORK])),
    "prompt-lookup": _of_drafts(lambda d: PromptLookup(draft_length=2, device=d[0].device)),
    "ngram": _of_drafts(
        lambda d: Ngram(NgramTable.count(DOCUMENTS, order=3, vocabulary=3), draft_length=2, device=d[0].device)
    ),
    "llma": _of_drafts(lambda d: Llma(DOCUMENTS, draft_length=2, device=d[0].device)),
    "rest": _of_drafts(
        lambda d: Rest(MemoryStore(), nodes=6, longest=2, shortest=1, draft_length=2, device=d[0].device)
    ),
    "suffix": _of_drafts(_suffix),
    "suffix tree": _of_drafts(lambda d: _suffix(d, nodes=5, factor=2.0)),
    "suffix-hybrid": _of_drafts(lambda d: _hybrid(_draft(DraftModel, d, draft_length=2), d[0].device)),
    "suffix-hybrid argmax": _of_drafts(
        lambda d: _hybrid(_draft(DraftModel, d, draft_length=2, policy="argmax"), d[0].device)
    ),
    "suffix-hybrid tempered": _of_drafts(
        lambda d: _hybrid(_draft(DraftModel, d, draft_length=2, factors=_FACTORS), d[0].device)
    ),
    "suffix-hybrid static": _of_target(lambda t: _hybrid(eagle(t, tree="static"), t.device)),
    "suffix-hybrid static argmax": _of_target(lambda t: _hybrid(eagle(t, tree="static", policy="argmax"), t.device)),
    "suffix-hybrid static tempered": _of_target(
        lambda t: _hybrid(eagle(t, tree="static", factors=_FACTORS), t.device)
    ),
    "suffix-hybrid likeliest": _of_target(lambda t: _hybrid(medusa(t), t.device)),
    "lookahead": _of_drafts(lambda d: Lookahead(window=2, ngram=3, guesses=2, pool=4, device=d[0].device)),
    "function": _of_drafts(
        lambda d: CallableDrafter(
            lambda text: [text[-1], text[0]], draft_length=2, remembers=False, device=d[0].device
        )
    ),
}


def toy_of(drafter: Proposer) -> str:
    """The name of a drafter's toy: its own class over tables, drafting as it drafts.

    Raises:
        RequestError: there is none, so that the audit could not prove the method.
    """
    family = str(getattr(drafter, "family", type(drafter).__name__))
    record = FAMILIES.get(family)
    if record is None:
        raise RequestError(f"the audit knows no drafter of family {family!r}; known: {', '.join(FAMILIES)}")
    name = record.toy(drafter)
    kind_of(name)
    return name


def kind_for(drafter: Proposer, make: MakeToy | None = None) -> ToyKind | None:
    """How the toy of a drafter is made, by its family's record or by `make`; None for one of the caller's own.

    A class of the caller's is not proven by a class of the package that it derives from: only a toy of that very
    class stands for it.
    """
    if make is not None:
        return ToyKind(make, prompt=SHORT_PROMPT)
    if str(getattr(drafter, "family", "")) not in FAMILIES:
        return None
    name = toy_of(drafter)
    shipped = type(drafter).__module__.split(".")[0] == __name__.split(".")[0]
    return kind_of(name) if shipped or type(Toy.of(name, 0).proposer()) is type(drafter) else None


def kind_of(name: str) -> ToyKind:
    """How the toy of that name is made.

    Raises:
        RequestError: nobody makes it.
    """
    for family in FAMILIES.values():
        if name in family.toys:
            return ToyKind(function(family.toys[name]), prompt=SHORT_PROMPT)
    if name not in TOYS:
        raise RequestError(f"the audit knows no toy {name!r}; known: {', '.join(TOYS)}")
    return TOYS[name]


@dataclass(frozen=True)
class Toy:
    """Tables, and the proposer over them, by the name of its method."""

    name: str
    target: TableModel
    drafts: list[TableModel]
    made: ToyKind | None = None
    """How it is made, where no record names it."""

    @classmethod
    def of(cls, name: str, seed: int, device: torch.device | str = "cpu", *, made: ToyKind | None = None) -> Toy:
        """The toy of that name, on the device on which the pair decodes."""
        kind = made or kind_of(name)
        target, drafts = tables(seed, vocabulary=kind.vocabulary, device=device)
        return cls(name, target, drafts, made)

    @property
    def kind(self) -> ToyKind:
        """How it is made."""
        return self.made or kind_of(self.name)

    def proposer(self) -> Proposer:
        """A fresh one."""
        return self.kind.make(self.target, self.drafts)
