"""The probe calls rounding a near-tie and every planted dependence on the shape a bug."""

from __future__ import annotations

import json
import platform

import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.errors import RequestError
from draftsmith.eval.audit.determinism import fingerprints, first_difference, probe_determinism, rounding_noise
from draftsmith.eval.audit.determinism_result import Determinism

PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7], [3]]
GREEDY = Warper(0.0)


def probe(target: Backbone, prompts=PROMPTS, **settings) -> Determinism:
    usual = {"max_new_tokens": 10, "batches": (1, 2), "verify_widths": (1, 4)}
    return probe_determinism(target, make_drafter(target), prompts, **(usual | settings))


class Changed(Backbone):
    """A target whose logits are changed behind every forward."""

    def see(self, tokens_BN, lengths_B, tree, kv_cache, **how):
        seen = super().see(tokens_BN, lengths_B, tree, kv_cache, **how)
        return seen._replace(logits_BNV=self.change(seen.logits_BNV, tokens_BN, kv_cache))


class Perturbed(Changed):
    """A target that adds a fixed noise to its logits where the shape is `when(B, N, static)`."""

    when = staticmethod(lambda rows, nodes, static: False)

    def change(self, logits_BNV, tokens_BN, kv_cache):
        if self.when(*tokens_BN.shape, kv_cache.static):
            g = torch.Generator().manual_seed(0)
            shift_V = torch.randn(logits_BNV.shape[-1], generator=g)
            return logits_BNV + shift_V.to(logits_BNV.dtype)
        return logits_BNV


class Tied(Changed):
    """Its two largest logits are neighbours; which one is larger depends on the batch."""

    def change(self, logits_BNV, tokens_BN, kv_cache):
        best, ids = logits_BNV.topk(2, dim=-1)
        toward = torch.tensor(float("inf") if len(tokens_BN) > 1 else -float("inf"))
        return logits_BNV.scatter(-1, ids[..., 1:], torch.nextafter(best[..., :1], toward))


class LastBit(Changed):
    """All nodes but the root are one bit off."""

    def change(self, logits_BNV, tokens_BN, kv_cache):
        logits_BNV = logits_BNV.clone()
        far = torch.tensor(float("inf"))
        logits_BNV[:, 1:, 7] = torch.nextafter(logits_BNV[:, 1:, 7], far)
        return logits_BNV


@pytest.fixture(scope="module")
def found() -> Determinism:
    return probe(make_target("qwen3"), dtypes=("float32", "bfloat16"))


def test_a_right_target_passes(found: Determinism) -> None:
    # dtypes x KV caches x batches x (a baseline for both widths, speculation for one)
    assert len(found.settings) == 2 * 2 * 2 * 3
    assert len({each.setting for each in found.settings}) == len(found.settings)
    assert found.passed
    assert found.first_bug is None
    assert found.identical + found.near_ties == len(PROMPTS) * len(found.settings)
    assert found.tokens == 2 * len(PROMPTS) * 10
    assert sum(count for _, count in found.margins) == found.tokens
    assert sum(count for _, count in found.margins_at_divergences) == found.near_ties
    assert 0 < found.noise["float32"] < 1e-4 < found.noise["bfloat16"] < 0.1


def test_it_prints_and_goes_into_json(found: Determinism) -> None:
    read = json.loads(json.dumps(found.to_dict()))
    assert read["passed"] is True
    assert read["settings"][0]["setting"]["dtype"] == "float32"
    text = found.text()
    assert "determinism at T = 0: passed" in text
    assert "FAILED" not in text
    assert f"{found.identical} identical" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="measured on x86 alone")
def test_a_padded_baseline_in_a_static_arena_is_the_twin_of_speculation(found: Determinism) -> None:
    assert found.shape_invariant
    static = [each for each in found.invariance if each.static]
    assert [each.dtype for each in static] == ["float32", "bfloat16"]
    assert all(each.same_logits == each.tokens > 50 for each in static)
    # calls of a growing KV cache see other numbers of slots, and round otherwise
    growing = next(each for each in found.invariance if not each.static)
    assert growing.same_tokens == growing.tokens > growing.same_logits


@pytest.mark.parametrize(
    ("when", "where"),
    [
        (lambda rows, nodes, static: rows > 1, "batch 2"),
        (lambda rows, nodes, static: nodes > 1, "width 4"),
        (lambda rows, nodes, static: static, "static KV cache"),
    ],
    ids=["batch", "width", "padding"],
)
def test_logits_that_depend_on_the_shape_are_a_bug(when, where: str) -> None:
    target = make_target("qwen3")
    target.__class__, target.when = Perturbed, when
    result = probe(target)
    assert not result.passed
    assert where in result.first_bug
    text = result.text()
    assert f"FAILED: {result.first_bug}" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    for each in result.settings:
        assert each.identical + each.near_ties + each.bugs == len(PROMPTS)
        assert (each.bugs > 0) == (where in str(each.setting)), str(each.setting)


