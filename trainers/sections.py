"""What a method's module reads of a recipe, as a protocol: trainers know no launcher.

`launch/recipe/load.py`'s `Recipe` satisfies it. A new method adds its own section here and there, so
that every read of a field is checked by its type. No torch in this file.
Read next: `medusa.py`, the plainest of the methods; `config.py`, the sections of trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..data.config import DataConfig, TokenizerConfig
    from ..decoding.target.backbone import Backbone
    from .config import (
        BoostConfig,
        BpdConfig,
        CheckpointConfig,
        Eagle3Config,
        EagleConfig,
        FeaturesConfig,
        LoopConfig,
        LoraConfig,
        Medusa2Config,
        MedusaConfig,
        ModelConfig,
        ObjectiveConfig,
        OptimizerConfig,
        ProbeConfig,
        RolloutsConfig,
        TargetConfig,
        TuneConfig,
    )
    from .loop.loop import Probe


class Sections(Protocol):
    """A recipe as trainers see it: read-only sections, each documented in its `config.py`."""

    @property
    def method(self) -> str:
        """What is trained, the name of a module of this folder."""

    @property
    def data(self) -> DataConfig: ...
    @property
    def tokenizer(self) -> TokenizerConfig: ...
    @property
    def target(self) -> TargetConfig: ...
    @property
    def features(self) -> FeaturesConfig: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def lora(self) -> LoraConfig: ...
    @property
    def objective(self) -> ObjectiveConfig: ...
    @property
    def rollouts(self) -> RolloutsConfig: ...
    @property
    def tune(self) -> TuneConfig: ...
    @property
    def medusa(self) -> MedusaConfig: ...
    @property
    def medusa2(self) -> Medusa2Config: ...
    @property
    def bpd(self) -> BpdConfig: ...
    @property
    def eagle(self) -> EagleConfig: ...
    @property
    def eagle3(self) -> Eagle3Config: ...
    @property
    def boost(self) -> BoostConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def loop(self) -> LoopConfig: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...
    @property
    def probe(self) -> ProbeConfig: ...

    @property
    def row_tokens(self) -> int:
        """Tokens of a training row."""

    @property
    def tunes_target(self) -> bool:
        """Whether the target is trained with its drafter."""


MakeProbe = Callable[["Backbone"], "Probe"]
"""Makes the real decoding of probes for a target; trainers know neither prompts nor measures."""


@dataclass(frozen=True)
class Run:
    """One training run: its recipe and folder, what it resumes, and how its probes decode."""

    recipe: Sections
    out: Path
    resume: str = "auto"
    """`auto`, `never` or a checkpoint's path; see `loop/setup.py`, `resume_from`."""
    make_probe: MakeProbe | None = None
    """None: nothing is decoded while training."""
