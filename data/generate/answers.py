"""Rows that the target answers anew: the prompts it gets, and the rows that its answers become.

A chat keeps its system and user turns, calls of tools and their results; every other assistant turn is
replaced in order, each asked with the target's own earlier answers before it. Of a text the first tokens
are the prompt. What comes out is read back by `data.source`: `messages`, `prompt` and `completion`, each
with the ids in which it was written where they are known, or token ids with the mask of the answer, for a
text has no end that could be written down. Read next: `decoded.py` and `server.py`, which get the
answers; `trial.py`; `journal.py`, which keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from ...errors import DataError, RequestError
from ..config import DataConfig, RowShape
from ..rows.chats.calls import with_text
from ..rows.chats.spoken import Spoken, ids_of, message_of, prompt_behind
from ..rows.chats.written import IDS, Turn, Written
from ..rows.encode import Encoder, beginning, plain_prompt
from ..rows.raw import BadRow, Rejected
from ..rows.records import Placed
from ..rows.shapes import Chat, Record, Text, Tokens
from ..rows.templates import render_chat
from .trial import FIRST, Trial

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CORRECTIONS = "corrections"
_OURS = ("train", "ended", "weight")
"""Marks of a turn that are no part of what is asked."""
Kind = Literal["source", "prompt", "answer", "empty", "cut", "server"]


class NoAnswer(BadRow):
    """A row left out, and which kind of reason it is: the manifest counts by kind."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind


@dataclass(frozen=True)
class Reply:
    """An answer of the target.

    Attributes:
        text: the answer without what ends it, with special tokens where its ids are known.
        tokens: how many were generated, the end included.
        ended: whether the target ended it; false where `max_new_tokens` did.
        ids: the tokens themselves, the end included; None where a server kept them to itself.
        reasoning: what a server tells apart as the target's thoughts.
        corrected: which of `ids` stand where the target rejected a draft; None without a drafter.
        steps, emitted, tested, accepted: of a drafter, over the steps that count (`StepLog.counted_TB`).
    """

    text: str
    tokens: int
    ended: bool
    ids: list[int] | None = None
    reasoning: str | None = None
    corrected: list[bool] | None = None
    steps: int = 0
    emitted: int = 0
    tested: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Ask:
    """One turn to answer: as token ids, and as a server takes it (`messages`, or else `text`)."""

    ids: list[int]
    text: str
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass
class Dialogue:
    """A row on its way. `waiting`: the indices of the turns still to be answered, in order."""

    number: int
    """Place in the source, rejected rows counted."""
    placed: Placed
    waiting: list[int]
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    """Of a text: the ids to go on with."""
    replies: list[Reply] = field(default_factory=list)
    asked: list[tuple[int, Ask]] = field(default_factory=list)
    """The turns that were asked for, and how."""
    corrections: list[dict[str, Any]] = field(default_factory=list)
    """Rows whose labels are the tokens by which the target replaced a draft's."""
    no_answer: NoAnswer | None = None

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def talking(self) -> bool:
        return bool(self.waiting) and self.no_answer is None


