"""Several independent drafts at once: their chains merge into one tree (SpecInfer's SSMs).

Miao et al. 2023, arXiv 2305.09781. Every member drafts a chain after the same text; prefixes that
they share are verified once. At temperature 0, and with policy `argmax`, the tree is a point mass;
above, every trial keeps the distribution of the member that made it (`DraftSampling.SEVERAL`), so that multi-step
speculative sampling is exact. Read next: `draft_model.py`; `decoding/tree/merge.py`.

Shapes: B rows, K drafted tokens of a member, M members, E tokens that a step can emit.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...decoding.proposal import Committed, DraftSampling, Proposal
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper
from ...decoding.tree.merge import Merged, compact, merge
from ..folder import write_entry
from ..temperatures import Policy
from .adapters import RowBackbone
from .draft_model import DraftModel

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone

FAMILY = "ensemble"


class Member(DraftModel):
    """A draft model of an ensemble: a step may accept tokens that another member drafted."""

    chains = 1
    """How many chains it drafts."""

    @property
    def adapters_read(self) -> Sequence[str] | None:
        """The adapters of its chains; None: whichever is in use."""
        return None

    def rooms(self) -> list[Tensor | None]:
        """`room` of every chain."""
        return [self.room()]

    def draft_chains(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> list[Proposal]:
        """One proposal per chain."""
        return [self.propose(last_B, warper, uniforms)]

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Its own chain."""
        proposal = super().propose(last_B, warper, uniforms)
        self._own_BK = proposal.tokens_BN[:, 1:]
        return proposal

    def observe(self, committed: Committed) -> None:
        """Keep of its KV cache what agrees with the committed tokens.

        The KV cache holds everything up to the root, the root, and its own tokens but the last.
        """
        before_B = self._history.lengths_B + 1
        same_BK = self._own_BK == committed.tokens_BE[:, : self._drafted]
        agreed_B = same_BK[:, :-1].long().cumprod(1).sum(1)
        self._history.append(committed)
        self._known_B.copy_(torch.minimum(before_B + agreed_B, self._history.lengths_B))

    @property
    def _longest_gap(self) -> int:
        """All that a step can commit: another member's whole chain, and the extra token."""
        return self.draft_length + 1


