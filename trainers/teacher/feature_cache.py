"""The cache of features that a run's recipe asks for, and what it must have been made for.

Read next: `features.py`, which reads and fills it; `data/features/store.py`, the shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...data.config import DataConfig
from ...data.features.shards import token_bytes
from ...data.features.store import FeatureStore
from ...data.rows.prepare import Prepared
from ...data.rows.templates import ChatTemplate
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.cut import is_cut, whole
from ...decoding.backbone.hidden_states import LAST
from ...decoding.backbone.quantised import plain_parts
from ...drafters.identity import TargetIdentity
from ...errors import RequestError
from ..config import FeaturesConfig
from ..loop.objective import Objective
from .engine import EngineFeatures, identity_of_engine, proved_engine, request_of
from .features import CachedFeatures, FeatureSource, OnlineFeatures, is_trained
from .handshake import drop_layers

_CHUNK = 1 << 18  # numbers of a weight that are summed at once; its int64 copy stays in a cache
_BITS = {1: torch.uint8, 2: torch.int16}  # wider ones are read as 32 bits each
_NOT_COMPUTED_WITH = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Entries of a config that change no hidden state; types are seen in the weights."""


@contextlib.contextmanager
def feature_source(
    objective: Objective,
    config: FeaturesConfig,
    target: Backbone,
    rows: Prepared,
    data: DataConfig,
    *,
    out: Path,
    accelerator: Accelerator,
) -> Iterator[None]:
    """Give the objective the source that the recipe asks for, while the run lasts.

    Raises:
        RequestError: the target is trained too, the cache was made for something else, or the engine's states
            are not the target's. EnvironmentFailure: the folder cannot be written, or no engine is there.
    """
    source = objective.features
    if source is not None:
        source.looks_ahead = source.looks_ahead and config.prefetch
    if isinstance(source, OnlineFeatures):
        source.precision = config.precision
    if config.source == "online":
        yield
        return
    if not isinstance(source, OnlineFeatures):
        raise RequestError(f"features.source is {config.source}, and this method reads no features; leave it")
    if is_trained(target.model):
        raise RequestError(
            f"features.source is {config.source}, and the target is trained in this run, so its states do not "
            "stay what they are; use features.source online"
        )
    with contextlib.ExitStack() as stack:
        if config.source == "engine":
            kept: FeatureSource = stack.enter_context(
                asked_source(config, target, rows, data, source.layers, out=out, accelerator=accelerator)
            )
            drop_layers(target.model)  # the engine is proved by them, and nothing else runs them
        else:
            identity = identity_of(target, config, source.layers, rows, data)
            store = _store(config, identity, source.layers, target, rows, out, accelerator)
            stack.enter_context(contextlib.closing(store))
            team = accelerator if is_cut(target.model) else None
            kept = stack.enter_context(contextlib.closing(CachedFeatures(source, store, config.dtype, together=team)))
        kept.looks_ahead = config.prefetch
        objective.features = kept
        yield


@contextlib.contextmanager
def asked_source(
    config: FeaturesConfig,
    target: Backbone,
    rows: Prepared,
    data: DataConfig,
    layers: Sequence[int],
    *,
    out: Path,
    accelerator: Accelerator,
) -> Iterator[EngineFeatures]:
    """States by the engine that the recipe names, once it is found to compute the target; errors as above."""
    request = request_of(config, target.name, layers, target.model.config)
    with contextlib.ExitStack() as stack:
        engine, proof = stack.enter_context(
            proved_engine(request, target.model, rows.train, out=out, accelerator=accelerator)
        )
        identity = identity_of(target, config, layers, rows, data) | identity_of_engine(request, proof)
        store = _store(config, identity, layers, target, rows, out, accelerator)
        stack.enter_context(contextlib.closing(store))
        asked = EngineFeatures(
            layers,
            target.model,
            engine,
            proof.fingerprint,
            store,
            config.dtype,
            accelerator=accelerator,
            requests=config.requests,
        )
        yield stack.enter_context(contextlib.closing(asked))


