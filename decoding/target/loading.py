"""Models with their weights, by folder or hub name.

Read next: `hub.py`, what is read without weights; `backbone.py`, what a loaded model becomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ...storage import check_tensors
from .attention import use_grouped_attention
from .backbone import Backbone
from .hub import folder_or_name, loading_errors

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    return Backbone(model, name=folder_or_name(path), revision=revision)


def check_weight_files(path: str) -> None:
    """Raise RequestError where a file of a model's folder is cut short."""
    folder = Path(folder_or_name(path))
    for file in sorted(folder.glob("model*.safetensors")):
        check_tensors(file, remedy=f"copy the folder {folder} again or make it anew")


def load_model(path: str, *, revision: str | None = None, dtype: str = "fp32", trust_remote_code: bool = False) -> Any:
    """The weights alone, ready to train further; the class is that of `transformers`.

    Raises:
        RequestError: there is no such model, or its weights are damaged.
    """
    from transformers import AutoModelForCausalLM

    source = folder_or_name(path)
    check_weight_files(path)  # what follows would not name the file
    # a bar is for what takes long: a download, not a folder that is here
    quiet = no_progress_bars() if Path(source).is_dir() else nullcontext()
    with loading_errors("model", path, "config.json and safetensors weights"), quiet:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                revision=revision,
                dtype=_DTYPES[dtype],
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):  # out of memory, for instance
                raise
            raise ValueError("its weights are of other sizes than its config.json says") from error
        model, report = loaded
        missing = sorted(report["missing_keys"])
        if missing:  # which transformers fills with random numbers, and a warning
            others = f" and {len(missing) - 1} others" * (len(missing) > 1)
            raise ValueError(f"its weights lack {missing[0]}{others}")
        return model


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
