"""Hidden states of a target that runs elsewhere: asked of a serving engine document by document, kept in the store.

The process that trains has the target's embedding, first layers, last norm and projection alone. The
next micro-batch is asked for while this one is trained on. What goes wrong on one process is said
by all. Read next: `handshake.py`, the proof before the first step; `data/features/engine.py`, the requests.

Shapes: R rows, S tokens of a row, T of a document, N hidden states that are asked for, H hidden size.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ...data.features.engine import AnswerStates, Engine, EngineRequest
from ...data.features.shards import FeatureDtype
from ...data.features.store import FeatureStore, row_keys
from ...data.rows.packed import PackedRows
from ...decoding.backbone.hidden_states import LAST, decoder_of, last_norm
from ...errors import DraftsmithError, EnvironmentFailure, RequestError
from ...storage import check_identity_file, write_text
from ..config import FeaturesConfig
from ..loop.objective import Batch
from ..loop.sums import total
from .features import Features, StoredFeatures
from .handshake import KEPT_LAYERS, Proof, shake

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IDENTITY = "engine.json"
"""In the run's folder: the engine that it has learnt from."""
_DOCUMENTS = 3  # of the handshake
_log = logging.getLogger(__name__)


def request_of(config: FeaturesConfig, name: str, layers: Sequence[int], model_config: Any) -> EngineRequest:
    """What is asked of the server, and how it has to be started.

    Args:
        name: the target's, as the recipe has it.
        layers: the states that the method learns from.
        model_config: the whole target's.
    """
    own = model_config.get_text_config(decoder=True)
    count = int(own.num_hidden_layers)
    wanted = {count if layer == LAST else layer for layer in layers}
    return EngineRequest(
        config.server or "",
        config.served_model or name,
        Path(config.shared or "").expanduser(),
        tuple(sorted({*wanted, count, min(KEPT_LAYERS, count)})),
        int(own.hidden_size),
        config.timeout,
    )


class EngineFeatures(StoredFeatures):
    """States that were stored, or else asked of an engine and stored, ahead of their use."""

    made_ahead = True

    def __init__(
        self,
        layers: Sequence[int],
        cut: PreTrainedModel,
        engine: Engine,
        fingerprint: str | None,
        store: FeatureStore,
        dtype: FeatureDtype,
        *,
        accelerator: Accelerator,
        requests: int,
    ) -> None:
        """`cut`: the target's norm is there; `fingerprint`: which every answer has to have."""
        super().__init__(layers, cut.dtype, store, dtype)
        self._engine, self._fingerprint, self._accelerator = engine, fingerprint, accelerator
        count = int(cut.config.get_text_config(decoder=True).num_hidden_layers)
        self._numbers = [count if layer == LAST else layer for layer in layers]
        self._count, self._norm, self._device = count, last_norm(decoder_of(cut)), cut.device
        self._askers = ThreadPoolExecutor(requests, thread_name_prefix="engine")

    def __call__(self, batch: Batch) -> Features:
        """The states of a batch; where any process could not have them, all raise what it says."""
        states: Features = ()
        failed: DraftsmithError | None = None
        try:
            states = super().__call__(batch)
        except DraftsmithError as error:
            failed = error
        agree(self._accelerator, failed)
        return states

    def close(self) -> None:
        """Wait for what is being asked, so that no file is left."""
        super().close()
        self._askers.shutdown(wait=True, cancel_futures=True)

    def answers(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, tokens: int, temperature: float
    ) -> list[AnswerStates]:
        """What the engine writes behind prompts, side by side, and the states of both."""

        def asked(prompt: Sequence[int], seed: int) -> Future[AnswerStates]:
            return self._askers.submit(self._engine.answer, prompt, tokens, temperature=temperature, seed=seed)

        replies = [asked(*each) for each in zip(prompts, seeds, strict=True)]
        try:
            answers = [reply.result() for reply in replies]
        finally:
            for reply in replies:
                reply.cancel()
        for answer in answers:
            self._check_same(answer.fingerprint)
        return answers

    @torch.no_grad()
    def keep(self, row: Batch, states_TNH: Tensor) -> None:
        """Store the states of a row's one document, which may lack those of its last token.

        That one stays zero, as padding does: behind it nothing is predicted, and no other token reads it.
        """
        S, T = row["input_ids"].shape[1], len(states_TNH)
        made_NSH = torch.zeros(len(self._numbers), S, self._engine.request.hidden, dtype=self.dtype)
        made_NSH[:, :T] = self._wanted(states_TNH.to(self._device)).cpu()
        self.kept(row_keys(row)[0], made_NSH)

    def _make(self, batch: Batch, keys: list[str], rows: list[Tensor | None]) -> None:
        """Ask for the rows that are not stored, all their documents side by side."""
        missing = [r for r, row in enumerate(rows) if row is None]
        parts = [(r, part) for r in missing for part in documents_of(batch, r)]
        replies = [self._askers.submit(self._engine.ask, part.ids) for _, part in parts]
        device, tokens = batch["input_ids"].device, batch["input_ids"].shape[1]
        # padding, which nothing reads, has no states
        shape = (len(self._numbers), tokens, self._engine.request.hidden)
        made = {r: torch.zeros(shape, dtype=self.dtype, device=device) for r in missing}
        try:
            for (r, part), reply in zip(parts, replies, strict=True):
                states_TNH, fingerprint, _, _ = reply.result()
                self._check_same(fingerprint)
                made[r][:, part.first : part.first + len(part.ids)] = self._wanted(states_TNH.to(device))
        finally:
            for reply in replies:
                reply.cancel()
        for r, states_NSH in made.items():
            rows[r] = self.kept(keys[r], states_NSH)

    def _wanted(self, states_TNH: Tensor) -> Tensor:
        """The states that the method asks for, [N, T, H], the last one behind the norm."""
        served = self._engine.request.layers
        with torch.autocast(states_TNH.device.type, enabled=False):
            return torch.stack(
                [
                    self._norm(state_TH) if number == self._count else state_TH
                    for number in self._numbers
                    for state_TH in [states_TNH[:, served.index(number)].to(self.dtype)]
                ]
            )

    def _check_same(self, fingerprint: str | None) -> None:
        if fingerprint != self._fingerprint:
            raise RequestError(
                f"{self._engine.request.public_url} is another server than at the start: its system_fingerprint is "
                f"{fingerprint!r} and was {self._fingerprint!r}; start it as it was, and go on with --resume auto"
            )


