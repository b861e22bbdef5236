"""`draftsmith push`: a run's drafter to a hub, as one commit; nothing of this machine's paths, no token anywhere.

`drafters/hub.py` takes it back. Read next: `folder.py`, what goes up; `card.py`, what it says of itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...drafters.folder import ENTRY, read_entry
from ...drafters.hub import FILES, PREFIX, TOKEN, endpoint, hub_errors, parsed, token
from ...errors import RequestError
from ..export import run_recipe
from .card import UNKNOWN, CardSubject, card_of, subject_of
from .folder import CARD, Upload, check_says_nothing, private_words, upload_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from ..requests import PushRequest


def push(request: PushRequest) -> str:
    """Upload, or with `dry_run` and without a token say what would be; returns what was done, in words.

    Raises:
        RequestError: no run, no name of a hub, results of other weights, a path of this machine in a file, or
            something else than a drafter of that name. EnvironmentFailure: the hub cannot be reached.
    """
    name, revision = parsed(request.name)
    if revision is not None:
        raise RequestError(f"{request.name!r}: a push makes a new commit; leave out @{revision}")
    recipe, run = run_recipe(request.run_folder), request.run_folder
    subject = subject_of(run, name, recipe, request.base_model, request.license)
    private = list(private_words(run, recipe.target.path))
    upload, card = upload_of(subject.folder, private), card_of(subject)
    check_says_nothing(card, private, "the card")
    upload.content[CARD] = card.encode()
    lines = [f"{PREFIX}{name}", *_listed(upload), *_notes(subject, upload)]
    if request.dry_run or not token():
        reason = "--dry-run" if request.dry_run else f"{TOKEN} is not set"
        return "\n".join([card, *lines, f"dry run ({reason}): nothing was sent"])
    return "\n".join([*lines, _send(name, upload, private=request.private)])


def _listed(upload: Upload) -> Iterator[str]:
    for name in upload.content:
        yield f"  {name} ({upload.size(name):,} bytes)"


def _notes(subject: CardSubject, upload: Upload) -> Iterator[str]:
    """What its owner should know before others read it."""
    for name in upload.cleaned:
        yield f"note: {name} named paths of this machine; their last parts go up"
    if upload.left_out:
        yield f"note: left out are {', '.join(upload.left_out)}: neither JSON nor safetensors"
    if subject.base_model is None:
        yield "note: the card names no base model, as the target has no name on the hub; --base-model gives it"
    if subject.target is None:
        yield "note: the card has no commands for engines: the target's config is not here, or needs code of its own"
    if subject.license == UNKNOWN:
        yield "note: the card says that the licence is unknown; --license gives it"
    if subject.license_of_target:
        yield f"note: the licence, {subject.license}, is what the target's card says; --license gives another"
    if read_entry(subject.folder)["identity"].tuned is not None:
        yield "note: the drafter fits the run's own target alone, which does not go up: publish that too"


def _send(name: str, upload: Upload, *, private: bool) -> str:
    """One commit: what is new, and without what a drafter before it has left there."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(endpoint=endpoint(), token=token())
    with hub_errors(f"{PREFIX}{name}"):
        there = _files_there(api, name, private=private)
        stale = sorted(each for each in there - upload.content.keys() if any(fnmatch(each, kind) for kind in FILES))
        commit = api.create_commit(
            name,
            [
                *(CommitOperationAdd(path, content) for path, content in upload.content.items()),
                *(CommitOperationDelete(path, is_folder=False) for path in stale),
            ],
            commit_message="Drafter pushed by draftsmith",
        )
    removed = f" (removed: {', '.join(stale)})" if stale else ""
    taken = f"draftsmith eval --target TARGET --drafter {PREFIX}{name}@{commit.oid}"
    return f"pushed to {endpoint()}/{name}{removed}\nnext: {taken}"


def _files_there(api: HfApi, name: str, *, private: bool) -> set[str]:
    """The files of a repository, made if it is not there.

    Raises:
        RequestError: it holds something else than a drafter, or is public where it should not be.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(name)
    except RepositoryNotFoundError:
        api.create_repo(name, private=private, exist_ok=True)
        return set()
    if private and not info.private:
        raise RequestError(f"{PREFIX}{name} is there and public; make it private there, or name another")
    files = {each.rfilename for each in info.siblings or ()}
    if any(fnmatch(each, kind) for each in files for kind in FILES) and not _is_drafter(api, name, files, info.sha):
        raise RequestError(f"{PREFIX}{name} holds something else than a drafter, and that would go; name another")
    return files


def _is_drafter(api: HfApi, name: str, files: set[str], revision: str | None) -> bool:
    if "config.json" not in files:
        return False
    try:
        content: Any = json.loads(Path(api.hf_hub_download(name, "config.json", revision=revision)).read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and ENTRY in content
