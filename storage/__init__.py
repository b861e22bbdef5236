"""Files and folders that are whole or not there; any room may use it, like `errors.py`.

`files.py` writes one file, `folder.py` a folder with its manifest, `identity.py` compares what a
folder was made for, `formats.py` has every format's number, `tensors.py` reads safetensors,
`lock.py` keeps a second process out. Nothing here imports torch when it is imported.
"""

from .files import MACHINE_ERRNOS, explain_full_disk, flush, sha256, staged_file, writable_folder, write_text, writing
from .folder import (
    MANIFEST,
    checksums,
    delete_folder,
    delete_leftovers,
    fault,
    publish,
    read_manifest,
    replace_folder,
    restore_folder,
    staged_folder,
    staging_of,
)
from .identity import check_identity, check_identity_file
from .lock import try_lock
from .tensors import check_tensors, derived_tensors, read_tensors, write_tensors

__all__ = [
    "MACHINE_ERRNOS",
    "MANIFEST",
    "check_identity",
    "check_identity_file",
    "check_tensors",
    "checksums",
    "delete_folder",
    "delete_leftovers",
    "derived_tensors",
    "explain_full_disk",
    "fault",
    "flush",
    "publish",
    "read_manifest",
    "read_tensors",
    "replace_folder",
    "restore_folder",
    "sha256",
    "staged_file",
    "staged_folder",
    "staging_of",
    "try_lock",
    "writable_folder",
    "write_tensors",
    "write_text",
    "writing",
]
