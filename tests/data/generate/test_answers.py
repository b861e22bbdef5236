"""Rows answered anew: what is asked, what is written, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from draftsmith.data.generate.answers import Asker, Dialogue, Reply
from draftsmith.data.generate.trial import FIRST, Trial
from draftsmith.data.rows.encode import Encoded, Encoder
from draftsmith.data.rows.raw import BadRow, Rejected
from draftsmith.data.rows.records import Placed
from draftsmith.data.rows.shapes import find_shape, parse
from draftsmith.errors import DataError, RequestError
from helpers.models.chat_templates import KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture
def asker(tokenizer: PreTrainedTokenizerBase) -> Asker:
    return Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=False)


def placed(row: dict[str, Any]) -> Placed:
    shape = find_shape(row)
    assert shape is not None
    return Placed("rows.jsonl", 7, parse(row, shape))


def chat(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns], **more}


def talk(asker: Asker, row: dict[str, Any], *answers: Reply | str) -> tuple[Dialogue, list[str]]:
    """A dialogue with these answers, and the prompts that it asked with."""
    dialogue, prompts = asker.open(0, placed(row)), []
    for answer in answers:
        ask = asker.ask(dialogue)
        if ask is None:
            break
        prompts.append(asker.tokenizer.decode(ask.ids))
        asker.hear(dialogue, Reply(answer, 3, ended=True) if isinstance(answer, str) else answer)
    return dialogue, prompts


def test_every_turn_is_asked_with_the_targets_own_answers_before_it(asker: Asker) -> None:
    row = chat(
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "OLD"),
        ("user", "two"),
        ("assistant", "OLD TOO"),
        ("user", "three"),
        tools=[{"name": "look"}],
    )
    dialogue, prompts = talk(asker, row, "first", "second")
    assert not dialogue.talking
    start = '<|im_start|>system\nTools:\n[{"name": "look"}]<|im_end|>\n<|im_start|>system\nbe brief<|im_end|>\n'
    one = f"{start}<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    two = f"{one}first<|endoftext|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == [one, two]
    entry = asker.entry(dialogue)
    assert entry["answer"] == chat(
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "first"),
        ("user", "two"),
        ("assistant", "second"),
        ("user", "three"),
        tools=[{"name": "look"}],
    )
    assert (entry["turns"], entry["tokens"], entry["cut"]) == (2, 6, 0)


def test_an_opening_word_of_the_assistant_is_left_out(asker: Asker) -> None:
    row = chat(("assistant", "hello!"), ("user", "one"), ("assistant", "OLD"))
    dialogue, prompts = talk(asker, row, "new")
    assert "hello" not in prompts[0]
    assert asker.entry(dialogue)["answer"] == chat(("user", "one"), ("assistant", "new"))


@pytest.mark.parametrize(
    "row", [{"prompt": "one", "completion": "OLD"}, {"instruction": "one", "input": "", "output": "OLD"}]
)
def test_prompt_and_completion_stay_a_pair(asker: Asker, row: dict[str, Any]) -> None:
    dialogue, _ = talk(asker, row, "new")
    entry = asker.entry(dialogue)
    assert entry["shape"] == "prompt_completion"
    assert entry["answer"] == {"prompt": "one", "completion": "new"}


def test_a_text_becomes_token_ids_with_the_mask_of_the_answer(asker: Asker) -> None:
    text = "the quick brown fox asks, and a lazy dog answers: yes, no, perhaps"
    ids = asker.tokenizer(text)["input_ids"]
    reply = Reply("yes", 2, ended=False, ids=[300, 301])
    dialogue, prompts = talk(asker, {"text": text}, reply)
    assert prompts == [asker.tokenizer.decode(ids[:8])]
    entry = asker.entry(dialogue)
    assert entry["shape"] == "tokens"
    assert entry["answer"] == {"input_ids": [*ids[:8], 300, 301], "loss_mask": [0] * 8 + [1, 1]}


@pytest.mark.parametrize("ended", [True, False])
def test_a_servers_answer_to_a_text_is_tokenised_here(asker: Asker, ended: bool) -> None:
    dialogue, _ = talk(asker, {"text": "the fox"}, Reply(" yes", 2, ended=ended))
    row = asker.entry(dialogue)["answer"]
    prompt, reply = (asker.tokenizer(text)["input_ids"] for text in ("the fox", " yes"))
    assert row["input_ids"] == prompt + reply + [asker.tokenizer.eos_token_id] * ended
    assert row["loss_mask"] == [0] * len(prompt) + [1] * (len(reply) + ended)


def test_a_prompt_never_ends_inside_a_character(asker: Asker) -> None:
    """Eight tokens of a byte-level tokenizer end in the middle of the third sign."""
    dialogue, prompts = talk(asker, {"text": "漢字漢字"}, "yes")
    assert prompts == ["漢字"]
    assert asker.entry(dialogue)["answer"]["loss_mask"][:7] == [0] * 6 + [1]


def test_token_ids_with_one_answer(asker: Asker) -> None:
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    dialogue, _ = talk(asker, row, Reply("yes", 1, ended=True, ids=[9, 0]))
    assert asker.entry(dialogue)["answer"] == {"input_ids": [5, 6, 9, 0], "loss_mask": [0, 0, 1, 1]}


def test_thoughts_of_a_server_are_kept_apart(asker: Asker) -> None:
    reply = Reply("new", 3, ended=True, reasoning="hm")
    dialogue, _ = talk(asker, {"prompt": "one", "completion": "OLD"}, reply)
    entry = asker.entry(dialogue)
    assert entry["shape"] == "messages"
    assert entry["answer"]["messages"][1] == {"role": "assistant", "content": "new", "reasoning_content": "hm"}


ASK = chat(("user", "one"), ("assistant", "OLD"))
TWICE = chat(("user", "one"), ("assistant", "OLD"), ("user", "two"), ("assistant", "OLD"))
CALLS = {
    "messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "tool_calls": [{"name": "look"}]},
        {"role": "tool", "content": "seen"},
        {"role": "assistant", "content": "OLD"},
    ]
}
REFUSED = [
    (ASK, [" \n"], "empty", "the answer is empty"),
    (ASK, [Reply("new", 9, ended=False)], "cut", "the answer was cut off after 9 tokens"),
    (TWICE, ["new", Reply("n", 9, ended=False)], "cut", "turn 4: the answer was cut off after 9"),
    (ASK, ["new \ufffd"], "answer", "no UTF-8 text"),
    (ASK, ["new \0"], "answer", "training could not read it: the content of messages[1] contains"),
    (chat(("user", "x" * 400), ("assistant", "OLD")), [], "prompt", "target has room for 100"),
    ({"messages": CALLS["messages"][:3]}, [], "source", "every turn of the assistant calls a tool"),
    (chat(("assistant", "hello!"), ("user", "one")), [], "source", "no assistant turn stands"),
    ({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}, [], "source", "has 2 answers"),
    ({"input_ids": [5, 6, 7, 8], "loss_mask": [1, 1, 1, 1]}, [], "source", "behind a prompt"),
]


@pytest.mark.parametrize(("row", "answers", "kind", "reason"), REFUSED)
def test_rows_that_are_left_out(
    asker: Asker, row: dict[str, Any], answers: list[Reply | str], kind: str, reason: str
) -> None:
    dialogue, _ = talk(asker, row, *answers)
    if not answers and dialogue.talking:
        assert asker.ask(dialogue) is None
    entry = asker.entry(dialogue)
    assert "answer" not in entry
    rejected = entry["rejected"]
    assert (rejected["file"], rejected["line"], rejected["kind"]) == ("rows.jsonl", 7, kind)
    assert reason in rejected["reason"]


def test_a_row_rejected_while_reading_keeps_its_reason(asker: Asker) -> None:
    dialogue = asker.open(3, Rejected("rows.jsonl", 4, "not JSON (why)"))
    assert not dialogue.talking
    assert asker.entry(dialogue) == {
        "row": 3,
        "rejected": {"file": "rows.jsonl", "line": 4, "reason": "not JSON (why)", "kind": "source"},
    }


def test_cut_answers_may_be_kept(tokenizer: PreTrainedTokenizerBase) -> None:
    asker = Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=True)
    dialogue, _ = talk(asker, ASK, Reply("new", 9, ended=False))
    entry = asker.entry(dialogue)
    assert entry["cut"] == 1
    cut = {"role": "assistant", "content": "new", "ended": False}
    assert entry["answer"] == {"messages": [{"role": "user", "content": "one"}, cut]}


@pytest.mark.parametrize("by_ids", [True, False])
@pytest.mark.parametrize("row", [ASK, {"prompt": "one", "completion": "OLD"}], ids=["chat", "exchange"])
def test_a_cut_answer_is_learnt_up_to_its_last_token(
    row: dict[str, Any], by_ids: bool, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Behind what was written stands no end, in the loss or out of it; behind a whole answer one does."""
    asker = Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=True)
    written = tokenizer("the fox").input_ids
    for ended in (False, True):
        ids = [*written, *[tokenizer.eos_token_id] * ended]
        reply = Reply("the fox", len(ids), ended=ended, ids=ids if by_ids else None)
        dialogue, _ = talk(asker, row, reply)
        answer = asker.entry(dialogue)["answer"]
        (encoded,) = asker.encoder([placed(answer).record])
        assert isinstance(encoded, Encoded)
        assert encoded.notes["cut"] == (not ended)
        (document,) = encoded.documents
        labels = document.ids[document.in_loss].tolist()
        assert labels == ids
        if not ended:
            assert document.ids.tolist()[-len(ids) :] == ids
        assert (tokenizer.eos_token_id in document.ids.tolist()) == ended
        everything = Encoder.of(tokenizer, asker.data.model_copy(update={"loss_on": "all"}))([placed(answer).record])
        assert [list(map(int, each.ids)) for each in everything[0].documents] == [document.ids.tolist()]


