"""What a run learns from, in numbers, and the checks that stop a run on hopeless data.

Read next: `prepare.py`, which fills the tally while it reads.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...storage import write_text
from .chats.turns import LEFT, NOTES
from .control import SpellsControlToken
from .encode import Encoded
from .packed import Document, PackedRows
from .raw import BadRow, Extents, Rejected
from .records import Placed
from .shapes import Chat, Record, shown_names

_log = logging.getLogger(__name__)
# bytes of a source that are tokenised without a word: seconds
_LONG = 2**24
# so many rejected rows are a verdict on the data: no need to read on
_ENOUGH = 1000


@dataclass(frozen=True)
class DataReport:
    """Statistics of a prepared data set."""

    source: str
    shapes: dict[str, str]
    """File -> shape of its rows."""
    answers_found_by: str
    """`generation marks`, `rendered prefixes`, or `nothing to find` for plain text."""
    rows: int
    """Usable rows."""
    rejected: int
    bytes_read: dict[str, tuple[int, int]]
    """Source -> bytes that were read, bytes in its files."""
    control_tokens: list[str]
    """Tokens by which the chat template opens and ends turns, and the end of a text."""
    control_rejected: int
    """Rows among the rejected ones because their content spells such a token."""
    control_kept: int
    """Usable rows whose content spells one, in turns or texts where it is no forged end of an answer."""
    ends_cut: int
    """Usable rows of which an answer ended with a token that ends it, which was cut off."""
    duplicates: int
    """Rows whose content was met before."""
    validation_rows: int
    leaked: int
    """Held-out rows whose content is trained on too."""
    unlabelled: int
    """Masked rows left out because no token within the row length counts."""
    cut_share: float
    """Share of rows longer than `sequence_length`: texts are cut in pieces, answers shortened."""
    straddling_answers: int
    """Answers whose first characters share a token with the prompt; that token does not count."""
    tokens: int
    """Tokens to train on, padding left out."""
    validation_tokens: int
    loss_share: float
    """Share of the tokens that count in the loss."""
    fill: float
    """Share of the packed rows' positions that hold a token."""
    answers: int
    """Turns of chats that count in the loss."""
    documents: int
    """Texts that the rows became."""
    rewritten_rows: int
    """Chats of several documents, because their template rewrites what was written."""
    rows_by_ids: int
    """Chats of which the token ids came along, and are trained on as they are."""
    notes: dict[str, int]
    """Answers that are not in the loss, or not as their row has them, by the reason (`turns.NOTES`)."""
    loose_arguments: int
    """Calls of tools whose arguments are text that is no object."""
    unread: list[str]
    """Columns that hold something and that nothing reads."""
    template_values: dict[str, Any] | None
    """The variables that the chat template was given."""
    template_date: str | None
    """The day that its clock shows, if it has one."""
    fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """The report in a few lines."""
        lines = [
            f"source      {self.source}",
            *(f"rows are    `{shape}`{_where(names)}" for shape, names in self._files().items()),
            f"rows        {self.rows:,} usable ({self.validation_rows:,} held out), "
            f"{self.rejected:,} rejected, {self.duplicates:,} duplicates, "
            f"{self.unlabelled:,} without a token in the loss",
            f"tokens      {self.tokens:,} to train on, {self.validation_tokens:,} held out; "
            f"{self.loss_share:.1%} count in the loss",
            f"rows cut    {self.cut_share:.1%}; packed rows are {self.fill:.1%} full",
            f"answers by  {self.answers_found_by}; {self.straddling_answers:,} share a token with their prompt",
            f"bytes       {'; '.join(f'{read:,} of {size:,} read' for read, size in self.bytes_read.values())}",
            f"fingerprint {self.fingerprint[:16]}",
        ]
        if self.control_rejected or self.control_kept:
            lines.append(
                f"control     content spells {' or '.join(self.control_tokens)}: {self.control_rejected:,} rows "
                f"rejected, {self.control_kept:,} kept (data.control_tokens)"
            )
        if self.ends_cut:
            lines.append(f"ends        of answers were spelled out and cut off in {self.ends_cut:,} rows")
        lines += self._of_chats()
        if self.leaked:
            lines.append(f"warning     {self.leaked:,} held-out rows are also trained on")
        return "\n".join(lines)

    def _of_chats(self) -> list[str]:
        """What became of the chats' answers, where it is not simply that each is learnt."""
        lines = []
        if self.rewritten_rows:
            lines.append(
                f"documents   {self.documents:,} of {self.rows:,} rows, {self.answers:,} answers in the loss: "
                f"{self.rewritten_rows:,} chats have one for every answer, as the template rewrites earlier turns; "
                "what these have in common is computed for each"
            )
        if self.rows_by_ids:
            lines.append(f"ids         as the target wrote them in {self.rows_by_ids:,} rows")
        left, kept = (
            {why: self.notes[why] for why in NOTES if why in self.notes and (why in LEFT) is out}
            for out in (True, False)
        )
        for words, counted in (("not in the loss", left), ("in the loss", kept)):
            if counted:
                listed = "; ".join(f"{count:,} {NOTES[why]}" for why, count in counted.items())
                lines.append(f"answers     {words}: {listed}")
        if self.loose_arguments:
            lines.append(f"calls       {self.loose_arguments:,} have arguments that are text and no object")
        if self.unread:
            lines.append(f"columns     not read: {shown_names(self.unread)}")
        if self.template_values:
            lines.append(f"template    with {json.dumps(self.template_values)}")
        if self.template_date:
            lines.append(f"template    has a clock, which shows {self.template_date} (data.template_date)")
        return lines

    def _files(self) -> dict[str, list[str]]:
        """Shape -> files that have it."""
        files: dict[str, list[str]] = {}
        for file, shape in self.shapes.items():
            files.setdefault(shape, []).append(Path(file).name)
        return files


