"""`draftsmith datastore build`: a corpus as a suffix array on disk, for REST and suffix decoding.

Read next: `data/datastore.py`.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ..data.config import DataConfig
from ..data.rows.sources import open_sources
from ..errors import RequestError
from ..storage import writable_folder
from .measure.methods import TargetTexts

if TYPE_CHECKING:
    from .requests import DatastoreRequest


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
        f"--drafter.rest_datastore {shlex.quote(str(request.out))}\n"
        f"or:   draftsmith eval --target {shlex.quote(request.target)} --method suffix "
        f"--drafter.suffix_datastore {shlex.quote(str(request.out))}"
    )
