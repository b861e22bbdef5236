"""Where rows come from: the standard library, files, folders and globs, hub data sets.

A source yields raw rows and has a hash of its content; it knows nothing of tokenizers.

Of a pattern every real folder is entered once and every real file read once: links are followed, as `glob` does, but
not to what the walk has met already, so links in a circle end. The Python standard library's own sources are real text
that every machine already has; their split is a pure function of the module's path, so a file never moves between
training, validation and prompts from one Python version to another.

Read next: `readers.py` for file formats, `records.py` for what becomes of the rows.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, Protocol

from ...errors import DataError, EnvironmentFailure, RequestError
from ..config import DataConfig
from .presets import ChosenPreset, chosen_preset, is_on_hub, near_preset
from .raw import Extent, Extents, RawRow, Rows
from .readers import SUFFIXES, import_datasets, read_file, reader_version

Split = Literal["train", "validation", "prompts"]

# tests repeat one pattern thousands of times, vendored trees are not the library, and `encodings`
# is a hundred generated tables: easy to foresee, they would flatter every figure measured on them
_SKIPPED = {"__pycache__", "dist-packages", "encodings", "idle_test", "lib-dynload", "site-packages", "test", "tests"}


def stdlib_texts(split: Split) -> Iterator[tuple[str, str]]:
    """Yield (module path, source) of one split, in the order of the paths.

    Paths are relative to the library's folder and use `/`. About 3 % of the modules are held out
    for validation and 3 % for prompts.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_sources(root)):
        module = path.relative_to(root).as_posix()
        if split_of(module) == split:
            yield module, path.read_text(encoding="utf-8", errors="replace")


def split_of(module: str) -> Split:
    """The split that a module's path belongs to, by its SHA-256."""
    bucket = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "big") % 100
    if bucket < 3:
        return "validation"
    return "prompts" if bucket < 6 else "train"