def _store(
    config: FeaturesConfig,
    identity: dict[str, object],
    layers: Sequence[int],
    target: Backbone,
    rows: Prepared,
    out: Path,
    accelerator: Accelerator,
) -> FeatureStore:
    """Where states are kept; errors as of `FeatureStore`."""
    bytes_ = token_bytes(len(layers), hidden_size(target.model), config.dtype)
    return FeatureStore(
        features_folder(config, out),
        identity,
        max_bytes=int(config.max_gb * 1e9),
        row_bytes=rows.train.sequence_length * bytes_,
        # two epochs: a row that was not asked for in them is none of this run's
        patience=2 * (len(rows.train) + len(rows.validation)),
        rank=accelerator.process_index,
        world=accelerator.num_processes,
    )


def features_folder(config: FeaturesConfig, out: Path) -> Path:
    """`features.folder`, or `features` in the run's folder."""
    return Path(config.folder).expanduser() if config.folder else out / "features"


def hidden_size(target: nn.Module) -> int:
    """Numbers of one hidden state."""
    config: Any = target.config
    return int(config.get_text_config(decoder=True).hidden_size)


def identity_of(
    target: Backbone, config: FeaturesConfig, layers: Sequence[int], rows: Prepared, data: DataConfig
) -> dict[str, object]:
    """All that stored states depend on but the row itself, by the names of a refusal."""
    whose = TargetIdentity.of(target)
    template = ChatTemplate(target.tokenizer, data.chat_template)
    written = template.override or target.tokenizer.chat_template
    count = int(target.model.config.get_text_config(decoder=True).num_hidden_layers)
    return {
        "target": whose.name,
        "target weights": weights_hash(target.model),
        "target config": config_hash(target.model),
        "tokenizer": whose.tokenizer,
        "chat template": hashlib.sha256(json.dumps(written).encode()).hexdigest(),
        "layers": [layer if layer != LAST else count for layer in layers],
        "features.dtype": config.dtype,
        **({"features.precision": config.precision} if config.precision else {}),
        "rows": rows.train.fingerprint,
    }


def model_hash(model: nn.Module) -> str:
    """A hash of all that a model computes with: its weights, and its config."""
    return hashlib.sha256(f"{weights_hash(model)} {config_hash(model)}".encode()).hexdigest()


def config_hash(model: nn.Module) -> str:
    """A hash of a config's entries that change hidden states, such as RoPE's and the norms'.

    The same weights under another entry are another model, which no weight shows.
    """
    config: Any = model.config
    entries = config.get_text_config(decoder=True).to_dict()
    used = {name: entry for name, entry in entries.items() if name not in _NOT_COMPUTED_WITH}
    return hashlib.sha256(json.dumps(used, sort_keys=True, default=str).encode()).hexdigest()


@torch.no_grad()
def weights_hash(model: nn.Module) -> str:
    """A hash over all weights' names, types, shapes and every bit; the same on all devices.

    That of a target which is cut over processes is the same too; they make it together, weight by weight.
    """
    kept = model.state_dict().keys()  # buffers that are saved: quantised weights are such
    buffers = [(name, each) for name, each in model.named_buffers() if name in kept]
    digest, factors = hashlib.sha256(), _factors(_CHUNK)
    for name, weight in sorted([*model.named_parameters(), *buffers], key=lambda each: each[0]):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        factors = factors.to(weight.device)
        for part in plain_parts(whole(weight)):
            digest.update(_sums(part, factors).numpy().tobytes())
    return digest.hexdigest()


def _sums(weight: Tensor, factors_C: Tensor) -> Tensor:
    """Two sums over each chunk's bits as integers, one of them weighted by position.

    Whole numbers wrap around, so that the order of the sum does not matter, as it does for others.
    """
    sums = []
    size = weight.element_size()
    for chunk in _chunks(weight, len(factors_C) * 4 // max(4, size)):
        bits = chunk.view(_BITS.get(size, torch.int32)).to(torch.int64)
        sums += [bits.sum(), bits.mul_(factors_C[: len(bits)]).sum()]
    return torch.stack(sums).cpu()


def _chunks(weight: Tensor, length: int) -> Iterator[Tensor]:
    """All numbers of a weight in its own order, `length` at a time; no more than that is copied."""
    if weight.is_contiguous():
        yield from weight.view(-1).split(length)
        return
    for at in range(0, weight.numel(), length):
        index = torch.arange(at, min(at + length, weight.numel()), device=weight.device)
        yield weight[torch.unravel_index(index, weight.shape)]


def _factors(count: int) -> Tensor:
    """Odd numbers without a pattern (splitmix64's), one per index of a chunk, int64 [count]."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64))
