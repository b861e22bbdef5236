"""A pytest plugin for tests on a device: it ends what would otherwise take other tests along.

Behind a moment that the surroundings name no test begins, in workers of xdist too. A worker whose device answers no
more would fail one test after the other and so take them all; it ends, and xdist begins another.

Read next: `../gpu_tests.py`, which sets it.
"""

from __future__ import annotations

import os
import sys
import time

import pytest

UNTIL = "DRAFTSMITH_TESTS_UNTIL"
"""Seconds since the epoch."""
REASON = "no time was left for it"


def pytest_runtest_setup() -> None:
    """Skip what would begin too late."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(REASON)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """End a worker whose device answers no more; the test behind which it did is named as the one that crashed."""
    torch = sys.modules.get("torch")
    if torch is None or "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)
