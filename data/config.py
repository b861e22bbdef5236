"""Recipe sections that the data room reads. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..config import Section

RowShape = Literal["auto", "messages", "conversations", "prompt_completion", "instruction", "text", "tokens"]


class DataConfig(Section):
    """Where the text comes from and how it becomes rows of tokens."""

    source: str = "stdlib"
    """`stdlib` (the library's own sources), a file, a folder, a glob, `hub:NAME[:CONFIG]`."""
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
    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens of a chat count in the loss; plain text always counts whole."""
    control_tokens: Literal["reject_answers", "reject_rows", "as_text"] = "reject_answers"
    """What becomes of content that spells a token by which the template opens or ends turns
    (`<|im_end|>`, say): rows whose answer does are left out, and other turns read it as the token;
    or every such row is left out; or it is tokenised as plain text everywhere."""
    chat_template: str | None = None
    """A Jinja file in place of the tokenizer's own template, for example the same with generation
    marks; prompts must render as by the tokenizer's, because the decoder knows only that one."""
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


class TokenizerConfig(Section):
    """The tokenizer of a target made from scratch."""

    path: str | None = None
    """An existing tokenizer (folder or hub name); without it one is trained on the data."""
    vocabulary: int = Field(4096, ge=300)
    """Entries of a trained byte-level BPE, special tokens included."""
    chat_template: str | None = None
    """Stored with the tokenizer, in place of its own, so that chats can be written: `chatml`, or a Jinja file."""
