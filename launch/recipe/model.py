"""The schema of a recipe: sections that every method has, and those that the methods' records name.

No torch here. Read next: `load.py`, which reads recipes; `trainers/methods.py`, the records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from ...config import Section
from ...data.config import DataConfig, TokenizerConfig
from ...drafters.config import DrafterConfig
from ...eval.config import AuditConfig, EvalConfig
from ...trainers.config import (
    CheckpointConfig,
    FeaturesConfig,
    LoopConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProbeConfig,
    TargetConfig,
)
from ...trainers.methods import METHODS, Method, own_sections
from .identity import identity_of


class MachineConfig(Section):
    """The machine that a run is made for; `check` alone reads it, where it runs on another one."""

    processes: int | None = Field(None, ge=1)
    """Processes of the launch over all machines, one per device; empty: the machine at hand."""
    device_gb: float = Field(80.0, gt=0)
    """Memory of each device in GB (10^9 bytes)."""
    sharding: Literal["none", "zero2", "zero3"] = "zero2"
    """What the launch configuration spreads over the processes: none is `ddp.yaml`. Of one process none by default."""


class _Recipe(Section):
    """A whole run: the resolved recipe alone repeats it."""

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
    drafter: DrafterConfig = Field(default_factory=DrafterConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    audit: AuditConfig = Field(default_factory=AuditConfig)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A section of a method's own."""

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
    def identity(self) -> dict[str, Any]:
        """What the run computes hangs on, by dotted path: its checkpoints carry it."""
        return identity_of(self, self)


def _of_the_records() -> dict[str, Any]:
    """The choice of methods, and the sections of their own."""
    choices = "; ".join(f"`{method.name}` {method.summary}" for method in METHODS.values())
    own = {name: (kind, Field(default_factory=kind)) for name, kind in own_sections().items()}
    return {"method": (Literal[tuple(METHODS)], Field(description=f"What is trained: {choices}.")), **own}


if TYPE_CHECKING:
    Recipe = _Recipe
else:
    Recipe = create_model("Recipe", __base__=_Recipe, __doc__=_Recipe.__doc__, **_of_the_records())


def rebuild() -> None:
    """Make the recipe anew of the records that there are now: the class stays, and whoever holds it knows them."""
    own: dict[str, FieldInfo] = {}
    for name, made in _of_the_records().items():
        if isinstance(made, tuple):
            kind, made = made
            own[name] = FieldInfo.from_annotated_attribute(kind, made)
    fields: dict[str, FieldInfo] = Recipe.model_fields
    for name in set(fields) - set(_Recipe.model_fields) - set(own):
        del fields[name]
    fields.update(own)
    Recipe.model_rebuild(force=True)


def section_of(name: str) -> type[Section] | None:
    """The class of a section of recipes; None for a value beside the sections."""
    kind = Recipe.model_fields[name].annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None
