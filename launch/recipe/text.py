"""The text of a recipe: YAML read safely, of which plain values come out. No torch here.

Read next: `load.py`, which puts recipes together of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from ...errors import RequestError
from ..screen import printable

_MOST_BYTES = 100_000  # of a recipe; a whole one has 6,000


def read_yaml(file: Path, given: str | None = None) -> CommentedMap:
    """The content of a recipe file, or `given` in its place."""
    try:
        size = file.stat().st_size if given is None else len(given)
        if size > _MOST_BYTES:
            raise RequestError(f"{file}: holds {size:,} bytes; a recipe has a few thousand: name the recipe itself")
        text = file.read_text(encoding="utf-8") if given is None else given
        check_plain_values(text, file)
        content = YAML(typ="rt", pure=True).load(text)
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise RequestError(f"{file}: cannot be read ({error.strerror})") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise RequestError(f"{file}: not valid YAML: {_yaml_reason(error)}") from error
    if not isinstance(content, CommentedMap):
        kind = "nothing" if content is None else "a list" if isinstance(content, list) else "a single value"
        raise RequestError(f"{file}: holds {kind}; expected sections such as `data:` and `loop:`")
    return content


_PLAIN_TAGS = {None, *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool"))}
_DEEPEST = 16  # mappings and lists inside each other; a recipe needs three


def check_plain_values(text: str, file: Path | str) -> None:
    """Refuse what could run code, grow without bound, or give one value two lines."""
    depth = 0
    for event in YAML(typ="rt", pure=True).parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        reason = None
        if getattr(event, "tag", None) not in _PLAIN_TAGS:
            reason = f"YAML tags are not allowed; found {shown(str(event.tag))}"
        elif getattr(event, "anchor", None) is not None:
            sign = "*" if isinstance(event, AliasEvent) else "&"
            reason = f"YAML aliases are not allowed; found {shown(sign + event.anchor)}. "
            reason += "Write the value out, or share it by `base:`"
        elif depth > _DEEPEST:
            reason = f"values are nested more than {_DEEPEST} deep"
        if reason is not None:
            raise RequestError(f"{file}:{event.start_mark.line + 1}: {reason}")


def _yaml_reason(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem:.200} (line {mark.line + 1})" if mark is not None else f"{problem:.200}"


def plain(value: Any) -> Any:
    """ruamel's own containers and scalars as ordinary Python values."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def is_text(value: Any) -> bool:
    """Whether a value's texts have nothing that a terminal would obey, and no file could be called."""
    if isinstance(value, dict):
        return all(is_text(each) for pair in value.items() for each in pair)
    if isinstance(value, list):
        return all(map(is_text, value))
    return not isinstance(value, str) or printable(value) == value


def shown(value: object) -> str:
    """A value as a message shows it, its beginning when it is long."""
    return cut(repr(value))


def cut(text: str, most: int = 80) -> str:
    """Its beginning when it is long."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
