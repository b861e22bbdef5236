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

from accelerate import Accelerator
from torch import nn

from ...data.config import DataConfig
from ...data.features.model_hash import config_hash, weights_hash
from ...data.features.shards import token_bytes
from ...data.features.store import FeatureStore
from ...data.rows.prepare import Prepared
from ...data.rows.templates import ChatTemplate
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.cut import is_cut
from ...decoding.backbone.hidden_states import LAST
from ...drafters.identity import TargetIdentity
from ...errors import RequestError
from ..config import FeaturesConfig
from ..loop.objective import Objective
from .engine import EngineFeatures, identity_of_engine, proved_engine, request_of
from .features import CachedFeatures, FeatureSource, OnlineFeatures, is_trained
from .handshake import drop_layers


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
        "rows": rows.train.content_hash(),  # wherever they lie: states take hours, and their folders are moved
    }
