"""What others wrote as folders of ours: a model in a GGUF file as an ordinary one, a published drafter as a drafter's.

Read next: `decoding/gguf/model.py`, which reads the file; `drafters/published/forms.py`, the forms of drafters.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..decoding.gguf.file import find_gguf, read_gguf
from ..drafters.folder import ENTRY, is_drafter, kind_of, read_entry
from ..drafters.hub import drafter_folder, shown
from ..drafters.published.forms import Published, published
from ..errors import DataError, RequestError
from ..storage import staged_folder, writable_folder, writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..decoding.backbone.backbone import Backbone
    from ..decoding.gguf.file import GgufFile
    from ..drafters.published.readings import Reading
    from .requests import ConvertDrafterRequest, ConvertRequest

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
    _check_new(request.out)
    path = find_gguf(str(request.file))
    if path is None:
        found = "holds none" if request.file.is_dir() else "is none" if request.file.exists() else "is not there"
        raise RequestError(f"convert reads a GGUF file, and {request.file} {found}; name a file that ends in .gguf")
    return read_gguf(path)


def _check_new(out: Path) -> None:
    if out.exists():
        raise RequestError(f"{out} exists; name a new folder")
    writable_folder(out.parent)


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


# ---- drafters -------------------------------------------------------------------------------------


def convert_drafter(request: ConvertDrafterRequest) -> str:
    """Write the folder; returns what it is, and the next command.

    Raises:
        RequestError: it is in no form that is read, or was made for another target, or the folder is there already.
    """
    _check_new(request.out)
    folder = drafter_folder(request.drafter)
    found = need_published(folder, request.target)
    from ..decoding.backbone.loading import load_target
    from ..drafters.registry import load_drafter

    trust = request.trust_remote_code
    target = load_target(request.target, revision=request.revision, device="cpu", trust_remote_code=trust)
    drafter: Any = load_drafter(folder, target)
    module = drafter.module
    reading = _reading_named(request.reading, found, target)
    with writing(request.out), staged_folder(request.out) as staged:
        save_as_read(found, reading, module, staged, target)
        with (staged / "README.md").open("a", encoding="utf-8") as card:
            card.write(
                f"\nConverted from {shown(folder)}, a drafter in the form of {found.form.title}, {reading.what}.\n"
            )
    numbers = sum(parameter.numel() for parameter in module.parameters())
    flags = f"--target {shlex.quote(request.target)} --drafter {shlex.quote(str(request.out))}"
    return (
        f"{request.out}: {found.form.family}, {numbers / 1e6:,.1f} M parameters, read in the form of "
        f"{found.form.title}\nnext: draftsmith audit {flags}"
    )


def need_published(folder: Path, target: str) -> Published:
    """The form of a folder that others wrote; RequestError where it is in none that is read."""
    found = published(folder)
    if found is None and is_drafter(folder):
        raise RequestError(
            f"{folder} is a drafter folder of ours already; decode with it by --target {target} --drafter {folder}"
        )
    if found is None:
        read_entry(folder)  # which says what it is instead
    assert found is not None
    return found


def readings_for(found: Published, target: Backbone) -> list[Reading]:
    """The ways to read it, that of `--drafter` first."""
    from ..drafters.folder import read_settings
    from ..drafters.published.readings import readings_of

    _, settings = read_settings(found.files.folder, target, found.form.family)
    return readings_of(found, settings, target.model.config)


def _reading_named(name: str | None, found: Published, target: Backbone) -> Reading:
    readings = readings_for(found, target)
    chosen = next((each for each in readings if name in (None, each.what)), None)
    if chosen is None:
        raise RequestError(
            f"{found.files.folder} has no reading {name!r}; expected one that `draftsmith inspect-drafter` lists: "
            f"{', '.join(each.what for each in readings)}"
        )
    return chosen


def save_as_read(found: Published, reading: Reading, module: Any, folder: Path, target: Backbone) -> None:
    """Write a drafter, loaded as it is read here, as our folder under a reading."""
    _save_as_ours(module, folder, target, found.form.family)
    if reading.changes:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config[ENTRY]["settings"].update(reading.changes)
        path.write_text(json.dumps(config, indent=2) + "\n")
    if reading.ids:
        from safetensors.torch import save_file

        from ..drafters.published.weights import TargetParts, weights_of

        by_ids = replace(found, form=replace(found.form, d2t_is_ids=True))
        save_file(
            weights_of(by_ids, asdict(module.config), TargetParts.of(target.model)),
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )


def _save_as_ours(module: Any, folder: Path, target: Backbone, family: str) -> None:
    """Write a loaded drafter as a drafter folder."""
    from ..drafters.folder import save_draft_model
    from ..trainers.teacher.frozen import saver

    if kind_of(family) == "model":
        save_draft_model(module, folder, target, family=family)
    else:
        saver(target, family)(module, folder)
