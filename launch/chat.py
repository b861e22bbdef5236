"""`draftsmith chat`: prompts from the keyboard, answers as they are written, coloured by where tokens come from.

Read next: `decoding/engine.py`, which calls the watcher after every step; `eval/report/pieces.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..data.prompts import Prompt, render
from ..data.rows.chats.spoken import Spoken
from ..decoding.engine import Generation, autoregressive, generate
from ..decoding.sampling import Warper
from ..drafters.tuned_file import DRAFT_LENGTH
from ..errors import DraftsmithError, RequestError
from ..eval.measure.arms import NOT_AUDITED
from ..eval.measure.metrics import tau
from ..eval.report.pieces import TokenTexts
from .measure.loaded import Loaded, load_pair, say_changed_target, say_tuned

if TYPE_CHECKING:
    from rich.console import Console

    from .check.early import NamedFolders
    from .requests import ChatRequest

# as on the report's page: what the drafter has guessed, and what the target had to say itself
_COLOURS = {"draft": "blue", "correction": "yellow", "bonus": "green", "prefill": "dim"}


class _Screen:
    """The tokens of an answer as they come, each in the colour of its origin."""

    def __init__(self, pair: Loaded, console: Console) -> None:
        self._console, self._eos = console, set(pair.target.eos_ids)
        self._pieces, self._shown = TokenTexts(pair.target.tokenizer), 0

    def __call__(self, tokens: list[list[int]], origins: list[list[str]]) -> None:
        for token, origin in list(zip(tokens[0], origins[0], strict=True))[self._shown :]:
            self._shown += 1
            if token not in self._eos:
                self._console.print(Text(self._pieces.add(token), style=_COLOURS[origin]), end="", soft_wrap=True)
        self._console.file.flush()


def chat(request: ChatRequest, named: NamedFolders, console: Console) -> None:
    """Answer prompts until there are no more; an error of one prompt ends only its turn."""
    say_tuned(named, console, none_pays=f"nothing is drafted; a flag for drafter.* or {DRAFT_LENGTH} drafts")
    pair = load_pair(replace(named, methods=[]) if named.plain else named)
    say_changed_target(pair, console)
    _warm_up(pair)
    legend = Text.assemble(*((f"{origin} ", colour) for origin, colour in _COLOURS.items()))
    if console.is_terminal:
        console.print(legend)
    turns: list[str] = []
    answers: list[Spoken] = []
    for line in _prompts(request, console):
        try:
            answer = _turn(request, pair, console, [*turns, line], answers)
        except DraftsmithError as error:
            if request.prompt is not None:
                raise
            console.print(Text(f"{error}. The chat begins anew", style="red"))
            turns, answers = [], []
            continue
        turns, answers = [*turns, line], [*answers, answer]


def _warm_up(pair: Loaded) -> None:
    """What only the first calls take is not shown as the speed of an answer."""
    if pair.drafters:
        generate(pair.target, pair.drafter, [[0, 0]], warper=Warper(0.0), max_new_tokens=8)
    autoregressive(pair.target, [[0, 0]], warper=Warper(0.0), max_new_tokens=8)


def _prompts(request: ChatRequest, console: Console) -> Iterator[str]:
    """The one prompt, or each line that is typed until the end of the input."""
    if request.prompt is not None:
        if not request.prompt.strip():
            raise RequestError("--prompt is empty; expected a text")
        yield request.prompt
        return
    while True:
        if console.is_terminal:
            console.print("> ", end="")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _turn(request: ChatRequest, pair: Loaded, console: Console, turns: list[str], answers: list[Spoken]) -> Spoken:
    """Write the answer to the last turn, and what it took."""
    config, tokenizer = pair.recipe.eval, pair.target.tokenizer
    data = pair.recipe.data
    prompt = Prompt(
        "chat", "chat", tuple(turns), chat=True, template_values=data.template_values, template_date=data.template_date
    )
    ids = render(prompt, tokenizer, answers=answers)
    how: dict[str, Any] = {
        "warper": Warper.of(config, request.temperature),
        "max_new_tokens": request.max_new_tokens,
        "eos_ids": pair.target.eos_ids,
        "seed": config.seed + len(answers),
    }
    screen = _Screen(pair, console)
    if pair.drafters:
        done = generate(pair.target, pair.drafter, [ids], rule=config.rule, watch=screen, **how)
    else:
        done = autoregressive(pair.target, [ids], watch=screen, **how)
    console.print()
    plain = autoregressive(pair.target, [ids], **how) if request.plain and pair.drafters else None
    took = _took(done, plain) if pair.drafters else f"[{len(done.tokens[0])} tokens, {_rate(done):.1f} tokens/s]"
    console.print(Text(took, style="dim"), soft_wrap=True)
    (written,) = done.tokens
    return Spoken(ids, written, bool(written) and written[-1] in pair.target.eos_ids)


def _took(done: Generation, plain: Generation | None) -> str:
    """Tokens, their speed beside plain decoding's, and tau; a single answer is no measurement."""
    own = _rate(done)
    parts = [f"{len(done.tokens[0])} tokens", f"{own:.1f} tokens/s with the drafter"]
    if plain is not None:
        parts.append(f"{_rate(plain):.1f} without")
    speculated = tau([done.steps])
    if speculated == speculated:
        parts.append(f"{speculated:.2f} tokens per target call ({NOT_AUDITED})")
    return f"[{', '.join(parts)}]"


def _rate(done: Generation) -> float:
    """Tokens per second behind the prefill, which writes the first one."""
    return (len(done.tokens[0]) - 1) / done.decode_seconds if done.decode_seconds else 0.0
