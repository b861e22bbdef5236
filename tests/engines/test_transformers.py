"""A draft model as `assistant_model` of transformers' own assisted generation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.registry import load_drafter
from engines.cases import Trained
from engines.engine import MOST_TOKENS, NEEDED
from engines.findings import Findings, counted, figure
from engines.measured import Prompts, first_drafts
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

pytestmark = NEEDED
K = 4
OURS = 2


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Accepted tokens of every step that had a draft."""
    found: list[int] = []
    update = AssistedCandidateGenerator.update_candidate_strategy

    def watched(self: AssistedCandidateGenerator, ids: torch.Tensor, scores: torch.Tensor, matches: int) -> None:
        if scores.shape[1] > 1:
            found.append(int(matches))
        update(self, ids, scores, matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", watched)
    return found


def test_assistant_model(
    target: Backbone, prompts: Prompts, trained: Trained, findings: Findings, matched: list[int]
) -> None:
    folder = trained("distill") / "drafter"
    assistant, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stored, own = load_file(folder / "model.safetensors"), assistant.state_dict()
    assert all(torch.equal(own[name], stored[name]) for name in stored)
    # chains of one length, as engines draft; by default the length follows the acceptance
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = K, "constant"
    settings.assistant_confidence_threshold = 0.0
    drafter = load_drafter(folder, target, draft_length=K)
    ours = generate(target, drafter, prompts, warper=Warper(0.0), max_new_tokens=MOST_TOKENS)
    assert ours.steps.running_TB.any()
    # theirs drafts before the target has written anything, ours behind its first token
    begun = [[*prompt, answer[0]] for prompt, answer in zip(prompts, ours.tokens, strict=True)]
    theirs = [written(target, assistant, ids, do_sample=False) for ids in begun]
    expected = within_the_limit(ours.steps.accepted_TB.T.tolist(), ours.steps.kept_TB.T.tolist())
    cold = list(matched)
    matched.clear()
    torch.manual_seed(0)
    for ids in begun:
        written(target, assistant, ids, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    share = first_drafts(target, drafter, prompts, MOST_TOKENS, repeats=OURS)
    low, high = share.interval(len(prompts))
    found = sum(count > 0 for count in matched) / len(matched)
    equal = sum(a == b[1:] for a, b in zip(theirs, ours.tokens, strict=True))
    findings.versions["transformers, assisted"] = transformers.__version__
    findings.add(
        "transformers",
        "draft model, T = 0",
        temperatures="0",
        untouched=0,
        text=f"{equal} of {len(prompts)}",
        ours=depths(expected),
        theirs=depths(cold),
    )
    sampled = {"sample": figure(share.value, (low, high)), "sample_engine": figure(found)}
    findings.add("transformers", "draft model, T = 1", temperatures="1", **sampled)
    assert theirs == [answer[1:] for answer in ours.tokens]
    assert depths(cold) == depths(expected)
    assert low <= found <= high


def written(target: Backbone, assistant: torch.nn.Module, ids: list[int], **how: object) -> list[int]:
    """What transformers writes behind `ids`, without an end: the limit alone cuts."""
    model = target.model
    done = model.generate(
        torch.tensor([ids]),
        assistant_model=assistant,
        max_new_tokens=MOST_TOKENS - 1,
        eos_token_id=-1,
        pad_token_id=0,
        **how,
    )
    return done[0, len(ids) :].tolist()


def within_the_limit(accepted_BT: list[list[int]], kept_BT: list[list[int]]) -> list[int]:
    """Our accepted tokens as they are where no draft goes beyond the limit: transformers cuts it before."""
    found = []
    for accepted_T, kept_T in zip(accepted_BT, kept_BT, strict=True):
        room = MOST_TOKENS - 1
        for accepted, kept in zip(accepted_T, kept_T, strict=True):
            if room > 1:
                found.append(min(accepted, room - 1))
            room -= kept
    return found


def depths(accepted: list[int]) -> str:
    """Steps, and in how many of them each position was accepted."""
    return counted(len(accepted), [sum(count > depth for count in accepted) for depth in range(K)])