def test_a_bug_is_seen_in_a_copy_of_another_dtype() -> None:
    target = make_target("qwen3")
    target.__class__, target.when = Perturbed, lambda rows, nodes, static: rows > 1
    result = probe(target, dtypes=("bfloat16",), verify_widths=(1,))
    assert result.bugs > 0
    assert "bfloat16" in result.first_bug
    assert target.model.dtype == torch.float32


def test_a_tie_within_the_noise_is_a_near_tie() -> None:
    target = make_target("qwen3")
    target.__class__ = Tied
    result = probe(target)
    assert result.passed, result.first_bug
    assert result.near_ties > 0
    assert dict(result.margins_at_divergences)["0 to 0.0001"] == result.near_ties
    for each in result.settings:
        assert (each.near_ties > 0) == (each.setting.batch == 2)


def test_another_token_than_the_tied_one_is_a_bug_even_at_a_tie() -> None:
    """The margin excuses the second best, not the worst."""

    class Worst(Tied):
        def change(self, logits_BNV, tokens_BN, kv_cache):
            logits_BNV = super().change(logits_BNV, tokens_BN, kv_cache)
            return -logits_BNV if len(tokens_BN) > 1 else logits_BNV

    target = make_target("qwen3")
    target.__class__ = Worst
    result = probe(target, verify_widths=(1,))
    assert result.near_ties == 0
    assert result.bugs == 2 * len(PROMPTS)


def test_a_last_bit_breaks_invariance_just_where_it_is() -> None:
    """Logits in front of a token are those of the node that decided it, counted by hand."""
    target = make_target("qwen3")
    target.__class__ = LastBit
    drafter = make_drafter(target, draft_length=3)
    prompt = [PROMPTS[1]]
    result = probe_determinism(target, drafter, prompt, max_new_tokens=20, batches=(1,), verify_widths=(4,))
    own = generate(target, drafter, prompt, warper=GREEDY, max_new_tokens=20, static=True)
    padded = autoregressive(target, prompt, warper=GREEDY, max_new_tokens=20, static=True, pad_to=4)
    assert own.tokens == padded.tokens
    assert not result.shape_invariant
    static = next(each for each in result.invariance if each.static)
    assert static.same_tokens == static.tokens == 20
    # the prefill's token, and the first of every call
    assert static.same_logits == 1 + own.target_calls < 20


def test_without_a_width_to_speculate_with_nothing_is_claimed(target: Backbone) -> None:
    result = probe(target, PROMPTS[:1], batches=(1,), verify_widths=(1,), max_new_tokens=4)
    assert result.passed
    assert result.invariance == []
    assert not result.shape_invariant
    assert "not tested" in result.text()


def test_the_drafter_keeps_its_length(target: Backbone) -> None:
    drafter = make_drafter(target, draft_length=6)
    with pytest.raises(RequestError):
        probe_determinism(target, drafter, [[1], []], max_new_tokens=3)
    probe_determinism(target, drafter, [[1]], max_new_tokens=3, batches=(1,), verify_widths=(2,))
    assert drafter.draft_length == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "no prompt"),
        ({"batches": (0,)}, "batches are"),
        ({"verify_widths": ()}, "verify widths are"),
        ({"dtypes": ("fp8",)}, "expected some of float32"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_bad_requests_are_refused(target: Backbone, change: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        probe(target, **change)


def test_noise_is_the_models_own() -> None:
    """Our forward may be as wrong as it likes: the noise stays that of rounding."""
    target, prompt, answer = make_target("qwen3"), PROMPTS[1], list(range(20, 32))
    noise = rounding_noise(target, prompt, answer, [2, 5, 50])
    assert 0 < noise < 1e-5
    target.__class__, target.when = Perturbed, lambda rows, nodes, static: nodes > 1
    assert rounding_noise(target, prompt, answer, [2, 5, 50]) == noise
    # where every block is the same there is still the spacing of the dtype
    alone = rounding_noise(target, prompt, answer, [1])
    assert 0 < alone < 1e-6
    target.model.to(torch.bfloat16)
    assert rounding_noise(target, prompt, answer, [1]) > 1e4 * alone


def test_fingerprints_see_one_bit() -> None:
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        logits_RV = torch.randn(50, 1000, generator=g).to(dtype)
        near_RV = logits_RV.clone()
        place_R = torch.randint(1000, (50,), generator=g)
        for row, place in enumerate(place_R.tolist()):
            far = torch.tensor(float("inf"), dtype=dtype)
            near_RV[row, place] = torch.nextafter(near_RV[row, place], far)
        assert torch.equal(fingerprints(logits_RV), fingerprints(logits_RV.clone()))
        assert (fingerprints(logits_RV) != fingerprints(near_RV)).all()
        # the same numbers in another order are other logits
        assert (fingerprints(logits_RV) != fingerprints(logits_RV.flip(-1))).all()


@pytest.mark.parametrize(("one", "other", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([4], [5], 0)])
def test_first_difference(one: list[int], other: list[int], at: int | None) -> None:
    assert first_difference(one, other) == at
