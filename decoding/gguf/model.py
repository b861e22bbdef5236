"""Config, tokenizer and weights of a model in a GGUF file: transformers reads them, and this file checks what it read.

transformers passes over what it has no name for, and a wrong number is not seen by its size. So whatever a file
states that changes what is computed, and that is not in what came out, is put right here or refused by name. The file
is read through a folder of its own: what lies beside it (an adapter, a config) is no part of it.
Read next: `file.py`; `backbone/hub.py` and `backbone/loading.py`, which ask here.
"""

from __future__ import annotations

import copy
import logging
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ...errors import EnvironmentFailure, RequestError
from .file import MERGES, ORIGIN, TOKENS, TYPES, GgufFile, read_gguf

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger(__name__)
_TESTED = Version("5.23")
"""The first release of transformers whose reading was tested: older ones take other tokenizers."""
_DIGITS = frozenset(("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"))
"""Ways to cut text before merges (`tokenizer.ggml.pre`) that transformers lacks: digits alone, the rest as GPT-2."""
_AS_GPT2 = frozenset(("default", "exaone4", "gpt-2", "granite-docling", "jais", "mpt", "olmo", "phi-2", "trillion"))
_MOST_LAYERS = 1_000
_ENDS = ("eos", "eot", "eom")
_TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<|end|>")
"""Tokens that end a turn by their very name, as llama.cpp takes them where no `eot_token_id` is stated."""
_CONTROL = 3  # the type of a token that no text is cut into
_MERGED = {"gpt2": (MERGES,), "llama": (MERGES, "tokenizer.ggml.scores")}
"""Kinds of tokenizers, and of what else than tokens each needs one."""
_SAME = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "residual_scale": "residual_multiplier",
}
"""What is computed with, as the file states it -> as the config names it: both have to say the same."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""How Llama 3.1 and later turn positions: a file holds the factors that follow (rope_freqs.weight), and not these."""
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Gemma's models of 27 B, which a file tells by their layers alone: they scale queries by the width of a head that
hidden size and heads would make, where transformers takes the 256 of the smaller ones."""


def gguf_config(path: Path) -> Any:
    """The config that a file states.

    Raises:
        RequestError: transformers knows no such kind of model, or not all that it computes with.
        EnvironmentFailure: a package is missing, or too old.
    """
    stat = path.stat()
    return copy.deepcopy(_config(path.resolve(), stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=4)  # transformers takes seconds for each
def _config(path: Path, _changed: int, _size: int) -> Any:
    from transformers import AutoConfig

    file = _checked(path)
    try:
        with _alone(path) as place:
            config = AutoConfig.from_pretrained(**place)
    except ValueError as error:
        if "rchitecture" not in str(error) and "model type" not in str(error):
            raise
        raise RequestError(
            f"{path} is a model of kind {file.architecture!r}, which transformers {metadata.version('transformers')} "
            "does not read from GGUF; a newer one may, or name the model that it was made from, with config.json and "
            "safetensors"
        ) from error
    config.__dict__.pop("_model_name_or_path", None)  # a title
    config.name_or_path = str(path)
    ends = _ends(file, config)
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    setattr(config, ORIGIN, file.origin())
    _set_positions(file, config)
    if config.num_hidden_layers == _SCALED_BY_WIDTH.get(file.architecture):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    _check_same(file, config)
    return config


def _checked(path: Path) -> GgufFile:
    file, found = read_gguf(path), Version(metadata.version("transformers"))
    if found < _TESTED:
        raise EnvironmentFailure(
            f"{path} is a GGUF file, and transformers {found} makes another tokenizer of some; "
            f"pip install 'transformers>={_TESTED}'"
        )
    layers = file.states("block_count")
    if not isinstance(layers, int) or not 0 < layers <= _MOST_LAYERS:
        raise RequestError(
            f"{path} states {file.architecture}.block_count {layers}; expected 1 to {_MOST_LAYERS:,} layers: take the "
            "file anew from where it was published"
        )
    return file


@contextmanager
def _alone(path: Path) -> Iterator[dict[str, Any]]:
    """What `from_pretrained` is given, without the file's neighbours and without its bar."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as theirs

    reader: Any = modeling_gguf_pytorch_utils

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        bar = reader.tqdm
        reader.tqdm = partial(bar, disable=not theirs.is_progress_bar_enabled() or None)
        try:
            yield {"pretrained_model_name_or_path": folder, "gguf_file": path.name, "local_files_only": True}
        finally:
            reader.tqdm = bar


