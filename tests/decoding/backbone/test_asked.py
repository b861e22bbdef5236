"""What `load_target` is asked for and cannot be had is named, in one message each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.errors import RequestError
from helpers.models.shallow_target import SHALLOW


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"layers": 0}, r"layers of '.*' is 0; expected a whole number of at least 1"),
        ({"layers": -1}, "is -1; expected a whole number of at least 1"),
        ({"layers": "two"}, "is 'two'; expected a whole number of at least 1"),
        ({"layers": 999}, r"layers is 999, and '.*' has \d+; expected a number from 1 to"),
        ({"device": "cuda:99"}, r"device is 'cuda:99', which this machine does not have \(.*; expected one of cpu"),
        ({"device": "graphics"}, "device is 'graphics', which this machine does not have"),
        ({"device": []}, r"device is \[\], which this machine does not have"),
        ({"quantization": "int3"}, "the quantization of '.*' is 'int3'; expected one of 'int8', 'int4', or None"),
        ({"quantization": 4}, "the quantization of '.*' is 4; expected one of"),
        ({"dtype": "fp8"}, "the dtype of '.*' is 'fp8'; expected one of 'fp32'"),
        ({"path": 3}, "the model is 3; expected a folder, a hub name, or 'tiny'"),
        ({"path": ""}, "the model is ''; expected a folder"),
        ({"path": None}, "the model is None; expected a folder"),
    ],
)
def test_what_cannot_be_loaded_is_named(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        draftsmith.load_target(**{"path": SHALLOW, **asked})


def test_a_part_of_a_target_decodes_a_text_of_its_own() -> None:
    whole, part = draftsmith.load_target(SHALLOW), draftsmith.load_target(Path(SHALLOW), layers=1)
    assert part.model.config.num_hidden_layers == whole.model.config.num_hidden_layers > 1
    found, other = (draftsmith.autoregressive(each, [[5, 6, 7]], max_new_tokens=8).tokens for each in (part, whole))
    assert found != other