class SharedBase(Member):
    """Adapters on one base, each a member: their rows decode as one batch, adapter by adapter."""

    replayable = False  # peft picks the rows of an adapter on the host

    def __init__(
        self,
        backbone: Backbone,
        vocabulary: int,
        names: Sequence[str | None],
        *,
        draft_length: int = 4,
        policy: Policy = "sample",
        factors: Sequence[float] = (),
    ) -> None:
        """`names`: the adapter of each chain, None for the base alone."""
        super().__init__(backbone, vocabulary, draft_length=draft_length, policy=policy, factors=factors)
        self.names, self.chains = list(names), len(names)
        self._base = backbone

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows: all of the first adapter, then all of the second."""
        self.close()
        self.backbone = RowBackbone(self._base, [name for name in self.names for _ in prompts])
        super().reset([*prompts] * self.chains, room, static=static)

    @property
    def adapters_read(self) -> Sequence[str] | None:
        """The adapter of each chain that has one; the others are the base alone."""
        return [name for name in self.names if name is not None]

    def close(self) -> None:
        """Remove the hooks from the base; `reset` sets them again."""
        if isinstance(self.backbone, RowBackbone):
            self.backbone.close()

    def rooms(self) -> list[Tensor | None]:
        """`room` of every adapter's rows."""
        room_B = self.room()
        return [None] * self.chains if room_B is None else list(room_B.chunk(self.chains))

    def draft_chains(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> list[Proposal]:
        """One proposal per adapter."""
        rows = self.propose(last_B.repeat(self.chains), warper, _Repeated(uniforms, self.chains))
        distributions = [None] * self.chains if rows.q_BNV is None else rows.q_BNV.chunk(self.chains)
        return [
            Proposal(tokens_BN, rows.tree, rows.sampling, q_BNV)
            for tokens_BN, q_BNV in zip(rows.tokens_BN.chunk(self.chains), distributions, strict=True)
        ]

    def observe(self, committed: Committed) -> None:
        """Continue every adapter's rows after what was committed."""
        n = self.chains
        super().observe(
            replace(committed, tokens_BE=committed.tokens_BE.repeat(n, 1), count_B=committed.count_B.repeat(n))
        )


class _Repeated(Uniforms):
    """A stream's numbers for several rows in place of each of its own."""

    def __init__(self, uniforms: Uniforms, times: int) -> None:
        self._uniforms, self._times = uniforms, times

    def take(self, count: int) -> Tensor:
        """The next `count` numbers of every row, [times * B, count]."""
        return torch.cat([self._uniforms.take(count) for _ in range(self._times)])


class Ensemble:
    """Drafts with all members, and proposes the merged tree of their chains."""

    family = FAMILY

    def __init__(self, members: Sequence[Member]) -> None:
        """All of one draft length, for the same target."""
        lengths = {each.draft_length for each in members}
        if len(lengths) != 1:
            raise ValueError(f"members of draft lengths {sorted(lengths)}; expected one, of all")
        self.members = list(members)

    @property
    def module(self) -> nn.Module:
        """What is trained: the members."""
        return nn.ModuleList(each.module for each in self.members)

    @property
    def chains(self) -> int:
        """How many chains are merged."""
        return sum(each.chains for each in self.members)

    @property
    def draft_length(self) -> int:
        """Tokens of a member's chain, settable: depth of the tree."""
        return self.members[0].draft_length

    @draft_length.setter
    def draft_length(self, length: int) -> None:
        for each in self.members:
            each.draft_length = length

    @property
    def nodes(self) -> int:
        """Most nodes of a proposal, the root included: where no two members agree."""
        return 1 + self.draft_length * self.chains

    @property
    def draft_steps(self) -> int:
        """Steps of drafting per target call; in each of them every member runs once."""
        return self.draft_length

    @property
    def replayable(self) -> bool:
        """Whether `propose` can be recorded."""
        return all(each.replayable for each in self.members)

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        self._static = static
        for each in self.members:
            each.reset(prompts, room, static=static)

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """The members' chains as one tree."""
        made = [chain for each in self.members for chain in each.draft_chains(last_B, warper, uniforms)]
        distributions = [each.q_BNV for each in made if each.q_BNV is not None]
        parents_N = torch.arange(-1, self.draft_length, device=last_B.device)
        merged = merge(
            last_B,
            [each.tokens_BN for each in made],
            [parents_N] * len(made),
            distributions or None,
            depth=self.draft_length,
            width=len(made),
            tries=len(made),
        )
        merged = compact(merged, static=self._static)
        merged = self._within(merged)
        return Proposal(
            merged.tokens_BN,
            merged.tree,
            DraftSampling.SEVERAL if distributions else DraftSampling.POINT_MASS,
            present_BN=merged.present_BN,
            trials=merged.trials,
            coins=self._coins(bool(distributions)),
        )

    def _within(self, merged: Merged) -> Merged:
        """The same trees as deep as the member with the least room drafts in every row."""
        rooms = [room_B for each in self.members for room_B in each.rooms() if room_B is not None]
        if not rooms:
            return merged
        room_B1 = torch.stack(rooms).amin(0)[:, None]
        depths_BN = merged.tree.on(room_B1.device).depths_BN
        there_BN = merged.present_BN & (depths_BN <= room_B1)
        trials = merged.trials
        if trials is not None:  # the children of a node are of one depth: it keeps all of its trials or none
            child_BNC = torch.where((depths_BN < room_B1)[..., None], trials.child_BNC, -1)
            trials = replace(trials, child_BNC=child_BNC)
        return replace(merged, present_BN=there_BN, trials=trials)

    def _coins(self, sampled: bool) -> int:
        """Most that a rule can need, so that a row's numbers do not depend on its neighbours."""
        return 1 + self.nodes * self.chains if sampled else self.nodes

    def close(self) -> None:
        """Remove all hooks from the members' models."""
        for each in self.members:
            if isinstance(each, SharedBase):
                each.close()

    def observe(self, committed: Committed) -> None:
        """Continue every member after what was committed, no matter which one proposed it."""
        for each in self.members:
            each.observe(committed)


def join(drafts: Sequence[DraftModel]) -> Ensemble:
    """An ensemble of draft models for the same target, each with the adapter that it uses."""
    return Ensemble([Member(each.backbone, each.vocabulary, **how_it_draws(each)) for each in drafts])


def join_adapters(draft: DraftModel, names: Sequence[str]) -> Ensemble:
    """An ensemble of adapters on one base, which is in memory once."""
    return Ensemble([SharedBase(draft.backbone, draft.vocabulary, names, **how_it_draws(draft))])


def how_it_draws(draft: DraftModel) -> dict[str, Any]:
    """The settings of a draft model, for another one that drafts alike."""
    return {"draft_length": draft.draft_length, "policy": draft.policy, "factors": draft.factors}


def save_ensemble(folder: Path, members: Sequence[Path], target: Backbone, *, adapters: Sequence[str] = ()) -> None:
    """Copy complete drafter folders of draft models into one, in the order of the members.

    `registry.load_drafter` reads it.

    Args:
        adapters: where all members are adapters of one base: `members` is one folder, and these are
            their names in it.
    """
    if adapters and len(members) != 1:
        raise ValueError(f"{len(members)} folders with adapters; expected one, of their base")
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"ssm-{number}" for number in range(1, len(members) + 1)]
    for name, member in zip(names, members, strict=True):
        shutil.copytree(member, folder / name, dirs_exist_ok=True)
    settings = {"members": names} | ({"adapters": list(adapters)} if adapters else {})
    write_entry(folder, target, family=FAMILY, settings=settings)
