"""The rows of a draft that reads the target's text in tokens of its own.

A prompt is read as the draft's tokenizer writes it; what is committed after it follows token by
token, so that every committed token ends where one of the draft's does. How the draft reads the
text decides how well it drafts, and nothing else: any context is lossless. Read next:
`foreign_draft.py`; `vocabulary/shared_tokens.py`, the translation.

Shapes: B rows, D the draft's vocabulary, W tokens fed at once, C committed tokens not yet read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.proposal import Committed
from ...decoding.tree.tree import chain
from ..history import History
from ..model.draft_model import say_limit
from .shared_tokens import VocabularyPair


class TranslatedRows:
    """What the draft has read of every row, and its KV cache; rows differ in length."""

    def __init__(self, backbone: Backbone, pair: VocabularyPair) -> None:
        self.backbone, self._pair = backbone, pair

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, ahead: int) -> None:
        """Start new rows.

        Args:
            room: the target's tokens that may follow the longest prompt.
            ahead: own tokens that are drafted at most.
        """
        self._ahead = ahead
        self._history = History(prompts, room, self.backbone.device)
        self._limit = self.backbone.context
        self._texts = [list(self._pair.text(tuple(prompt))) for prompt in prompts]
        self._seen = [len(prompt) for prompt in prompts]
        self._written: list[Tensor] = []
        self._read_all(max(map(len, self._texts)) + 2 * room)

    def observe(self, committed: Committed) -> None:
        """Take in what was committed; it is translated when the next step reads it."""
        self._history.append(committed)

    def read(self, last_B: Tensor) -> Tensor:
        """Read on, up to the last emitted token of every row; logits [B, D] after it."""
        known = self._translate(last_B)
        missing = [text[at:] for text, at in zip(self._texts, known, strict=True)]
        W = max(map(len, missing))
        longest = max(map(len, self._texts))
        if longest + W + self._ahead > self._kv_cache.capacity:
            self._read_all(2 * (longest + W + self._ahead))
        device = last_B.device
        W = min(W, self._limit)
        # near the draft's last position rows read some tokens again; rows behind it are not drafted for
        start = [max(0, min(at, self._limit - W)) for at in known]
        missing = [text[at : at + W] for text, at in zip(self._texts, start, strict=True)]
        # rows that lack fewer tokens are padded at the end, which the next tokens overwrite
        tokens_BW = torch.tensor([[*each, *[0] * (W - len(each))] for each in missing])
        start_B = torch.tensor(start, device=device)
        logits_BWD = self.backbone.forward(tokens_BW.to(device), start_B, chain(W - 1), self._kv_cache)
        self._ends_B = torch.tensor([len(text) for text in self._texts], device=device)
        self._written = []
        last_B = (self._ends_B - start_B - 1).clamp_max(W - 1)
        return logits_BWD.gather(1, last_B[:, None, None].expand(-1, 1, logits_BWD.shape[2]))[:, 0]

    def write(self, token_B: Tensor) -> Tensor:
        """Feed a drafted token of the draft's own after the others; logits [B, D] after it."""
        at_B = (self._ends_B + len(self._written)).clamp_max(self._limit - 1)
        self._written.append(token_B)
        return self.backbone.forward(token_B[:, None], at_B, chain(0), self._kv_cache)[:, -1]

    def tail(self, tokens: int) -> list[tuple[int, ...]]:
        """The last of the target's tokens of every row, at most so many."""
        at_T = torch.arange(-tokens + 1, 1, device=self._history.lengths_B.device)
        slots_BT = self._history.lengths_B[:, None] + at_T
        ids_BT = self._history.tokens_BL.gather(1, slots_BT.clamp_min(0)).tolist()
        return [tuple(row[max(0, tokens - seen) :]) for row, seen in zip(ids_BT, self._seen, strict=True)]

    def _translate(self, last_B: Tensor) -> list[int]:
        """Append the pieces of the newest tokens; how many of its row the KV cache holds then.

        It holds what the row was, and after it what was drafted, as far as the two agree. The last
        token is read again in any case: its logits are asked for.
        """
        self._history.write_last(last_B)
        drafted = torch.stack(self._written, 1).tolist() if self._written else None
        known = []
        for row, ids in enumerate(self._newest()):
            pieces = [piece for number in ids for piece in self._pair.piece(number)]
            fed = drafted[row] if drafted else []
            agreed = next((n for n, (a, b) in enumerate(zip(pieces, fed)) if a != b), None)
            agreed = min(len(pieces), len(fed)) if agreed is None else agreed
            held = len(self._texts[row]) + agreed
            self._texts[row] += pieces
            known.append(min(held, len(self._texts[row]) - 1))
        return known

    def _newest(self) -> list[list[int]]:
        """The target's tokens that were not read yet, row by row; waits for the device."""
        ends = (self._history.lengths_B + 1).tolist()
        counts = [end - seen for end, seen in zip(ends, self._seen, strict=True)]
        seen_B = torch.tensor(self._seen, device=self._history.lengths_B.device)
        at_C = torch.arange(max(max(counts), 1), device=seen_B.device)
        slots_BC = (seen_B[:, None] + at_C).clamp_max(self._history.tokens_BL.shape[1] - 1)
        rows = self._history.tokens_BL.gather(1, slots_BC).tolist()
        self._seen = ends
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def _read_all(self, capacity: int) -> None:
        """Read every row anew, as far as the draft reads, into a KV cache with room for more."""
        self._kv_cache = KVCache(len(self._texts), capacity)
        self.backbone.prefill([text[: self._limit] for text in self._texts], self._kv_cache)

    def drafted(self) -> Tensor | None:
        """Which rows [B] may be drafted for behind what was read; None: all.

        Those whose draft would end behind the draft's own context may not, which is said once.
        """
        longest = max(map(len, self._texts)) + self._ahead - 1
        if longest <= self._limit:
            return None
        say_limit(self.backbone.name, self._limit, f"a text with a draft takes {longest} of its own")
        return self._ends_B + self._ahead - 1 <= self._limit
