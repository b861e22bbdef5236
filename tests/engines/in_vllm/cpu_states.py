"""vLLM's file connector for hidden states, where there is no CUDA: it writes at once, without a stream.

Named by `kv_connector_module_path`, which is vLLM's own door for connectors. What a request asks and what a
file holds are untouched.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as base


class CpuStates(base.ExampleHiddenStatesConnector):
    """Written while the step ends; a request is finished once its file is there."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._written: set[str] = set()

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        first = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (first + torch.arange(self._block_size)).flatten()
        states = base.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        lock = self._lock_fds.pop(pending.req_id, None)
        tensors = {"hidden_states": states.clone().contiguous(), "token_ids": pending.token_ids.clone()}
        save_file(tensors, pending.filename)
        if lock is not None:
            os.close(lock)
        self._written.add(pending.req_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose file is written."""
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        for pending in getattr(metadata, "pending_saves", []):
            self._submit_async_write(pending)
        self._accumulated_finished_req_ids.update(finished_req_ids)
        done = self._accumulated_finished_req_ids & self._written
        self._accumulated_finished_req_ids -= done
        return done or None, None
