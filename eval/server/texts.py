"""Greedy answers of which only the text is known, beside the target's own greedy text.

The same text can be other tokens, so nothing is encoded anew: the target's own greedy tokens are followed
as long as they spell the server's text. Where they part, the target's margin tells a near-tie from a bug;
behind that nothing is known. Read next: `eval/audit/replay.py`, the same for tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scipy import stats

from ...decoding.engine import autoregressive
from ...decoding.sampling import Warper
from ...decoding.target.backbone import Backbone
from ..audit.replay import Replay, explained_near_ties, histogram_of, one_by_one
from .answers import Judgeable

_UNFINISHED = "\ufffd"


def replay_texts(
    target: Backbone, answers: Sequence[Judgeable], rounding: Sequence[float], *, max_new_tokens: int, batch: int
) -> Replay:
    """Compare texts token by token of the target's own greedy answers, up to where they part."""
    noise = max(map(abs, rounding), default=0.0)
    tested = near = bugs = 0
    margins: list[float] = []
    first_bug = None
    numbered = list(enumerate(answers))
    for start in range(0, len(numbered), batch):
        some = numbered[start : start + batch]
        prompts = [each.prompt for _, each in some]
        own = autoregressive(
            target, prompts, warper=Warper(0.0), max_new_tokens=max_new_tokens, eos_ids=target.eos_ids
        ).tokens
        for (number, each), tokens in zip(some, own, strict=True):
            top = one_by_one(target, each.prompt, tokens).topk(2, dim=-1).values
            margin = (top[:, 0] - top[:, 1]).tolist()
            at = _parting(target.tokenizer, tokens, each.answer.text, ended=each.answer.ended)
            margins += margin[: at + 1]
            tested += min(at + 1, len(tokens))
            if at >= len(tokens):
                continue
            if margin[at] <= 2 * noise:
                near += 1
                continue
            bugs += 1
            first_bug = first_bug or (
                f"request {number}, token {at}: the text is not that of the argmax {tokens[at]}, margin "
                f"{margin[at]:.3g} against noise {noise:.3g}"
            )
    explained = explained_near_ties(margins, [2**0.5 * each for each in rounding], noise)
    p_value = float(stats.poisson.sf(near - 1, explained))
    smallest = min(margins, default=float("nan"))
    argmax = tested - near - bugs
    return Replay(tested, argmax, near, explained, p_value, bugs, noise, smallest, histogram_of(margins), first_bug)


def _parting(tokenizer: Any, tokens: Sequence[int], text: str, *, ended: bool) -> int:
    """The first of the target's own tokens that the text does not go along with; their number if there is none."""
    for at in range(len(tokens)):
        spelled = str(tokenizer.decode(tokens[: at + 1], skip_special_tokens=True)).rstrip(_UNFINISHED)
        if text.startswith(spelled):
            continue
        # a text that the length limit ended early is one of other, longer tokens, and no contradiction
        return at if ended or not spelled.startswith(text) else len(tokens)
    return len(tokens)
