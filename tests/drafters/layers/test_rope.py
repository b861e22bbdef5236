"""Drafters turn their heads as their target does: its theta, its scaling, at every position of its context."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.layers.llama import LayerShape, Rotary
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from helpers.models.random_models import random_model, ready
from helpers.models.small_drafters import FAMILIES, make_on_target
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import RopeParameters

ORIGINAL, CONTEXT = 16, 128
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LONG = {
    **{"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL},
    **{"short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0], "long_factor": [float(n) for n in range(2, 10)]},
}
KINDS = [
    YARN,
    YARN | {"beta_fast": 4.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5},
    LLAMA3,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    LONG,
]
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def target_with(rope: dict[str, Any], family: str = "llama") -> Any:
    rope = rope if "full_attention" in rope else {"rope_theta": 5e5} | rope
    return random_model(family, max_position_embeddings=CONTEXT, rope_parameters=rope, **SIZES)


@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: rope["rope_type"])
def test_angles_are_those_of_the_targets_own_class(rope: dict[str, Any]) -> None:
    model = target_with(rope)
    reach = ORIGINAL if rope is LONG else CONTEXT  # as far as the decoder goes, whose limit longrope is
    positions_1N = torch.arange(reach)[None]
    theirs = model.get_decoder().rotary_emb(torch.zeros(1), positions_1N)
    ours = Rotary(LayerShape.of(model.config))(positions_1N)
    plain = Rotary(LayerShape(**asdict(LayerShape.of(model.config)) | {"rope_scaling": None}))(positions_1N)
    for mine, wanted, unscaled in zip(ours, theirs, plain, strict=True):
        torch.testing.assert_close(mine[:, 0], wanted, rtol=1e-6, atol=1e-6)
        assert rope["rope_type"] == "dynamic" or not torch.allclose(unscaled, mine, atol=0.05)


def test_words_that_a_release_does_not_list_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 reads them and leaves them out of its list of what a scaling may have."""
    words = {"truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
    for name in words:
        monkeypatch.delitem(RopeParameters.__annotations__, name, raising=False)
    scaling = LayerShape.of(target_with(YARN | words).config).rope_scaling
    assert scaling is not None
    assert {name: scaling.get(name) for name in words} == words


def test_of_positions_by_kind_of_layer_those_of_full_attention_are_followed() -> None:
    """Gemma 3: theta of a million, scaled, where local layers have 10,000."""
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    model = random_model("gemma3_text", max_position_embeddings=CONTEXT, rope_parameters=kinds, **SIZES, **layers)
    shape, positions_1N = LayerShape.of(model.config), torch.arange(CONTEXT)[None]
    assert (shape.rope_theta, shape.rope_scaling) == (1e6, {"rope_type": "linear", "factor": 8.0})
    theirs = model.get_decoder().rotary_emb(torch.zeros(1), positions_1N, "full_attention")
    for mine, wanted in zip(Rotary(shape)(positions_1N), theirs, strict=True):
        torch.testing.assert_close(mine[:, 0], wanted, rtol=1e-6, atol=1e-6)


def test_a_folder_without_the_word_has_plain_positions() -> None:
    settings = asdict(LayerShape.of(target_with(YARN).config))
    del settings["rope_scaling"]
    shape = LayerShape.from_settings(settings)
    assert shape.rope_scaling is None
    angle_N = torch.arange(5) / 5e5 ** (2 / 16)  # of the second pair of numbers
    torch.testing.assert_close(Rotary(shape)(torch.arange(5)[None])[0][0, 0, :, 1], angle_N.cos())


@pytest.mark.parametrize(
    "scaling",
    [
        "yarn",
        {"factor": 2.0},
        {"rope_type": "evil"},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": "much"},
        {"rope_type": "linear", "factor": 0.0},
        LONG | {"factor": 8.0, "short_factor": [1.0, 2.0]},
        {"rope_type": "llama3", "factor": 8.0},
    ],
)
def test_a_folder_whose_scaling_says_nothing_is_refused(scaling: Any) -> None:
    settings = asdict(LayerShape.of(target_with(YARN).config))
    with pytest.raises(ValueError, match="rope_scaling"):
        LayerShape.from_settings(settings | {"rope_scaling": scaling})


def test_a_scaling_that_cannot_be_followed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Phi-4-mini turns a part of each head and has factors for that part alone."""
    config = AutoConfig.for_model("llama", max_position_embeddings=CONTEXT, **SIZES)
    config.rope_parameters = LONG | {"rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    with caplog.at_level(logging.WARNING):
        assert LayerShape.of(config).rope_scaling is None
    assert "of type longrope, which its drafter does not follow" in caplog.text


@pytest.mark.parametrize("rope", [YARN, LLAMA3, LONG, {"rope_type": "linear", "factor": 4.0}])
def test_a_fresh_draft_model_has_the_targets_positions(rope: dict[str, Any]) -> None:
    like = target_with(rope)
    model = fresh_model(ModelConfig(layers=1, hidden=32, head_size=16), vocabulary=61, eos=None, like=like.config)
    positions_1N = torch.arange(ORIGINAL if rope is LONG else CONTEXT)[None]
    mine, wanted = (each.get_decoder().rotary_emb(torch.zeros(1), positions_1N) for each in (model, like))
    torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


class Watching:
    """Keeps the text in front of every proposal, and what the first draft was drawn from."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.met = drafter, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, *given: Any) -> Any:
        proposal = self.drafter.propose(*given)
        self.met.append(proposal.q_BNV[0, 0])
        return proposal


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in ("eagle", "eagle3", "mtp", "peagle")])
def test_training_and_decoding_agree_beyond_the_original_context(family: str) -> None:
    """The first draft of every step, 40 to 70 tokens into a text of a target that learnt 16 positions."""
    target = ready(target_with(YARN, "qwen3"))
    chain = {} if family == "peagle" else {"tree": "chain"}
    drafter = make_on_target(family, target, noise=0.2, draft_length=1, **chain)
    prompt = [(7 * n) % 61 for n in range(40)]
    watching = Watching(drafter)
    made = generate(target, watching, [prompt], warper=Warper(1.0), max_new_tokens=30, seed=3)  # type: ignore[arg-type]
    text = prompt + made.tokens[0]
    forced_XV = first_draft(drafter, target, text).softmax(-1)
    ends = step_ends(made.origin[0], len(prompt))
    assert len(ends) > 5
    for q_V, end in zip(watching.met, ends):
        torch.testing.assert_close(q_V, forced_XV[end - 1], rtol=1e-3, atol=1e-5)
    drafter.net.rotary.scaling = ""
    plain_XV = first_draft(drafter, target, text).softmax(-1)
    assert float((plain_XV[ends[0] - 1] - forced_XV[ends[0] - 1]).abs().max()) > 1e-3


def step_ends(origin: list[str], prompt: int) -> list[int]:
    """The place of the root of every step: each follows a token that the target chose."""
    return [prompt + place for place, each in enumerate(origin[:-2]) if each != "draft"]


def first_draft(drafter: Any, target: Backbone, text: list[int]) -> Tensor:
    hidden = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    layers = getattr(drafter.net.config, "layers", None) or (-1,)
    states = torch.cat([hidden[layer] for layer in layers], -1)[0]
    forced: Tensor = next(iter(drafter.teacher_forced(states, torch.tensor(text), 1)))
    return forced
