"""Drafters that need no training: `derive` makes one of the target itself, `datastore` one of a corpus.

A datastore is a suffix array on disk, for REST and suffix decoding.

Read next: `drafters/model/quantised.py`, `drafters/model/early_exit.py`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.config import DataConfig
from ..data.rows.sources import open_sources
from ..errors import RequestError
from ..storage import staged_folder, writable_folder, writing
from .methods import TargetTexts

if TYPE_CHECKING:
    from ..decoding.backbone.backbone import Backbone
    from .requests import DatastoreRequest, DeriveRequest


def derive(request: DeriveRequest) -> str:
    """Write the drafter folder; returns what it is, what it reads per token, and the next command."""
    _check_flags(request)
    if request.out.exists():
        raise RequestError(f"{request.out} exists; name a new folder")
    writable_folder(request.out.parent)
    from ..decoding.backbone.loading import load_target

    target = load_target(request.target, revision=request.revision)
    make = _early_exit if request.kind == "early-exit" else _quantised
    with writing(request.out), staged_folder(request.out) as folder:
        summary = make(request, target, folder)
    flags = f"--target {shlex.quote(request.target)} --drafter {shlex.quote(str(request.out))}"
    return f"{request.out}: {summary}\nnext: draftsmith eval {flags}"


def _check_flags(request: DeriveRequest) -> None:
    """Raise RequestError for a flag that the chosen kind ignores."""
    early = request.kind == "early-exit"
    if early and request.layers is None:
        raise RequestError("early-exit needs --layers: how many of the target's layers draft")
    ignored = {
        "--layers": request.layers is not None and not early,
        "--bits": request.bits is not None and early,
        "--group-size": request.group_size is not None and request.bits != 4,
    }
    flags = [flag for flag, is_set in ignored.items() if is_set]
    if flags:
        raise RequestError(
            f"{flags[0]} means nothing here; --layers is of early-exit, --bits of quantised, "
            "--group-size of quantised with --bits 4"
        )


def _early_exit(request: DeriveRequest, target: Backbone, folder: Path) -> str:
    from ..drafters.model.early_exit import first_layers, save_early_exit

    layers = request.layers or 0
    save_early_exit(folder, target, layers=layers)
    share = _share(first_layers(target, layers), target)
    return f"the first {layers} layers of the target; a draft step reads {share} of its weights"


def _quantised(request: DeriveRequest, target: Backbone, folder: Path) -> str:
    from ..drafters.model.quantised import save_quantised

    bits = request.bits or 8
    draft = save_quantised(folder, target, bits=bits, group_size=request.group_size)
    share = _share(draft.backbone, target)
    return f"the target in {bits} bits; a draft step reads {share} of the target's bytes"


def _share(draft: Backbone, target: Backbone) -> str:
    from ..eval.measure.speed import bytes_of

    return f"{bytes_of(draft.model) / bytes_of(target.model):.0%}"


def build(request: DatastoreRequest) -> str:
    """Build the datastore; returns a summary and the next command."""
    if request.limit is not None and request.limit < 1:
        raise RequestError(f"--limit is {request.limit}; expected 1 or more rows, or none for all")
    open_sources(DataConfig(source=request.source))  # refuses one that is not there
    writable_folder(request.out.parent)
    from ..data.datastore_build import build_datastore
    from ..decoding.backbone.hub import load_tokenizer
    from ..drafters.identity import fingerprint

    tokenizer = load_tokenizer(request.target)
    manifest = build_datastore(
        TargetTexts(tokenizer).texts(request.source, request.limit),
        request.out,
        vocabulary=max(tokenizer.get_vocab().values()) + 1,
        tokenizer=fingerprint(tokenizer),
        shard_tokens=request.shard_tokens,
    )
    shards = len(manifest["shards"])
    return (
        f"{request.out}: {manifest['tokens']:,} tokens of {manifest['documents']:,} texts in "
        f"{shards} shard{'' if shards == 1 else 's'}\n"
        f"next: draftsmith eval --target {shlex.quote(request.target)} --method rest "
        f"--drafter.rest.datastore {shlex.quote(str(request.out))}\n"
        f"or:   draftsmith eval --target {shlex.quote(request.target)} --method suffix "
        f"--drafter.suffix.datastore {shlex.quote(str(request.out))}"
    )
