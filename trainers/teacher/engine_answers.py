"""Rows that a serving engine's target answers itself: the answer and its states come from one request.

Each prompt of the prepared rows is sent once. The engine writes what its target says and hands out the
states of both; they are in the store before the first step, and training asks for nothing twice.
A row is one document, prompt and answer, of which the answer counts as labels. Read next:
`data/generate/continuations.py`, the parts on disk, so that a killed run keeps its answers; `engine.py`.

Shapes: S tokens of a row, T of a prompt and its answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from accelerate import Accelerator

from ...data.config import DataConfig
from ...data.features.model_hash import model_hash
from ...data.generate.continuations import SettingNames, Team, Wanted, Write, continuations, sample_tensors
from ...data.rows.packed import PackedRows
from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...decoding.random import FOR_TRAINING, salted
from ...errors import DraftsmithError
from ..config import FeaturesConfig
from .engine import EngineFeatures, agree
from .feature_cache import asked_source

_FOLDER = "answers"
_log = logging.getLogger(__name__)


def answered_rows(
    rows: Prepared,
    config: FeaturesConfig,
    target: Backbone,
    data: DataConfig,
    *,
    layers: Sequence[int],
    seed: int,
    out: Path,
    accelerator: Accelerator,
) -> Prepared:
    """The prompts of `rows` with the engine's answers, in `out/answers`; their states are in the store.

    Args:
        layers: whose states the method learns from.

    Raises:
        On every process what any of them meets: DataError without a prompt, RequestError where the engine's states
        are not the target's or the folder has answers to something else, EnvironmentFailure where nobody answers.
    """
    assert config.answers is not None
    wanted = Wanted(
        samples=None,
        held_out=None,
        prompt_tokens=data.sequence_length - config.answers,
        tokens=config.answers,
        temperature=config.answer_temperature,
        seed=seed,
        weights=model_hash(target.model),
    )
    named = SettingNames("--out", "features.answers")
    together = _Together(accelerator)
    team = Team(accelerator.process_index, accelerator.num_processes, together.wait)
    expected = replace(rows, train=replace(rows.train, fingerprint=_fingerprint(rows, wanted)))
    with asked_source(config, target, expected, data, layers, out=out, accelerator=accelerator) as source:
        try:
            made = continuations(
                target, rows, wanted, out / _FOLDER, team, named=named, write=_by_engine(source, wanted)
            )
        except DraftsmithError as error:
            if not together.has_raised:
                together.wait(error)
            raise
    if accelerator.is_main_process:
        _log.info("the engine has answered %d prompts, and %d held-out ones", len(made.train), len(made.validation))
    train, validation = (replace(part, fingerprint=expected.train.fingerprint) for part in made)
    return replace(rows, train=train, validation=validation)


def _fingerprint(rows: Prepared, wanted: Wanted) -> str:
    """What the answered rows are made from, known before they are."""
    made_from = [rows.train.fingerprint, rows.validation.fingerprint, asdict(wanted)]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def _by_engine(source: EngineFeatures, wanted: Wanted) -> Write:
    """Prompts to the engine's answers; the states of each go to the store under the key of its row."""
    length = wanted.prompt_tokens + wanted.tokens
    # far from the seeds of other runs, which would share all answers but one with those of the seed beside theirs
    first = salted(wanted.seed, FOR_TRAINING)

    def write(prompts: Sequence[list[int]], numbers: range) -> list[list[int]]:
        seeds = [(first + number) % 2**31 for number in numbers]
        answers = source.answers(prompts, seeds, tokens=wanted.tokens, temperature=wanted.temperature)
        for prompt, answer in zip(prompts, answers, strict=True):
            ids_1S, labels_1S, documents_1S = sample_tensors([prompt], [answer.ids], length).values()
            row = PackedRows(ids_1S.numpy(), labels_1S.numpy(), documents_1S.numpy(), fingerprint="")
            source.keep(row.batch([0]), answer.states_TNH)
        return [answer.ids for answer in answers]

    return write


class _Together:
    """A barrier at which every process raises what any of them has failed with."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self.has_raised = accelerator, False

    def wait(self, failed: DraftsmithError | None = None) -> None:
        try:
            agree(self._accelerator, failed)
        except DraftsmithError:
            self.has_raised = True
            raise
