"""Which process of a launch this one is, by what launchers set; nothing is imported for it. Read next: `held.py`."""

from __future__ import annotations

import os

# torch's launcher, MPICH and Intel MPI, Open MPI, MVAPICH2: those that accelerate takes
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def rank() -> str | None:
    """The number of this process in its launch; None where no launcher gives one."""
    return next((os.environ[name] for name in _RANKS if os.environ.get(name)), None)


def is_first() -> bool:
    """Whether this process speaks for its launch, or is alone."""
    return rank() in (None, "0")
