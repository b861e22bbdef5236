"""Models with their weights, by folder or hub name.

What older releases of `transformers` compute wrongly is computed otherwise here, or refused. A wrong number is not
seen by its size. So whatever a release that pyproject.toml allows is known to get wrong stands here, with the first
release that was tested to be right.

Read next: `hub.py`, what is read without weights; `backbone.py`, what a loaded model becomes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from ...errors import EnvironmentFailure, RequestError
from ..devices import check_device, runs_on_cpu
from ..gguf.file import find_gguf
from ..gguf.model import as_ordinary, check_from_gguf, gguf_weights
from ..request import whole
from .attention import OWN, use_grouped_attention
from .backbone import Backbone
from .cut import Cut, cut_class, move_whole_parts
from .foreign import check_generation_config, raw_json
from .hub import auto_class, folder_or_name, loading_errors, skeleton, vetted_config
from .quantised import ASKED, asked_config, check_can_read, check_projection, quantisation_of
from .weights import INDEX, check_held, check_weight_files, shards

# else transformers asks a service on the hub to convert a model's pickles, in the user's name
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_target(
    path: str,
    *,
    revision: str | None = None,
    dtype: str = "fp32",
    device: str | None = None,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    layers: int | None = None,
    cut: Cut | None = None,
) -> Backbone:
    """Load a causal LM by folder or hub name; `tiny` is the embedded default target.

    Args:
        quantization: `int8` or `int4`: round the linear layers' weights to it, all but the output projection's.
        layers: load only so many first layers, with embedding, last norm and projection; the config stays the
            whole model's. What such a part decodes is a text of its own, not the model's.
        cut: each process reads its share of the layers alone; the run's group is joined already.

    Raises:
        RequestError: there is no such model, dtype or device, it has fewer layers, its state cannot be rolled back,
            or it cannot be cut, or not quantised.
        EnvironmentFailure: it is quantised, and a package or a device for that is missing.
    """
    if device is not None:
        check_device(device)
    chosen = device or ("cpu" if runs_on_cpu() else "cuda")
    model = load_model(
        path,
        revision=revision,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
        layers=layers,
        device=chosen,
        cut=cut,
    )
    model.requires_grad_(False).eval()
    if cut is None and quantisation_of(model.config) is None:  # which are read where they will stay
        model.to(chosen)
    use_grouped_attention(model)
    return Backbone(model, name=folder_or_name(str(path)), revision=revision)


def load_model(
    path: str,
    *,
    revision: str | None = None,
    dtype: str = "fp32",
    trust_remote_code: bool = False,
    quantization: str | None = None,
    layers: int | None = None,
    device: str = "cpu",
    cut: Cut | None = None,
) -> Any:
    """The weights alone, ready to train further; the class is that of `transformers`.

    Args:
        quantization, layers: as for `load_target`.
        device: where a cut or quantised model is put; others are on the CPU.
        cut: how the layers are cut over processes.

    Raises:
        RequestError: there is no such model or dtype, its weights are damaged, or it cannot be cut or quantised.
        EnvironmentFailure: as for `load_target`.
    """
    path = _name_of(path)
    _check_precision(path, dtype, quantization)
    layers = None if layers is None else whole(layers, f"layers of {path!r}", least=1)
    source = folder_or_name(path)
    file = find_gguf(source)
    # a bar is for what takes long: a download, not a folder that is here
    quiet = no_progress_bars() if Path(source).exists() else nullcontext()
    with loading_errors("model", path, "config.json and safetensors weights"), quiet:
        config = vetted_config(path, revision=revision, trust_remote_code=trust_remote_code)
        check_can_read(path, config, quantization)
        if file is not None:
            check_from_gguf(file, quantization=quantization, is_cut=cut is not None)
        check_release(config)
        check_weight_files(path)  # what follows would not name the file
        if not trust_remote_code or file is not None:
            _check_foreign(path, revision, config)
        all_layers = None if layers is None else _keep_first(config, layers, path)
        loader = auto_class(config)
        placed: dict[str, Any] = {}
        quantised = quantization is not None or quantisation_of(config) is not None
        if quantization is not None:
            placed["quantization_config"] = asked_config(quantization, skeleton(config, trust_remote_code))
        if cut is not None or quantised:
            placed["device_map"] = {"": "cpu" if cut is not None and cut.offload else device}
        if cut is not None:
            _check_not_both(path, cut, quantised)
            made = type(skeleton(config, trust_remote_code))
            loader = cut_class(made, cut, cut.mesh(device))
        with _where(source, file) as place:
            model = _read(
                loader,
                **place,
                config=config,
                revision=revision,
                dtype=_DTYPES[dtype],
                trust_remote_code=trust_remote_code,
                **placed,
            )
        if file is not None:
            as_ordinary(model, file)
        keep_soft_cap(model)
        if all_layers is not None:
            _set_layers(model.config.get_text_config(decoder=True), *all_layers)
        if cut is not None:
            model.__class__ = made
            if cut.offload:
                move_whole_parts(model, device)
        if quantised:
            check_projection(model, path)
        return model


def _where(source: str, file: Path | None) -> AbstractContextManager[dict[str, Any]]:
    """What `from_pretrained` is told of where the weights are."""
    return nullcontext({"pretrained_model_name_or_path": source}) if file is None else gguf_weights(file)


def _name_of(path: object) -> str:
    """The folder or hub name that the caller named; RequestError for what names nothing."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise RequestError(f"the model is {path!r:.60}; expected a folder, a hub name, or 'tiny'")
    return str(path)