def _sources(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        # not gone into: beside the library there may be a hundred thousand files of packages
        inner[:] = [each for each in inner if each not in _SKIPPED and not each.startswith("config-")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


_log = logging.getLogger(__name__)
_HUB = "hub:"


class Source(Protocol):
    """Something that rows can be read from, more than once."""

    @property
    def name(self) -> str: ...

    def rows(self, extents: Extents | None = None) -> Rows:
        """Every row, in an order that depends on the content alone.

        Args:
            extents: told how many bytes there are, before the first row, and how many are read.
        """

    def identity(self) -> str:
        """A hash of the content: equal if and only if the same rows would be read."""


@dataclass(frozen=True)
class StdlibSource:
    """One split of the Python standard library's own sources."""

    split: Split
    name: str = "stdlib"

    def rows(self, extents: Extents | None = None) -> Rows:
        modules = stdlib_texts(self.split) if extents is None else list(stdlib_texts(self.split))
        sizes = {module: len(text.encode()) for module, text in modules} if extents is not None else {}
        extent = Extent(sum(sizes.values()))
        if extents is not None:
            extents[self.name] = extent
        for module, text in modules:
            extent.read += sizes.get(module, 0)
            if text:  # an empty __init__.py is no bad row
                yield RawRow(module, 1, {"text": text})

    def identity(self) -> str:
        return _hashed(part for pair in stdlib_texts(self.split) for part in pair)


@dataclass(frozen=True)
class FileSource:
    """Files, read one after another."""

    name: str
    files: tuple[Path, ...]
    block: int

    def rows(self, extents: Extents | None = None) -> Rows:
        extents = {} if extents is None else extents
        extents |= {str(path): Extent(_size(path)) for path in self.files}
        for path in self.files:
            yield from read_file(path, block=self.block, extent=extents[str(path)])

    def identity(self) -> str:
        return _hashed(part for path in self.files for part in (str(path), _content(path), *reader_version(path)))


@dataclass(frozen=True)
class HubSource:
    """A split of a hub data set, loaded by `datasets`."""

    name: str
    dataset: Any

    def rows(self, extents: Extents | None = None) -> Rows:
        # what the split holds in memory: its files are the hub's
        extent, count = Extent(int(self.dataset.data.nbytes)), len(self.dataset)
        if extents is not None:
            extents[self.name] = extent
        for number, row in enumerate(self.dataset, 1):
            extent.read = extent.size * number // count
            yield RawRow(self.name, number, row)

    def identity(self) -> str:
        return _hashed([self.name, str(self.dataset._fingerprint)])


@dataclass(frozen=True)
class PresetSource:
    """The rows of a set by name, its columns named as a shape has them; a copy where they are so already stays."""

    name: str
    rows_of: Source
    rename: Mapping[str, str]

    def rows(self, extents: Extents | None = None) -> Rows:
        for row in self.rows_of.rows(extents):
            if isinstance(row, RawRow) and set(self.rename) <= set(row.columns):
                row = row._replace(columns={self.rename.get(key, key): each for key, each in row.columns.items()})
            yield row

    def identity(self) -> str:
        return _hashed([self.rows_of.identity(), *self.rename, *self.rename.values()])


def open_sources(config: DataConfig) -> tuple[Source, Source | None]:
    """Rows to train on and the named held-out rows, None where a hash holds them out.

    Raises:
        RequestError: the source does not exist or names no data. EnvironmentFailure: the hub
        cannot be reached, or `datasets` is missing.
    """
    train = _open(config.source, config, split=config.split, part="train")
    if config.validation is not None:
        split = config.validation_split or config.split
        return train, _open(config.validation, config, split=split, part="validation")
    if config.validation_split is not None:
        if not is_on_hub(config.source):
            raise RequestError(
                f"data.validation_split is {config.validation_split!r}, but data.source "
                f"{config.source!r} has no splits; name the held-out rows by data.validation"
            )
        return train, _open(config.source, config, split=config.validation_split, part="validation")
    if config.source == "stdlib":
        return train, StdlibSource("validation")
    return train, None


def _open(source: str, config: DataConfig, *, split: str, part: Split) -> Source:
    if source == "stdlib":
        return StdlibSource(part)
    if (chosen := chosen_preset(source)) is not None:
        return _open_preset(chosen, config, split)
    if source.startswith(_HUB):
        return _open_hub(source.removeprefix(_HUB), config.revision, split)
    return _open_files(source, config)


def _open_files(source: str, config: DataConfig) -> FileSource:
    # long enough that a cut costs little, short enough that a single book still has many rows
    return FileSource(source, tuple(find_files(source)), block=16 * config.sequence_length)


def _open_preset(chosen: ChosenPreset, config: DataConfig, split: str) -> PresetSource:
    """A set by name; `train`, which is the default, is the split that it is trained on."""
    preset = chosen.preset
    if chosen.own is not None:
        own = _open_files(chosen.own, config)
        return PresetSource(f"{chosen.name}={own.name}", own, preset.rename)
    split, revision = preset.split if split == "train" else split, config.revision or preset.revision
    dataset = _load_hub(
        preset.repository, preset.config, revision, split, files=preset.file, instead=chosen.bring, name=chosen.name
    )
    name = f"{chosen.name} ({replace(preset, revision=revision).origin}[{split}])"
    return PresetSource(name, HubSource(name, dataset), preset.rename)


def find_files(source: str) -> list[Path]:
    """The data files that a path, a folder or a glob names, sorted."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() in SUFFIXES:
            return [path]
        raise RequestError(f"data: {source} has the suffix {path.suffix!r}; readable are {', '.join(SUFFIXES)}")
    if path.is_dir():
        files = [each for each in path.rglob("*") if _is_data(each.relative_to(path), each)]
    elif glob.has_magic(source):
        files = [each for each in glob_files(path) if _is_data(Path(each.name), each)]
    else:
        raise RequestError(
            f"data: there is no {source!r}; expected `stdlib`, a file, a folder, a glob in quotes, hub:NAME"
            f"{near_preset(source)}"
        )
    if not files:
        raise RequestError(f"data: {source} names no file with one of {', '.join(SUFFIXES)}")
    return sorted(once(own_names_first(files)))


def _is_data(relative: Path, path: Path) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and path.suffix.lower() in SUFFIXES and path.is_file()


def _open_hub(name: str, revision: str | None, split: str) -> HubSource:
    """`NAME` or `NAME:CONFIG` at a revision."""
    repository, _, subset = name.partition(":")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository):
        raise RequestError(
            f"data: hub:{name} names no data set; expected hub:NAME, hub:OWNER/NAME or, with a "
            "configuration, hub:OWNER/NAME:CONFIG"
        )
    if revision is None:
        _log.warning("data: hub:%s has no data.revision; the run cannot be repeated when it changes", name)
    dataset = _load_hub(repository, subset or None, revision, split)
    return HubSource(f"{_HUB}{name}[{split}]", dataset)


def _load_hub(
    repository: str,
    subset: str | None,
    revision: str | None,
    split: str,
    *,
    files: str | None = None,
    instead: str = "without a network, name a local file, or `stdlib`",
    name: str = "",
) -> Any:
    """A split of a data set; `instead` is what to do where the hub cannot be reached."""
    datasets, what = import_datasets(), f"{name} (hub:{repository})" if name else f"hub:{repository}"
    try:
        return datasets.load_dataset(repository, subset, split=split, revision=revision, data_files=files)
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise RequestError(f"data: {what}: {_first_line(error)}") from error
    except OSError as error:
        raise EnvironmentFailure(f"data: {what} cannot be loaded ({_first_line(error)}); {instead}") from error
    except datasets.exceptions.DatasetsError as error:
        raise DataError(f"data: {what} is broken ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _content(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _hashed(parts: Iterable[str]) -> str:
    """A hash of texts; lengths go in, so that no two lists run together."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def glob_files(pattern: Path) -> list[Path]:
    """What matches: `*`, `?` and `[]` inside a name, `**` for folders of any depth; dot files by name alone."""
    parts = list(pattern.parts)
    at = next(at for at, part in enumerate(parts) if glob.has_magic(part))
    found = [Path(*parts[:at])]
    if parts[-1] == "**":
        parts.append("*")
    for part in parts[at:]:
        entered: set[str] = set()
        found = once(each for path in found for each in _step(path, part, entered))
    return found


def once(files: Iterable[Path]) -> list[Path]:
    """The paths, each real file or folder under the first of its names."""
    seen: dict[str, Path] = {}
    for path in files:
        seen.setdefault(os.path.realpath(path), path)
    return list(seen.values())


def own_names_first(files: Iterable[Path]) -> list[Path]:
    """In order of name, links behind what is no link."""
    return sorted(files, key=lambda path: (path.is_symlink(), path))


def _step(path: Path, part: str, entered: set[str]) -> Iterator[Path]:
    """What one part of a pattern leads to from `path`."""
    if part == "**":
        yield from _folders(path, entered)
    elif not glob.has_magic(part):
        yield from (each for each in [path / part] if each.exists())
    else:
        hidden = part.startswith(".")
        yield from (each for each in _entries(path, hidden=hidden) if fnmatch(each.name, part))


def _folders(folder: Path, entered: set[str]) -> Iterator[Path]:
    """The folder and all below it, each real one once."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        real = os.path.realpath(path)
        if real not in entered and path.is_dir():
            entered.add(real)
            yield path
            waiting += reversed(_entries(path, hidden=False))


def _entries(folder: Path, *, hidden: bool) -> list[Path]:
    """What a folder holds; nothing where it is none, or may not be looked into."""
    try:
        return own_names_first(each for each in folder.iterdir() if hidden or not each.name.startswith("."))
    except OSError:
        return []
