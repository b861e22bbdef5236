"""A pytest plugin: behind a moment that the surroundings name no test begins, in workers of xdist too.

Read next: `../gpu_tests.py`, which sets it.
"""

from __future__ import annotations

import os
import time

import pytest

UNTIL = "DRAFTSMITH_TESTS_UNTIL"
"""Seconds since the epoch."""
REASON = "no time was left for it"


def pytest_runtest_setup() -> None:
    """Skip what would begin too late."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(REASON)