@dataclass(frozen=True)
class Asker:
    """Turns rows into questions and answers into rows, for one tokenizer and one set of rules."""

    tokenizer: PreTrainedTokenizerBase
    prompt_tokens: int
    """Tokens of a text that are its prompt."""
    longest_prompt: int
    """Tokens of a prompt behind which an answer still has its room."""
    keep_cut: bool
    """Whether a chat may hold an answer that the length limit ended."""
    text_prompts: bool = False
    """Whether prompts travel as text: one that its text does not give back is refused."""
    data: DataConfig = field(default_factory=DataConfig)
    """How training will read the rows: the template's variables and its day among others."""
    trial: Trial = field(default_factory=Trial)

    @cached_property
    def encoder(self) -> Encoder:
        """What training reads the rows with; a row has whatever length they need."""
        return Encoder.of(self.tokenizer, self.data.model_copy(update={"sequence_length": 2**31}))

    def open(self, number: int, placed: Placed | Rejected) -> Dialogue:
        """The row as a dialogue; where it cannot be answered, `no_answer` has the reason.

        Raises:
            RequestError: a chat, but the tokenizer has no template to write it with.
        """
        if isinstance(placed, Rejected):
            empty = Placed(placed.file, placed.line, Text(""))
            return Dialogue(number, empty, [], no_answer=NoAnswer("source", placed.reason))
        dialogue = Dialogue(number, placed, [0])
        try:
            self._prepare(dialogue, placed.record)
        except NoAnswer as reason:
            dialogue.no_answer = reason
        return dialogue

    def ask(self, dialogue: Dialogue) -> Ask | None:
        """The next question; None, with `no_answer` set, where there cannot be one."""
        try:
            question = self._ask(dialogue)
            if len(question.ids) > self.longest_prompt:
                raise NoAnswer(
                    "prompt",
                    f"the prompt has {len(question.ids)} tokens; with an answer behind it the target "
                    f"has room for {self.longest_prompt}",
                )
        except BadRow as bad:
            reason = bad if isinstance(bad, NoAnswer) else NoAnswer("prompt", str(bad))
            self.refuse(dialogue, reason)
            return None
        dialogue.asked = [*dialogue.asked[: len(dialogue.replies)], (dialogue.waiting[0], question)]
        return question

    def hear(self, dialogue: Dialogue, reply: Reply) -> None:
        """Take the reply into the dialogue, or refuse it and the row with it."""
        if not reply.ended:
            # a limit of tokens falls into characters too; ids are whole
            reply = replace(reply, text=reply.text.rstrip("\ufffd"))
        try:
            self._judge(dialogue, reply)
        except NoAnswer as reason:
            self.refuse(dialogue, reason)
            return
        dialogue.replies.append(reply)
        at = dialogue.waiting.pop(0)
        if dialogue.is_chat:
            dialogue.messages[at] = self._turn_of(dialogue, reply)

    def _turn_of(self, dialogue: Dialogue, reply: Reply) -> dict[str, Any]:
        """An answer as a turn of the chat."""
        if reply.ids is not None and self.tokenizer.chat_template is not None:
            asked, values = dialogue.asked[-1][1].text, self.data.template_values
            return message_of(self.tokenizer, reply.text, asked, ended=reply.ended, values=values)
        thoughts = {} if reply.reasoning is None else {"reasoning_content": reply.reasoning}
        ended = {} if reply.ended else {"ended": False}
        return {"role": "assistant", "content": reply.text, **thoughts, **ended}

    def refuse(self, dialogue: Dialogue, reason: NoAnswer) -> None:
        """End the dialogue without an answer; where a row has several turns, the turn is named."""
        if len(dialogue.waiting) + len(dialogue.replies) > 1:
            reason = NoAnswer(reason.kind, f"turn {dialogue.waiting[0] + 1}: {reason}")
        dialogue.no_answer = reason

    def entry(self, dialogue: Dialogue) -> dict[str, Any]:
        """What the journal keeps of a dialogue that is over: the row written, or the reason."""
        number = {"row": dialogue.number}
        if dialogue.no_answer is None:
            shape, row = self._written(dialogue)
            try:
                self.trial.check(row, shape, self.encoder)  # as training will read it
                entry = number | {"shape": shape, "answer": row} | self._counts(dialogue)
                return entry | {CORRECTIONS: dialogue.corrections}
            except BadRow as bad:
                dialogue.no_answer = NoAnswer("answer", f"training could not read it: {bad}")
        reason = dialogue.no_answer
        rejected = dialogue.placed.rejected(str(reason))
        return number | {"rejected": {**rejected._asdict(), "kind": reason.kind}}

    def rehearse(self, rows: Iterable[Placed | Rejected], ids: list[int] | None) -> None:
        """Put the first rows through training's encoder with a word in place of each answer: nothing is asked.

        Args:
            ids: of the word and its end; None where answers come as text.

        Raises:
            DataError: training would leave them all out, whatever the answers are.
        """
        trial = Trial()
        rehearsed = replace(self, trial=trial)
        for number, row in enumerate(islice(rows, 4 * FIRST)):
            dialogue = rehearsed.open(number, row)
            while dialogue.talking and rehearsed.ask(dialogue) is not None:
                rehearsed.hear(dialogue, Reply("so", 2, True, ids))
            rehearsed.entry(dialogue)
            if trial.learnt:
                return
        if trial.refused:
            raise DataError(trial.failure())

    def _prepare(self, dialogue: Dialogue, record: Record) -> None:
        if isinstance(record, Chat):
            if self.tokenizer.chat_template is None and not record.plain:
                raise RequestError(
                    f"{dialogue.placed.file}:{dialogue.placed.line} is a chat, but the target's "
                    "tokenizer has no chat template to ask with; take a target that has one, or "
                    "rows of prompt and completion"
                )
            _prepare_chat(dialogue, record)
        elif isinstance(record, Text):
            dialogue.prompt = self._first_tokens(record.text)
        else:
            dialogue.prompt = _before_answer(record, self.prompt_tokens)

    def _first_tokens(self, text: str) -> list[int]:
        """As many tokens of a text as asked for, up to the last whole character."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        start = self._text_of(ids[: self.prompt_tokens]).rstrip("\ufffd")
        if not start:
            raise NoAnswer("prompt", "the text's first tokens make no whole character")
        return [*beginning(self.tokenizer), *self._ids_of(start)]

    def _ask(self, dialogue: Dialogue) -> Ask:
        if not dialogue.is_chat:
            return self._ask_text(dialogue)
        record = dialogue.placed.record
        tools = record.tools if isinstance(record, Chat) else None
        before = dialogue.messages[: dialogue.waiting[0]]
        if self.tokenizer.chat_template is None:
            # a plain exchange, written one after the other as in training
            text = plain_prompt([each["content"] for each in before])
            return Ask([*beginning(self.tokenizer), *self._ids_of(text)], text)
        values, day = self.data.template_values, self.data.template_date
        text = render_chat(self.tokenizer, before, answer_next=True, tools=tools, values=values, day=day)
        sent = [{name: each for name, each in turn.items() if name not in _OURS} for turn in before]
        # OpenAI's interface has the arguments of calls as text
        return Ask(self._ids_behind(dialogue, text), text, with_text(sent) or sent, tools)

    def _ids_behind(self, dialogue: Dialogue, text: str) -> list[int]:
        """The ids of a prompt, those of the answer in it as they were written where the template leaves it so."""
        last = dialogue.replies[-1] if dialogue.replies else None
        if last is None or last.ids is None:
            return self._ids_of(text)
        _, asked = dialogue.asked[len(dialogue.replies) - 1]
        return prompt_behind(self.tokenizer, text, asked.text, Spoken(asked.ids, last.ids, last.ended))

    def _ask_text(self, dialogue: Dialogue) -> Ask:
        ids, start = dialogue.prompt, beginning(self.tokenizer)
        shown = ids[len(start) :] if start and ids[: len(start)] == start else ids
        text = self._text_of(shown)
        # a server puts the beginning-of-text token there by itself
        if self.text_prompts and [*start, *self._ids_of(text)] != ids:
            raise NoAnswer("prompt", "the prompt's token ids cannot be sent as text: it has others")
        return Ask(ids, text)

    def _judge(self, dialogue: Dialogue, reply: Reply) -> None:
        if not reply.text.strip() and (reply.ended or not reply.reasoning):
            raise NoAnswer("empty", "the answer is empty")
        if not dialogue.is_chat:
            return
        if not reply.ended and not self.keep_cut:
            raise NoAnswer("cut", f"the answer was cut off after {reply.tokens} tokens")
        if "\ufffd" in reply.text:
            raise NoAnswer("answer", "the answer's tokens are no UTF-8 text")

    def _written(self, dialogue: Dialogue) -> tuple[RowShape, dict[str, Any]]:
        record = dialogue.placed.record
        if not isinstance(record, Chat):
            return "tokens", self._written_tokens(dialogue)
        ids = self._written_ids(dialogue)
        if record.plain:
            *system, prompt, answer = dialogue.messages
            if set(answer) <= {"role", "content", "ended"}:
                row = {"prompt": prompt["content"], "completion": answer["content"]}
                row |= {"system": system[0]["content"]} if system else {}
                return "prompt_completion", row | ({} if answer.get("ended", True) else {"ended": False}) | ids
        tools = {} if record.tools is None else {"tools": record.tools}
        return "messages", {"messages": dialogue.messages, **tools, **ids}

    def _written_ids(self, dialogue: Dialogue) -> dict[str, Any]:
        """The column of ids; nothing where a server kept those of an answer to itself, or no template is there."""
        asked = list(zip(dialogue.asked, dialogue.replies, strict=True))
        if self.tokenizer.chat_template is None or any(reply.ids is None for _, reply in asked):
            return {}
        turns = tuple(Turn(at, ask.ids, list(reply.ids or ()), reply.ended) for (at, ask), reply in asked)
        return {IDS: Written(self.encoder.origin, turns).to_row()}

    def _written_tokens(self, dialogue: Dialogue) -> dict[str, Any]:
        (reply,) = dialogue.replies
        answer = reply.ids
        if answer is None:
            eos = self.tokenizer.eos_token_id
            answer = [*self._ids_of(reply.text), *([eos] if reply.ended and eos is not None else [])]
        mask = [0] * len(dialogue.prompt) + [1] * len(answer)
        return {"input_ids": [*dialogue.prompt, *answer], "loss_mask": mask}

    def _counts(self, dialogue: Dialogue) -> dict[str, Any]:
        replies = dialogue.replies
        summed = {
            name: sum(getattr(each, name) for each in replies)
            for name in ("tokens", "steps", "emitted", "tested", "accepted")
        }
        chats = replies if dialogue.is_chat else []
        return summed | {
            "turns": len(replies),
            "cut": sum(not each.ended for each in replies),
            "retokenised": sum(self._differs(each) for each in chats if each.ids is not None),
        }

    def _differs(self, reply: Reply) -> bool:
        """Whether the answer's text has other tokens than those that were written."""
        ids = reply.ids or []
        return self._ids_of(reply.text) != (ids[:-1] if reply.ended else ids)

    def _ids_of(self, text: str) -> list[int]:
        return ids_of(self.tokenizer, text)

    def _text_of(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


def corrections(prompt: list[int], reply: Reply) -> list[dict[str, Any]]:
    """Prompt and answer as a row whose labels are the corrected tokens alone; none: no row.

    What online distillation replays (OSD, Liu et al. 2023, arXiv 2310.07177): the positions at
    which the draft was wrong, in the contexts in which it was.
    """
    if not reply.corrected or not any(reply.corrected):
        return []
    mask = [0] * len(prompt) + [int(each) for each in reply.corrected]
    return [{"input_ids": [*prompt, *(reply.ids or [])], "loss_mask": mask}]


def _prepare_chat(dialogue: Dialogue, record: Chat) -> None:
    """The turns, and the indices of the assistant's that are answered, an opening one left out.

    A call of a tool stays as it is, for its result stands behind it, and is not trained on: the target might
    have called another.
    """
    messages = [dict(each) for each in record.messages]
    while messages and messages[0]["role"] == "assistant":
        # no prompt stands before it, so the target cannot answer it
        del messages[0]
    answers = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
    for at in answers:
        if messages[at].get("tool_calls"):
            messages[at]["train"] = False
    dialogue.messages = messages
    dialogue.waiting = [at for at in answers if not messages[at].get("tool_calls")]
    if not answers:
        raise NoAnswer("source", "no assistant turn stands behind somebody else's")
    if not dialogue.waiting:
        raise NoAnswer("source", "every turn of the assistant calls a tool; the target may call another")


def _before_answer(record: Tokens, prompt_tokens: int) -> list[int]:
    """The ids before what counts in the loss; without a mask, the first ones."""
    if record.in_loss is None:
        return record.ids[:prompt_tokens]
    starts = [at for at, counts in enumerate(record.in_loss) if counts and (at == 0 or not record.in_loss[at - 1])]
    if len(starts) != 1 or starts[0] == 0:
        raise NoAnswer("source", f"the mask of the token ids has {len(starts)} answers; expected one, behind a prompt")
    return record.ids[: starts[0]]
