"""Whose shards are whose, where a run goes on in fewer processes."""

from __future__ import annotations

from pathlib import Path

import torch
from draftsmith.data.features.shards import Shards


def test_what_a_process_that_is_gone_has_kept_belongs_to_another(tmp_path: Path) -> None:
    """Three processes, then two: the first takes the last one's part over, and may push it out."""
    row = {"states": torch.zeros(1, 2, 3)}
    for rank in range(3):
        made = Shards(tmp_path, "own", rank=rank, world=3)
        for number in range(rank + 1):
            made.write(made.encode({f"{rank}-{number}": row}), [f"{rank}-{number}"], used=0)
    first, second = (Shards(tmp_path, "own", rank=rank, world=2) for rank in range(2))
    kept = [sorted(key for shard in each.mine() for key in shard.rows) for each in (first, second)]
    assert kept == [["0-0", "2-0", "2-1", "2-2"], ["1-0", "1-1"]]
    assert "1-1" in first, "read by all"
    for shard in first.mine():
        first.forget(shard)
    assert {path.name[:3] for path in tmp_path.glob("*.safetensors")} == {"001"}
