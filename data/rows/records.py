"""From a source's raw rows to records: the shape of each file found, rows judged one by one.

Also the rule that holds rows out for validation. Read next: `encode.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, RequestError
from ..config import DataConfig, RowShape
from .raw import BadRow, Extents, RawRow, Rejected
from .shapes import COLUMNS, Record, Text, find_shape, parse, shown_names, unread
from .sources import Source


class Placed(NamedTuple):
    """A record and where it stands."""

    file: str
    line: int
    record: Record

    def rejected(self, reason: str) -> Rejected:
        return Rejected(self.file, self.line, reason)


@dataclass
class RecordReader:
    """Judges the rows of sources under one config; remembers each file's shape."""

    config: DataConfig
    shapes: dict[str, RowShape] = field(default_factory=dict)
    """Source or file -> the shape of its rows."""
    unread: dict[str, None] = field(default_factory=dict)
    """Columns that hold something and that nothing reads, in the order met."""

    def read(self, source: Source, extents: Extents | None = None) -> Iterator[Placed | Rejected]:
        """Records and rejected rows of `source`, in its order; `extents` as for `Source.rows`.

        Raises:
            DataError: a file's columns are no known shape, or the file is broken.
        """
        for row in islice(source.rows(extents), self.config.limit_rows):
            yield row if isinstance(row, Rejected) else self._record(row, source)

    def _record(self, row: RawRow, source: Source) -> Placed | Rejected:
        columns = self._renamed(row)
        shape = self._shape(row, columns, source)
        try:
            record = parse(columns, shape)
        except BadRow as bad:
            return Rejected(row.file, row.line, str(bad))
        except RecursionError:
            return Rejected(row.file, row.line, "nested too deeply")
        self.unread |= dict.fromkeys(unread(columns, shape))
        if isinstance(record, Text) and not row.ends:
            record = Text(record.text, ends=False)
        return Placed(row.file, row.line, record)

    def _renamed(self, row: RawRow) -> dict[str, Any]:
        names = self.config.columns
        if not names:
            return row.columns
        # a renamed column takes the place of one that has the name already
        kept = {k: v for k, v in row.columns.items() if k not in names and k not in names.values()}
        return kept | {new: row.columns[old] for old, new in names.items() if old in row.columns}

    def _shape(self, row: RawRow, columns: dict[str, Any], source: Source) -> RowShape:
        key = source.name if source.name == "stdlib" else row.file
        if key not in self.shapes:
            self.shapes[key] = self._find(row, columns)
        return self.shapes[key]

    def _find(self, row: RawRow, columns: dict[str, Any]) -> RowShape:
        where, names = f"{row.file}:{row.line}", shown_names(row.columns)
        unknown = [name for name in self.config.columns if name not in row.columns]
        if unknown:
            raise RequestError(f"data.columns renames {unknown[0]!r}, which {where} does not have; found {names}")
        shape = find_shape(columns) if self.config.shape == "auto" else self.config.shape
        if shape is None or not set(columns).issuperset(COLUMNS[shape]):
            expected = _known_shapes() if shape is None else _described(shape)
            raise DataError(
                f"{where}: the columns are {names}; expected {expected}. Rename them with "
                "data.columns, for example {question: prompt, answer: completion}"
            )
        return shape


def held_out(digests: Sequence[int], share: float) -> NDArray[np.bool_]:
    """Which rows are held out: a fixed property of a row's content, so equal rows stay together.

    When no row falls under the share, the one with the smallest digest is taken.
    """
    values = np.asarray(digests, dtype=np.uint64)
    chosen = values < np.uint64(int(share * 2**64))
    if len(values) and not chosen.any():
        chosen = values == values.min()
    _check_duplicates(values, chosen)
    if chosen.all():
        raise DataError(
            f"{len(values)} usable row(s) with the same content cannot be split into training and "
            "validation; add rows, or name held-out ones by data.validation"
        )
    return chosen


def _check_duplicates(values: NDArray[np.uint64], chosen: NDArray[np.bool_]) -> None:
    """Raise DataError where one content, met again and again, holds out most of the rows."""
    if chosen.all() or chosen.mean() <= 0.5:
        return
    most = int(np.unique(values[chosen], return_counts=True)[1].max())
    if most > len(values) / 2:
        raise DataError(
            f"{chosen.sum():,} of {len(values):,} rows would be held out, because {most:,} of them have the same "
            "content and equal rows stay together; leave the duplicates out, or name held-out rows by data.validation"
        )


def _known_shapes() -> str:
    return "; or ".join(_described(shape) for shape in COLUMNS)


def _described(shape: RowShape) -> str:
    return " and ".join(COLUMNS[shape])
