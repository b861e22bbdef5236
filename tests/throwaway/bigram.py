"""A family that is nowhere in the package, in one file: a bigram network, by which a token depends on the last one.

Shapes: B rows, K drafted tokens, N nodes, R rows of a batch, S tokens and X places of a row, V vocabulary.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draftsmith
import torch
from draftsmith.config import Section
from draftsmith.drafters.export import Export
from draftsmith.drafters.folder import read_settings
from draftsmith.drafters.weights import net_for
from draftsmith.trainers.student.warm_start import warm_started
from draftsmith.trainers.teacher.frozen import saver
from draftsmith.trainers.teacher.own import OwnObjective
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    inner: int


class BigramNet(nn.Module):
    family = "bigram"

    def __init__(self, vocabulary: int, inner: int) -> None:
        super().__init__()
        self.config = Shape(vocabulary, inner)
        self.inner, self.outer = nn.Embedding(vocabulary, inner), nn.Linear(inner, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.outer(self.inner(tokens))


class Bigram(draftsmith.Drafter):
    family, replayable = "bigram", True

    def __init__(self, net: BigramNet, draft_length: int) -> None:
        self.module, self.draft_length, self.draft_steps = net, draft_length, draft_length

    def propose(self, last_B: Tensor, warper: Any, uniforms: Any) -> draftsmith.Proposal:
        random_BK, tokens, q = uniforms.take(self.draft_length), [last_B], []
        for k in range(self.draft_length):
            q.append(warper(self.module(tokens[-1]).float()))
            tokens.append(draftsmith.draw(q[-1], random_BK[:, k]))
        q_BNV = torch.stack([*q, torch.zeros_like(q[-1])], 1)  # of the leaf, never read
        tree, tokens_BN = draftsmith.chain(len(q)), torch.stack(tokens, 1)
        return draftsmith.Proposal(tokens_BN, tree, draftsmith.DraftSampling.IID, q_BNV)


def loss(net: BigramNet, batch: dict[str, Tensor], _states: Any) -> Tensor:
    ids_RS, counts_RX = batch["input_ids"], batch["loss_mask"][:, 1:]
    return cross_entropy(net(ids_RS[:, :-1][counts_RX]), ids_RS[:, 1:][counts_RX], reduction="sum")


def check_recipe(recipe: Any) -> None:
    if recipe.bigram.inner % 2:
        raise draftsmith.RequestError(f"bigram.inner is {recipe.bigram.inner}; expected an even number")


def student(recipe: Any, target: Any) -> BigramNet:
    return BigramNet(len(target.get_output_embeddings().weight), recipe.bigram.inner)


def build(run: Any, target: Any, _rows: Any) -> OwnObjective:
    net = warm_started(student(run.recipe, target.model), run.recipe, target)
    return OwnObjective(net, loss, target.model, saver(target, "bigram"), layers=())


def load(folder: Path, target: Any, *, draft_length: int, config: Any) -> Bigram:
    _, settings = read_settings(folder, target, "bigram")
    return Bigram(net_for(folder, target, lambda: BigramNet(**settings), "a bigram network"), draft_length)


class BigramConfig(Section):
    inner: int = Field(8, ge=2)
    """Numbers between a token and the next one."""


FAMILY = draftsmith.Family(
    name="bigram",
    title="bigram",
    kind="on target",
    summary="what follows depends on the last token alone",
    page="extending.md",
    build=lambda settings: BigramNet(**settings),
    load=load,
    proposer=lambda net, _target, draft_length: Bigram(net, draft_length),
    toy=lambda _drafter: "bigram",
    toys={"bigram": lambda target, _: Bigram(BigramNet(target.vocabulary, 4).requires_grad_(False).eval(), 2)},
    exports={
        "vllm": draftsmith.Form("bigram", lambda net, *_: Export({"architectures": ["Bigram"]}, net.state_dict()))
    },
)
METHOD = draftsmith.Method(
    name="bigram",
    summary="a bigram network",
    family="bigram",
    module=sys.modules[__name__],
    sections={"bigram": BigramConfig},
    reads=("target", "features", "probe", "model.start_from"),
    sizes={"inner": "bigram.inner"},
)
draftsmith.register(FAMILY, METHOD)
