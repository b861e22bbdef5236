"""What a model's folder or hub name leads to without its weights: config, sizes, tokenizer.

One clear message where there is no such model or its files are damaged. `tiny` is the target that
ships with the package. Read next: `loading.py`, which reads weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from ...errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "tiny"
"""Name of the target that ships with the package."""


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model, no weights read.

    Raises:
        RequestError: there is none.
    """
    from transformers import AutoConfig

    with loading_errors("config of", path, "config.json"):
        return AutoConfig.from_pretrained(folder_or_name(path), revision=revision, trust_remote_code=trust_remote_code)


def is_here(path: str, *, revision: str | None = None) -> bool:
    """Whether a model can be loaded without asking a hub: a folder, or fetched before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(folder_or_name(path)).is_dir():
        return True
    try:
        return isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str)
    except HFValidationError:  # no name that a hub knows; whatever loads it says what is wrong
        return False


def load_sizes(name: str) -> PretrainedConfig:
    """The config of a model that is not here, from its config.json or a shipped one's name.

    Raises:
        RequestError: there is none, or it is no config.
    """
    shipped = Path(str(files("draftsmith.recipes"))) / "assets" / "sizes"
    own = shipped / f"{name}.json"
    if not own.is_file() and not Path(name).is_file():
        known = ", ".join(sorted(path.stem for path in shipped.glob("*.json")))
        raise RequestError(f"no sizes are called {name!r}; expected the path of a config.json, or one of {known}")
    return load_config(str(own if own.is_file() else name))


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Raises:
        RequestError: there is none.
    """
    from transformers import AutoTokenizer

    with loading_errors("tokenizer of", path, "tokenizer.json"):
        return AutoTokenizer.from_pretrained(
            folder_or_name(path), revision=revision, trust_remote_code=trust_remote_code
        )


def folder_or_name(path: str) -> str:
    """What `transformers` is given: the folder of the embedded target for its name, else `path` itself."""
    return embedded_target() if path == EMBEDDED else path


def embedded_target() -> str:
    """Folder of the target that ships with the package."""
    folder = Path(str(files("draftsmith.recipes"))) / "assets" / "tiny-target"
    if not (folder / "config.json").is_file():
        raise RequestError(f"the embedded target is missing at {folder}; run `make tiny-target`")
    return str(folder)


@contextmanager
def loading_errors(what: str, path: str, files_expected: str) -> Iterator[None]:
    """Inside, `transformers` reads files of the model `path`.

    Raises:
        RequestError: in place of what `transformers` raises for missing or damaged files.
    """
    try:
        yield
    except _faults() as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[0].rstrip(".")
        if not isinstance(error, (OSError, ValueError)):  # its words are about code, not files
            reason = f"its files are damaged ({type(error).__name__}: {' '.join(lines):.300})"
        raise RequestError(
            f"cannot load the {what} {path!r}: {reason}; expected a folder with "
            f"{files_expected}, a hub name, or 'tiny'"
        ) from error


def _faults() -> tuple[type[Exception], ...]:
    """What `transformers` raises for files that are missing, damaged or of another shape."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        SafetensorError,
        StrictDataclassError,
    )


def skeleton(config: Any, trust: bool = False) -> PreTrainedModel:
    """The causal LM of a config, its weights only shapes (on torch's meta device).

    Args:
        trust: run code that comes with the model.

    Raises:
        RequestError: the config is of no causal LM.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except ValueError as error:
        raise RequestError(f"{config.model_type} is no causal LM: {error!s:.200}") from error
