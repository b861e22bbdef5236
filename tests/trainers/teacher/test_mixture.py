"""Texts by one model or several: as plain decoding writes them, and in the distribution of the mixture."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.random import SharedStream, Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from draftsmith.trainers.teacher.mixture import write

PROMPTS = [[5, 9, 2, 7, 7, 1], [3], [11, 4, 60]]


def texts(models, shares, *, temperature, prompts=PROMPTS, eos_ids=(), tokens=12, uniforms=None):
    return write(
        models,
        shares,
        prompts,
        warper=Warper(temperature),
        max_new_tokens=tokens,
        uniforms=uniforms or Uniforms(3, range(len(prompts)), "cpu"),
        eos_ids=eos_ids,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("eos_ids", [(), tuple(range(0, VOCABULARY, 5))])
def test_one_model_writes_as_plain_decoding_does(
    temperature: float, eos_ids: tuple[int, ...], target: Backbone
) -> None:
    """The same numbers of the same streams: the same tokens, ends included."""
    base = autoregressive(target, PROMPTS, warper=Warper(temperature), max_new_tokens=12, eos_ids=eos_ids, seed=3)
    assert texts([target], [1.0], temperature=temperature, eos_ids=eos_ids) == base.tokens


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_nothing_leaves_the_other_model(share: float, target: Backbone) -> None:
    other = make_target("qwen3", seed=5)
    mixed = texts([other, target], [share, 1 - share], temperature=0.0)
    alone = texts([other if share else target], [1.0], temperature=0.0)
    assert mixed == alone


def test_each_token_is_of_the_mixture(target: Backbone) -> None:
    """The second token too, given the first, whichever model wrote that: total variation within
    what so many draws leave to chance, and the distributions of the two models far beyond it."""
    other, rows, share = make_target("qwen3", seed=5), 60_000, 0.5
    prompt = [5, 9, 2]
    found = texts(
        [other, target],
        [share, 1 - share],
        temperature=0.7,
        prompts=[prompt] * rows,
        tokens=2,
        uniforms=SharedStream(0, rows),
    )
    pairs = torch.tensor(found)
    commonest = int(pairs[:, 0].mode().values)
    for context, seen in [(prompt, pairs[:, 0]), ([*prompt, commonest], pairs[pairs[:, 0] == commonest, 1])]:
        distributions = [distribution(each, context, 0.7) for each in (other, target)]
        wanted = share * distributions[0] + (1 - share) * distributions[1]
        counted = torch.bincount(seen, minlength=VOCABULARY) / len(seen)
        # E|counted - wanted| summed is below sqrt(V / n)
        bound = (VOCABULARY / len(seen)) ** 0.5 / 2
        assert float((counted - wanted).abs().sum()) / 2 < bound
        for alone in distributions:
            assert float((counted - alone).abs().sum()) / 2 > 1.5 * bound


def distribution(model: Backbone, ids: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        return (model.model(torch.tensor([ids])).logits[0, -1] / temperature).softmax(-1)


def test_padding_that_one_model_lacks_is_never_written(target: Backbone) -> None:
    sizes = ModelConfig(layers=1, hidden=32, heads=2, head_size=16, max_positions=256)
    torch.manual_seed(0)
    wide = Backbone(fresh_model(sizes, vocabulary=VOCABULARY + 19, eos=None).eval(), name="wide")
    found = texts([wide, target], [1.0, 0.0], temperature=4.0, tokens=60)
    assert max(max(row) for row in found) < VOCABULARY
