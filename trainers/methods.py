"""What a training method is, one record each: the only list of methods there is.

Importing this file imports no torch. The recipe's sections and its choice of methods, the dispatch
of `train`, the values that a method reads, the pre-flight's sums, the docs' table: all are derived
from these records. A method's own code is its module, which holds `check_recipe`, `student` and `build`
(`recipe.py` says what they are given). Read next: `drafters/families.py`, the records of what is
trained; `spine.py`, the run of all methods; `medusa.py`, a method from top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import Section
from .config import MASKED
from .method_config import (
    BlockConfig,
    BoostConfig,
    BpdConfig,
    DFlash2Config,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    LoraConfig,
    Medusa2Config,
    MedusaConfig,
    MtpConfig,
    PardConfig,
    PeagleConfig,
    RolloutsConfig,
    TuneConfig,
)
from .student.numbers import of_eagle, of_eagle3, of_medusa, of_mtp

if TYPE_CHECKING:
    from .recipe import TrainingRecipe
    from .student.numbers import TargetSizes

Count = Callable[["TrainingRecipe"], int]
Share = Callable[["TrainingRecipe"], float]

EVERY = (
    *("method", "name", "summary", "data", "objective", "optimizer", "loop", "machine", "checkpoint"),
    *("drafter", "eval", "audit"),
)
"""Sections and values that every method reads, or the commands behind it."""
_WITH_TARGET = ("target", "features", "probe")
_ROWS_CUT, _COMPILED = "loop.context_parallel", "loop.compile"


def _one(_recipe: TrainingRecipe) -> int:
    return 1


def _sequence_length(recipe: TrainingRecipe) -> int:
    return int(recipe.data.sequence_length)


def _never(_recipe: TrainingRecipe) -> bool:
    return False


def _nothing(_recipe: TrainingRecipe) -> Mapping[str, str]:
    return {}


def _start_from(recipe: TrainingRecipe) -> list[str]:
    return [recipe.model.start_from] if recipe.model.start_from else []


def _no_samples(_recipe: TrainingRecipe) -> None:
    return None


def _uncounted(_recipe: TrainingRecipe, _target: TargetSizes) -> None:
    return None


class Samples(NamedTuple):
    """Rows that a run makes itself."""

    rows: int
    held_out: int
    times: int
    """How often the steps of the recipe are run over them."""


@dataclass(frozen=True)
class PassMemory:
    """What the forward passes of a method keep for the gradient: the pre-flight's model of them."""

    positions: Share = _one
    """Tokens behind a position that the loss speaks of, per token of a row."""
    passes: Share = _one
    """Forward passes of what is trained, per row."""
    mask: Share = lambda _recipe: 0.0
    """Numbers of the attention mask that each layer keeps, per token of a row; 0 where none of that size is made."""
    logit_layers: tuple[str, ...] = ()
    """Ends of the names of linear layers, beside `lm_head`, whose outputs are as wide as the vocabulary: they go
    through in chunks too."""
    kept_inputs: Mapping[str, int] = field(default_factory=dict)
    """How often more the input of a linear layer is kept, by the end of its name: for what reads it beside it."""
    recomputed_layers: Callable[[Any], Sequence[Any]] | None = None
    """Where not a whole pass is computed again but layer by layer: which layers what is trained has."""
    keeps_inputs: bool = True
    """Whether these layers keep what they read; heads find it in the target's states again."""
    text_only: float = 0.0
    """Share of `passes` in which layers make but keys and values of the text, which are kept in any case."""


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str
    """The value of the recipe's `method`, and the name of its module here."""
    summary: str
    """What is trained, for help, schema and docs."""
    family: str | None
    """The family of what is trained (`drafters/families.py`); None: no drafter."""
    variants: tuple[str, ...] = ()
    """Families that it trains instead where the recipe says so."""
    module: str | ModuleType = ""
    """Where its code is, absolute or relative to this package, or the module itself; empty: that of its name."""
    sections: Mapping[str, type[Section]] = field(default_factory=dict)
    """Recipe sections that not every method reads, by name."""
    reads: tuple[str, ...] = ()
    """Of the other sections, or values in them, those that it reads beside EVERY."""
    ignores: tuple[str, ...] = ()
    """Values of sections that it reads otherwise."""
    unread: Callable[[TrainingRecipe], Mapping[str, str]] = _nothing
    """Sections that this very recipe turns off, each with what would turn it on."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Settings of the drafter that the recipe chooses -> the value that does; others follow from the target."""
    numbers: Callable[[TrainingRecipe, TargetSizes], int | None] = _uncounted
    """Numbers that are trained for a target, by its sizes alone; None where these do not say."""
    memory: PassMemory = field(default_factory=PassMemory)
    """What its passes keep, for the pre-flight."""
    cuts_rows: bool = False
    """Whether several processes can share a row (`loop.context_parallel`)."""
    compiles: bool = False
    """Whether torch.compile can take parts of it (`loop.compile`)."""
    recompute: str = ""
    """The value by which passes keep their ends alone, and are computed again for the gradient; empty: none does."""
    mask_field: str = ""
    """The field that may name a token as its mask, which texts may not have; empty: there is none."""
    unrolled: str = ""
    """The value by which it is trained for so many drafts behind a place; empty: `most_drafts` says."""
    most_drafts: Callable[[TrainingRecipe], int | None] = lambda _recipe: None
    """Most tokens that what is trained drafts one behind another per target call; None: any number."""
    probes_deepest: bool = False
    """Whether a probe drafts as many, whatever `probe.draft_length` says."""
    origins: Callable[[TrainingRecipe], list[str]] = _start_from
    """Folders and names that what is trained is initialised from."""
    runs: Count = _one
    """Runs of the loop that keep checkpoints of their own."""
    samples: Callable[[TrainingRecipe], Samples | None] = _no_samples
    """What is trained on in place of the data's own rows, if so; known without looking at the data."""
    row_tokens: Count = _sequence_length
    """Tokens of a row in training."""
    row_flags: str = "--data.sequence_length"
    """The values that say how many they are, for messages."""
    tunes_target: Callable[[TrainingRecipe], bool] = _never
    """Whether the target is trained with its drafter, and written beside it."""

    @property
    def has_target(self) -> bool:
        """Whether it trains for a target."""
        return "target" in self.reads

    def drafts_trained(self, recipe: TrainingRecipe) -> int:
        """Drafts behind a place that a drafter of hidden states learns."""
        return int(attrgetter(self.unrolled)(recipe)) if self.unrolled else (self.most_drafts(recipe) or 0)

    @property
    def drafts_its_own(self) -> bool:
        """Whether it can learn along its own drafts, behind places of a row (`trainers/own_drafts/objective.py`)."""
        return "rollouts" in self.sections and _PLACES not in self.ignores

    def drafts_of(self, recipe: TrainingRecipe, asked: int) -> int:
        """Tokens that are drafted per target call where so many are asked for."""
        most = self.most_drafts(recipe)
        return asked if most is None else min(asked, most)

    def probe_depth(self, recipe: TrainingRecipe) -> int:
        """Most tokens that a probe drafts per target call."""
        most = self.most_drafts(recipe) if self.probes_deepest else None
        return self.drafts_of(recipe, int(recipe.probe.draft_length)) if most is None else most

    def recomputes(self, recipe: TrainingRecipe) -> bool:
        """Whether passes, or layers, are computed again for the gradient."""
        return bool(self.recompute) and bool(attrgetter(self.recompute)(recipe))

    def hook(self, name: str) -> Callable[..., Any] | None:
        """What its module adds to a check that others do not need; `trainers/recipe.py` lists them."""
        return getattr(self.code(), name, None)

    def code(self) -> ModuleType:
        """Its module, imported now."""
        if not isinstance(self.module, str):
            return self.module
        return import_module(self.module or f".{self.name}", __package__)

    def reads_value(self, path: str, recipe: TrainingRecipe) -> bool:
        """Whether what it computes, or a command behind it, reads the value at a dotted path."""
        off = (*self.ignores, *self.unread(recipe))
        off += () if self.cuts_rows else (_ROWS_CUT,)
        off += () if self.compiles else (_COMPILED,)
        return _within(path, (*EVERY, *self.reads, *self.sections)) and not _within(path, off)


