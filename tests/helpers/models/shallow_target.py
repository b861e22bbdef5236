"""The embedded target with four of its layers, for tests to which its depth is nothing: a call takes a fifth.

Made once for a version of the weights; the session's fixture in `conftest.py` makes it where a test file
imports this one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from draftsmith.decoding.backbone.hub import embedded_target

LAYERS = (0, 6, 13, 19)


def _folder() -> Path:
    weights = Path(embedded_target(), "model.safetensors").read_bytes()
    version = hashlib.sha256(weights + repr(LAYERS).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir(), f"draftsmith-tests-{os.getuid()}", version, "tiny-target")


SHALLOW = str(_folder())
"""Its folder; it has the embedded target's name."""
ON_SHALLOW = ["--target.path", SHALLOW]


def make() -> None:
    """Write the folder if it is not there. Several processes may do so at once."""
    if Path(SHALLOW).is_dir():
        return
    from draftsmith.decoding.backbone.layers import with_layers
    from draftsmith.decoding.backbone.loading import load_model

    Path(SHALLOW).parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=Path(SHALLOW).parent))
    shutil.copytree(embedded_target(), staged, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    with_layers(load_model("tiny"), LAYERS).save_pretrained(staged)
    try:
        staged.rename(SHALLOW)
    except OSError:  # another process was faster
        shutil.rmtree(staged)
