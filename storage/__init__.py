"""Files and folders that are whole or not there; any room may use it, like `errors.py`.

`files.py` writes one file, `folder.py` a folder with its manifest, `staging.py` names and clears what
is not there yet, `identity.py` compares what a folder was made for, `formats.py` has every format's
number, `tensors.py` reads safetensors, `held.py` keeps a second process and a second run out, and says which
process of a launch this is.
Nothing here imports torch when it is imported.
"""

from .files import (
    MACHINE_ERRNOS,
    check_name,
    explain_full_disk,
    flush,
    json_lines,
    nearest_folder,
    sha256,
    staged_file,
    system_error,
    writable_folder,
    write_text,
    writing,
)
from .folder import MANIFEST, checksums, delete_folder, fault, publish, read_manifest, replace_folder, staged_folder
from .formats import MANIFEST_LIST
from .held import Holder, check_free, hold, holder_of, is_first, rank, try_lock
from .identity import check_identity, check_identity_file
from .staging import delete_leftovers, restore_folder, staging_of
from .tensors import check_tensors, derived_tensors, read_tensors, tensor_heads, write_tensors

__all__ = [
    "MACHINE_ERRNOS",
    "Holder",
    "MANIFEST",
    "MANIFEST_LIST",
    "check_free",
    "check_identity",
    "check_identity_file",
    "check_name",
    "check_tensors",
    "checksums",
    "delete_folder",
    "delete_leftovers",
    "derived_tensors",
    "explain_full_disk",
    "fault",
    "flush",
    "hold",
    "holder_of",
    "is_first",
    "json_lines",
    "nearest_folder",
    "publish",
    "rank",
    "read_manifest",
    "read_tensors",
    "replace_folder",
    "restore_folder",
    "sha256",
    "staged_file",
    "staged_folder",
    "staging_of",
    "system_error",
    "tensor_heads",
    "try_lock",
    "writable_folder",
    "write_tensors",
    "write_text",
    "writing",
]