def _within(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


_ON_TARGET = (*_WITH_TARGET, "model.start_from")
_DEEPER = ("model.deepen_to",)
_DRAFTED = "model.vocabulary"
_CHAINED = "objective.draft_length"
_NOT_MOVING = ("objective.from_kl_share", _CHAINED)
_WHOLE_TEACHER = (*_NOT_MOVING, "objective.teacher_top_k")
_ROLLOUTS = {"rollouts": RolloutsConfig}
_PLACES = "rollouts.places"
_ROWS_WRITTEN = tuple(
    f"rollouts.{name}"
    for name in ("by", "student_tokens", "prompt_tokens", "new_tokens", "every_steps", "unlikelihood")
)
"""Of rows that are written anew whole; drafters of hidden states draft behind places of theirs."""
_HEADS = {
    **{"heads": "medusa.heads", "layers": "medusa.layers", "shared_head": "medusa.shared_head"},
    "draft_vocabulary": "medusa.vocabulary",
}


def _model_layers(model: Any) -> Sequence[Any]:
    from .student.recomputed import layers_within

    return layers_within(model)


_BY_LAYERS = PassMemory(recomputed_layers=_model_layers)


def _by_passes(count: Count, each: float = 1.0) -> PassMemory:
    """So many passes, one behind another, each of which a token of the loss speaks of."""
    return PassMemory(positions=count, passes=lambda recipe: each * count(recipe))


def _heads(recipe: TrainingRecipe) -> int:
    return int(recipe.medusa.heads)


def _heads_of(drafter: Any) -> Sequence[Any]:
    return list(getattr(drafter, "blocks", None) or drafter[0].blocks)  # a tuned target's part stands beside


def _bpd_tunes(recipe: TrainingRecipe) -> bool:
    return recipe.bpd.backbone == "tuned"


def _masks_and_text(recipe: TrainingRecipe) -> float:
    config, row = recipe.pard, _sequence_length(recipe)
    masks = sum(max(config.kept**d, config.kept_least) for d in range(1, config.drafts)) * row
    step = 64  # `block/masked_chains.py` fills up to a multiple of it
    return 1 + -(-masks // step) * step / row


def _all_by_all(recipe: TrainingRecipe) -> float:
    row = _sequence_length(recipe)
    # text and masks against text and masks; `block/chain_spans.py` has none
    return 0.0 if row > MASKED else _masks_and_text(recipe) ** 2 * row


def _pairs_by_text(recipe: TrainingRecipe) -> float:
    row = _sequence_length(recipe)
    # mask pairs against the text; in long rows they go block by block
    return 0.0 if row > MASKED else (_pairs_per_token(recipe) - 1) * row


def _slots_per_token(recipe: TrainingRecipe) -> float:
    row = _sequence_length(recipe)
    return float(min(recipe.block.anchors, row) * recipe.block.size / row)


def _in_a_block(recipe: TrainingRecipe, layout: str) -> int:
    """Drafts of a block; `layout`: where the recipe leaves the choice to the method."""
    return int(recipe.block.size) - ((recipe.block.layout or layout) == "fill-in")


def _block_layers(net: Any) -> Sequence[Any]:
    return list(net.layers)


def _slots_and_text(recipe: TrainingRecipe) -> float:
    row = _sequence_length(recipe)
    # every slot has a place for every token, whether it sees it or not; in long rows there is no such mask
    return 0.0 if row > MASKED else _slots_per_token(recipe) * row


def _pairs_per_token(recipe: TrainingRecipe) -> float:
    config = recipe.peagle
    return float(1 + sum(max(config.kept**d, config.kept_least) for d in range(1, config.depths)))


_BLOCK_SIZES = {
    name: f"block.{name}" for name in ("layers", "decoder_layers", "size", "layout", "causal", "mask_token")
} | {"draft_vocabulary": "block.vocabulary"}

_MEDUSA = Method(
    name="medusa",
    summary="Medusa heads on the frozen target",
    family="medusa",
    sections={"medusa": MedusaConfig, **_ROLLOUTS},
    reads=_ON_TARGET,
    ignores=(*_NOT_MOVING, *_ROWS_WRITTEN),
    sizes=_HEADS,
    numbers=of_medusa,
    memory=PassMemory(positions=_heads, recomputed_layers=_heads_of, keeps_inputs=False),
    recompute="medusa.recompute",
    most_drafts=_heads,
    probes_deepest=True,
    compiles=True,
)
_DFLASH = Method(
    name="dflash",
    summary="a DFlash block drafter on the frozen target",
    family="dflash",
    mask_field="block.mask_token",
    module=".block.dflash",
    sections={"block": BlockConfig, **_ROLLOUTS},
    reads=_ON_TARGET,
    ignores=(*_NOT_MOVING, *_ROWS_WRITTEN),
    sizes=_BLOCK_SIZES,
    memory=PassMemory(
        positions=_slots_per_token,
        # the text itself goes through a few of the projections alone
        passes=lambda recipe: 0.5 + _slots_per_token(recipe),
        mask=_slots_and_text,
        recomputed_layers=_block_layers,
        text_only=0.5,
    ),
    recompute="block.recompute",
    most_drafts=lambda recipe: _in_a_block(recipe, "fill-in"),
)
_DISTILL = Method(
    name="distill",
    summary="a draft for a target",
    family="draft_model",
    sections={"lora": LoraConfig, **_ROLLOUTS},
    reads=(*_WITH_TARGET, "model"),
    ignores=(*_DEEPER, "rollouts.unlikelihood", _PLACES),
    sizes={"draft_vocabulary": "model.vocabulary"},
    memory=_BY_LAYERS,
    recompute="model.recompute",
    compiles=True,
)
_EAGLE = Method(
    name="eagle",
    summary="an EAGLE-1 feature drafter on the frozen target, HASS with several passes",
    family="eagle",
    sections={"eagle": EagleConfig, **_ROLLOUTS},
    reads=_ON_TARGET,
    ignores=(*_WHOLE_TEACHER, *_ROWS_WRITTEN),
    sizes={"draft_vocabulary": "eagle.vocabulary"},
    numbers=of_eagle,
    memory=_by_passes(lambda recipe: int(recipe.eagle.passes)),
    unrolled="eagle.passes",
    cuts_rows=True,
    recompute="eagle.recompute",
    compiles=True,
)
_ALL = (
    Method(
        name="target",
        summary="a small model from scratch",
        family=None,
        sections=_ROLLOUTS,
        reads=("tokenizer", "model"),
        ignores=(*_WHOLE_TEACHER, _DRAFTED, "rollouts.by", "rollouts.student_tokens", _PLACES),
        memory=_BY_LAYERS,
        recompute="model.recompute",
        compiles=True,
    ),
    _DISTILL,
    replace(
        _DISTILL,
        name="pard",
        summary="a draft for a target that drafts in one pass",
        family="pard",
        mask_field="pard.mask_token",
        module=".block.pard",
        sections={"pard": PardConfig},
        ignores=(*_DEEPER, *_NOT_MOVING, _DRAFTED),
        sizes={},
        memory=replace(_BY_LAYERS, positions=_masks_and_text, passes=_masks_and_text, mask=_all_by_all),
        compiles=False,
    ),
    replace(
        _DISTILL,
        name="boost",
        summary="several drafts that cover for each other",
        family="ensemble",
        sections={"lora": LoraConfig, "boost": BoostConfig},
        ignores=(*_DEEPER, _DRAFTED, _CHAINED),
        sizes={},
        compiles=False,
        origins=lambda recipe: [*_start_from(recipe), *(each for each in recipe.boost.start_from if each)],
        runs=lambda recipe: int(recipe.boost.members) if recipe.boost.order == "in_turn" else 1,
        samples=lambda recipe: Samples(recipe.boost.samples, recipe.boost.held_out, recipe.boost.members),
        row_tokens=lambda recipe: int(recipe.boost.prompt_tokens + recipe.boost.continuation),
        row_flags="the sum of --boost.prompt_tokens and --boost.continuation",
    ),
    _MEDUSA,
    replace(
        _MEDUSA,
        name="medusa2",
        numbers=_uncounted,
        summary="Medusa heads and the target beneath them together",
        sections={"medusa": MedusaConfig, "medusa2": Medusa2Config, "tune": TuneConfig},
        tunes_target=lambda _recipe: True,
        compiles=False,
    ),
    replace(
        _MEDUSA,
        name="hydra",
        numbers=_uncounted,
        summary="Hydra or Hydra++ heads on the frozen target",
        family="hydra",
        variants=("hydra++",),
        sizes=_HEADS | {"as_published": "medusa.as_published"},
    ),
    Method(
        name="bpd",
        summary="the outputs of blockwise parallel decoding, the target frozen or tuned with them",
        family="bpd",
        sections={"bpd": BpdConfig, "tune": TuneConfig},
        reads=_ON_TARGET,
        ignores=_NOT_MOVING,
        unread=lambda recipe: {} if _bpd_tunes(recipe) else {"tune": "set bpd.backbone to tuned"},
        sizes={"block": "bpd.block", "inner": "bpd.inner", "draft_vocabulary": "bpd.vocabulary"},
        memory=PassMemory(positions=lambda recipe: int(recipe.bpd.block)),
        most_drafts=lambda recipe: int(recipe.bpd.block) - 1,
        probes_deepest=True,
        tunes_target=_bpd_tunes,
    ),
    _EAGLE,
    replace(
        _EAGLE,
        name="eagle3",
        summary="an EAGLE-3 feature drafter on the frozen target",
        family="eagle3",
        sections={"eagle3": Eagle3Config, **_ROLLOUTS},
        sizes={
            "layers": "eagle3.layers",
            "draft_vocabulary": "eagle3.vocabulary",
            "feature_norms": "eagle3.feature_norms",
        },
        numbers=of_eagle3,
        memory=_by_passes(lambda recipe: int(recipe.eagle3.passes)),
        unrolled="eagle3.passes",
        recompute="eagle3.recompute",
    ),
    replace(
        _EAGLE,
        name="mtp",
        summary="an MTP module on the frozen target, its own or a fresh one",
        family="mtp",
        module=".block.mtp",
        sections={"mtp": MtpConfig, **_ROLLOUTS},
        ignores=(*_NOT_MOVING, *_ROWS_WRITTEN),
        sizes={"state": "mtp.state", "draft_vocabulary": "mtp.vocabulary"},
        numbers=of_mtp,
        # norms of queries and keys, and of both halves of a pair, keep what they read too
        memory=_by_passes(lambda recipe: int(recipe.mtp.passes), each=1.2),
        unrolled="mtp.passes",
        recompute="mtp.recompute",
    ),
    Method(
        name="peagle",
        summary="a P-EAGLE drafter on the frozen target: EAGLE-3 in one pass",
        family="peagle",
        module=".block.peagle",
        sections={"peagle": PeagleConfig, **_ROLLOUTS},
        reads=_ON_TARGET,
        ignores=(*_WHOLE_TEACHER, *_ROWS_WRITTEN),
        sizes={
            "layers": "peagle.layers",
            "draft_vocabulary": "peagle.vocabulary",
            "decoder_layers": "peagle.decoder_layers",
        },
        memory=PassMemory(
            positions=_pairs_per_token,
            # queries, keys and values of the text are laid out a second time, for the mask pairs
            passes=lambda recipe: 0.25 + _pairs_per_token(recipe),
            mask=_pairs_by_text,
            recomputed_layers=lambda net: [net.midlayer, *net.deeper],
        ),
        unrolled="peagle.depths",
        recompute="peagle.recompute",
    ),
    _DFLASH,
    replace(
        _DFLASH,
        name="dspark",
        summary="a DSpark block drafter on the frozen target",
        family="dspark",
        memory=replace(_DFLASH.memory, logit_layers=("markov_w2",)),
        module=".block.dspark",
        sections={"block": BlockConfig, "dspark": DSparkConfig, **_ROLLOUTS},
        sizes=_BLOCK_SIZES | {"rank": "dspark.rank", "confidence": "dspark.confidence"},
        most_drafts=lambda recipe: _in_a_block(recipe, "anchor-first"),
    ),
    replace(
        _DFLASH,
        name="dflash2",
        summary="a DFlash 2 block drafter on the frozen target: convolutions and a selector of candidates",
        family="dflash2",
        # a convolution on both sides of a sublayer keeps what it reads, and its kernel
        memory=replace(_DFLASH.memory, kept_inputs={"kernel_projection": 4}),
        module=".block.dflash2",
        sections={"block": BlockConfig, "dflash2": DFlash2Config, **_ROLLOUTS},
        sizes=_BLOCK_SIZES | {name: f"dflash2.{name}" for name in ("rank", "candidates", "taps", "group")},
    ),
)
METHODS: dict[str, Method] = {method.name: method for method in _ALL}
"""Name -> record."""


def own_sections() -> dict[str, type[Section]]:
    """Every section that some method alone reads, by name."""
    return {name: section for method in METHODS.values() for name, section in method.sections.items()}
