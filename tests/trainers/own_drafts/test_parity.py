"""What is drafted while training is what decoding drafts there, with the same random numbers, and what the target says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith.benchmarks.common.random_models import GROUPED
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.sampling import Warper
from helpers.models.random_models import random_model
from helpers.own_drafts import CASES, LENGTH, Noted, made, rows, trained_on


class Given:
    """Random numbers that are known."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers.double()[None]

    def take(self, count: int) -> torch.Tensor:
        return self.numbers[:, :count]


def proposal(drafter: Any, target: Backbone, text: list[int], warper: Warper, numbers: torch.Tensor) -> Any:
    """What decoding drafts behind a text whose last token has just been emitted."""
    kv_cache, features = KVCache(1, len(text) + 8), []
    target.prefill([text[:-1]], kv_cache, layers=drafter.layers, features=features)
    drafter.reset([text[:-1]], 8)
    drafter.begin(features)
    return drafter.propose(torch.tensor([text[-1]]), warper, Given(numbers))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_decoding(
    name: str, temperature: float, target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind every place: the tokens, and the probability that each was drawn with."""
    noted, batch = Noted(monkeypatch), rows()
    goal = made(name, target, rollouts={"temperature": temperature})
    goal.module.eval()
    _, terms = trained_on(goal, batch)
    drafter = CASES[name][3](goal.draft().eval(), target)
    places, drafted = noted.places, noted.drafted
    assert len(places.row_X) == 2 * 5, "half of the rows, five places each"
    for x in range(len(places.row_X)):
        row, at = int(terms["rows"][places.row_X[x]]), int(places.at_X[x])
        start = at - int(batch["positions"][row, at])
        text = batch["input_ids"][row, start : at + 2].tolist()
        with torch.no_grad():
            numbers = terms["uniforms"][row, int(places.number_X[x])]
            found = proposal(drafter, target, text, Warper(temperature), numbers)
        tokens = found.tokens_BN[0]
        assert drafted.token_XT[x].tolist() == tokens.tolist(), (row, at)
        q = torch.ones(LENGTH) if found.q_BNV is None else found.q_BNV[0].gather(1, tokens[1:, None])[:LENGTH, 0]
        torch.testing.assert_close(noted.q_XJ[x], q, rtol=1e-3, atol=1e-6)


TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},  # all layers slide
    "gemma2": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 5,
        "num_hidden_layers": 4,
    },
}


@pytest.mark.parametrize("architecture", TARGETS)
def test_the_target_reads_drafts_as_it_reads_a_text(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the keys and values of packed rows: the last hidden states of document, root and drafts alone."""
    model = random_model(architecture, spread=0.5, **(GROUPED | TARGETS[architecture]))
    use_grouped_attention(model)
    target = Backbone(model, name="random")
    noted, batch = Noted(monkeypatch), rows()
    _, terms = trained_on(made("dflash", target), batch)
    places, drafted = noted.places, noted.drafted
    for x in range(len(places.row_X)):
        row, at = int(terms["rows"][places.row_X[x]]), int(places.at_X[x])
        start = at - int(batch["positions"][row, at])
        text = [*batch["input_ids"][row, start : at + 1].tolist(), *drafted.token_XT[x, :-1].tolist()]
        with torch.no_grad():
            states = target.model.model(torch.tensor([text]), use_cache=False).last_hidden_state[0, -LENGTH:]
        torch.testing.assert_close(drafted.states_XTH[x, :-1], states, rtol=1e-4, atol=1e-4)
        assert not drafted.states_XTH[x, -1].any(), "nobody asks what follows the last draft"
