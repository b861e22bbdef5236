"""What of a recipe a run computes hangs on: what may not change before it goes on.

The rest says how a run is measured and reported. Read next: `../check/resume.py`, which compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...storage.identity import flat

if TYPE_CHECKING:
    from .model import Recipe

_FREE = (
    "eval.",
    "audit.",
    "checkpoint.",
    "loop.log_every",
    "loop.trackers",
    "loop.stall_seconds",
    "loop.context_parallel",  # as the number of processes: the order of sums, and what noise each draws
    "loop.compile",  # the order of sums too
    "loop.micro_rows",  # memory that ran out may ask for fewer; the batch is the same
    "summary",
    "name",
    "machine.",
    "target.sizes",
    "model.sizes",
    "features.folder",
    # which engine a run learns from, its own folder says (`trainers/teacher/engine.py`)
    "features.server",
    "features.served_model",
    "features.shared",
    "features.requests",
    "features.timeout",
    "features.max_gb",
    "features.prefetch",
    "data.cache",  # where rows are kept, which a warning may advise to change
    "boost.continuations",
    "drafter.",
)
_MEASURED = ("loop.validate_every", "loop.validate_rows", "probe.")
"""What says when and how a run is measured: a checkpoint tells what it was, and it may change when the run goes on."""
_SAME_BITS = ".recompute"
"""The end of what changes memory and time alone, in whatever section."""
# what the probes decode, which says which draft is the best
_PROBED = ("eval.prompts", "eval.seed", "eval.prompt_tokens")


def identity_of(recipe: Recipe, reader: Recipe) -> dict[str, Any]:
    """The values of `recipe` that the method of `reader` computes with, as JSON, by dotted path."""
    return compared(flat(recipe.model_dump(mode="json")), reader)


def compared(values: Mapping[str, Any], reader: Recipe) -> dict[str, Any]:
    """Those of the values, by dotted path, that the method of `reader` computes with."""
    return {path: value for path, value in values.items() if _is_read(path, reader)}


def changes_weights(path: str) -> bool:
    """Whether a value that a run computes with has a say in its weights, and not in what is measured alone."""
    return not path.startswith(_MEASURED)


def _is_read(path: str, reader: Recipe) -> bool:
    if path in _PROBED:
        return reader.record.reads_value("probe", reader)
    return not path.startswith(_FREE) and not path.endswith(_SAME_BITS) and reader.record.reads_value(path, reader)
