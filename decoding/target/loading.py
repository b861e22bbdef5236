"""Models, configs and tokenizers by folder or hub name, with one clear message where there is none.

Read next: `backbone.py`, what a loaded model becomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ...errors import RequestError
from ...storage import check_tensors
from .attention import use_grouped_attention
from .backbone import Backbone

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EMBEDDED = "tiny"


def load_target(
    path: str,
    *,
    revision: str | None = None,
    dtype: str = "fp32",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Backbone:
    """Load a causal LM by folder or hub name; `tiny` is the embedded default target.

    Raises:
        RequestError: there is no such model, or its state cannot be rolled back.
    """
    model = load_model(path, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model.requires_grad_(False).eval().to(chosen)
    use_grouped_attention(model)
    return Backbone(model, name=_place(path), revision=revision)


def check_weight_files(path: str) -> None:
    """Raise RequestError where a file of a model's folder is cut short."""
    place = Path(_place(path))
    for file in sorted(place.glob("model*.safetensors")):
        check_tensors(file, remedy=f"copy the folder {place} again or make it anew")


def load_model(path: str, *, revision: str | None = None, dtype: str = "fp32", trust_remote_code: bool = False) -> Any:
    """The weights alone, ready to train further; the class is that of `transformers`.

    Raises:
        RequestError: there is no such model, or its weights are damaged.
    """
    from transformers import AutoModelForCausalLM

    place = _place(path)
    check_weight_files(path)  # what follows would not name the file
    # a bar is for what takes long: a download, not a folder that is here
    quiet = no_progress_bars() if Path(place).is_dir() else nullcontext()
    with _explained("model", path, "config.json and safetensors weights"), quiet:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place,
                revision=revision,
                dtype=_DTYPES[dtype],
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):  # out of memory, for instance
                raise
            raise ValueError("its weights are of other sizes than its config.json says") from error
        model, found = loaded
        missing = sorted(found["missing_keys"])
        if missing:  # which transformers fills with random numbers, and a warning
            others = f" and {len(missing) - 1} others" * (len(missing) > 1)
            raise ValueError(f"its weights lack {missing[0]}{others}")
        return model


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model, no weights read.

    Raises:
        RequestError: there is none.
    """
    from transformers import AutoConfig

    with _explained("config of", path, "config.json"):
        return AutoConfig.from_pretrained(_place(path), revision=revision, trust_remote_code=trust_remote_code)


def is_here(path: str, *, revision: str | None = None) -> bool:
    """Whether a model can be loaded without asking a hub: a folder, or fetched before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(_place(path)).is_dir():
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
    place = shipped / f"{name}.json"
    if not place.is_file() and not Path(name).is_file():
        known = ", ".join(sorted(path.stem for path in shipped.glob("*.json")))
        raise RequestError(f"no sizes are called {name!r}; expected the path of a config.json, or one of {known}")
    return load_config(str(place if place.is_file() else name))


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Raises:
        RequestError: there is none.
    """
    from transformers import AutoTokenizer

    with _explained("tokenizer of", path, "tokenizer.json"):
        return AutoTokenizer.from_pretrained(_place(path), revision=revision, trust_remote_code=trust_remote_code)


def _place(path: str) -> str:
    return embedded_target() if path == EMBEDDED else path


@contextmanager
def _explained(what: str, path: str, files_expected: str) -> Iterator[None]:
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


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep the bars of `transformers` off the screen inside the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def embedded_target() -> str:
    """Folder of the target that ships with the package."""
    place = Path(str(files("draftsmith.recipes"))) / "assets" / "tiny-target"
    if not (place / "config.json").is_file():
        raise RequestError(f"the embedded target is missing at {place}; run `make tiny-target`")
    return str(place)