def _ends(file: GgufFile, config: Any) -> list[int]:
    """The ids that end a text: those that are stated, and one that ends a turn by its name."""
    stated = [file.fields.get(f"tokenizer.ggml.{end}_token_id") for end in _ENDS]
    theirs = config.eos_token_id if isinstance(config.eos_token_id, list) else []
    if stated[1] is None and isinstance(file.fields.get(TOKENS), int):
        tokens, kinds = file.texts(TOKENS), file.fields.get(TYPES)
        stated += [
            number
            for number, token in enumerate(tokens)
            if token in _TURN_ENDS and (not isinstance(kinds, list) or kinds[number] == _CONTROL)
        ]
    return list(dict.fromkeys(each for each in [*stated, *theirs] if each is not None))


def _set_positions(file: GgufFile, config: Any) -> None:
    """Set how positions are turned where the file says so and transformers leaves it out.

    Raises:
        RequestError: in a way that is not known here.
    """
    scaling = file.states("rope.scaling.type")
    factors = next((each for each in file.tensors if each.name == "rope_freqs.weight"), None)
    if factors is not None:
        config.rope_parameters = {**config.rope_parameters, **_of_llama3(file, config)}
    elif scaling not in (None, "none") and not _scaled(config, scaling):
        raise RequestError(
            f"{file.path} turns positions by {scaling!r} (rope.scaling.type), which transformers leaves out when it "
            "reads GGUF; name the model that it was made from, with config.json and safetensors"
        )


def _scaled(config: Any, scaling: str) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return any(each.get("rope_type") == scaling for each in tables)


def _of_llama3(file: GgufFile, config: Any) -> dict[str, Any]:
    """The way of Llama 3 whose factors are those of the file."""
    import numpy as np
    from gguf import GGUFReader

    held = next(each.data for each in GGUFReader(file.path).tensors if each.name == "rope_freqs.weight")
    factors = np.asarray(held, np.float64).ravel()
    largest, theta = float(factors.max()), config.rope_parameters["rope_theta"]
    lengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    low, high, original = _LLAMA3.values()
    between = np.clip((original / lengths - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - between) / largest + between), rtol=1e-3):
        raise RequestError(
            f"{file.path} turns positions by factors (rope_freqs.weight) that are not those of Llama 3, and "
            "transformers leaves them out; name the model that it was made from, with config.json and safetensors"
        )
    return {"rope_type": "llama3", "factor": largest, **_LLAMA3}


def _check_same(file: GgufFile, config: Any) -> None:
    """Raise RequestError where the file states otherwise what the config computes with."""
    for key, name in _SAME.items():
        stated, read = file.states(key), getattr(config, name, None)
        if stated in (None, 0) or isinstance(stated, list):
            continue
        if read is None or not math.isclose(float(stated), float(read), rel_tol=1e-4):
            raise RequestError(
                f"{file.path} states {file.architecture}.{key} {stated:g}, and transformers reads {name} {read}; "
                "name the model that it was made from, with config.json and safetensors"
            )


def check_from_gguf(path: Path, *, quantization: str | None, is_cut: bool) -> None:
    """Raise RequestError for a way to place or round weights that needs a folder of them.

    Args:
        quantization: the value of `target.quantization`.
        is_cut: whether the layers are to lie over processes.
    """
    if quantization is not None or is_cut:
        asked = "a target cut over processes" if quantization is None else f"target.quantization {quantization}"
        raise RequestError(
            f"{asked} needs a folder with safetensors, and {path} is a GGUF file; write one by "
            f"`draftsmith convert {path} --out FOLDER`, and name it"
        )


