"""Evaluation and audit by several processes that hold one target together: all of them decode, the first one speaks.

    accelerate launch --config_file ddp.yaml -m draftsmith.launch.cli eval RUN --target.tensor_parallel 8

`tune`, `tree` and `chat` decide by themselves and are refused (`check_alone`). Read next: `run.py`, which asks here;
`decoding/backbone/cut.py`, how the target lies over them.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from ...decoding.backbone.cut import Cut
from ...decoding.devices import runs_on_cpu
from ...errors import RequestError
from ...storage import is_first
from ..check.devices import processes

if TYPE_CHECKING:
    from rich.console import Console

    from ..recipe.model import Recipe


def joined(recipe: Recipe) -> tuple[Cut | None, str | None]:
    """Join the processes of this launch: how they hold the target, and this one's device; None for one process alone.

    Raises:
        RequestError: there are several, and the recipe does not say that they hold the target together.
    """
    count, team = processes(), recipe.target.tensor_parallel
    if count == 1:
        return None, None
    if team != count:
        raise RequestError(
            f"{count} processes were launched, and target.tensor_parallel is {team}: each would decode everything by "
            f"itself; set --target.tensor_parallel {count}, so that they hold the target together, or start one"
        )
    from accelerate import PartialState

    on_cpu = runs_on_cpu()
    bound = timedelta(seconds=recipe.loop.stall_seconds)
    state = PartialState(cpu=on_cpu, timeout=bound, **({"backend": "gloo"} if on_cpu else {}))
    return Cut(team, bound=bound), str(state.device)


def speaks() -> bool:
    """Whether this process prints and writes what all of them have measured."""
    return processes() == 1 or is_first()


def of_first(console: Console) -> Console:
    """The console, which says nothing in the other processes."""
    if not speaks():
        console.quiet = True
        os.environ["TQDM_DISABLE"] = "1"
    return console
