"""`draftsmith datastore build`: a corpus as a suffix array on disk, for REST.

Read next: `data/datastore.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .methods import token_texts

if TYPE_CHECKING:
    from .cli import Datastore


def build(request: Datastore) -> str:
    """Build it and say what it holds."""
    from ..data.datastore import build_datastore
    from ..decoding.loading import load_target
    from ..drafters.identity import fingerprint

    target = load_target(request.target, device="cpu")
    manifest = build_datastore(
        token_texts(target, request.source, request.limit), request.out,
        vocabulary=target.vocabulary, tokenizer=fingerprint(target.tokenizer),
        shard_tokens=request.shard_tokens,
    )  # fmt: skip
    return (
        f"{request.out}: {manifest['tokens']:,} tokens of {manifest['documents']:,} texts in "
        f"{len(manifest['shards'])} shards\n"
        f"next: draftsmith eval --target {request.target} --method rest "
        f"--drafter.rest_datastore {request.out}"
    )
