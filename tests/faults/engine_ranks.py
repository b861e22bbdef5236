"""Two processes that ask engines for the target's states, each of which writes what it met."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from draftsmith.data.config import DataConfig
from draftsmith.data.features.engine import EngineRequest
from draftsmith.data.features.store import FeatureStore
from draftsmith.data.generate import continuations
from draftsmith.data.rows.packed import Document, PackedRows, pack
from draftsmith.data.rows.prepare import Prepared
from draftsmith.data.rows.report import DataReport
from draftsmith.decoding.backbone.hidden_states import LAST
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.errors import DraftsmithError
from draftsmith.trainers.config import FeaturesConfig
from draftsmith.trainers.teacher import engine as teacher
from draftsmith.trainers.teacher.engine import EngineFeatures
from draftsmith.trainers.teacher.engine_answers import answered_rows
from draftsmith.trainers.teacher.handshake import KEPT_LAYERS
from helpers.servers import fake_engine

LAYERS = (2, 3, 5)
"""What the engine hands out."""


def rows_of(vocabulary: int, rows: int = 8) -> PackedRows:
    """Two documents and padding in every row."""
    g = np.random.default_rng(3)
    documents = [
        Document(g.integers(0, vocabulary - 2, length).astype(np.int32), np.ones(length, dtype=np.bool_))
        for _ in range(rows)
        for length in (17, 9)
    ]
    return pack(documents, 30, pad=0, fingerprint="f")


def store_in(folder: Path, **how: Any) -> FeatureStore:
    given: dict[str, Any] = {"max_bytes": 10_000_000, "row_bytes": 12_000} | how
    return FeatureStore(folder, {"a": 1}, **given)


def two_ranks_answered(out: Path, target: str, servers: list[tuple[str, str, str]]) -> None:
    """Each server answers the prompts of both processes; the file `NAME-RANK` says what came of it."""
    accelerator = Accelerator(cpu=True)
    cut = load_target(target, layers=KEPT_LAYERS)
    continuations._PART = 2  # so that either process has several
    rows = rows_of(cut.model.config.vocab_size)
    report = DataReport(*[None] * len(fields(DataReport)))  # type: ignore[arg-type] # nobody reads it here
    prepared = Prepared(rows, rows_of(cut.model.config.vocab_size, rows=2), report)
    data = DataConfig(source="stdlib", sequence_length=30)
    for name, url, shared in servers:
        settings = {"server": url, "served_model": "the-target", "shared": shared, "timeout": 60.0, "requests": 2}
        config = FeaturesConfig.model_validate({"source": "engine", "answers": 20, "dtype": "fp32", **settings})
        try:
            made = answered_rows(
                prepared, config, cut, data, layers=(3, LAST), seed=3, out=out / f"run-{name}", accelerator=accelerator
            )
            said = f"{len(made.train)} and {len(made.validation)} rows, {made.train.content_hash()}"
        except DraftsmithError as error:
            said = f"{type(error).__name__}: {error}"
        (out / f"{name}-{accelerator.process_index}").write_text(said)


def two_ranks(out: Path, target: str, servers: list[tuple[str, str, str]]) -> None:
    """Each server in turn, by the handshake and the rows of this process; the file `NAME-RANK` says what it met."""
    accelerator = Accelerator(cpu=True)
    cut = load_target(target, layers=KEPT_LAYERS).model
    rows = rows_of(cut.config.vocab_size)
    mine = rows.batch([accelerator.process_index])
    for name, url, shared in servers:
        patience = fake_engine.patience(name)
        request = EngineRequest(url, "the-target", Path(shared), LAYERS, 32, timeout=patience, first_wait=0.01)
        folder = out / f"run-{name}"
        try:
            with teacher.proved_engine(request, cut, rows, out=folder, accelerator=accelerator) as (engine, proof):
                rank, world = accelerator.process_index, accelerator.num_processes
                store = store_in(folder / "store", rank=rank, world=world)
                source = EngineFeatures(
                    (LAST,), cut, engine, proof.fingerprint, store, "fp32", accelerator=accelerator, requests=2
                )
                source(mine)
                source.close()
            said = "nothing"
        except DraftsmithError as error:
            said = f"{type(error).__name__}: {error}"
        (out / f"{name}-{accelerator.process_index}").write_text(said)
