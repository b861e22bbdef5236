"""On-policy rows: continuations that the student, the target or both write while training.

On-policy distillation (DistillSpec, Zhou et al. 2023, arXiv 2310.08461; GKD, Agarwal et al. 2024,
2306.13649): a draft meets its own mistakes while decoding, so it should meet them in training. A share
of a step's rows is written anew: prompts are cut from the row's own text, each in front of a token
that counts in the loss, and continued by the student as it is now, by the target, or by both token
by token. Only the continuations count in the loss. Read next: `trainers/teacher/mixture.py`, which writes;
`loop/loop.py`, which asks for it before every step and keeps it in checkpoints.

What is written for a row depends on the weights, the step's seed and the row's index in the step, not
on how rows are spread over processes (but for rounding).

Shapes: R rows of this process, S tokens of a row.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...data.rows.packed import PackedRows
from ...decoding.backbone.attention import use_grouped_attention
from ...decoding.backbone.backbone import Backbone
from ...decoding.on_host import on_host, sent
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper
from ...errors import RequestError
from ..loop.objective import Batch
from ..loop.sharding import is_sharded
from ..method_config import RolloutsConfig
from .mixture import write

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOOKED_AT = 1000  # rows, to say how many hold a prompt
_log = logging.getLogger(__name__)
REPLACED = "replaced"
"""Of a batch: bool [R], rows that were written anew."""
NAMES = ("input_ids", "loss_mask", "positions", "documents")


class Rollouts:
    """Writes rows of a step anew, and keeps them for the steps that train on the same ones."""

    def __init__(self, config: RolloutsConfig, draft: PreTrainedModel, target: PreTrainedModel) -> None:
        self.config, self._draft = config, draft
        self._target = Backbone(target, name="target")
        self._writers: tuple[list[Backbone], list[float]] | None = None
        self.kept: Batch | None = None
        """The rows of this process as they were last written, on the CPU, and which `replaced`."""

    def rewrite(self, batches: Sequence[Batch], indices: Sequence[int], step: int, seed: int) -> list[Batch]:
        """The micro-batches of `step` with a share of their rows replaced.

        Args:
            indices: of all their rows in the whole step, over all processes.
            seed: the step's own, the same on every process.
        """
        # on the host, which then knows the new rows as it knew the old ones
        gold = {name: torch.cat([on_host(each[name]) for each in batches]) for name in NAMES}
        device = batches[0]["input_ids"].device
        if self.kept is None or step % self.config.every_steps == 0:
            self.kept = self.written(gold, indices, seed, device)
        kept = self.kept
        replaced_R1 = kept[REPLACED][:, None]
        merged = {name: torch.where(replaced_R1, kept[name], gold[name]) for name in NAMES}
        sizes = [len(each["input_ids"]) for each in batches]
        parts = {name: t.split(sizes) for name, t in merged.items()}
        parts[REPLACED] = kept[REPLACED].split(sizes)
        return [
            {**batch, **{name: sent(each[number], device) for name, each in parts.items()}}
            for number, batch in enumerate(batches)
        ]

    def of_all(self, parts: Sequence[Batch]) -> Batch:
        """The rows that all processes keep, in the order of the step, for a checkpoint."""
        return {name: torch.stack([each[name] for each in parts], 1).flatten(0, 1) for name in parts[0]}

    def recall(self, rows: Batch, rank: int, world: int) -> None:
        """Take this process's share of what `of_all` gave, after a resume."""
        self.kept = {name: t[rank::world].clone() for name, t in rows.items()}

    def written(self, rows: Batch, indices: Sequence[int], seed: int, device: torch.device) -> Batch:
        """The rows that are replaced; rows that stay are empty in it.

        Args:
            rows: all of them as they were, on the host.
            indices: as of `rewrite`.
            seed: the step's own.
            device: where the models write.
        """
        S = rows["input_ids"].shape[1]
        room = _room(self.config, S)
        wanted = [
            at
            for at, index in enumerate(indices)
            if is_replaced(index, self.config.share) and bool(cuttable(rows, at, self.config.prompt_tokens).any())
        ]
        empty = {
            "input_ids": torch.zeros_like(rows["input_ids"]),
            "loss_mask": torch.zeros_like(rows["loss_mask"]),
            "positions": torch.zeros_like(rows["positions"]),
            "documents": torch.full_like(rows["documents"], -1),
            REPLACED: torch.zeros(len(indices), dtype=torch.bool),
        }
        if not wanted:
            return empty
        each = S // room
        streams = [indices[at] * each + piece for at in wanted for piece in range(each)]
        uniforms = Uniforms(seed, streams, device)
        chances = uniforms.take(1)[:, 0].tolist()
        prompts = [
            cut_prompt(rows, at, chances[number * each + piece], self.config.prompt_tokens)
            for number, at in enumerate(wanted)
            for piece in range(each)
        ]
        answers = self._write(prompts, uniforms, device)
        for number, at in enumerate(wanted):
            empty[REPLACED][at] = True
            for piece in range(each):
                which = number * each + piece
                _put(empty, at, piece, piece * room, prompts[which], answers[which])
        return empty

    def _write(self, prompts: Sequence[Sequence[int]], uniforms: Uniforms, device: torch.device) -> list[list[int]]:
        if self._writers is None:
            self._writers = self._make_writers()
        models, shares = self._writers
        for each in models:
            plain: Any = each.model
            plain.to(device)
        with torch.autocast(device.type, enabled=False):
            return write(
                models,
                shares,
                prompts,
                warper=Warper(self.config.temperature),
                max_new_tokens=self.config.new_tokens,
                uniforms=uniforms,
                eos_ids=self._target.eos_ids,
                vocabulary=self._target.vocabulary,
            )

    def _make_writers(self) -> tuple[list[Backbone], list[float]]:
        if is_sharded(self._draft):
            raise RequestError(
                "rollouts.share is above 0, and ZeRO-3 cuts the weights into pieces, which the "
                "decoder would have to gather for every token; use ZeRO-2 or less, or "
                "rollouts.share 0"
            )
        by, config = self.config.by, self.config
        target = self._target
        if by == "target":
            return [target], [1.0]
        student = Backbone(cast("PreTrainedModel", view_to_decode(self._draft)), name="draft")
        if by == "student":
            return [student], [1.0]
        return [student, target], [config.student_tokens, 1 - config.student_tokens]


