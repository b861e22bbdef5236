"""A recipe as trainers read it, and what a method's module has to offer: the contract between both.

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

`TrainingRecipe` is what trainers read of a recipe; `launch/recipe/model.py` adds what the commands behind a run read.
No torch in this file. Read next: `spine.py`, which calls them; `medusa.py`, the plainest
of the methods; `config.py` and `method_config.py`, the sections of trainers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..config import Section
from ..data.config import DataConfig, TokenizerConfig
from .config import (
    CheckpointConfig,
    FeaturesConfig,
    LoopConfig,
    MachineConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProbeConfig,
    TargetConfig,
)
from .methods import METHODS, Method

if TYPE_CHECKING:
    from ..decoding.backbone.backbone import Backbone
    from . import method_config
    from .loop.loop import Probe


class TrainingRecipe(Section):
    """The sections of every training run; those of the methods' records join them in `launch/recipe/model.py`."""

    method: str
    """What is trained."""
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is `runs/NAME` unless --out says otherwise."""
    summary: str = ""
    """One line for `draftsmith ls`."""
    data: DataConfig = Field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    target: TargetConfig = Field(default_factory=TargetConfig)
    features: FeaturesConfig = Field(default_factory=FeaturesConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    loop: LoopConfig = Field(default_factory=LoopConfig)
    machine: MachineConfig = Field(default_factory=MachineConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    probe: ProbeConfig = Field(default_factory=ProbeConfig)

    if TYPE_CHECKING:
        # sections of the methods' own, as their records name them
        lora: method_config.LoraConfig = method_config.LoraConfig()
        rollouts: method_config.RolloutsConfig = method_config.RolloutsConfig()
        tune: method_config.TuneConfig = method_config.TuneConfig()
        medusa: method_config.MedusaConfig = method_config.MedusaConfig()
        medusa2: method_config.Medusa2Config = method_config.Medusa2Config()
        bpd: method_config.BpdConfig = method_config.BpdConfig()
        eagle: method_config.EagleConfig = method_config.EagleConfig()
        eagle3: method_config.Eagle3Config = method_config.Eagle3Config()
        mtp: method_config.MtpConfig = method_config.MtpConfig()
        peagle: method_config.PeagleConfig = method_config.PeagleConfig()
        pard: method_config.PardConfig = method_config.PardConfig()
        block: method_config.BlockConfig = method_config.BlockConfig()
        dspark: method_config.DSparkConfig = method_config.DSparkConfig()
        dflash2: method_config.DFlash2Config = method_config.DFlash2Config()
        boost: method_config.BoostConfig = method_config.BoostConfig()

        def __getattr__(self, name: str) -> Any:
            """A section of a method that was registered."""

    @property
    def record(self) -> Method:
        """What its method is."""
        return METHODS[self.method]

    @property
    def row_tokens(self) -> int:
        """Tokens of a row in training: packed text, or a prompt and its continuation."""
        return self.record.row_tokens(self)

    @property
    def tunes_target(self) -> bool:
        """Whether the target is trained with its drafter, and written beside it."""
        return self.record.tunes_target(self)

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """What the run computes hangs on, by dotted path: its checkpoints carry it. Only a whole recipe knows it."""


MakeProbe = Callable[["Backbone"], "Probe"]
"""Makes the real decoding of probes for a target; trainers know neither prompts nor measures."""


@dataclass(frozen=True)
class Run:
    """One training run: its recipe and folder, what it resumes, and how its probes decode."""

    recipe: TrainingRecipe
    out: Path
    resume: str = "auto"
    """`auto`, `never` or a checkpoint's path; see `loop/setup.py`, `resume_from`."""
    make_probe: MakeProbe | None = None
    """None: nothing is decoded while training."""
