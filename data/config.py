"""Recipe sections that the data room reads. No torch here."""

from __future__ import annotations

import keyword
from datetime import date
from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator

from ..config import Section

_NO_VARIABLES = frozenset(
    {
        *("messages", "tools", "conversation", "chat_template", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "return_assistant_tokens_mask", "return_tensors", "return_dict"),
        *("padding", "truncation", "max_length", "tokenizer_kwargs"),
    }
)
"""What a rendering says itself."""

RowShape = Literal["auto", "messages", "conversations", "prompt_completion", "instruction", "text", "tokens"]


class DataConfig(Section):
    """Where the text comes from and how it becomes rows of tokens."""

    source: str = "stdlib"
    """`stdlib` (the library's own sources), a file, a folder, a glob, `hub:NAME[:CONFIG]`, or a set by name, as
    `draftsmith ls --sources` lists them: NAME, NAME@REVISION or NAME=FILE."""
    revision: str | None = None
    """Commit, tag or branch of a hub data set; set it, or the run cannot be repeated."""
    split: str = "train"
    """Split of a hub data set to train on."""
    validation: str | None = None
    """Source of held-out rows; without it `validation_share` of the rows is held out by a hash."""
    validation_split: str | None = None
    """Split of the hub data set that is held out, of `validation` or else of `source`."""
    validation_share: float = Field(0.03, gt=0, lt=0.5)
    """Share of rows held out when no validation source is named."""
    shape: RowShape = "auto"
    """Shape of a row; `auto` finds it by the columns and prints it."""
    columns: dict[str, str] = {}
    """Renames columns before the shape is looked for, e.g. `{question: prompt}`."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens of a chat count in the loss: every answer, the last one alone, or all; plain text always
    counts whole."""
    control_tokens: Literal["reject_answers", "reject_rows", "as_text"] = "reject_answers"
    """What becomes of content that spells a token by which the template opens or ends turns
    (`<|im_end|>`, say): rows whose answer does are left out, and other turns read it as the token;
    or every such row is left out; or it is tokenised as plain text everywhere."""
    chat_template: str | None = None
    """A Jinja file in place of the tokenizer's own template, for example the same with generation
    marks; prompts must render as by the tokenizer's, because the decoder knows only that one."""
    template_values: dict[str, JsonValue] | None = None
    """Variables of the chat template, e.g. `{enable_thinking: false}`, for rows, decoding and servers alike."""
    template_date: str | None = None
    """The day that a template with a clock is told, as 2026-07-01; empty: the day on which the run begins."""
    sequence_length: int = Field(512, ge=8)
    """Tokens in a packed row."""
    packing: bool = True
    """Put several documents into a row (best fit); attention never crosses documents."""
    limit_rows: int | None = Field(None, ge=1)
    """Read only the first rows, for a quick look."""
    train_rows: int | None = Field(None, ge=1)
    """Packed rows to train on, spread evenly over all of them; empty: all. Several epochs over a part, their states
    kept by `features.source: cache`, take less time a step than one epoch over all."""
    max_rejected_share: float = Field(0.01, ge=0, le=1)
    """Stop when more than this share of the rows is unusable."""
    cache: str | None = None
    """Folder of tokenised data; default is the user's cache folder."""

    @field_validator("template_values")
    @classmethod
    def _are_variables(cls, values: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in values or ():
            if not name.isidentifier() or keyword.iskeyword(name) or name in _NO_VARIABLES:
                raise ValueError(f"{name!r:.60} is no variable of a chat template")
        return values or None

    @field_validator("template_date")
    @classmethod
    def _is_a_day(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                date.fromisoformat(value)
            except ValueError:
                raise ValueError("expected a day such as 2026-07-01") from None
        return value


class TokenizerConfig(Section):
    """The tokenizer of a target made from scratch."""

    path: str | None = None
    """An existing tokenizer (folder or hub name); without it one is trained on the data."""
    vocabulary: int = Field(4096, ge=300)
    """Entries of a trained byte-level BPE, special tokens included."""
    chat_template: str | None = None
    """Stored with the tokenizer, in place of its own, so that chats can be written: `chatml`, or a Jinja file."""