def check_rollout_rows(config: RolloutsConfig, sequence_length: int, batch_rows: int) -> None:
    """Raise RequestError where a row or a step has no room for what is asked for."""
    if not config.share:
        return
    _room(config, sequence_length)
    check_share(config, batch_rows)


def check_share(config: RolloutsConfig, batch_rows: int) -> None:
    """Raise RequestError for a share that is none of the rows of a step."""
    if config.share and not replaced_of(batch_rows, config.share):
        least = math.ceil(1e4 / batch_rows) / 1e4
        raise RequestError(
            f"rollouts.share is {config.share:g}, less than one of loop.batch_rows = {batch_rows}; "
            f"take {least:g} or more, or 0"
        )


def is_replaced(index: int, share: float) -> bool:
    """Whether the row of that index in a step is written anew: spread evenly over the step."""
    return replaced_of(index + 1, share) > replaced_of(index, share)


def replaced_of(rows: int, share: float) -> int:
    """How many of the first rows of a step are written anew."""
    # a share is written with a few digits: 0.333333 of 3 rows is one row, as 1/3 is
    return int(rows * share + 1e-4)


def cut_prompt(rows: Batch, at: int, chance: float, longest: int) -> list[int]:
    """What stands in front of one of row `at`'s `cuttable` labels, chosen by `chance` in [0, 1).

    At most `longest` tokens and never of another document; at least one, because the first token
    of a document is no label.
    """
    labels = cuttable(rows, at, longest).nonzero()[:, 0]
    end = int(labels[int(chance * len(labels))])
    start = max(end - longest, end - int(rows["positions"][at, end]))
    ids: list[int] = rows["input_ids"][at, start:end].tolist()
    return ids


def cuttable(rows: Batch, at: int, longest: int) -> Tensor:
    """The labels of row `at` that a prompt of at most `longest` tokens may end at, bool [S].

    A text may be entered anywhere. A chat, which has tokens that are no labels, keeps its
    beginning: without header and system turn it would be what decoding never meets.
    """
    label_S, position_S, document_S = (rows[name][at] for name in ("loss_mask", "positions", "documents"))
    chats = document_S[~label_S & (position_S > 0) & (document_S >= 0)]
    return label_S & (~torch.isin(document_S, chats) | (position_S <= longest))


def check_rollout_prompts(config: RolloutsConfig, rows: PackedRows) -> None:
    """Raise RequestError where no row holds a prompt, and log how many of the rows do."""
    if not config.share:
        return
    few = rows.batch(range(min(len(rows), _LOOKED_AT)))
    count = len(few["input_ids"])
    fit = sum(bool(cuttable(few, at, config.prompt_tokens).any()) for at in range(count))
    if not fit:
        raise RequestError(
            f"rollouts.share is {config.share:g}, and none of {count} rows has an answer within "
            f"rollouts.prompt_tokens = {config.prompt_tokens} tokens of its chat's beginning; set "
            "it higher, beside data.sequence_length, or share to 0"
        )
    if fit < count:
        _log.info(
            "rollouts: %.0f%% of the rows hold a prompt of at most rollouts.prompt_tokens = %d; "
            "the others stay as they are",
            100 * fit / count,
            config.prompt_tokens,
        )


def view_to_decode(model: nn.Module) -> nn.Module:
    """The same weights in a module tree of its own, in evaluation mode, attending as decoding does.

    Parameters and buffers are the very tensors of `model`: what the optimiser does to them is seen.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    view: Any = copy.deepcopy(model, shared)
    use_grouped_attention(view)
    view.eval()
    return cast(nn.Module, view)


def _room(config: RolloutsConfig, sequence_length: int) -> int:
    """Tokens of a prompt and its continuation."""
    room = config.prompt_tokens + config.new_tokens
    if room > sequence_length:
        raise RequestError(
            f"rollouts.prompt_tokens + rollouts.new_tokens = {room}, and a row has "
            f"data.sequence_length = {sequence_length} tokens; shorten one of the two"
        )
    return room


def _put(rows: Batch, at: int, piece: int, first: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Write a prompt and its continuation into row `at` from slot `first` on, as a document."""
    ids = torch.tensor([*prompt, *answer])
    end = first + len(ids)
    rows["input_ids"][at, first:end] = ids
    rows["documents"][at, first:end] = piece
    rows["positions"][at, first:end] = torch.arange(len(ids))
    rows["loss_mask"][at, first + len(prompt) : end] = True
