"""What a target's config alone says of it: its kind, its sizes, whether it knows chats, by which names it goes.

A config of the commonest kinds is read as JSON, so that an answer takes no torch; others are built in shapes, as the
pre-flight does, which refuses what cannot be decoded. Read next: `recommend.py`, which says what follows from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...decoding.backbone.hub import EMBEDDED, folder_or_name, say_asked
from ...decoding.gguf.file import GgufFile, find_gguf, read_gguf
from ...decoding.no_model import what_it_is
from ...drafters.hub import PREFIX, endpoint, hub_errors, is_fetched, shown, token
from ...drafters.sizes import check_sizes
from ...errors import EnvironmentFailure, RequestError

PLAIN = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds whose layers are of one form, gated and dense, whose numbers can be counted from the config."""
_GGUF = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
_NAMED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Described:
    """A target by its config."""

    name: str
    """As it was asked for."""
    kind: str
    """Its model_type."""
    parameters: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int | None
    chats: bool | None
    """Whether it has a chat template; None where the files that say so are not here."""
    names: Mapping[str, str]
    """Names that published drafters may know it by -> where each was found."""
    quantised: str | None = None


def described(name: str) -> Described:
    """What the config of a folder, a GGUF file or a model of the hub says.

    Raises:
        RequestError: there is none, it is damaged, or of what cannot be decoded.
        EnvironmentFailure: the hub cannot be asked for it.
    """
    if not name.strip():
        raise RequestError("the target's name is empty; expected a folder, a GGUF file, a hub name, or 'tiny'")
    source = folder_or_name(name)
    if (file := find_gguf(source)) is not None:
        return _of_gguf(name, read_gguf(file))
    raw = _config_of(name, source)
    names = {each: "its name" for each in _called(name, Path(source))} if name != EMBEDDED else {}
    if isinstance(made_from := raw.get("_name_or_path"), str):
        names |= {made_from: "_name_or_path in its config.json"}
    quantised = raw.get("quantization_config")
    method = str(quantised.get("quant_method", "some way")) if isinstance(quantised, dict) else None
    return _sized(name, raw, names, chats=_knows_chats(name, source), count=None, quantised=method)


def _called(name: str, place: Path) -> tuple[str, ...]:
    """What a target goes by: as it was asked for, and how its folder is called, or its page on the hub."""
    if not place.is_dir():
        return (name,)
    folder = place.resolve()
    return (name, shown(folder).removeprefix(PREFIX).partition("@")[0] if is_fetched(folder) else folder.name)


def _of_gguf(name: str, file: GgufFile) -> Described:
    stated = {ours: file.states(theirs) for ours, theirs in _GGUF.items()}
    embedding = next((each for each in file.tensors if each.name == "token_embd.weight"), None)
    raw = {
        **{key: value for key, value in stated.items() if value is not None},
        "model_type": file.architecture,
        "vocab_size": None if embedding is None else embedding.shape[0],
    }
    names = {Path(name).stem: "its file's name"}
    for key in ("general.name", "general.base_model.0.name"):
        if isinstance(found := file.fields.get(key), str):
            names |= {found: f"{key} of the file"}
    count = sum(prod(each.shape) for each in file.tensors if each.name != "rope_freqs.weight")
    chats = "tokenizer.chat_template" in file.fields
    return _sized(name, raw, names, chats=chats, count=count, quantised=f"GGUF, {file.quantisation}")


def _config_of(name: str, source: str) -> dict[str, Any]:
    """The content of a config.json, nothing of which is acted on."""
    place = Path(source)
    if (reason := what_it_is(place, of_config=True)) or (place.exists() and not place.is_dir()):
        raise RequestError(f"{name}: {reason}; {_EXPECTED}")
    if not place.is_dir():
        say_asked(name, None)
    file = place / "config.json" if place.is_dir() else _fetched(name, "config.json")
    if file is None:
        raise RequestError(f"{name}: that page of the hub has no config.json; {_EXPECTED}")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the config.json of {name} is no JSON ({error!s:.120}); {_ANEW}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise RequestError(f"the config.json of {name} names no model_type; {_EXPECTED}")
    return raw