def check_held(path: Path, model: nn.Module) -> None:
    """Raise RequestError where the file holds other weights than the model has; no weight is read.

    Args:
        model: what the config describes, in shapes alone.
    """
    file = read_gguf(path)
    tied = any("lm_head" in name for name in getattr(model, "all_tied_weights_keys", None) or ())
    passed = {"rope_freqs.weight"} | ({"output.weight"} if tied else set())
    held = sum(math.prod(each.shape) for each in file.tensors if each.name not in passed)
    described = sum(parameter.numel() for parameter in model.parameters())
    if held != described:
        more = "more than transformers reads" if held > described else "fewer than the model needs"
        raise RequestError(
            f"{path} holds {held:,} numbers, and a model of its kind ({file.architecture}) and sizes has "
            f"{described:,}: {more}{_named(file, model, passed)}; name the model that it was made from, with "
            "config.json and safetensors"
        )


def _named(file: GgufFile, model: Any, passed: set[str]) -> str:
    """One tensor that the model has no place for, or none for a place; empty where names do not tell."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next((each for each in MODEL_ARCH if MODEL_ARCH_NAMES[each] == file.architecture), None)
    if kind is None:
        return ""
    names = get_tensor_name_map(kind, model.config.num_hidden_layers)
    known = {f"{names.get_name(stem)}.{end}" for stem, _, end in (name.rpartition(".") for name in model.state_dict())}
    there = {each.name for each in file.tensors} - passed
    odd = sorted(there - known) or sorted(known - there)
    return f" ({odd[0]})" if odd else ""


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a file, with its chat template.

    Raises:
        RequestError: the file has none, or a part of it is missing, or transformers cuts text in another way.
    """
    from transformers import AutoTokenizer

    file = _checked(path)
    _check_tokenizer(file)
    with _alone(path) as place:
        tokenizer = AutoTokenizer.from_pretrained(**place)
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(path)
    tokenizer.init_kwargs.pop("gguf_file", None)
    _set_cuts(file, tokenizer)
    return tokenizer


def _check_tokenizer(file: GgufFile) -> None:
    """Raise RequestError where a file's tokenizer is not there, or not whole."""
    kind, tokens = file.fields.get("tokenizer.ggml.model"), file.fields.get(TOKENS)
    missing = next((key for key, value in (("tokenizer.ggml.model", kind), (TOKENS, tokens)) if not value), None)
    if missing is None and kind in _MERGED and not any(file.fields.get(key) for key in _MERGED[kind]):
        missing = " or ".join(_MERGED[kind])
    if missing is not None:
        raise RequestError(
            f"the tokenizer of {file.path} is missing or not whole: it has no {missing}; take another file of the "
            "model, or name the model that it was made from"
        )
    kinds = file.fields.get(TYPES)
    if isinstance(kinds, list) and len(kinds) != tokens:
        raise RequestError(
            f"the tokenizer of {file.path} is damaged: it lists {tokens:,} tokens, and types for {len(kinds):,}; "
            "take another file of the model"
        )


def _set_cuts(file: GgufFile, tokenizer: Any) -> None:
    """Have text cut as the file says where transformers would cut it as GPT-2 without a word.

    Raises:
        RequestError: in a way that is known to neither.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    way = file.fields.get("tokenizer.ggml.pre")
    if file.fields["tokenizer.ggml.model"] != "gpt2" or way in GGUF_PRE_TOKENIZER_SPLITS or way in _AS_GPT2:
        return
    if way is None:
        _log.warning("%s does not say how its tokenizer cuts text (tokenizer.ggml.pre): as GPT-2's here", file.path)
    elif way not in _DIGITS:
        raise RequestError(
            f"the tokenizer of {file.path} cuts text by {way!r:.80} (tokenizer.ggml.pre), which neither transformers "
            f"{metadata.version('transformers')} nor draftsmith knows; name the model that it was made from"
        )
    else:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


@contextmanager
def gguf_weights(path: Path) -> Iterator[dict[str, Any]]:
    """What `from_pretrained` is given to read the weights as numbers."""
    from transformers import GgufConfig

    with _alone(path) as place:
        yield {**place, "quantization_config": GgufConfig(dequantize=True)}


def as_ordinary(model: Any, path: Path) -> None:
    """Take the last mark of a quantiser off a model: its weights are numbers, and it can be saved."""
    model.hf_quantizer = None
    model.config.name_or_path = str(path)
