"""Sizes of a published drafter that neither a word nor a tensor says: what whoever wrote the form takes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draftsmith.drafters.published.files import Files
from draftsmith.drafters.published.sizes import dflash, layer_sizes
from draftsmith.errors import RequestError
from draftsmith.storage.tensors import Head

# hidden size 4; what is not said has its default
BLOCK = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 8, "block_size": 4, "mask_token_id": 3}


@pytest.mark.parametrize(
    ("target_layers", "states", "decoder_layers", "layers"),
    [
        (36, 5, 5, [2, 10, 18, 26, 34]),  # behind layers 1 + 8 i, one in three from the last
        (20, 2, 2, [2, 18]),
        (28, 3, 3, [2, 14, 26]),
        (36, 1, 1, [19]),
        (9, 1, 1, [5]),
    ],
)
def test_states_of_a_block_drafter_that_names_none(
    target_layers: int, states: int, decoder_layers: int, layers: list[int]
) -> None:
    """Evenly from the second layer's to the last but two; of one layer the state behind the middle one."""
    found = read_block(target_layers, states, decoder_layers)
    assert (found["layers"], found["decoder_layers"]) == (layers, decoder_layers)


@pytest.mark.parametrize(("states", "decoder_layers"), [(1, 2), (5, 2), (3, 1)])
def test_states_that_are_not_one_of_each_layer_have_to_be_named(states: int, decoder_layers: int) -> None:
    with pytest.raises(RequestError, match=f"{states} states for {decoder_layers} layers, and does not name them"):
        read_block(36, states, decoder_layers)


def read_block(target_layers: int, states: int, decoder_layers: int) -> dict[str, Any]:
    heads = {"fc.weight": Head("F32", (4, 4 * states))}
    heads |= {f"layers.{n}.mlp.up_proj.weight": Head("F32", (8, 4)) for n in range(decoder_layers)}
    return dflash(Files(Path("d"), BLOCK | {"num_target_layers": target_layers}, heads, {}))


def test_sizes_of_a_layer_that_are_not_said() -> None:
    said = BLOCK | {"rms_norm_eps": 1e-5, "head_dim": 3, "num_key_value_heads": 1, "rope_theta": 7.0}
    asked = ("eps", "head_size", "kv_heads", "rope_theta")
    for config, sizes in ((BLOCK, [1e-6, 2, 2, 10_000.0]), (said, [1e-5, 3, 1, 7.0])):
        found = layer_sizes(Files(Path("d"), config, {}, {}))
        assert [found[name] for name in asked] == sizes
