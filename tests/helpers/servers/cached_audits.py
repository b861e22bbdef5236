"""Audits of one target by many servers, in which what was judged once is not judged again.

Servers that differ in what they hand out write the same texts. Their audits ask the same questions of the target: what
it says of these tokens, how they are distributed, what its own greedy text is. Answers are kept; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from draftsmith.eval.server import evidence, precision, texts
from draftsmith.eval.server.answers import Judgeable

_ASKED = (
    (evidence, ("judge_sampled", "replay", "_written")),
    (precision, ("_own", "_rounding")),
    (texts, ("one_by_one", "autoregressive")),
)


@contextmanager
def judged_once() -> Iterator[None]:
    """Until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in _ASKED:
            for name in names:
                patch.setattr(module, name, _kept(getattr(module, name)))
        # journals of audits that nobody resumes need not reach the disk
        patch.setattr("draftsmith.data.generate.journal.flush", lambda _: None)
        yield


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def asked(target: Any, *args: Any, **named: Any) -> Any:
        key = (id(target), _key(args), _key(sorted(named.items())))
        if key not in known:
            known[key] = function(target, *args, **named)
        return known[key]

    return asked


def _key(value: Any) -> Any:
    """The value as one that can be looked up; of an answer its prompt and tokens."""
    if isinstance(value, Judgeable):
        return tuple(value.prompt), tuple(value.tokens)
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return value
