"""Recipes: one strict schema, YAML read safely, every error at once with its path and line.

Values come from the defaults, a `base:` recipe, the recipe, and flags, in rising precedence; where
each came from is remembered for `show`. No torch here. Read next: `model.py`, the schema; `text.py`, the YAML;
`train/run.py`.
"""

from __future__ import annotations

import difflib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import CollectionStartEvent, ScalarEvent

from ...drafters.config import current_path, turned_off
from ...errors import RequestError
from .model import Recipe
from .text import check_plain_values, cut, is_text, plain, read_yaml, shown
from .values import current_flag, listed, say_renamed

Path_ = tuple[str, ...]
Reason = str | Callable[[], str]
"""An error, or what looks for its words: a nearest name takes milliseconds, and there may be thousands."""
_IN_A_FILE = re.compile(r"\S+ \((?!--)")  # an error's path, and a place that is no flag
_RECIPES = Path(str(files("draftsmith.recipes")))
_BASES = _RECIPES / "bases"
_GIVEN = Path("the given recipe")
_SHOWN = 10  # errors, so that they fit a screen


@dataclass(frozen=True)
class Resolved:
    """A validated recipe and where each of its values comes from."""

    recipe: Recipe
    origin: Mapping[str, str]
    """Dotted path -> `default`, `FILE:LINE` or the flag."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """The sections that a file or a flag names, and where."""

    def yaml(self) -> str:
        """The recipe with every value written out, as saved beside a run."""
        stream = io.StringIO()
        writer = YAML()
        writer.dump(json.loads(self.recipe.model_dump_json()), stream)
        return stream.getvalue()


@dataclass
class _Values:
    """Raw values by path, with their origin, before validation."""

    values: dict[Path_, Any] = field(default_factory=dict)
    origin: dict[Path_, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)
    """Where each section of the recipe begins that a file or a flag names."""
    errors: list[Reason] = field(default_factory=list)

    def nested(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for path, value in self.values.items():
            at = tree
            for key in path[:-1]:
                at = at.setdefault(key, {})
            at[path[-1]] = value
        return tree


def load_recipe(name: str | Mapping[str, Any], overrides: Sequence[tuple[str, str]] = ()) -> Resolved:
    """Read a recipe by name, by path or from a dict of its sections, apply `section.field` overrides, validate it all;
    RequestError with all errors at once, each with its path and where it came from."""
    file = find_recipe(name) if isinstance(name, str) else _GIVEN
    collected = _Values()
    _read_with_base(file, None if isinstance(name, str) else json.dumps(name, default=str), collected)
    overrides = [(current_flag(flag), text) for flag, text in overrides]
    for flag, text in overrides:
        _override(flag, text, collected)
    # sizes of a tree that the recipe has and a flag turns off
    for size in turned_off({flag.removeprefix("drafter."): text for flag, text in overrides}):
        for kept in (collected.values, collected.origin):
            kept.pop(("drafter", *size.split(".")), None)
    try:
        # strictly, or `true` would be a count of 1; as JSON, or a list would be no pair of numbers
        recipe = Recipe.model_validate_json(json.dumps(collected.nested(), default=str), strict=True)
    except ValidationError as error:
        collected.errors += [_explain(each, collected, file) for each in _own(error.errors())]
    if collected.errors:
        raise RequestError(_all_errors(file, collected.errors, with_flags=bool(overrides) and _is_right(file)))
    origin = {".".join(path): where for path, where in collected.origin.items()}
    return Resolved(recipe, {path: origin.get(path, "default") for path in field_paths()}, collected.sections)


def _is_right(file: Path) -> bool:
    """Whether a recipe has no error by itself."""
    try:
        load_recipe(str(file))
    except RequestError:
        return False
    return True


def _all_errors(file: Path, errors: Sequence[Reason], *, with_flags: bool) -> str:
    """One screen: how many, the first of them, each on its line; `with_flags`: the recipe is right by itself, so that
    flags are wrong, or do not fit it."""
    count = len(errors)
    lines = [each if isinstance(each, str) else each() for each in errors[:_SHOWN]]
    if count > _SHOWN:
        lines.append(f"and {count - _SHOWN:,} more")
    found = f"{count:,} error{'s' * (count > 1)}"
    head = f"{file}: {found} in the recipe"
    if with_flags:
        placed = any(_IN_A_FILE.match(line) for line in lines)
        head = f"{file}: {found} in the recipe with these flags" if placed else f"{found} in the flags"
    return "\n".join([head, *(f"  - {line}" for line in lines)])


def without_run(overrides: Sequence[tuple[str, str]] = ()) -> Recipe:
    """What commands go by that are given no run: how a target is decoded and measured, whatever a drafter was trained
    with. RequestError as of `load_recipe`."""
    return load_recipe(str(_BASES / "without-run.yaml"), overrides).recipe


def shipped_recipes() -> list[Path]:
    """The recipes that come with the package, sorted by name."""
    return sorted(_RECIPES.glob("*.yaml"))


def headline(file: Path) -> tuple[str, str]:
    """Method and summary of a shipped recipe, read no further than its first section: for `ls`."""
    words: list[str] = []  # keys and values in turn
    for event in YAML(typ="rt", pure=True).parse(file.read_text(encoding="utf-8")):
        if isinstance(event, CollectionStartEvent) and words:
            break
        if isinstance(event, ScalarEvent):
            words.append(event.value)
    head = dict(zip(words[::2], words[1::2], strict=False))  # a section's key has no value
    method = head["method"] if "method" in head else headline(file.parent / head["base"])[0]
    return method, head["summary"]


def find_recipe(name: str) -> Path:
    """A shipped recipe by name, or any file by path."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        if _is_file(Path(name)):
            return Path(name)
        if _is_file(Path(name), Path.is_dir):
            own = Path(name) / "run.yaml"
            inside = f"the recipe of a run is {cut(str(own))}" if _is_file(own) else "name a file in it"
            raise RequestError(f"{cut(name)} is a folder; expected a recipe file: {inside}")
        raise RequestError(f"there is no recipe file {cut(name)}; `draftsmith ls` lists shipped ones")
    shipped = {path.stem: path for path in shipped_recipes()}
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise RequestError(
        f"no recipe is called {shown(name)}{hint} Shipped: {', '.join(shipped)}. A file is named "
        "by its path, as in ./my.yaml"
    )


