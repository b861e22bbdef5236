"""Checks of the config files of a foreign model, before `transformers` acts on them.

A config.json is data, and some of its keys choose code all the same: kernels from a hub, quantisers that are not
known here, other files of weights. They are refused unless the recipe trusts the model by name
(`target.trust_remote_code`). Counts are bounded too, if something would be built piece by piece from them. Read next:
`hub.py`, which asks here before it reads a config; `weights.py`, the same for weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import RequestError
from .quantised import KEY, check_quantisation

_ATTENTION = frozenset(
    f"{private}{part}_implementation{internal}"
    for part in ("attn", "experts")
    for private in ("", "_")
    for internal in ("", "_internal")
)
# names of attention and of experts that are part of transformers or of a package that the user installed: the config's
# choice among them is not followed, as ours is made anyway
_BUILT_IN = re.compile(r"eager|sdpa|flash_attention_[234]|flex_attention|grouped_mm|batched_mm")
_CODE = {
    "compile_config": "a compiler",
    "custom_generate": "code from a hub",
    "distributed_config": "how a model is spread",
    "fusion_config": "other modules",
    "kernel_config": "kernels from a hub",
    "transformers_weights": "another file of weights",
    "trust_remote_code": "code that comes with the model",
    "use_kernels": "kernels from a hub",
}
_QUANTISED = frozenset((KEY, "compression_config"))
_MOST = {"layers": 1_000, "experts": 4_096, "labels": 100_000}
"""Of what is built one by one, far more than any model has."""
_COUNTED = {
    "layers": re.compile(r"(^|_)(n_)?layers?$|^num_blocks$|^depth$"),
    "experts": re.compile(r"experts$"),
    "labels": re.compile(r"^num_labels$"),
}
_TRUST = "for a target that you trust, set target.trust_remote_code"


def check_config(path: str, raw: Any) -> None:
    """Refuse a config.json that chooses code, or counts what nobody could build.

    Args:
        path: the model, as the user named it.
        raw: the file's content.

    Raises:
        RequestError: it does; the message names the key. ValueError: it is no table.
    """
    from transformers import PretrainedConfig

    _check_keys(path, "config.json", raw, PretrainedConfig)
    for key, value in _pairs(raw):
        kind = next((kind for kind, names in _COUNTED.items() if names.search(key)), None)
        if kind is not None and _number(value) > _MOST[kind]:
            raise RequestError(
                f"the config.json of {path!r} has {key} {value:,}, and each would be built by itself; "
                f"expected at most {_MOST[kind]:,} {kind}"
            )


def check_generation_config(path: str, source: str, revision: str | None) -> None:
    """As `check_config`, for the generation_config.json of a model, if it has one.

    Args:
        source: the model's folder, or its name on the hub.
    """
    from transformers import GenerationConfig

    raw = raw_json(source, "generation_config.json", revision)
    if raw is not None:
        _check_keys(path, "generation_config.json", raw, GenerationConfig)


def check_tokenizer_config(path: str, source: str, revision: str | None) -> None:
    """As `check_generation_config`, for the config of a tokenizer, and the model's beside it."""
    raw = raw_json(source, "config.json", revision)
    if raw is not None:
        check_config(path, raw)
    own = raw_json(source, "tokenizer_config.json", revision)
    if own is not None:
        _check_keys(path, "tokenizer_config.json", own, object)


def end_ids(path: str, eos: Any) -> tuple[int, ...]:
    """An `eos_token_id` as ids; none where it is null.

    Raises:
        RequestError: it is something else than ids.
    """
    if eos is None:
        return ()
    ids = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    if not all(isinstance(each, int) and 0 <= each < 2**63 for each in ids):
        raise RequestError(
            f"{path} names {eos!r:.80} as the tokens that end a text (eos_token_id of its "
            "generation_config.json or config.json); expected ids, whole numbers from 0 on"
        )
    return ids


def raw_json(path: str, name: str, revision: str | None) -> Any:
    """The content of a JSON file of a model's folder or hub page; None where it has none, as a GGUF file."""
    from transformers.utils.hub import cached_file

    if Path(path).is_file():
        return None
    absent = dict.fromkeys(
        [f"_raise_exceptions_for_{what}" for what in ("missing_entries", "connection_errors", "gated_repo")], False
    )
    found = cached_file(path, name, revision=revision, **absent)
    return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))


def _check_keys(path: str, file: str, raw: Any, kind: type) -> None:
    """Raise RequestError for a key that chooses code, or stands where `kind` has a function."""
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds no table of names and values")
    for key, value in _pairs(raw):
        if value is None or value is False or value == {}:
            continue
        if key in _QUANTISED:
            if key != KEY or file != "config.json":
                raise RequestError(
                    f"the {file} of {path!r} says that its weights are quantised ({key}: {str(value):.80}); expected "
                    f"that in {KEY} of config.json: take the model anew, or the unquantised one (bf16)"
                )
            check_quantisation(path, file, value)
        chosen = "kernels from a hub" if key in _ATTENTION and not _is_built_in(value) else _CODE.get(key)
        if chosen is not None:
            raise RequestError(
                f"the {file} of {path!r} chooses {chosen} ({key}: {str(value):.80}), and what a model's files choose "
                f"is not run here; take a copy without the key, or {_TRUST}"
            )
        if callable(getattr(kind, key, None)):
            raise RequestError(
                f"the {file} of {path!r} has the key {key!r}, which is the name of a function of transformers and no "
                "setting; take the model from its publisher, or a copy without the key"
            )


def _is_built_in(value: Any) -> bool:
    names = value.values() if isinstance(value, dict) else [value]
    return all(name is None or (isinstance(name, str) and _BUILT_IN.fullmatch(name)) for name in names)


def _pairs(raw: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a table and of the tables in it."""
    waiting = [raw]
    while waiting:
        for key, value in waiting.pop().items():
            yield key, value
            if isinstance(value, dict):
                waiting.append(value)


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0
