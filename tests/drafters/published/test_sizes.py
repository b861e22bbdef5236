"""Sizes of a published drafter that neither a word nor a tensor says: what whoever wrote the form takes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draftsmith.drafters.published.files import Files
from draftsmith.drafters.published.sizes import _windows_of_block, dflash, dflash2, layer_sizes
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


def test_a_word_is_the_first_name_s_wherever_it_stands() -> None:
    """On top before a method's own table; null says nothing."""
    config = {"a": None, "b": 1, "c": 4, "dflash_config": {"a": 2, "b": 3, "c": 5}, "eagle_config": {"d": 6}}
    word = Files(Path("d"), config, {}, {}).word
    assert [word(*names) for names in (("a", "b"), ("b", "a"), ("c",), ("d",), ("e", "d"))] == [2, 1, 4, 6, 6]
    assert word("e", default=7) == 7


@pytest.mark.parametrize(
    ("words", "candidates"), [({"speculators_model_type": "dflash2"}, 16), ({"selector_top_k": 5}, 5), ({}, None)]
)
def test_candidates_that_are_not_said_are_those_of_speculators(words: dict[str, Any], candidates: int | None) -> None:
    """Rows of a selector's table are tokens; kernels of 3 taps over groups of 2 of the 4 numbers, two a layer."""
    shapes = {
        "fc.weight": (4, 4),
        "layers.0.mlp.up_proj.weight": (8, 4),
        "candidate_selector.predecessor_codebook": (61, 6),
        "layers.0.attention_conv.base_kernel": (1, 3, 4),
        "layers.0.attention_conv.kernel_projection.weight": (12, 4),
    }
    config = BLOCK | {"num_target_layers": 9, "vocab_size": 61} | words
    files = Files(Path("d"), config, {name: Head("F32", shape) for name, shape in shapes.items()}, {})
    if candidates is None:
        with pytest.raises(KeyError, match="selector_top_k"):
            dflash2(files)
        return
    found = dflash2(files)
    assert [found[name] for name in ("candidates", "vocabulary", "rank", "taps", "group")] == [candidates, 61, 6, 3, 2]


@pytest.mark.parametrize(
    ("words", "causal"),
    [
        ({}, True),
        ({"sliding_window_non_causal": True}, False),
        ({"sliding_window_non_causal": False}, True),
        ({"is_causal": False}, False),
        ({"causal": True, "sliding_window_non_causal": True}, True),
    ],
)
def test_blocks_are_causal_in_windows_unless_it_is_said(words: dict[str, Any], causal: bool) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = BLOCK | {"layer_types": kinds, "sliding_window": 7} | words
    found = _windows_of_block(Files(Path("d"), config, {}, {}), 2)
    assert found == {"windows": [7, None], "causal_windows": causal}
    assert _windows_of_block(Files(Path("d"), BLOCK | words, {}, {}), 2) == {}
