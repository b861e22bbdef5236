"""The cache of features that a run's recipe asks for, and what it must have been made for.

Read next: `features.py`, which reads and fills it; `data/feature_store.py`, the shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..data.config import DataConfig
from ..data.feature_codec import token_bytes
from ..data.feature_store import FeatureStore
from ..data.prepare import Prepared
from ..data.templates import ChatTemplate
from ..decoding.backbone import Backbone
from ..drafters.identity import TargetIdentity
from ..errors import RequestError
from .config import FeaturesConfig
from .features import LAST, CachedFeatures, Featured, FeatureSource, OnlineFeatures, is_trained
from .objective import Objective

_SAMPLED = 1024  # numbers of each weight that are hashed


@contextlib.contextmanager
def feature_source(
    objective: Objective, config: FeaturesConfig, target: Backbone, rows: Prepared,
    data: DataConfig, *, out: Path, accelerator: Accelerator,
) -> Iterator[None]:  # fmt: skip
    """Give the objective the source that the recipe asks for, while the run lasts.

    Raises:
        RequestError: the target is trained too, or the cache was made for something else.
        EnvironmentFailure: the folder cannot be written.
    """
    source = objective.features if isinstance(objective, Featured) else None
    if source is not None:
        source.looks_ahead = source.looks_ahead and config.prefetch
    if config.source == "online":
        yield
        return
    if not isinstance(objective, Featured) or not isinstance(source, OnlineFeatures):
        raise RequestError("features.source is cache, and this method reads no features; leave it")
    if is_trained(target.model):
        raise RequestError(
            "features.source is cache, and the target is trained in this run, so its states do not "
            "stay what they are; use features.source online"
        )
    folder = features_folder(config, out)
    bytes_ = token_bytes(len(source.layers), hidden_size(target.model), config.dtype)
    store = FeatureStore(
        folder, identity_of(target, config, source.layers, rows, data),
        max_bytes=int(config.max_gb * 1e9), row_bytes=rows.train.sequence_length * bytes_,
        # two epochs: a row that was not asked for in them is none of this run's
        patience=2 * (len(rows.train) + len(rows.validation)),
        rank=accelerator.process_index, world=accelerator.num_processes,
    )  # fmt: skip
    cached: FeatureSource = CachedFeatures(source, store, config.dtype)
    cached.looks_ahead = config.prefetch
    objective.features = cached
    with contextlib.closing(store), contextlib.closing(cached):
        yield


def features_folder(config: FeaturesConfig, out: Path) -> Path:
    """`features.folder`, or `features` in the run's folder."""
    return Path(config.folder).expanduser() if config.folder else out / "features"


def hidden_size(target: nn.Module) -> int:
    """Numbers of one hidden state."""
    config: Any = target.config
    return int(config.get_text_config(decoder=True).hidden_size)


def identity_of(
    target: Backbone, config: FeaturesConfig, layers: tuple[int, ...], rows: Prepared,
    data: DataConfig,
) -> dict[str, object]:  # fmt: skip
    """All that stored states depend on but the row itself, by the names of a refusal."""
    whose = TargetIdentity.of(target)
    template = ChatTemplate(target.tokenizer, data.chat_template)
    written = template.override or target.tokenizer.chat_template
    count = int(target.model.config.get_text_config(decoder=True).num_hidden_layers)
    return {
        "target": whose.name,
        "target weights": weights_hash(target.model),
        "tokenizer": whose.tokenizer,
        "chat template": hashlib.sha256(json.dumps(written).encode()).hexdigest(),
        "layers": [layer if layer != LAST else count for layer in layers],
        "features.dtype": config.dtype,
        "rows": rows.train.fingerprint,
    }


@torch.no_grad()
def weights_hash(model: nn.Module) -> str:
    """A hash over all weights' names, types and shapes, and a spread of their numbers."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        step = max(1, weight.numel() // _SAMPLED)
        digest.update(weight.flatten()[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()
