"""Tokenised data on disk, under a hash of everything that shaped it.

An entry is a folder that is whole or not there (`storage/folder.py`); its files carry checksums,
so a damaged one is made anew. Read next: `prepare.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...decoding.backbone.hub import generation_ends
from ...storage import delete_leftovers, read_manifest, sha256, staged_folder
from ...storage.formats import TOKENISED
from ..config import DataConfig
from .packed import PackedRows
from .raw import Rejected
from .report import DataReport
from .tokenizer import tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_PACKAGES = ("tokenizers", "transformers", "jinja2", "datasets", "pyarrow", "numpy")
_ARRAYS = ("ids_RS", "in_loss_RS", "document_RS")


@dataclass(frozen=True)
class Prepared:
    """Rows to train on, rows held out, what they are made of, and what was left out."""

    train: PackedRows
    validation: PackedRows
    report: DataReport
    rejected: Sequence[Rejected] = ()


def make_key(config: DataConfig, tokenizer: PreTrainedTokenizerBase, contents: Sequence[str | None]) -> str:
    """A hash of content, config, tokenizer and the versions of what reads and tokenises."""
    shape = config.model_dump(exclude={"cache"})
    for newer in ("control_tokens", "train_rows", "template_values", "template_date"):
        if shape[newer] == DataConfig.model_fields[newer].default:
            del shape[newer]  # keys from before there was that field are the same rows' still
    shaped_by = {
        "format": TOKENISED.number,
        "contents": contents,
        "config": shape,
        "template": _file_hash(config.chat_template),
        "tokenizer": tokenizer_hash(tokenizer),
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": sys.version_info[:2],  # its json and csv read the lines
    }
    if ends := sorted({*generation_ends(tokenizer.name_or_path)} - {tokenizer.eos_token_id}):
        shaped_by["ends"] = ends  # rows that spell one are left out
    return hashlib.sha256(json.dumps(shaped_by, sort_keys=True).encode()).hexdigest()


def cache_folder(config: DataConfig) -> Path:
    """`data.cache`, or `draftsmith` in the user's cache folder (XDG_CACHE_HOME)."""
    if config.cache is not None:
        return Path(config.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "draftsmith" / "data"


def load(folder: Path, key: str) -> Prepared | None:
    """The entry, its arrays mapped rather than read; None if there is none that is whole."""
    entry = folder / key
    if not entry.is_dir():
        return None
    try:
        record = read_manifest(entry)
        report = DataReport(**record["report"])
        return Prepared(
            train=_read_rows(entry, "train", report.fingerprint),
            validation=_read_rows(entry, "validation", report.fingerprint),
            report=report,
            rejected=tuple(Rejected(*each) for each in record["rejected"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = "of an older version" if isinstance(error, TypeError) else f"damaged ({error})"
        _log.warning("data: cache entry %s is %s; making it anew", entry, reason)
        shutil.rmtree(entry, ignore_errors=True)
        return None


def store(folder: Path, key: str, prepared: Prepared) -> None:
    """Write the entry; a folder that cannot be written is a warning, not the end of the run."""
    entry = folder / key
    record = {"report": prepared.report.to_dict(), "rejected": [list(each) for each in prepared.rejected]}
    try:
        delete_leftovers(folder)
        with staged_folder(entry, manifest=record) as staging:
            for part in ("train", "validation"):
                for array in _ARRAYS:
                    np.save(staging / f"{part}.{array}.npy", getattr(getattr(prepared, part), array))
    except OSError as error:
        # a second process that was faster has made the same entry
        if not entry.is_dir():
            _log.warning("data: cannot cache in %s (%s); set data.cache", folder, error.strerror)


def _read_rows(entry: Path, part: str, fingerprint: str) -> PackedRows:
    arrays: Mapping[str, Any] = {
        name: np.load(entry / f"{part}.{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS
    }
    return PackedRows(**arrays, fingerprint=fingerprint)


def _file_hash(path: str | None) -> str | None:
    return None if path is None else sha256(Path(path).expanduser())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
