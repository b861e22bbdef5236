"""Recipe sections that the launch room reads. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ...config import Section


class MachineConfig(Section):
    """The machine that a run is made for; `check` alone reads it, where it runs on another one."""

    processes: int | None = Field(None, ge=1)
    """Processes of the launch over all machines, one per device; empty: the machine at hand."""
    device_gb: float = Field(80.0, gt=0)
    """Memory of each device in GB (10^9 bytes)."""
    sharding: Literal["none", "zero2", "zero3"] = "zero2"
    """What the launch configuration spreads over the processes: none is `ddp.yaml`. Of one process none by default."""