def _is_file(file: Path, kind: Callable[[Path], bool] = Path.is_file) -> bool:
    """Whether there is such a file, or a folder by `Path.is_dir`; of a name that none can have, there is none."""
    try:
        return kind(file)
    except (OSError, ValueError):
        return False


def field_paths() -> list[str]:
    """Dotted paths of all fields of a recipe, sections opened."""
    return [".".join(path) for path, _ in _fields(Recipe)]


def _fields(model: type[BaseModel], prefix: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    for name, info in model.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _fields(section, (*prefix, name))
        else:
            yield (*prefix, name), info


def _read_with_base(file: Path, given: str | None, collected: _Values) -> None:
    content = read_yaml(file, given)
    base = content.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise RequestError(f"{file}: base is {shown(base)}; expected the name or path of a recipe")
        base_file = _find_base(base, file)
        below = read_yaml(base_file)
        if "base" in below:
            raise RequestError(f"{file}: base {base_file} has a base itself; only one level is allowed")
        _collect(below, base_file, collected)
    _collect(content, file, collected)


def _find_base(base: str, file: Path) -> Path:
    """The file beside the recipe, or a shipped one: a copied recipe keeps the base that it had."""
    shipped = {str(path.relative_to(_RECIPES)): path for path in (*shipped_recipes(), *_BASES.glob("*.yaml"))}
    beside = file.parent / base
    if _is_file(beside) or base in shipped:
        return beside if _is_file(beside) else shipped[base]
    try:
        return find_recipe(base)
    except RequestError as error:
        raise RequestError(f"{file}: base: {error}") from error


def _collect(content: CommentedMap, file: Path, collected: _Values) -> None:
    """Take the values of a file, under the names that they have now; a line tells of a file that has old ones."""
    here: dict[Path_, str] = {}
    old = [*_flatten(content, file, collected, here)]
    if old:
        where, now = old[0]
        more = f" ({len(old) - 1} more renamed alike)" if len(old) > 1 else ""
        say_renamed(where, f"{now} now{more}")


def _flatten(
    content: CommentedMap, file: Path, collected: _Values, here: dict[Path_, str], prefix: Path_ = ()
) -> Iterator[tuple[str, str]]:
    """Flatten a mapping into paths, noting lines; keys that are no fields become errors.

    Args:
        here: the paths that this file has set, and where.

    Yields:
        Each field that has another name now: what it is called and where, and the name.
    """
    sections = _section_names(prefix)
    for key, value in content.items():
        path = (*prefix, str(key))
        lines = content.lc.data or {}  # a key of a merge (`<<`) has no line of its own
        line = (lines[key][0] if key in lines else content.lc.line) + 1
        where = file.name if file is _GIVEN else f"{file.name}:{line}"
        now = tuple(current_path(".".join(path)).split(".")) if len(path) > 1 else path
        if now != path:
            yield f"{'.'.join(path)} ({where})", ".".join(now)
        if str(key) in sections:
            collected.sections[".".join(path)] = where
            if isinstance(value, CommentedMap):
                yield from _flatten(value, file, collected, here, path)
            elif value is not None:
                collected.errors.append(
                    f"{'.'.join(path)} ({where}): found {shown(plain(value))}; expected a section of fields"
                )
        elif now in here:
            name = ".".join(now)
            collected.errors.append(f"{'.'.join(path)} ({where}): {name} is set at {here[now]} too; leave one out")
        elif now in _known_paths():
            here[now] = where
            collected.values[now], collected.origin[now] = plain(value), where
            if not is_text(collected.values[now]):
                name, found = ".".join(path), shown(collected.values.pop(now))
                collected.errors.append(f"{name} ({where}): found {found}; expected text without control characters")
        else:
            collected.errors.append(partial(_unknown, path, where))


def _unknown(path: Path_, where: str) -> str:
    return f"{'.'.join(path):.80} ({where}): unknown key{_suggest(path)}"


def forget_fields() -> None:
    """Find the fields anew: the recipe has been made of other records."""
    for known in (_section_names, _known_paths):
        known.cache_clear()


@cache
def _section_names(prefix: Path_) -> set[str]:
    depth = len(prefix)
    return {path[depth] for path, _ in _fields(Recipe) if path[:depth] == prefix and len(path) > depth + 1}


@cache
def _known_paths() -> set[Path_]:
    return {path for path, _ in _fields(Recipe)}


def _suggest(path: Path_) -> str:
    """The key that was probably meant: its namesake elsewhere, a sibling, then any of all."""
    full, name = ".".join(path), path[-1]
    known = field_paths()
    if len(path) == 1:
        known = sorted({each.split(".")[0] for each in known})
    namesakes = [each for each in known if each.split(".")[-1] == name]
    parts = [each.split(".") for each in known]
    # sections within sections too
    siblings = sorted({".".join(each[: len(path)]) for each in parts if each[: len(path) - 1] == list(path[:-1])})
    near = difflib.get_close_matches(full, siblings, n=1, cutoff=0.75)
    near = namesakes or near or difflib.get_close_matches(full, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _override(flag: str, text: str, collected: _Values) -> None:
    path = tuple(flag.split("."))
    if path not in _known_paths():
        collected.errors.append(lambda: f"--{cut(flag)}: unknown flag{_suggest(path)}")
        return
    if len(path) > 1:
        collected.sections.setdefault(path[0], f"--{flag}")
    annotation = dict(_fields(Recipe))[path].annotation
    value = _flag_value(text, annotation, f"--{flag}")
    collected.values[path], collected.origin[path] = plain(value), f"--{flag}"


def _flag_value(text: str, annotation: Any, flag: str) -> Any:
    """A flag's text as YAML would read it; where text is expected it stays as it is."""
    if not text:
        return "" if annotation is str else None
    either = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
    try:
        if str not in either:
            check_plain_values(text, flag)
        value = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError):
        return text
    return text if str in either and value is not None else listed(value, either)


def _own(errors: Sequence[Any]) -> list[Any]:
    """Without those that follow from others: the count of a list with wrong items, each missing item but the last."""
    places = [each["loc"] for each in errors]
    inside = {place[:n] for place in places for n in range(len(place))}
    following = {(*place[:-1], place[-1] - 1) for place in places if isinstance(place[-1], int)}
    dropped = {"too_short": inside, "missing": following}
    return [each for each in errors if each["loc"] not in dropped.get(each["type"], ())]


def _explain(error: Any, collected: _Values, file: Path) -> str:
    path, value = tuple(str(part) for part in error["loc"]), error["input"]
    reason = error["msg"].removeprefix("Value error, ")
    field = reason.split()[0]
    if isinstance(value, dict) and field in value:  # a section's own rule, on that field of it
        path, value = (*path, field), value[field]
    origin = collected.origin
    where = next((origin[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origin), file.name)
    if error["type"] == "missing" and isinstance(error["loc"][-1], int):  # the last item of a tuple
        return f"{'.'.join(path[:-1])} ({where}): found {shown(value)}; expected {error['loc'][-1] + 1} numbers"
    if error["type"] == "missing":
        return f"{'.'.join(path)} ({where}): missing; {cut(str(Recipe.model_fields[path[0]].description), 150)}"
    return f"{'.'.join(path)} ({where}): found {shown(value)}; {reason[0].lower()}{reason[1:]}"
