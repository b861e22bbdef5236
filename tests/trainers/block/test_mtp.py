"""An MTP module's loss against a loop over tokens, and where a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.mtp.net import MtpNet
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.block import mtp
from draftsmith.trainers.config import FeaturesConfig, ObjectiveConfig, TargetConfig
from draftsmith.trainers.method_config import MtpConfig
from helpers.models.method_objectives import build
from safetensors.torch import load_file, save_file
from torch import Tensor

LENGTHS = (7, 10)


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def rows() -> dict[str, Tensor]:
    """Two rows of two documents each; each document's first token is no label, and a few others."""
    g, S = torch.Generator().manual_seed(0), sum(LENGTHS)
    documents = torch.cat([torch.full((n,), k) for k, n in enumerate(LENGTHS)]).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    mask = (positions > 0) & (torch.rand(2, S, generator=g) > 0.1)
    ids = torch.randint(0, VOCABULARY, (2, S), generator=g)
    return {"input_ids": ids, "loss_mask": mask, "positions": positions, "documents": documents}


def goal_for(target: Backbone, objective: dict[str, Any], **config: Any) -> Any:
    torch.manual_seed(0)
    goal = build("mtp", target.model, mtp=MtpConfig(**config), objective=ObjectiveConfig(chunk=5, **objective))
    with torch.no_grad():
        for weight in goal.draft().parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return goal


def drafted(net: MtpNet, target: Backbone, text: list[int], t: int, depth: int) -> Tensor:
    """Logits of depth 0 on behind the true pairs up to t, pair by pair as drafting goes: own states, true tokens."""
    seen: list[Tensor] = []
    norm = target.model.model.norm
    hook = norm.register_forward_hook(lambda _norm, given, out: seen.extend([given[0], out]))
    with torch.no_grad():
        target.model(torch.tensor([text]), use_cache=False)
    hook.remove()
    state = seen[-2] if net.config.state == "before" else seen[-1]
    hidden, made = state[:, : t + 1], []
    for d in range(depth):
        embeds = target.model.get_input_embeddings()(torch.tensor([text[1 : t + 2 + d]]))
        out = net(hidden, embeds, torch.arange(t + 1 + d)[None], None)[:, -1:]
        made.append(target.model.get_output_embeddings()(net.head_input(out))[0, 0])
        hidden = torch.cat((hidden, out), 1)
    return torch.stack(made)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(("objective", "state"), [({"kl": 0.0, "ce": 1.0}, "behind"), ({}, "before")])
def test_the_loss_is_that_of_a_loop(target: Backbone, passes: int, objective: dict[str, Any], state: str) -> None:
    """FastMTP's cross-entropy and the KL, document by document and token by token."""
    goal, batch = goal_for(target, objective, passes=passes, state=state), rows()
    loss, terms = goal.module(batch, goal.prepare(batch))
    wanted, weights = torch.zeros(()), [0.6**k / sum(0.6**j for j in range(passes)) for k in range(passes)]
    for row in range(2):
        for first, last in ((0, LENGTHS[0]), (LENGTHS[0], sum(LENGTHS))):
            text = batch["input_ids"][row, first:last].tolist()
            with torch.no_grad():
                log_p = target.model(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
            for t in range(len(text) - 2):
                depth = min(passes, len(text) - 2 - t)
                log_q = drafted(goal.draft(), target, text, t, depth).log_softmax(-1)
                for k in range(depth):
                    if not batch["loss_mask"][row, first + t + 2 + k]:
                        continue
                    each = -log_q[k, text[t + 2 + k]]
                    if not objective:
                        each = F.kl_div(log_q[k], log_p[t + 1 + k], reduction="sum", log_target=True)
                    wanted = wanted + weights[k] * each
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    assert {f"alpha_{k + 1}" for k in range(1, passes)} <= terms.keys()
    used = list(goal.draft().parameters())
    ours, theirs = (torch.autograd.grad(each, used) for each in (loss, wanted))
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)


def test_the_projection_is_frozen(target: Backbone) -> None:
    goal = goal_for(target, {})
    assert {id(each) for each in goal.module.parameters()} == {id(each) for each in goal.draft().parameters()}


def test_a_run_begins_with_the_targets_own_module(target: Backbone, tmp_path: Path) -> None:
    """Its sizes and its weights, read from the files beside the target's; the pre-flight has the sizes alone."""
    target.model.save_pretrained(tmp_path)
    own = MtpNet.for_target(target.model)
    for weight in own.parameters():
        torch.nn.init.normal_(weight)
    file = tmp_path / "model.safetensors"
    whole = load_file(file) | {f"mtp.{name}": each.detach() for name, each in own.state_dict().items()}
    save_file(whole, file, metadata={"format": "pt"})
    recipe = Recipe(method="mtp", target=TargetConfig(path=str(tmp_path)), mtp=MtpConfig(from_target=True))
    with torch.device("meta"):
        shapes = mtp.student(recipe, target.model)
    assert {name: each.shape for name, each in shapes.state_dict().items()} == {
        name: each.shape for name, each in own.state_dict().items()
    }
    net = mtp.began(recipe, target.model)
    for name, weight in own.state_dict().items():
        assert torch.equal(net.state_dict()[name], weight)


def test_an_engine_is_not_asked_for_states_before_the_norm() -> None:
    features = FeaturesConfig(source="engine", server="http://localhost:1", shared="/tmp/x")
    recipe = Recipe(method="mtp", mtp=MtpConfig(state="before"), features=features)
    with pytest.raises(RequestError, match="hands out the last state behind its norm alone"):
        mtp.check_recipe(recipe)