def _where(names: Sequence[str]) -> str:
    """The files that have a shape, the first few by name."""
    more = f" and {len(names) - 4} more files" if len(names) > 4 else ""
    return f" in {', '.join(names[:4])}{more}"


@dataclass
class Tally:
    """Counts of one source while it is read."""

    rejected: list[Rejected] = field(default_factory=list)
    extents: Extents = field(default_factory=dict)
    usable: int = 0
    spelling: int = 0
    forged: int = 0
    ended: int = 0
    cut: int = 0
    straddles: int = 0
    masked: int = 0
    unlabelled: int = 0
    full: int = 0
    answers: int = 0
    documents: int = 0
    rewritten: int = 0
    by_ids: int = 0
    loose: int = 0
    fuller: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    _said: int = 0

    def add(self, encoded: Encoded) -> list[Document]:
        """Count a row; its documents that can be trained on."""
        self.usable += 1
        self.answers += encoded.answers
        self.documents += len(encoded.documents)
        self.rewritten += len(encoded.documents) > 1
        self.by_ids += encoded.by_ids
        self.notes.update(encoded.notes)
        self.cut += encoded.cut
        self.straddles += encoded.straddles
        self.spelling += encoded.spells
        self.ended += encoded.ended
        # the first token has nothing before it, so it is never a label
        if not encoded.masked:
            return encoded.documents
        labelled = [each for each in encoded.documents if each.in_loss[1:].any()]
        self.masked += 1
        self.full += all(each.in_loss[1:].all() for each in encoded.documents)
        self.unlabelled += not labelled
        return labelled

    def read(self, record: Record) -> None:
        """Count what a record that can be trained on has beside its texts."""
        if isinstance(record, Chat):
            self.loose += record.loose
            self.fuller += record.is_fuller

    def of_answers(self) -> str:
        """What becomes of the answers of chats, as the end of a sentence; empty where each is simply learnt."""
        parts = []
        if self.rewritten:
            parts.append(
                f"{self.rewritten:,} chats become a document for every answer, as the template rewrites earlier "
                "turns, and what these have in common is computed for each"
            )
        parts += [f"{count:,} answers {NOTES[why]}" for why, count in self.notes.items()]
        return "".join(f"; {part}" for part in parts)

    def reject(self, placed: Placed, reason: BadRow) -> None:
        """Count a row that cannot be used."""
        self.rejected.append(placed.rejected(str(reason)))
        self.forged += isinstance(reason, SpellsControlToken)

    def bytes_read(self) -> tuple[int, int]:
        """Bytes that were read, and bytes there are."""
        extents = self.extents.values()
        return sum(each.read for each in extents), sum(each.size for each in extents)

    def say_progress(self, source: str) -> None:
        """A line for each tenth of a source that takes its time."""
        read, size = self.bytes_read()
        tenths = 10 * read // size if size >= _LONG else 0
        if self._said < tenths < 10:
            self._said = tenths
            _log.info("data: %s: %s of %s MB read, %s rows", source, read // 10**6, size // 10**6, f"{self.usable:,}")

    def too_many(self, allowed: float) -> bool:
        """Whether more than `allowed` of the rows are unusable."""
        return len(self.rejected) > allowed * (len(self.rejected) + self.usable)

    def hopeless(self, allowed: float) -> bool:
        return len(self.rejected) >= _ENOUGH and self.too_many(allowed)


def check_tally(tally: Tally, source: str, allowed: float, rejected_file: Path | None) -> None:
    """Stop on too many bad rows, on no rows, on a mask that is empty or full everywhere.

    Raises:
        DataError: with counts, examples, and what to do.
    """
    if tally.too_many(allowed):
        raise DataError(_too_many(tally, source, allowed, rejected_file))
    if not tally.usable:
        raise DataError(f"{source}: holds no row")
    if tally.masked and tally.unlabelled == tally.masked:
        raise DataError(
            f"{source}: the loss mask is empty: no token of any of {tally.masked} rows counts. "
            f"{_why_empty(tally)}; look with `draftsmith inspect`, or set data.loss_on: all"
        )
    if tally.masked and tally.full == tally.masked:
        raise DataError(
            f"{source}: the loss mask is full: every token of all {tally.masked} rows counts, "
            "prompts included. Correct their masks, or set data.loss_on: all if that is meant"
        )


def _why_empty(tally: Tally) -> str:
    known = ", ".join(f"{tally.notes[why]:,} {NOTES[why]}" for why in LEFT if tally.notes[why])
    if known:
        return f"Its answers are left out: {known}"
    return "Either data.sequence_length cuts every answer off, or the chat template's generation marks enclose nothing"


def left_out(tally: Tally, source: str) -> str:
    """How many rows of a source were left out, and the first of them with their reasons."""
    count = len(tally.rejected)
    return "\n".join(
        [f"{source}: {count:,} of {count + tally.usable:,} rows cannot be used", *_examples(tally.rejected)]
    )


def write_rejected(rejected: Sequence[Rejected], folder: Path) -> Path:
    """`rejected.jsonl`: file, line and reason of each row left out; no file when there are none."""
    path = folder / "rejected.jsonl"
    if not rejected:
        path.unlink(missing_ok=True)
        return path
    write_text(path, "".join(json.dumps(each._asdict()) + "\n" for each in rejected))
    return path


def token_counts(rows: PackedRows) -> tuple[int, int, int]:
    """Tokens, tokens in the loss (as `PackedRows.batch` counts them), and positions."""
    real_RS = rows.document_RS >= 0
    first_RS = np.ones_like(real_RS)
    first_RS[:, 1:] = rows.document_RS[:, 1:] != rows.document_RS[:, :-1]
    counted = int((rows.in_loss_RS & real_RS & ~first_RS).sum())
    return int(real_RS.sum()), counted, real_RS.size


def _too_many(tally: Tally, source: str, allowed: float, rejected_file: Path | None) -> str:
    count = len(tally.rejected)
    share = count / (count + tally.usable)
    listed = "" if rejected_file is None else f" All are listed in {rejected_file}."
    return "\n".join(
        [
            f"{source}: {count:,} of {count + tally.usable:,} rows ({share:.1%}) are unusable; "
            f"data.max_rejected_share allows {allowed:.1%}.{listed}",
            *_examples(tally.rejected),
        ]
    )


def _examples(rejected: Sequence[Rejected]) -> list[str]:
    """The first three with their reasons, and how many more there are."""
    shown = [f"  {each.file}:{each.line}: {each.reason}" for each in rejected[:3]]
    return shown + [f"  ... and {len(rejected) - 3:,} more"] * (len(rejected) > 3)
