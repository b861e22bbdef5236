"""The schema of a recipe: sections that every method has, and those that the methods' records name.

No torch here. Read next: `load.py`, which reads recipes; `trainers/methods.py`, the records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

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
from .machine import MachineConfig


class _Recipe(Section):
    """A whole run: the resolved recipe alone repeats it."""

    if TYPE_CHECKING:  # fields are put together below
        method: str
        name: str
        summary: str
        data: DataConfig
        tokenizer: TokenizerConfig
        target: TargetConfig
        features: FeaturesConfig
        model: ModelConfig
        objective: ObjectiveConfig
        optimizer: OptimizerConfig
        loop: LoopConfig
        machine: MachineConfig
        checkpoint: CheckpointConfig
        probe: ProbeConfig
        drafter: DrafterConfig
        eval: EvalConfig
        audit: AuditConfig

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


def _section(kind: type[Section]) -> tuple[type[Section], Any]:
    return kind, Field(default_factory=kind)


def _fields() -> dict[str, Any]:
    choices = "; ".join(f"`{method.name}` {method.summary}" for method in METHODS.values())
    name = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run; its folder is `runs/NAME` unless --out says otherwise.",
    )
    return {
        "method": (Literal[tuple(METHODS)], Field(description=f"What is trained: {choices}.")),
        "name": (str, name),
        "summary": (str, Field("", description="One line for `draftsmith ls`.")),
        "data": _section(DataConfig),
        "tokenizer": _section(TokenizerConfig),
        "target": _section(TargetConfig),
        "features": _section(FeaturesConfig),
        "model": _section(ModelConfig),
        "objective": _section(ObjectiveConfig),
        **{name: _section(kind) for name, kind in own_sections().items()},
        "optimizer": _section(OptimizerConfig),
        "loop": _section(LoopConfig),
        "machine": _section(MachineConfig),
        "checkpoint": _section(CheckpointConfig),
        "probe": _section(ProbeConfig),
        "drafter": _section(DrafterConfig),
        "eval": _section(EvalConfig),
        "audit": _section(AuditConfig),
    }


if TYPE_CHECKING:
    Recipe = _Recipe
else:
    Recipe = create_model("Recipe", __base__=_Recipe, __doc__=_Recipe.__doc__, **_fields())
