"""Sets of rows by name: what `presets.yaml` states of them, and the words by which `data.source` asks for one.

NAME is read from the hub at its commit, NAME@REVISION at another one; NAME=FILE is the user's own copy. What lies
under that name here, a file or a folder, goes first. Read next: `sources.py`, which reads them.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from ...errors import RequestError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preset:
    """A set of rows as its publisher has it."""

    repository: str
    revision: str
    """The commit that is read unless another is named."""
    columns: tuple[str, ...]
    """What its rows hold that is read."""
    licence: str
    """As its card states it."""
    good_for: str
    config: str | None = None
    split: str = "train"
    file: str | None = None
    """The only one of the repository that is read; None: those of the split."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Columns -> those of the shape that they make."""

    @property
    def origin(self) -> str:
        """Where its rows are from, for people and records."""
        return f"hub:{self.repository}{f':{self.config}' if self.config else ''}@{self.revision}"


@dataclass(frozen=True)
class ChosenPreset:
    """A preset that a source names."""

    name: str
    preset: Preset
    own: str | None = None
    """The user's file, folder or glob in its place."""

    @property
    def bring(self) -> str:
        """What to do where the hub cannot be asked."""
        what = self.preset.file or f"a file of its split {self.preset.split}"
        return f"connect, or bring {what} ({' and '.join(self.preset.columns)}) and give {self.name}=FILE in its place"


@cache
def presets() -> dict[str, Preset]:
    """All of `presets.yaml`, by name."""
    from ruamel.yaml import YAML

    content = YAML(typ="safe", pure=True).load((files(__package__) / "presets.yaml").read_text(encoding="utf-8"))
    return {name: Preset(**{**stated, "columns": tuple(stated["columns"])}) for name, stated in content.items()}


def chosen_preset(source: str) -> ChosenPreset | None:
    """The preset that `data.source` names; None where it names something else.

    Raises:
        RequestError: a preset's name with nothing behind its @ or =.
    """
    match = re.fullmatch(r"([\w-]+)(?:([=@])(.*))?", source, re.DOTALL)
    if match is None or match[1] not in presets():
        return None
    name, mark, more = match[1], match[2], match[3]
    if Path(source).exists():
        _log.warning("data: %s is a file or folder here, and is read in place of the set of that name", source)
        return None
    preset = presets()[name]
    if mark and not more:
        raise RequestError(
            f"data: {source} names nothing behind {mark}; expected {name}, {name}@REVISION or {name}=FILE"
        )
    if mark == "@":
        preset = replace(preset, revision=more)
    return ChosenPreset(name, preset, more if mark == "=" else None)


def near_preset(source: str) -> str:
    """The end of a sentence about a source that is none: the preset that may have been meant, and what there are."""
    near = difflib.get_close_matches(source.partition("=")[0].partition("@")[0], presets(), 1)
    return f", or a set by name ({', '.join(presets())}){f'; did you mean {near[0]}?' if near else ''}"


def is_on_hub(source: str) -> bool:
    """Whether rows come from the hub, so that they may have to be fetched."""
    chosen = chosen_preset(source)
    return source.startswith("hub:") if chosen is None else chosen.own is None
