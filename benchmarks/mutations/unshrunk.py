"""A plugin of pytest for runs on planted bugs: hypothesis draws the same every time and does not shrink.

That a bug is seen is enough; the smallest example of it takes minutes. Read next: `planting.py`.
"""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "unshrunk", derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("unshrunk")
