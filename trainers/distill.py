"""Distil an independent draft model from a frozen target, the target run in the same process.

Sources: Hinton et al. 2015; DistillSpec (Zhou et al. 2023) for the forward KL on drafts, and which
divergence suits which task. Order of the file, as in every trainer: the module, the objective,
set-up. Read next: `losses/chunked.py` and `divergences.py` for the mathematics, `loop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from ..data.rows.prepare import Prepared
from ..decoding.target.backbone import Backbone
from ..decoding.target.hub import load_tokenizer
from ..decoding.target.loading import load_model
from ..drafters.folder import check_trainable_model, save_draft_model
from ..drafters.projection import check_plain_logits
from ..errors import RequestError
from .config import FROM_TARGET, LoraConfig, ModelConfig, ObjectiveConfig, RolloutsConfig
from .loop.loop import Outcome
from .loop.objective import Batch, check_start_context, hidden_states, label_shares, labelled
from .loop.sharding import standalone
from .losses.chunked import ChunkedLoss, Teacher
from .losses.mix import TERMS, Mix
from .losses.ramp import Ramp
from .pruning.layers import prune
from .pruning.sizes import check_not_pruned
from .student.architecture import fresh_model
from .student.lora import adapt, save_adapted
from .teacher.features import FeatureSource, OnlineFeatures
from .teacher.frozen import Given, Save, run_for_target
from .teacher.rollouts import Rollouts, check_rollout_prompts, check_rollout_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class DraftStudent(nn.Module):
    """The draft and its loss against the target's distribution, in chunks over positions.

    It trains on the mix of the step and is validated on the recipe's own.
    """

    def __init__(self, draft: PreTrainedModel, mix: Mix, *, chunk: int, rows: int) -> None:
        super().__init__()
        self.draft = draft
        self.mix = self.step_mix = mix
        self.head = ChunkedLoss(draft.get_output_embeddings(), mix, chunk=chunk, rows=rows)
        self.train()  # a loaded draft comes without dropout, that of its adapter included

    def forward(self, batch: Batch, teacher: Teacher) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_PH, label_P = labelled(hidden_states(self.draft, batch), batch)
        mix = self.step_mix if self.training else self.mix
        return self.head(hidden_PH, label_P, teacher, label_shares(batch), loss=mix)


class DistillObjective:
    """Trains `draft` to have the distribution of the frozen `target`."""

    def __init__(self, draft: PreTrainedModel, target: PreTrainedModel, config: ObjectiveConfig, save: Save) -> None:
        # a head may be padded beyond the tokenizer; the rows that both have are compared
        rows = min(_rows(draft), _rows(target))
        self._ramp, self._steps = Ramp.of(config), 1
        self._student = DraftStudent(draft, self._ramp.last, chunk=config.chunk, rows=rows)
        self.module: nn.Module = self._student
        self._draft, self._target, self._save = draft, target, save
        self.features: FeatureSource = OnlineFeatures(target)
        self.rollouts: Rollouts | None = None
        """What writes some of the rows; set by `build` where the recipe asks for it."""

    def set_steps(self, steps: int) -> None:
        """How many steps the run has: the mix moves over a share of them."""
        self._steps = steps

    def begin_step(self, step: int, _seed: int) -> None:
        """Minimise that step's mix; what is validated is the recipe's at every step."""
        self._student.step_mix = self._ramp.at(step, self._steps)

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Teacher:
        """The target's last hidden states at the labelled positions."""
        (hidden_RSH,) = self.features(batch)
        hidden_PH, _ = labelled(hidden_RSH, batch)
        head: Any = self._target.get_output_embeddings()
        weight_VH = head.weight
        return Teacher(hidden_PH.to(weight_VH.dtype), weight_VH)

    def export(self, folder: Path) -> None:
        """A drafter checkpoint, as `drafters/` writes and reads it."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        return self._draft


def build(
    model: ModelConfig,
    objective: ObjectiveConfig,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    save: Save,
    lora: LoraConfig | None = None,
    rollouts: RolloutsConfig | None = None,
    pruned: PreTrainedModel | None = None,
) -> DistillObjective:
    """A fresh or given draft for `target`, which is frozen here, or an adapter on a given one.

    `rollouts`: whether some of the rows are written by the models, and how. `pruned`: the draft,
    where it was cut from the target.

    Raises:
        RequestError: nothing would be learnt, the draft says other tokens, or the logits of one of
            the two are more than a projection.
    """
    check_terms(objective)
    check_plain_logits(target)
    target.requires_grad_(False).eval()
    draft = pruned or draft_model(model, target, tokenizer)
    adapt(draft, lora or LoraConfig(), model)
    goal = DistillObjective(draft, target, objective, save)
    if rollouts is not None and rollouts.share:
        goal.rollouts = Rollouts(rollouts, draft, target)
        goal.features.looks_ahead = False  # at rows that will be others
    return goal


def check_terms(objective: ObjectiveConfig, *, own: Mapping[str, float] | None = None, places: int = 1) -> None:
    """Raise RequestError when an objective teaches nothing, or weighs places that there are not.

    Args:
        own: weights of the method's own terms by the names that recipes give them; where there are
            such terms the KL is off unless the recipe sets it.
        places: how many places ahead a step learns together.
    """
    mix = Mix.of(objective, kl=1.0 if own is None else 0.0)
    if not (mix.asked or any((own or {}).values())):
        names = ", ".join([*(own or {}), *(f"objective.{name}" for name in TERMS)])
        raise RequestError(f"{names} are all 0: nothing would be learnt; set one of them")
    if objective.teacher_top_k is not None and mix.reverse_kl:
        raise RequestError(
            "objective.reverse_kl is infinite where objective.teacher_top_k leaves the target "
            "nothing and the draft has something; leave one of them out, or take objective.jsd"
        )
    if objective.positions == "d-pace" and places < 2:
        raise RequestError(
            "objective.positions is d-pace, which weighs the places ahead that a step learns "
            "together, and here it learns one; leave it out, or train with method `medusa` or "
            "`hydra` with several heads, or `eagle` or `eagle3` with several passes"
        )


def run(
    *,
    model: ModelConfig,
    objective: ObjectiveConfig,
    lora: LoraConfig,
    rollouts: RolloutsConfig,
    **given: Unpack[Given],
) -> Outcome:
    """Distil a draft into `out/drafter`."""
    check_rollout_rows(rollouts, given["data"].sequence_length, given["plan"].loop.batch_rows)
    check_start_context(model, given["data"].sequence_length)

    def make(target: Backbone, rows: Prepared) -> DistillObjective:
        check_rollout_prompts(rollouts, rows.train)
        pruned = None
        if model.start_from == FROM_TARGET:
            loop = given["plan"].loop
            pruned = prune(
                model,
                target.model,
                rows.validation,
                out=given["out"],
                seed=loop.seed,
                micro_rows=loop.micro_rows,
                chunk=objective.chunk,
            )

        def save(module: nn.Module, folder: Path) -> None:
            if lora.rank is None:
                save_draft_model(module, folder, target)
            else:
                save_adapted(module, folder, target, lora)

        words = target.tokenizer
        return build(model, objective, target.model, words, save, lora, rollouts, pruned)

    return run_for_target(make, given)


def draft_model(config: ModelConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Fresh weights over the target's vocabulary, or the model that `start_from` names."""
    if config.start_from is None:
        like = target.config.get_text_config(decoder=True)
        return fresh_model(config, vocabulary=_rows(target), eos=tokenizer.eos_token_id, like=like)
    check_not_pruned(config)
    check_trainable_model(config.start_from)
    check_same_tokens(config.start_from, tokenizer)
    draft = load_model(config.start_from)
    if _rows(draft) < len(tokenizer):
        raise RequestError(
            f"model.start_from {config.start_from!r} has an output projection of {_rows(draft)} "
            f"rows, the target's tokenizer has {len(tokenizer)} tokens: it cannot say all of them"
        )
    check_plain_logits(draft, f"model.start_from {config.start_from!r}")
    return draft


def check_same_tokens(start_from: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """A draft must mean the same tokens by the same numbers; the first difference is named."""
    mine, theirs = load_tokenizer(start_from).get_vocab(), tokenizer.get_vocab()
    if mine == theirs:
        return
    token = min(
        (token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token)),
        key=lambda token: theirs.get(token, mine.get(token, 0)),
    )
    raise RequestError(
        f"model.start_from {start_from!r} has another tokenizer than the target: token "
        f"{token!r} is {mine.get(token, 'missing')} there and {theirs.get(token, 'missing')} in "
        "the target. Take a draft of the same family, or leave start_from out; as it is it may "
        "draft by --drafter.vocabulary auto"
    )


def _rows(model: PreTrainedModel) -> int:
    """Rows of the output projection: the vocabulary, padding included."""
    return int(model.get_output_embeddings().weight.shape[0])
