"""Prompts cut from a corpus and the target's own continuations: the text that SSMs are boosted on.

A serving engine may write them too (`trainers/teacher/engine_answers.py`).

A sample is one document of its own row: prompt, then continuation, of which the continuation alone
counts as labels. Samples are written in parts that are whole or not there; a run that was killed
makes the missing ones, and any run those that were damaged since; processes share the parts out.
Read next: `rows/packed.py`, whose rows they become; `trainers/boost.py`, which trains on them.

Shapes: R samples, S tokens of a sample, prompt and continuation.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import autoregressive
from ...decoding.random import FOR_TRAINING, salted
from ...decoding.sampling import Warper
from ...drafters.identity import TargetIdentity
from ...errors import DataError, EnvironmentFailure, RequestError
from ...storage import check_identity_file, derived_tensors, write_tensors, write_text, writing
from ..rows.cache import Prepared
from ..rows.packed import Ids, PackedRows

_PART = 64  # samples that are decoded together, and stored as one file
_SETTINGS = "settings.json"
_TENSORS = ("ids", "labels", "documents")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What is to be written; two folders with the same values for the same rows are the same.

    Attributes:
        samples, held_out: prompts of training documents, and of held-out ones; None: as many as there are.
        prompt_tokens: tokens of a text prompt; of a chat the most that a prompt may have.
        tokens: most tokens of a continuation.
    """

    samples: int | None
    held_out: int | None
    prompt_tokens: int
    tokens: int
    temperature: float
    seed: int
    weights: str
    """A hash of the target's weights and config."""


class Continuations(NamedTuple):
    """Samples to train on, and samples of held-out documents."""

    train: PackedRows
    validation: PackedRows


class SettingNames(NamedTuple):
    """What the recipe calls the values that a message is about."""

    folder: str
    prompt: str


_OF_BOOST = SettingNames("boost.continuations", "boost.prompt_tokens")
Write = Callable[[Sequence[list[int]], range], Sequence[Sequence[int]]]
"""Prompts, and the numbers of the samples that they begin, to continuations."""


@dataclass(frozen=True)
class Team:
    """The processes that share the work; alone by default."""

    rank: int = 0
    world: int = 1
    wait: Callable[[], None] = lambda: None
    """Returns when every process has called it."""


def continuations(
    target: Backbone,
    rows: Prepared,
    wanted: Wanted,
    folder: Path,
    team: Team | None = None,
    *,
    named: SettingNames = _OF_BOOST,
    write: Write | None = None,
) -> Continuations:
    """The samples of `folder`, those made that are missing.

    Args:
        named: what messages call the folder and the length of prompts.
        write: who continues a prompt; default: `target` itself, here.

    Raises:
        DataError: the rows hold no prompt of that length.
        RequestError: the folder was made for something else or is a file, or the target's context
            is too short.
        EnvironmentFailure: the folder cannot be written.
    """
    team = team or Team()
    settings = _settings(target, rows, wanted)
    _check_same(folder, settings, named.folder)
    write = write or by_decoding(target, wanted)
    train, held_out = (
        choose_prompts(part, count, wanted.prompt_tokens, seed=wanted.seed, named=named.prompt)
        for part, count in ((rows.train, wanted.samples), (rows.validation, wanted.held_out))
    )
    team.wait()  # nobody writes before all have read
    parts = _parts([*held_out, *train])
    with writing(folder, again="go on with --resume auto"):
        if team.rank == 0:
            write_text(folder / _SETTINGS, json.dumps(settings, indent=1) + "\n")
        for part in parts[team.rank :: team.world]:
            if part.stored(wanted, folder) is None:
                part.make(write, wanted, folder)
                _log.info("continuations: %d of %d", part.end, len(held_out) + len(train))
    team.wait()
    stored = [_read_back(part, wanted, folder) for part in parts]
    ids_RS, labels_RS, document_RS = (np.concatenate([each[name].numpy() for each in stored]) for name in _TENSORS)
    made = hashlib.sha256(ids_RS.tobytes() + labels_RS.tobytes()).hexdigest()
    split = len(held_out)
    return Continuations(
        *(
            PackedRows(ids_RS[part], labels_RS[part], document_RS[part], made)
            for part in (slice(split, None), slice(split))
        )
    )


def by_decoding(target: Backbone, wanted: Wanted) -> Write:
    """The target continues prompts in this process."""

    def write(prompts: Sequence[list[int]], numbers: range) -> Sequence[Sequence[int]]:
        made = autoregressive(
            target,
            prompts,
            warper=Warper(wanted.temperature),
            max_new_tokens=wanted.tokens,
            eos_ids=target.eos_ids,
            seed=salted(wanted.seed, FOR_TRAINING),
            requests=numbers,
        )
        return made.tokens

    return write


def sample_tensors(prompts: Sequence[list[int]], answers: Sequence[Sequence[int]], length: int) -> dict[str, Tensor]:
    """Rows of one document each, [R, length]: prompt, then continuation, which counts as labels."""
    ids_RS = torch.zeros(len(prompts), length, dtype=torch.int32)
    labels_RS = torch.zeros_like(ids_RS, dtype=torch.bool)
    documents_RS = torch.full_like(ids_RS, -1)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids_RS[row, :end] = torch.tensor([*prompt, *answer], dtype=torch.int32)
        labels_RS[row, len(prompt) : end] = True
        documents_RS[row, :end] = 0
    return dict(zip(_TENSORS, (ids_RS, labels_RS, documents_RS), strict=True))


