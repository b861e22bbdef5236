"""Drafters by their name on a hub: `hub:NAME`, or `hub:NAME@REVISION`, in place of a folder.

Fetched into the hub's own cache, JSON and safetensors alone, whatever else lies there; from then on it
is a folder like any other, and read as one of a stranger. Read next: `registry.py`, which loads it;
`launch/share/push.py`, which puts one there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..decoding.backbone.hub import hush_retries
from ..errors import EnvironmentFailure, RequestError
from ..storage import MACHINE_ERRNOS, system_error

PREFIX = "hub:"
FILES = ("*.json", "*.safetensors")
"""What is fetched: no pickle, no code, no template."""
TOKEN = "HF_TOKEN"  # noqa: S105 - its name
_COMMIT = re.compile("[0-9a-f]{40}")


def token() -> str | bool:
    """The user's token, from the environment alone; False says to the library that there is none."""
    return os.environ.get(TOKEN) or False


def endpoint() -> str:
    """The URL of the hub: HF_ENDPOINT, or the public one."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def is_hub_name(name: str | Path) -> bool:
    """Whether a drafter is named on a hub."""
    return str(name).startswith(PREFIX)


def parsed(name: str) -> tuple[str, str | None]:
    """`hub:NAME@REVISION` as repository and revision; None: the newest.

    Raises:
        RequestError: no repository can have that name.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    repository, at, revision = name.removeprefix(PREFIX).partition("@")
    try:
        validate_repo_id(repository)
        if "/" not in repository or (at and not revision) or revision.startswith("-") or ".." in revision:
            raise HFValidationError("its owner or its revision is missing, or is none")
    except HFValidationError as error:
        raise RequestError(
            f"{name!r:.120} names nothing on a hub ({error!s:.200}); expected {PREFIX}OWNER/NAME, or "
            f"{PREFIX}OWNER/NAME@REVISION with a commit, tag or branch"
        ) from error
    return repository, revision or None


def drafter_folder(name: str | Path) -> Path:
    """The folder of a drafter: `name` itself, or where that of the hub now lies.

    Raises:
        RequestError: the hub has no such drafter, or shows it to others alone.
        EnvironmentFailure: it cannot be reached, and the drafter was not fetched before; or there is no room.
    """
    if not is_hub_name(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    repository, revision = parsed(str(name))
    with hub_errors(str(name)):
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(FILES), token=token(), endpoint=endpoint()
            )
        )


def is_fetched(folder: Path) -> bool:
    """Whether a folder is a revision in the hub's cache, in which nothing is to be written."""
    parts = folder.parts[-3:]
    if len(parts) < 3 or parts[1] != "snapshots" or not parts[0].startswith("models--"):
        return False
    return _COMMIT.fullmatch(parts[2]) is not None


def shown(folder: Path) -> str:
    """A drafter's folder for people and records; of one that was fetched its name, and its commit."""
    if not is_fetched(folder):
        return str(folder)
    repository, _, commit = folder.parts[-3:]
    return f"{PREFIX}{repository.removeprefix('models--').replace('--', '/', 1)}@{commit}"


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Inside, the hub is asked for, or given, the drafter `name`.

    Raises:
        RequestError: in place of what the library raises where it is not there, or not for us.
        EnvironmentFailure: the same where the hub cannot be reached, or this machine has no room.
    """
    import httpx2
    from huggingface_hub import constants, errors

    at = f"{name} ({endpoint()})"
    hush_retries()
    try:
        yield
    except errors.GatedRepoError as error:
        raise RequestError(f"{at} is open to whom its owner lets in; ask there, and set {TOKEN}") from error
    except errors.RepositoryNotFoundError as error:
        raise RequestError(
            f"{at} is not there, or not for us to see; check the name, and set {TOKEN} where it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise RequestError(f"{at} has no such revision; name a commit, tag or branch behind the @") from error
    except errors.LocalEntryNotFoundError as error:
        reason = error.__cause__ or error
        do = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "connect"
        raise EnvironmentFailure(
            f"{at} cannot be asked for ({_first_line(reason)}), and was not fetched whole before; {do}, or name "
            "a folder"
        ) from error
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        if code in (401, 403):
            raise RequestError(
                f"{at}: refused ({code}); set {TOKEN} to a token that may do this with that name"
            ) from error
        raise EnvironmentFailure(f"{at}: the hub answered {code} ({_first_line(error)}); try again later") from error
    except (httpx2.HTTPError, errors.OfflineModeIsEnabled, errors.FileMetadataError) as error:
        raise EnvironmentFailure(f"{at} cannot be reached: {_first_line(error)}; connect and try again") from error
    except OSError as error:
        if system_error(error) not in MACHINE_ERRNOS:
            raise
        raise EnvironmentFailure(
            f"{at} cannot be kept: {_first_line(error)}; make room or get the right there, or set HF_HOME to "
            "another folder"
        ) from error
    except (RuntimeError, ValueError, LookupError, TypeError, AssertionError) as error:
        # the library's words for answers that it did not expect, and for an upload that was cut
        raise EnvironmentFailure(
            f"{at}: no answer of a hub ({_first_line(error.__cause__ or error)}); see where HF_ENDPOINT leads"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")[:300]