class RowDocument(NamedTuple):
    """A document in its row."""

    first: int
    ids: list[int]


def documents_of(batch: Batch, r: int) -> list[RowDocument]:
    """The documents of a row, each as the engine sees it: alone, from position 0 on."""
    documents_S, positions_S, ids_S = (batch[name][r].tolist() for name in ("documents", "positions", "input_ids"))
    parts: list[RowDocument] = []
    for at, (document, position, token) in enumerate(zip(documents_S, positions_S, ids_S, strict=True)):
        if document < 0:  # padding
            continue
        if position == 0:
            parts.append(RowDocument(at, []))
        if not parts or position != len(parts[-1].ids):
            raise RequestError(
                f"a row's document {document} has position {position} where {len(parts[-1].ids) if parts else 0} was "
                "expected: an engine can be asked for documents that begin at 0 alone; use features.source online"
            )
        parts[-1].ids.append(token)
    return parts


def agree(accelerator: Accelerator, failed: DraftsmithError | None) -> None:
    """Raise on every process what any of them has failed with; all have to call it."""
    if not total(accelerator, float(failed is not None)):
        return
    if failed is not None and accelerator.num_processes == 1:
        raise failed
    told = gather_object([None if failed is None else (failed.exit_code, str(failed))])
    if failed is not None:
        raise failed
    code, message = next(each for each in told if each is not None)
    raise {each.exit_code: each for each in (RequestError, EnvironmentFailure)}.get(code, DraftsmithError)(message)


@contextlib.contextmanager
def proved_engine(
    request: EngineRequest, cut: PreTrainedModel, rows: PackedRows, *, out: Path, accelerator: Accelerator
) -> Iterator[tuple[Engine, Proof]]:
    """An engine, once it is found to compute the target, the same one that the run has learnt from so far.

    Raises:
        RequestError: it does not, on every process. EnvironmentFailure: nobody is there.
    """
    with contextlib.closing(Engine(request)) as engine:
        proof: Proof | None = None
        failed: DraftsmithError | None = None
        if accelerator.is_main_process:
            try:
                engine.check_serves(rows.sequence_length)
                proof = shake(engine, cut, chosen_documents(rows))
                _check_known(out, request, proof)
            except DraftsmithError as error:
                failed = error
        agree(accelerator, failed)
        # one of them has asked; the others take its word
        proof = next(each for each in gather_object([proof]) if each is not None) if proof is None else _told(proof)
        if accelerator.is_main_process:
            _log.info(
                "engine %s: the target's (state %d %.2g away, log-probabilities %.2g nats), %s",
                request.public_url,
                request.layers[0],
                proof.error,
                proof.nats,
                proof.dtype,
            )
        yield engine, proof


def _told(proof: Proof) -> Proof:
    gather_object([proof])
    return proof


def chosen_documents(rows: PackedRows) -> list[list[int]]:
    """The longest document of the first rows, and some others."""
    batch = rows.batch(list(range(min(16, len(rows)))))
    found = [part.ids for r in range(len(batch["input_ids"])) for part in documents_of(batch, r) if len(part.ids) > 1]
    if not found:
        raise RequestError("no training document has two tokens: there is nothing to prove an engine on")
    return sorted(found, key=len, reverse=True)[:: max(1, len(found) // _DOCUMENTS)][:_DOCUMENTS]


def identity_of_engine(request: EngineRequest, proof: Proof) -> dict[str, object]:
    """What of a server its states depend on; the weights are the handshake's."""
    return {
        "served model": request.model,
        "system_fingerprint": proof.fingerprint,
        "engine's precision": proof.dtype,
        "engine's layers": list(request.layers),
    }


def _check_known(out: Path, request: EngineRequest, proof: Proof) -> None:
    """Compare with the engine that the run began with; a new run keeps this one's word."""
    path, own = out / IDENTITY, identity_of_engine(request, proof)
    remedy = "The run has learnt from another server: start that one again, or begin in another --out"
    if any((out / "checkpoints").glob("step-*")) and check_identity_file(path, own, remedy=remedy):
        return
    write_text(path, json.dumps(own, indent=1) + "\n")
