"""What a method's module is given and has to offer: the contract between recipes and trainers.

A method's module (`methods.py` names it) has these functions:

    check_recipe(recipe)                    RequestError where sections do not fit each other; loads nothing
    student(recipe, target[, ...])          what is trained, buildable on torch's meta device; behind them the ids of
                                            its draft vocabulary, or of a draft model the tokenizer
    build(run, target, rows)                the objective of a run, its drafter as the run begins with it

and where they are needed: `check_target(recipe, target)`, what it requires of the target beside what all methods do,
weights or shapes alone; `check_start(recipe)`, the same of the model that it begins with; `check_rows(recipe, rows)`;
`build_tuned(run, tuned, rows)` and `remembers(recipe)` where the target is trained too (`teacher/tuned.py`);
`check_resume(out, resume)`, which words `--resume` takes; `kept_for_probes(recipe, target, tokenizer)`, bytes in
memory beside the student.
`run(recipe, out, resume, make_probe)` in place of `build` is a run of another order (`target.py`, `boost.py`). The
pre-flight (`launch/check`) calls the same functions, so nothing is required twice.

`Sections` is a recipe as trainers see it, who know no launcher; `launch/recipe/model.py`'s `Recipe`
satisfies it. No torch in this file. Read next: `spine.py`, which calls them; `medusa.py`, the plainest
of the methods; `config.py` and `method_config.py`, the sections of trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..data.config import DataConfig, TokenizerConfig
    from ..decoding.backbone.backbone import Backbone
    from . import method_config
    from .config import (
        CheckpointConfig,
        FeaturesConfig,
        LoopConfig,
        ModelConfig,
        ObjectiveConfig,
        OptimizerConfig,
        ProbeConfig,
        TargetConfig,
    )
    from .loop.loop import Probe


class Sections(Protocol):
    """A recipe as trainers see it: read-only sections, each documented in its class."""

    def __getattr__(self, name: str) -> Any:
        """A section of a method that is not typed below."""

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
    def lora(self) -> method_config.LoraConfig: ...
    @property
    def objective(self) -> ObjectiveConfig: ...
    @property
    def rollouts(self) -> method_config.RolloutsConfig: ...
    @property
    def tune(self) -> method_config.TuneConfig: ...
    @property
    def medusa(self) -> method_config.MedusaConfig: ...
    @property
    def medusa2(self) -> method_config.Medusa2Config: ...
    @property
    def bpd(self) -> method_config.BpdConfig: ...
    @property
    def eagle(self) -> method_config.EagleConfig: ...
    @property
    def eagle3(self) -> method_config.Eagle3Config: ...
    @property
    def mtp(self) -> method_config.MtpConfig: ...
    @property
    def peagle(self) -> method_config.PeagleConfig: ...
    @property
    def pard(self) -> method_config.PardConfig: ...
    @property
    def block(self) -> method_config.BlockConfig: ...
    @property
    def dspark(self) -> method_config.DSparkConfig: ...
    @property
    def dflash2(self) -> method_config.DFlash2Config: ...
    @property
    def boost(self) -> method_config.BoostConfig: ...
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

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the run computes hangs on, by dotted path."""


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