def _check_precision(path: str, dtype: str, quantization: str | None) -> None:
    """Raise RequestError for a dtype or a quantization that there is not."""
    if dtype not in _DTYPES:
        raise RequestError(
            f"the dtype of {path!r} is {dtype!r}; expected one of {', '.join(map(repr, _DTYPES))}; `quantization` "
            "rounds weights further"
        )
    if quantization not in (None, *ASKED):
        raise RequestError(
            f"the quantization of {path!r} is {quantization!r:.60}; expected one of {', '.join(map(repr, ASKED))}, or "
            "None for the weights as they are"
        )


def _keep_first(config: Any, layers: int, path: str) -> tuple[int, list[str] | None]:
    """Let a config be of the first layers alone; number and types of all that it had.

    Raises:
        RequestError: it has fewer.
    """
    own = config.get_text_config(decoder=True)
    count, types = own.num_hidden_layers, getattr(own, "layer_types", None)
    if layers > count:
        raise RequestError(
            f"layers is {layers}, and {path!r} has {count}; expected a number from 1 to {count}, or None for all"
        )
    _set_layers(own, layers, None if types is None else types[:layers])
    return count, types


def _read(loader: Any, **how: Any) -> Any:
    """The model that `loader` reads, every weight of it from the files.

    Raises:
        ValueError: weights are missing, or of other sizes than the config's.
    """
    try:
        with _without_report():
            model, report = loader.from_pretrained(use_safetensors=True, output_loading_info=True, **how)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):  # out of memory, for instance
            raise
        raise ValueError("its weights are of other sizes than its config.json says") from error
    missing = sorted(report["missing_keys"])
    if missing:  # which transformers fills with random numbers, and a warning
        others = f" and {len(missing) - 1} others" * (len(missing) > 1)
        raise ValueError(f"its weights lack {missing[0]}{others}")
    return model


def _check_not_both(path: str, cut: Cut, quantised: bool) -> None:
    """Raise RequestError for a quantised model that is to be cut over processes."""
    how = f"target.tensor_parallel is {cut.team}" if cut.team > 1 else "target.sharding is fully_shard"
    if quantised:
        raise RequestError(
            f"{how}, and {path!r} is quantised: its packed weights cannot be cut; leave out one of the two"
        )


@contextmanager
def _without_report() -> Iterator[None]:
    """Inside, transformers does not print which weights are missing or left over: what matters is an error."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _set_layers(config: Any, count: int, types: list[str] | None) -> None:
    """Set how many layers a config has, and of which kinds."""
    config.num_hidden_layers = count
    if types is not None:
        config.layer_types = types


def _check_foreign(path: str, revision: str | None, config: Any) -> None:
    """Raise RequestError for what a model that is not trusted may not say beside its config; for its sizes."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.utils.peft_utils import find_adapter_config_file

    source = folder_or_name(path)
    check_generation_config(path, source, revision)
    if not Path(source).exists():
        index = raw_json(source, INDEX, revision)
        if index is not None:
            shards(index)
        if find_adapter_config_file(source, revision=revision) is not None:
            raise RequestError(
                f"{path} is an adapter of peft on the hub; name a whole model, the adapter merged into it"
            )
    elif not is_deepspeed_zero3_enabled():  # which would cut what is built here into pieces
        check_held(skeleton(config), path)


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


_RIGHT_FROM = {
    "doge": (Version("5.23"), "without a word: a prompt's tokens see those behind them"),
    "olmo_hybrid": (Version("5.23"), "or not at all: its layers look for their states in a cache that has none"),
}
"""Families that older releases compute otherwise: the first release that was tested to be right, and what is wrong."""


def check_release(config: Any) -> None:
    """Raise EnvironmentFailure where the installed release computes a family wrongly."""
    family = config.get_text_config(decoder=True).model_type
    if family not in _RIGHT_FROM:
        return
    found, (needed, wrong) = Version(metadata.version("transformers")), _RIGHT_FROM[family]
    if found < needed:
        raise EnvironmentFailure(
            f"transformers {found} computes models of type {family} wrongly, {wrong}; "
            f"pip install 'transformers>={needed}'"
        )


def keep_soft_cap(model: Any) -> None:
    """Let a model whose scores are capped compute them by its own function: older releases give SDPA no cap."""
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    if capped and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(OWN)
