"""The environment block of a bug report: versions, hardware, git state. Nothing private."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from .. import __version__
from ..eval.measure.environment import environment


def doctor() -> str:
    """A block to paste; no user names, no paths, no tokens."""
    block = {"draftsmith": __version__, "git": _git_state(), **environment()}
    return json.dumps(block, indent=1)


def _git_state() -> str:
    root = Path(__file__).parent.parent
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(root, "status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return commit + (" with changes" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    process = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return process.stdout.strip()