def count_prompts(rows: PackedRows, longest: int) -> int:
    """How many prompts the rows hold."""
    return sum(1 for row in range(len(rows)) for _ in prompts_in(rows, row, longest))


def choose_prompts(
    rows: PackedRows, count: int | None, longest: int, *, seed: int, named: str = _OF_BOOST.prompt
) -> list[list[int]]:
    """Prompts spread over as many rows as there are: one of each before a second of any; all without a `count`.

    Raises:
        DataError: there is none.
    """
    # sorted raw draws: a shuffle that no version of numpy changes
    raw = np.random.Philox(key=np.array([seed & (2**64 - 1), 0], np.uint64)).random_raw(len(rows))
    order = np.argsort(raw, kind="stable")
    prompts: list[list[int]] = []
    for turn in itertools.count():
        before = len(prompts)
        for row in order:
            cuts = list(prompts_in(rows, int(row), longest))
            if turn < len(cuts):
                prompts.append(cuts[(turn + int(raw[row] % len(cuts))) % len(cuts)])
            if len(prompts) == count:
                return prompts
        if len(prompts) == before:
            break
    if not prompts:
        raise DataError(
            f"none of {len(rows)} rows holds a prompt: a stretch of {longest} tokens in front of "
            f"more text, or a chat's prompt of at most {longest}. Change {named} or "
            "data.sequence_length"
        )
    if count is not None:
        _log.info("continuations: %d prompts asked for, the rows hold %d", count, len(prompts))
    return prompts


def prompts_in(rows: PackedRows, row: int, longest: int) -> Iterator[list[int]]:
    """Prompts of one packed row: pieces of a text, or what stands in front of an answer."""
    ids_S, in_loss_S, document_S = (each[row] for each in (rows.ids_RS, rows.in_loss_RS, rows.document_RS))
    for number in range(int(document_S.max()) + 1):
        at_T = np.flatnonzero(document_S == number)
        ids_T, in_loss_T = ids_S[at_T], in_loss_S[at_T]
        if in_loss_T[1:].all():  # a text; its first token may be the mark of the beginning
            yield from _pieces(ids_T, longest)
            continue
        # a prompt that is longer would lose its beginning: what decoding never meets
        begins = np.flatnonzero(in_loss_T[1:] & ~in_loss_T[:-1]) + 1
        yield from (ids_T[:begin].tolist() for begin in begins if begin <= longest)


def _pieces(ids_T: Ids, length: int) -> Iterator[list[int]]:
    """Pieces of one length, none with the text's last token, behind which nothing follows."""
    for at in range(0, len(ids_T) - length, length):
        yield ids_T[at : at + length].tolist()


class _Part(NamedTuple):
    """Some samples by their numbers."""

    begin: int
    prompts: list[list[int]]

    @property
    def end(self) -> int:
        return self.begin + len(self.prompts)

    def path(self, folder: Path) -> Path:
        return folder / f"part-{self.begin // _PART:05d}.safetensors"

    def stored(self, wanted: Wanted, folder: Path) -> dict[str, Tensor] | None:
        """What is written; None where it is missing or damaged, and has to be made."""
        shape = (len(self.prompts), wanted.prompt_tokens + wanted.tokens)
        return derived_tensors(self.path(folder), dict.fromkeys(_TENSORS, shape))

    def make(self, write: Write, wanted: Wanted, folder: Path) -> None:
        """Have the continuations written, and keep the part, whole or not at all."""
        answers = write(self.prompts, range(self.begin, self.end))
        write_tensors(self.path(folder), sample_tensors(self.prompts, answers, wanted.prompt_tokens + wanted.tokens))


def _parts(prompts: Sequence[list[int]]) -> list[_Part]:
    return [_Part(at, list(prompts[at : at + _PART])) for at in range(0, len(prompts), _PART)]


def _read_back(part: _Part, wanted: Wanted, folder: Path) -> dict[str, Tensor]:
    tensors = part.stored(wanted, folder)
    if tensors is None:
        raise EnvironmentFailure(
            f"{part.path(folder)} was whole and is not any more; look after the disk, and let no "
            "other run write there, then go on with --resume auto"
        )
    return tensors


def _settings(target: Backbone, rows: Prepared, wanted: Wanted) -> dict[str, object]:
    return {
        "target": TargetIdentity.of(target).to_dict(),
        "rows": [rows.train.fingerprint, len(rows.train), len(rows.validation)],
        **asdict(wanted),
    }


def _check_same(folder: Path, settings: dict[str, object], named: str) -> None:
    """Raise RequestError where the continuations answer another question, or it is no folder."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise RequestError(
            f"{named} is {folder}, and {nearest} is a file; expected a folder, which "
            "is made where there is none: name another one"
        )
    check_identity_file(folder / _SETTINGS, settings, remedy=f"Name another {named}, or remove {folder}")