def test_answers_that_tokenise_differently_are_counted(asker: Asker) -> None:
    """Trained on, such a text has other labels than the tokens that the target wrote."""
    whole = asker.tokenizer("the fox")["input_ids"]
    letters = [each for letter in "the fox" for each in asker.tokenizer(letter)["input_ids"]]
    assert len(letters) > len(whole)
    for ids, differs in ((whole, 0), (letters, 1)):
        dialogue, _ = talk(asker, ASK, Reply("the fox", len(ids) + 1, ended=True, ids=[*ids, 0]))
        assert asker.entry(dialogue)["retokenised"] == differs


def test_a_chat_needs_a_template(tokenizer: PreTrainedTokenizerBase) -> None:
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    asker = Asker(bare, prompt_tokens=8, longest_prompt=100, keep_cut=False)
    with pytest.raises(RequestError, match="rows.jsonl:7 is a chat, but .* no chat template"):
        asker.open(0, placed(ASK))
    _, prompts = talk(asker, {"prompt": "one", "completion": "OLD"}, "new")
    assert prompts == ["one"]


def test_token_ids_that_cannot_travel_as_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Letters one by one: a server, given the text, would read other tokens."""
    asker = Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=False, text_prompts=True)
    ids = [each for letter in "the fox" for each in tokenizer(letter)["input_ids"]]
    dialogue = asker.open(0, placed({"input_ids": ids}))
    assert asker.ask(dialogue) is None
    assert "cannot be sent as text" in str(dialogue.no_answer)


def test_an_answer_cut_inside_a_character_is_kept_up_to_it(tokenizer: PreTrainedTokenizerBase) -> None:
    """Its ids are whole; one that ended so is no text."""
    asker, row = (
        Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=True),
        chat(("user", "one"), ("assistant", "OLD")),
    )
    dialogue, _ = talk(asker, row, Reply("caf\ufffd", 3, ended=False))
    assert asker.entry(dialogue)["answer"]["messages"][1]["content"] == "caf"
    dialogue, _ = talk(asker, row, Reply("caf\ufffd", 3, ended=True))
    assert "no UTF-8 text" in asker.entry(dialogue)["rejected"]["reason"]


@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_of_thoughts_alone_is_learnt_in_its_ids(ended: bool) -> None:
    """gpt-oss, cut off in its analysis or ended behind it."""
    tokenizer = KINDS["gpt-oss"].tokenizer()
    asker, row = (
        Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=True),
        chat(("user", "why"), ("assistant", "OLD")),
    )
    text = "<|channel|>analysis<|message|>so the"
    ids = tokenizer(text + "<|return|>" * ended, add_special_tokens=False)["input_ids"]
    dialogue, _ = talk(asker, row, Reply(text, len(ids), ended, ids))
    answer = asker.entry(dialogue)["answer"]
    assert answer["messages"][1]["reasoning_content"] == "so the"
    (encoded,) = asker.encoder([parse(answer, "messages")])
    assert isinstance(encoded, Encoded)
    assert encoded.document.ids[encoded.document.in_loss].tolist() == ids


def test_answers_that_no_row_can_hold_stop_after_the_first_ones(tokenizer: PreTrainedTokenizerBase) -> None:
    """What reading refuses counts as what encoding refuses does."""
    trial, row = Trial(), chat(("user", "one"), ("assistant", ""))
    encoder = Asker(tokenizer, prompt_tokens=8, longest_prompt=100, keep_cut=True).encoder
    for _ in range(FIRST - 1):
        with pytest.raises(BadRow, match="every assistant turn is empty"):
            trial.check(row, "messages", encoder)
    with pytest.raises(DataError, match=f"every one of the first {FIRST} answered rows"):
        trial.check(row, "messages", encoder)
