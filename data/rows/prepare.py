"""From a recipe's `data` section to packed rows for training and validation.

`prepare` is the whole way: source -> records -> tokens -> checks -> rows, or straight from the
cache. Read next: `sources.py`, `records.py`, `encode.py`, `rows/packed.py`, in the order of the data.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...storage import write_text, writing
from ..config import DataConfig
from . import cache
from .cache import Prepared
from .csv_rows import SWALLOWS
from .encode import Encoder
from .packed import Document, PackedRows, pack
from .raw import BadRow, Rejected
from .records import Placed, RecordReader, held_out
from .report import DataReport, Tally, check_tally, left_out, token_counts, write_rejected
from .shapes import Chat, Text, digest
from .sources import Source, open_sources
from .templates import today

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_BATCH = 256  # rows tokenised together: enough to keep the tokenizer's threads busy

__all__ = ["Prepared", "all_texts", "prepare", "training_texts"]


def prepare(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, out: Path | None) -> Prepared:
    """Tokenise and pack what `config` names, or find it in the cache.

    Args:
        out: receives `rejected.jsonl` (only if rows were rejected) and `data.json`, the report.

    Raises:
        DataError: too many bad rows, no rows, an empty or full loss mask, prompts that the decoder
        would render differently. RequestError: no such source, columns or template.
        EnvironmentFailure: the hub is out of reach, or `out` cannot be written.
    """
    train, validation = open_sources(config)
    encoder = Encoder.of(tokenizer, config)  # reads the template: its errors come first
    if not encoder.template.reads_clock:
        config = config.model_copy(update={"template_date": None})
    elif config.template_date is None:  # or a preparation over midnight would be of two days
        config = config.model_copy(update={"template_date": today()})
        encoder = Encoder.of(tokenizer, config)
    key = cache.make_key(
        config, tokenizer, [None if each is None else each.identity() for each in (train, validation)]
    )
    folder = cache.cache_folder(config)
    prepared = cache.load(folder, key)
    if prepared is None:
        prepared = _Preparation(config, encoder, out).run(train, validation, key)
        cache.store(folder, key, prepared)
    _record(prepared, out)
    return prepared


def training_texts(config: DataConfig) -> Iterator[str]:
    """The texts that a new tokenizer is trained on: the training split alone.

    Raises:
        DataError: rows are token ids already, or none are usable.
    """
    train, validation = open_sources(config)
    if validation is not None:
        for placed in _placed(config, train):
            yield from _texts(placed)
        return
    # which rows are held out is known only when all have been seen, so they are read twice
    digests = [digest(each.record) for each in _placed(config, train)]
    if not digests:
        raise DataError(f"{train.name}: holds no usable row")
    out = held_out(digests, config.validation_share)
    for placed, skip in zip(_placed(config, train), out, strict=True):
        if not skip:
            yield from _texts(placed)


def all_texts(config: DataConfig, limit: int | None = None) -> Iterator[str]:
    """The texts of a source, as many rows as `limit`: what tables and datastores are made of.

    Rows that cannot be used are left out, and said once behind the last text.

    Raises:
        DataError: none can be used.
    """
    source, tally = open_sources(config)[0], Tally()
    for placed in islice(_counted(config, source, tally), limit):
        yield from _texts(placed)
    if tally.rejected and not tally.usable:
        raise DataError(left_out(tally, source.name))
    if tally.rejected:
        _log.warning("left out: %s", left_out(tally, source.name))


@dataclass
class _Read:
    """One source, read and tokenised."""

    documents: list[list[Document]] = field(default_factory=list)
    """Those of each row."""
    digests: list[int] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


class _Preparation:
    """One making of rows, without the cache."""

    def __init__(self, config: DataConfig, encoder: Encoder, out: Path | None) -> None:
        self.config, self.encoder, self.out = config, encoder, out
        self.reader = RecordReader(config)

    def run(self, train: Source, validation: Source | None, key: str) -> Prepared:
        read = self._read(train)
        named = None if validation is None else self._read(validation)
        if named is None:
            out = held_out(read.digests, self.config.validation_share)
        else:
            out = np.repeat([False, True], [len(read.documents), len(named.documents)])
        both = [read] if named is None else [read, named]
        key = self._key(key, [each.tally for each in both])
        documents = [each for part in both for each in part.documents]
        digests = np.asarray([each for part in both for each in part.digests], dtype=np.uint64)
        learnt = self._pack(documents, ~out, key).spread(self.config.train_rows)
        rows = learnt, self._pack(documents, out, key)
        names = [train.name] if validation is None else [train.name, f"{validation.name}, held out"]
        report = self._report(names, both, digests, out, rows)
        return Prepared(*rows, report, [each for part in both for each in part.tally.rejected])

    def _read(self, source: Source) -> _Read:
        """Every row of a source, tokenised batch by batch; stops on hopeless data."""
        read = _Read()
        allowed = self.config.max_rejected_share
        records = self.reader.read(source, read.tally.extents)
        while batch := list(islice(records, _BATCH)):
            self._encode(batch, read)
            read.tally.say_progress(source.name)
            if read.tally.hopeless(allowed):
                break
        listed = None
        if self.out is not None and read.tally.rejected:
            with writing(self.out):
                listed = write_rejected(read.tally.rejected, self.out)
        check_tally(read.tally, source.name, allowed, listed)
        return read

    def _encode(self, batch: Sequence[Placed | Rejected], read: _Read) -> None:
        placed = [each for each in batch if isinstance(each, Placed)]
        encoded = iter(self.encoder([each.record for each in placed]))
        for each in batch:
            if isinstance(each, Rejected):
                read.tally.rejected.append(each)
                continue
            result = next(encoded)
            if isinstance(result, BadRow):
                read.tally.reject(each, result)
                continue
            read.tally.read(each.record)
            if documents := read.tally.add(result):
                read.documents.append(documents)
                read.digests.append(digest(each.record))

    def _pack(self, documents: Sequence[Sequence[Document]], chosen: NDArray[np.bool_], key: str) -> PackedRows:
        tokenizer, length = self.encoder.tokenizer, self.config.sequence_length
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        mine = (document for own, kept in zip(documents, chosen, strict=True) if kept for document in own)
        return pack(mine, length, pad=pad, fingerprint=key, together=self.config.packing)

    def _key(self, key: str, tallies: Sequence[Tally]) -> str:
        """`key`, or another one where versions that had it trained on other rows of this source."""
        forged, as_text = any(each.forged for each in tallies), self.config.control_tokens == "as_text"
        spelled = forged or (as_text and any(each.spelling for each in tallies))
        others = {
            " without forged turns": forged,
            " by the model's stops": spelled and bool(self.encoder.control.stops),
            " with ends cut off": any(each.ended for each in tallies),
            " without rows of many": any(SWALLOWS in row.reason for each in tallies for row in each.rejected),
            " by answers": any(each.rewritten or each.by_ids or +each.notes for each in tallies),
            " with all that a chat has": any(each.fuller for each in tallies),
        }
        said = "".join(words for words, is_so in others.items() if is_so)
        return hashlib.sha256(f"{key}{said}".encode()).hexdigest() if said else key

    def _report(
        self,
        names: Sequence[str],
        both: Sequence[_Read],
        digests: NDArray[np.uint64],
        out: NDArray[np.bool_],
        rows: tuple[PackedRows, PackedRows],
    ) -> DataReport:
        tallies = [each.tally for each in both]
        usable = sum(each.usable for each in tallies)
        tokens, counted, positions = token_counts(rows[0])
        masked = any(each.masked for each in tallies) and self.encoder.template.exists
        return DataReport(
            source=names[0],
            shapes={file: str(shape) for file, shape in self.reader.shapes.items()},
            answers_found_by=self.encoder.template.method if masked else "nothing to find",
            rows=usable,
            rejected=sum(len(each.rejected) for each in tallies),
            bytes_read={name: each.bytes_read() for name, each in zip(names, tallies, strict=True)},
            control_tokens=list(self.encoder.control.tokens),
            control_rejected=sum(each.forged for each in tallies),
            control_kept=sum(each.spelling for each in tallies),
            ends_cut=sum(each.ended for each in tallies),
            duplicates=len(digests) - len(np.unique(digests)),
            validation_rows=int(out.sum()),
            leaked=int(np.isin(digests[out], digests[~out]).sum()),
            unlabelled=sum(each.unlabelled for each in tallies),
            cut_share=sum(each.cut for each in tallies) / usable,
            straddling_answers=sum(each.straddles for each in tallies),
            answers=sum(each.answers for each in tallies),
            documents=sum(each.documents for each in tallies),
            rewritten_rows=sum(each.rewritten for each in tallies),
            rows_by_ids=sum(each.by_ids for each in tallies),
            notes=dict(sum((each.notes for each in tallies), Counter[str]())),
            loose_arguments=sum(each.loose for each in tallies),
            unread=list(self.reader.unread),
            template_values=self.config.template_values,
            template_date=self.config.template_date,
            tokens=tokens,
            validation_tokens=token_counts(rows[1])[0],
            loss_share=counted / max(tokens, 1),
            fill=tokens / max(positions, 1),
            fingerprint=rows[0].fingerprint,
        )


def _record(prepared: Prepared, out: Path | None) -> None:
    """Say what the run learns from, on the screen and in its folder."""
    for line in prepared.report.text().splitlines():
        _log.info("data: %s", line)
    if out is None:
        return
    report = json.dumps(prepared.report.to_dict(), indent=1) + "\n"

    with writing(out):
        write_rejected(prepared.rejected, out)
        write_text(out / "data.json", report)


def _placed(config: DataConfig, source: Source) -> Iterator[Placed]:
    """The usable rows of a source; the rejected ones are reported when the rows are tokenised."""
    return _counted(config, source, Tally())


def _counted(config: DataConfig, source: Source, tally: Tally) -> Iterator[Placed]:
    """The usable rows of a source; `tally` counts them, and has the others."""
    for each in RecordReader(config).read(source, tally.extents):
        if isinstance(each, Placed):
            tally.usable += 1
            yield each
        else:
            tally.rejected.append(each)


def _texts(placed: Placed) -> Iterator[str]:
    record = placed.record
    if isinstance(record, Text):
        yield record.text
    elif isinstance(record, Chat):
        yield from (message["content"] for message in record.messages if message["content"])
    else:
        raise DataError(
            f"{placed.file}:{placed.line}: rows are token ids already, so no tokenizer can be "
            "trained on them; name the one they were made with by tokenizer.path"
        )
