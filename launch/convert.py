"""A model in a GGUF file as an ordinary folder, for engines, for other tools, and to be read at once.

Read next: `decoding/gguf/model.py`, which reads the file.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ..decoding.gguf.file import find_gguf, read_gguf
from ..errors import DataError, RequestError
from ..storage import staged_folder, writable_folder, writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..decoding.gguf.file import GgufFile
    from .requests import ConvertRequest

_QUESTION = [{"role": "user", "content": "Hello"}]


def convert(request: ConvertRequest) -> str:
    """Write the folder; returns what it is, and the next command.

    Raises:
        RequestError: there is no such file, it cannot be read whole, or the folder is there already.
    """
    file = _file_of(request)
    from ..decoding.backbone.hub import load_tokenizer
    from ..decoding.backbone.loading import load_model, no_progress_bars

    tokenizer = load_tokenizer(str(file.path))
    template = _checked_template(tokenizer, file)
    model = load_model(str(file.path), dtype=request.dtype)
    with writing(request.out), staged_folder(request.out) as folder, no_progress_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(_card(file, request.dtype), encoding="utf-8")
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{request.out}: {model.config.model_type}, {numbers / 1e6:,.1f} M parameters in {request.dtype}, made of "
        f"{file.quantisation}; {template}\n"
        f"next: draftsmith check eagle3-small --target.path {shlex.quote(str(request.out))}"
    )


def _file_of(request: ConvertRequest) -> GgufFile:
    if request.out.exists():
        raise RequestError(f"{request.out} exists; name a new folder")
    path = find_gguf(str(request.file))
    if path is None:
        found = "holds none" if request.file.is_dir() else "is none" if request.file.exists() else "is not there"
        raise RequestError(f"convert reads a GGUF file, and {request.file} {found}; name a file that ends in .gguf")
    writable_folder(request.out.parent)
    return read_gguf(path)


def _checked_template(tokenizer: PreTrainedTokenizerBase, file: GgufFile) -> str:
    """What is to be said of the chat template.

    Raises:
        RequestError: it is damaged.
    """
    from ..data.rows.raw import BadRow
    from ..data.rows.templates import render_chat

    if tokenizer.chat_template is None:
        return "it has no chat template, so texts can be trained on and not chats (a base model has none)"
    try:
        render_chat(tokenizer, _QUESTION, answer_next=True)
    except DataError as error:
        raise RequestError(f"{file.path} is damaged: {error}; take another file of the model") from error
    except BadRow as error:
        return f"its chat template does not take a question alone ({error})"
    return "with tokenizer and chat template"


def _card(file: GgufFile, dtype: str) -> str:
    """Where the folder comes from, with the licence that the file states."""
    origin, name = file.origin(), file.fields.get("general.name", file.path.stem)
    license_ = file.fields.get("general.license")
    front = f"---\nlicense: {license_}\n---\n\n" if isinstance(license_, str) and license_.isprintable() else ""
    return (
        f"{front}# {name}\n\nMade by `draftsmith convert` of `{origin['file']}` ({origin['quantisation']}, SHA-256 "
        f"{origin['sha256']}): its rounded weights as {dtype} numbers.\n"
    )
