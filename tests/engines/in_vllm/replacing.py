"""A drafter's weights put in the place of those that run, as docs/adapt.md has it.

For `--worker-extension-cls replacing.Replacing`, by which a server's worker has the method; what is faulty in the CPU
build is replaced as well (`mended.py`).
"""

from __future__ import annotations

from pathlib import Path

from mended import Mended
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class Replacing(Mended):
    """One method more for a worker of vLLM's."""

    def replace_drafter(self, folder: str) -> None:
        """Take the weights of an exported folder."""
        draft = self.get_draft_model()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(draft)
            draft.load_weights(load_file(Path(folder) / "model.safetensors").items())
            finalize_layerwise_reload(draft, self.speculative_config.draft_model_config)
