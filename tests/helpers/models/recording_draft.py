"""A draft model that keeps what it proposed, and the same distributions by training's forward pass."""

from __future__ import annotations

import torch
from draftsmith.decoding.proposal import Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.trainers.packed.passes import hidden_states
from torch import Tensor


class Watched(DraftModel):
    """Keeps what was known before each proposal, and the proposal."""

    def reset(self, prompts, room, *, static=False):  # noqa: ANN001, ANN201
        super().reset(prompts, room, static=static)
        self.seen: list[tuple[list[list[int]], Proposal]] = []

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        known = [
            self._history.tokens_BL[row, : int(self._history.lengths_B[row])].tolist() for row in range(len(last_B))
        ]
        self.seen.append((known, proposal))
        return proposal


def teacher_forced(model: torch.nn.Module, texts: list[list[int]]) -> list[Tensor]:
    """Logits of training's forward pass, all texts packed into one row. [T, V] of each."""
    ids = torch.tensor([[token for text in texts for token in text]])
    batch = {
        "input_ids": ids,
        "positions": torch.tensor([[at for text in texts for at in range(len(text))]]),
        "documents": torch.tensor([[n for n, text in enumerate(texts) for _ in text]]),
    }
    logits = model.get_output_embeddings()(hidden_states(model, batch))[0]
    return list(logits.split([len(text) for text in texts]))
