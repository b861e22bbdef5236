"""Values of a recipe on the command line: which words are such values, and which are the verb's own flags.

Read next: `load.py`, which puts them over the recipe's.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import fields
from functools import cache

from ...drafters.config import current_path
from ...errors import RequestError
from ..screen import printable
from .model import Recipe, section_of

_log = logging.getLogger(__name__)


def value_path(name: str, known: Sequence[str]) -> str:
    """The dotted path of a value as Python code names it: `loop__steps`, `loop_steps`, or `steps` if there is one.

    Args:
        known: the paths that there are; of a name that is none the section is told from the field, for the error.

    Raises:
        RequestError: several sections have a value of that name.
    """
    path = name.replace("__", ".")
    if path in known:
        return path
    joined = [each for each in known if each.replace(".", "_") == path.replace(".", "_")]
    found = joined or [each for each in known if each.partition(".")[2].replace(".", "_") == name.replace("__", "_")]
    if len(found) > 1:
        shown = " or ".join(each.replace(".", "_") for each in found)
        raise RequestError(f"{name} is a value of several sections; expected {shown}")
    if found:
        return found[0]
    sections = {each.partition(".")[0] for each in known if "." in each}
    meant = next((each for each in sections if path.startswith(f"{each}_")), None)
    return path if meant is None else f"{meant}.{path.removeprefix(f'{meant}_')}"


def current_flag(flag: str) -> str:
    """A flag of a recipe as it is called now; a line tells of one that had another name."""
    now = current_path(flag)
    if now != flag:
        say_renamed(f"--{flag}", f"--{now} now")
    return now


@cache
def say_renamed(old: str, now: str) -> None:
    """Say once what took the place of an old name."""
    _log.warning("%s is %s; this is the last version that knows the old names", old, now)


def check_words(words: Sequence[str]) -> None:
    """Raise RequestError for a word with what no name and no value has: it would be obeyed by a terminal."""
    for word in words:
        if printable(word) != word:
            raise RequestError(
                f"the word {ascii(word):.200} holds control characters, or bytes that are not UTF-8 text; "
                "expected names and values without them: rename the file, or write the value anew"
            )


def split_overrides(words: Sequence[str], *, of: type | None = None) -> tuple[list[str], list[tuple[str, str]]]:
    """Take the recipe's values out of the words: `--section.field value`, `--name=value`.

    Args:
        of: the verb, whose own flags are left among the words.

    Raises:
        RequestError: a value is missing, a whole section is named, or a flag is neither the recipe's nor the verb's.
    """
    own = {each.name for each in fields(of)} if of is not None else set()
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        path = name.replace("-", "_")
        if not word.startswith("--") or not _is_value(path, own):
            if of is not None and len(name) > 1 and word.startswith("--"):
                _check_own(name, path, own)
            rest.append(word)
            continue
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise RequestError(f"{word}: no value given; expected {word} VALUE")
            value = waiting.pop(0)
        overrides.append((current_flag(path), value))
    return rest, overrides


def _is_value(path: str, own: set[str]) -> bool:
    """Whether a flag sets a value of the recipe.

    Raises:
        RequestError: it names a section.
    """
    if "." in path:
        return True
    if path in own or path not in Recipe.model_fields:
        return False
    section = section_of(path)
    if section is None:
        return True
    some = ", ".join(f"--{path}.{name}" for name in list(section.model_fields)[:3])
    raise RequestError(f"--{path} names a section of the recipe; expected one of its values, as in {some}")


def _check_own(name: str, path: str, own: set[str]) -> None:
    """Raise RequestError for a flag that the verb does not have."""
    known = {*own, "help"}
    if path in known or path.removeprefix("no_") in known:
        return
    near = difflib.get_close_matches(path, {*known, *Recipe.model_fields}, n=1, cutoff=0.6)
    hint = f"did you mean --{near[0].replace('_', '-')}? " if near else ""
    raise RequestError(f"--{name}: no such flag, and no value of the recipe; {hint}--help lists what there is")