def _fetched(name: str, file: str) -> Path | None:
    """A file of a model's page on the hub, by way of its cache; None where the page has none."""
    from huggingface_hub import errors, hf_hub_download
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except errors.HFValidationError as error:
        raise RequestError(f"there is no folder {name!r:.200}, and no hub has such a name; {_EXPECTED}") from error
    with hub_errors(name):
        try:
            return Path(hf_hub_download(name, file, endpoint=endpoint(), token=token()))
        except errors.RemoteEntryNotFoundError:
            return None


def _knows_chats(name: str, source: str) -> bool | None:
    """Whether there is a chat template beside a config, in a file of its own or in the tokenizer's."""
    place, files = Path(source), (*_TEMPLATES, "tokenizer_config.json")
    try:
        found = [place / each if place.is_dir() else _fetched(name, each) for each in files]
    except EnvironmentFailure:  # the config was fetched before, these were not
        return None
    *templates, tokenizer = (each if each is not None and each.is_file() else None for each in found)
    if any(templates) or tokenizer is None:
        return any(templates) or None
    return '"chat_template"' in tokenizer.read_text(encoding="utf-8", errors="replace")


def _sized(
    name: str, raw: Mapping[str, Any], names: Mapping[str, str], *, chats: bool | None, count: int | None, **more: Any
) -> Described:
    """The sizes of a config; those of a kind that is not counted here come from its shapes."""
    kind = str(raw["model_type"])
    if kind not in PLAIN:
        raw, built = _by_shapes(name)
        count = count or built
    if lacking := [key for key in _NAMED if raw.get(key) is None]:
        raise RequestError(f"the config of {name} names no {' and no '.join(lacking)}; {_ANEW}")
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    try:
        check_sizes(**{key: raw[key] for key in _NAMED}, num_key_value_heads=kv_heads)
        head = raw.get("head_dim") or (128 if kind == "qwen3" else raw["hidden_size"] // heads)
        check_sizes(head_dim=head)
    except ValueError as error:
        raise RequestError(f"the config of {name}: {error}; {_ANEW}") from error
    hidden, intermediate, layers, _, vocabulary = (raw[key] for key in _NAMED)
    if count is None:
        layer = _layer(kind, raw, head, kv_heads)
        count = layers * layer + hidden + vocabulary * hidden * (1 if raw.get("tie_word_embeddings") else 2)
    context = raw.get("max_position_embeddings")
    sizes = (hidden, intermediate, layers, heads, kv_heads, head, vocabulary)
    return Described(name, kind, count, *sizes, context, chats, names, **more)


def _layer(kind: str, raw: Mapping[str, Any], head: int, kv_heads: int) -> int:
    """The numbers of one layer: attention, feed-forward part and norms, and the biases that its kind has."""
    hidden, intermediate, queries = raw["hidden_size"], raw["intermediate_size"], raw["num_attention_heads"] * head
    keys, biased = kv_heads * head, bool(raw.get("attention_bias")) and kind in ("llama", "qwen3")
    count = 2 * hidden * (queries + keys) + 3 * hidden * intermediate + 2 * hidden
    count += 2 * head if kind == "qwen3" else 0
    count += queries + 2 * keys if biased or kind == "qwen2" else 0
    count += hidden if biased else 0
    return count + (2 * intermediate + hidden if kind == "llama" and raw.get("mlp_bias") else 0)


def _by_shapes(name: str) -> tuple[Mapping[str, Any], int]:
    """Sizes and number of parameters of any other kind, which decoding takes; no weights are read."""
    from ...decoding.backbone.hub import load_config
    from ...drafters.layers.llama import sizes_like
    from ..check.memory import parameters
    from ..check.models import decodable

    model = decodable(load_config(name))
    config: Any = model.config.get_text_config(decoder=True)
    keys = (*_NAMED, "num_key_value_heads", "head_dim", "max_position_embeddings")
    found: dict[str, Any] = {key: getattr(config, key, None) for key in keys}
    # families without gated layers name theirs otherwise, and drafters have Llama's proportions then
    found["intermediate_size"] = sizes_like(config)["intermediate"]
    return found, parameters(model)


_EXPECTED = "expected a folder with config.json, a GGUF file, a hub name, or 'tiny'"
_ANEW = "take the file anew from where it was published"
