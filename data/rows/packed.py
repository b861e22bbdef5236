"""Packed rows of tokens: what a trainer reads, with the boundaries of documents kept.

`pack` puts documents into rows of one length (best fit); `PackedRows` hands out batches.
Read next: `prepare.py`, which fills it from a recipe.

Shapes: R rows of a batch, S tokens of a row, D documents of like length, L tokens of the longest of them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int32]


class Document(NamedTuple):
    """One tokenised document: ids and, for each, whether it counts as a label."""

    ids: Ids
    in_loss: NDArray[np.bool_]


@dataclass(frozen=True)
class PackedRows:
    """Rows of equal length; padding carries document number -1."""

    ids_RS: Ids
    in_loss_RS: NDArray[np.bool_]
    document_RS: NDArray[np.int32]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.ids_RS)

    @property
    def sequence_length(self) -> int:
        return int(self.ids_RS.shape[1])

    def content_hash(self) -> str:
        """A hash of the rows themselves; `fingerprint` is of what they were made from, versions of packages too."""
        made = hashlib.sha256()
        for array in (self.ids_RS, self.in_loss_RS, self.document_RS):
            made.update(f"{array.dtype} {array.shape}".encode())
            made.update(np.ascontiguousarray(array).reshape(-1).data)
        return made.hexdigest()

    def spread(self, count: int | None) -> PackedRows:
        """`count` of the rows, spread evenly over all; all of them where there are no more, or for None."""
        if count is None or count >= len(self):
            return self
        chosen = np.arange(count) * len(self) // count
        return PackedRows(self.ids_RS[chosen], self.in_loss_RS[chosen], self.document_RS[chosen], self.fingerprint)

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Tensors of the named rows.

        Returns `input_ids`, `positions`, `documents` (int64) and `loss_mask` (bool), all [R, S].
        Positions restart with every document; `loss_mask` marks tokens that count as labels,
        never the first of a document, because nothing stands before it to predict it from.
        """
        index = np.asarray(rows, dtype=np.int64)
        documents = torch.from_numpy(self.document_RS[index].astype(np.int64))
        positions, first = _positions(documents)
        return {
            "input_ids": torch.from_numpy(self.ids_RS[index].astype(np.int64)),
            "loss_mask": torch.from_numpy(self.in_loss_RS[index]) & ~first & (documents >= 0),
            "positions": positions,
            "documents": documents,
        }


def pack(
    documents: Iterable[Document], length: int, *, pad: int, fingerprint: str, together: bool = True
) -> PackedRows:
    """Put documents into rows of `length` tokens.

    A document longer than a row is cut into pieces. With `together`, pieces share rows by
    best-fit decreasing (Ding et al. 2024, "Fewer truncations"); otherwise each has its own row.
    """
    pieces = [piece for document in documents for piece in _cut(document, length)]
    rows = _best_fit(pieces, length) if together else [[i] for i in range(len(pieces))]
    ids_RS = np.full((len(rows), length), pad, dtype=np.int32)
    in_loss_RS = np.zeros((len(rows), length), dtype=np.bool_)
    document_RS = np.full((len(rows), length), -1, dtype=np.int32)
    for r, row in enumerate(rows):
        at = 0
        for number, piece in enumerate(pieces[i] for i in row):
            end = at + len(piece.ids)
            ids_RS[r, at:end] = piece.ids
            in_loss_RS[r, at:end] = piece.in_loss
            document_RS[r, at:end] = number
            at = end
    return PackedRows(ids_RS, in_loss_RS, document_RS, fingerprint)


def documents_by_length(documents_RS: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Where the documents of packed rows lie, to be read apart from each other.

    Args:
        documents_RS: int64, a number per document, -1 for padding; tokens of a document stand together.

    Returns:
        For documents of like length, the longest less than twice the shortest: the slots [D, L] of their
        tokens, counted over all rows (int64), and which of them there are (bool); a shorter document
        repeats its last slot.
    """
    R, S = documents_RS.shape
    slots_RS = torch.arange(R * S, device=documents_RS.device).view(R, S)
    _, first_RS = _positions(documents_RS.cpu())
    start_D = slots_RS[first_RS.to(documents_RS.device)]
    count_D = torch.cat([start_D[1:], start_D.new_tensor([R * S])]) - start_D
    present_D = documents_RS.flatten()[start_D] >= 0
    alike: dict[int, list[int]] = {}
    for number, (count, present) in enumerate(zip(count_D.tolist(), present_D.tolist(), strict=True)):
        if present:
            alike.setdefault(count.bit_length(), []).append(number)
    made = []
    for _, numbers in sorted(alike.items()):
        start_D1, last_D1 = start_D[numbers, None], count_D[numbers, None] - 1
        at_L = torch.arange(int(last_D1.max()) + 1, device=documents_RS.device)
        made.append((start_D1 + torch.minimum(at_L, last_D1), at_L <= last_D1))
    return made


def _cut(document: Document, length: int) -> Iterable[Document]:
    for at in range(0, len(document.ids), length):
        piece = Document(document.ids[at : at + length], document.in_loss[at : at + length])
        # a single token has nothing before it: it can be neither input nor label
        if len(piece.ids) > 1:
            yield piece


def _best_fit(pieces: Sequence[Document], length: int) -> list[list[int]]:
    """Longest first, each into the fullest row that still takes it."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for i in sorted(range(len(pieces)), key=lambda i: (-len(pieces[i].ids), i)):
        need = len(pieces[i].ids)
        at = bisect_left(room, (need, -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = length, len(rows)
            rows.append([])
        rows[row].append(i)
        if left > need:
            insort(room, (left - need, row))
    return rows


def _positions(documents_RS: Tensor) -> tuple[Tensor, Tensor]:
    """Position of each token inside its document, and whether it is the first. Both [R, S]."""
    S = documents_RS.shape[1]
    first_RS = torch.ones_like(documents_RS, dtype=torch.bool)
    first_RS[:, 1:] = documents_RS[:, 1:] != documents_RS[:, :-1]
    index_RS = torch.arange(S).expand_as(documents_RS)
    start_RS = torch.where(first_RS, index_RS, torch.zeros_like(index_RS)).cummax(dim=1).values
    return index_RS - start_RS, first_RS
