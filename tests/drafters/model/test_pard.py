"""PARD drafts a chain in one pass: what it declares is what a fresh pass over true tokens and masks says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_drafter, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import DraftSampling, Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.folder import save_draft_model
from draftsmith.drafters.identity import mark_tuned
from draftsmith.drafters.model import pard
from draftsmith.drafters.model.pard import Pard
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1]]
MASK = VOCABULARY - 1


class Watched(Pard):
    """Keeps the text before each proposal, and the proposal."""

    def reset(self, prompts: Any, room: int, *, static: bool = False) -> None:
        super().reset(prompts, room, static=static)
        self.seen: list[tuple[list[list[int]], Proposal]] = []

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        history = self._history
        ends = (history.lengths_B + 1).tolist()
        known = [history.tokens_BL[row, :end].tolist() for row, end in enumerate(ends)]
        self.seen.append((known, proposal))
        return proposal


class KeepsMasks(Watched):
    """A planted bug: entries of masks count as those of accepted tokens."""

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        self._drafted = self.draft_length
        return proposal


def made(target: Backbone, kind: type[Pard] = Watched, **settings: Any) -> Pard:
    draft = make_drafter(target, noise=0.05)
    return kind(draft.backbone, target.vocabulary, mask=MASK, **settings)


def fresh_q(drafter: Pard, text: list[int], length: int) -> Tensor:
    """What one call of the model, without any cache, says of the drafts behind a text, [K, V]."""
    ids = torch.tensor([[*text, *[MASK] * (length - 1)]])
    logits_KV = drafter.module(ids).logits[0, -length:].clone()
    logits_KV[:, MASK] = -torch.inf
    return logits_KV.softmax(-1)


def check_seen(drafter: Pard) -> None:
    for known, proposal in drafter.seen:
        assert proposal.q_BNV is not None
        assert proposal.sampling is DraftSampling.IID
        assert not (proposal.tokens_BN[:, 1:] == MASK).any()
        for row, text in enumerate(known):
            q_KV = proposal.q_BNV[row, :-1]
            torch.testing.assert_close(q_KV, fresh_q(drafter, text, drafter.draft_length), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("length", [1, 4])
@torch.inference_mode()
def test_every_q_is_that_of_a_fresh_pass(architecture: str, length: int) -> None:
    target = make_target(architecture)
    drafter = made(target, draft_length=length)
    done = generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=20)
    assert len(drafter.seen) > 4
    assert done.target_calls < 60
    check_seen(drafter)


@torch.inference_mode()
def test_one_draft_is_a_plain_draft_model_s_to_the_bit() -> None:
    """With the mask in a row of its own, behind the target's tokens."""
    target = make_target("qwen3")
    plain = make_drafter(target, noise=0.05, draft_length=1)
    plain.backbone.model.resize_token_embeddings(VOCABULARY + 1, mean_resizing=False)
    drafter = Watched(plain.backbone, target.vocabulary, mask=VOCABULARY, draft_length=1)
    ours = generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=20, seed=2)
    q: list[Tensor] = []
    propose = plain.propose

    def noting(*args: Any) -> Proposal:
        proposal = propose(*args)
        assert proposal.q_BNV is not None
        q.append(proposal.q_BNV)
        return proposal

    plain.propose = noting  # type: ignore[method-assign]
    theirs = generate(target, plain, PROMPTS, warper=Warper(1.0), max_new_tokens=20, seed=2)
    assert ours.tokens == theirs.tokens
    assert len(q) == len(drafter.seen) > 4
    for (_, proposal), wanted in zip(drafter.seen, q, strict=True):
        assert proposal.q_BNV is not None
        assert torch.equal(proposal.q_BNV, wanted)


def test_one_draft_serves_every_target_of_its_tokenizer(tmp_path: Path) -> None:
    """A wider target with padding behind its tokens, one that a run has tuned; not one of another tokenizer."""
    target, words = make_target("qwen3"), ["abc def ghi jkl mno pqr\n"] * 5
    target.tokenizer = train_tokenizer(words, 300)
    draft = make_drafter(target, noise=0.05).backbone.model
    pard.mark(draft, MASK)
    save_draft_model(draft, tmp_path / "drafter", target, family="pard")
    sizes = ModelConfig(architecture="llama", layers=1, hidden=48, heads=2, kv_heads=1, max_positions=256)
    torch.manual_seed(0)
    other = Backbone(fresh_model(sizes, vocabulary=VOCABULARY + 3, eos=None).eval(), name="other")
    other.tokenizer = target.tokenizer
    mark_tuned(other.model, name="other", identity="abc")
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 16}
    for each in (target, other):
        loaded = load_drafter(tmp_path / "drafter", each, draft_length=3)
        assert isinstance(loaded, Pard)
        assert generate(each, loaded, PROMPTS, **how).tokens == autoregressive(each, PROMPTS, **how).tokens
    other.tokenizer = train_tokenizer(["zyx wvu tsr"] * 5, 300)
    with pytest.raises(RequestError, match="with tokenizer"):
        load_drafter(tmp_path / "drafter", other)


@torch.inference_mode()
def test_kept_entries_of_masks_are_noticed() -> None:
    target = make_target("qwen3")
    drafter = made(target, KeepsMasks)
    generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=20)
    with pytest.raises(AssertionError):
        check_seen(drafter)


@torch.inference_mode()
def test_a_mask_that_may_be_drafted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pard, "without_mask", lambda logits, _mask: logits)
    target = make_target("qwen3")
    drafter = made(target)
    generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=20)
    with pytest.raises(AssertionError):
        check_seen(drafter)


@torch.inference_mode()
def test_the_greedy_text_is_the_target_s() -> None:
    target = make_target("qwen3")
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 24}
    assert generate(target, made(target), PROMPTS, **how).tokens == autoregressive(target, PROMPTS, **how).tokens


@pytest.mark.parametrize("settings", [{}, {"policy": "argmax"}, {"factors": (1.0, 0.3)}])
@torch.inference_mode()
def test_a_row_alone_is_the_row_in_a_batch_and_at_fixed_shapes(settings: dict[str, Any]) -> None:
    target = make_target("qwen3")
    how: dict[str, Any] = {"warper": Warper(1.0), "max_new_tokens": 16, "seed": 3}
    together = generate(target, made(target, **settings), PROMPTS, **how).tokens
    assert generate(target, made(target, **settings), PROMPTS[:1], **how).tokens[0] == together[0]
    assert generate(target, made(target, **settings), PROMPTS, static=True, **how).tokens == together


def test_one_pass_whatever_its_length() -> None:
    drafter = made(make_target("qwen3"), draft_length=7)
    assert (drafter.draft_steps, drafter.nodes) == (1, 8)


def test_a_mask_without_an_embedding_is_refused() -> None:
    target = make_target("qwen3")
    draft = make_drafter(target)
    with pytest.raises(RequestError, match=f"token id {VOCABULARY}, .* {VOCABULARY}"):
        Pard(draft.backbone, target.vocabulary, mask=VOCABULARY)
