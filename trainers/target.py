"""Train a small causal LM from scratch, so that everything can be tried without a hub.

With rollouts it learns as well to leave the loops of its own text (`teacher/loops.py`).

Order of the file, as in every trainer: what it requires and what is trained, the loss, the run; there
is no teacher. Read next: `loop/loop.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.config import DataConfig, TokenizerConfig
from ..data.rows.prepare import prepare, training_texts
from ..data.rows.templates import named_template
from ..data.rows.tokenizer import train_tokenizer
from ..decoding.backbone.hub import load_tokenizer
from ..decoding.backbone.loading import no_progress_bars
from ..drafters.layers.static import StaticParts
from ..drafters.projection import Shaping
from ..errors import RequestError
from ..storage import replace_folder
from .config import ObjectiveConfig
from .labels import at_labels, labelled
from .loop.interruptions import name_the_silent
from .loop.loop import RunOutcome
from .loop.objective import Batch, Objective
from .loop.setup import make_accelerator, make_deterministic, run_loop
from .loop.sharding import standalone
from .losses.chunked import ChunkedLoss, cross_entropy
from .losses.mix import Mix
from .packed.lengths import check_rows_fit, check_start_context
from .packed.passes import check_compiled_rows, hidden_states
from .pruning.sizes import check_not_pruned
from .recipe import MakeProbe, TrainingRecipe
from .student.architecture import fresh_model
from .student.deeper import deepened
from .student.draft import given_model, rows_of, whose
from .student.recomputed import recompute_layers
from .teacher.frozen import plan_of
from .teacher.loops import LoopedRows, check_loops
from .teacher.rollouts import REPLACED, check_rollout_prompts, check_rollout_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where a term asks for a teacher, the model is to be cut from one, or rows keep
    no shape for `loop.compile`."""
    check_only_ce(recipe.objective)
    check_not_pruned(recipe.model)
    check_compiled_rows(recipe.loop, recipe.data.sequence_length)
    check_loops(recipe.rollouts)
    check_rollout_rows(recipe.rollouts, recipe.data.sequence_length, recipe.loop.batch_rows)


def check_only_ce(objective: ObjectiveConfig) -> None:
    """Raise RequestError where a term asks for the distribution of a target, of which there is none yet."""
    asked = [name for name in Mix.of(objective, kl=0.0).asked if name != "ce"]
    if asked:
        raise RequestError(
            f"objective.{asked[0]} compares with a target's distribution, and method `target` trains a "
            "model from the text alone; leave it out, or distil a draft with method `distill`"
        )


def student(
    recipe: TrainingRecipe, _target: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedModel:
    """A fresh model, or the one that `start_from` names; on the meta device its shapes alone.

    Args:
        tokenizer: None in the pre-flight of a tokenizer that the run will train.

    Raises:
        RequestError: the given model has too few tokens or logits that training does not know
            how to make, or rows do not fit its context.
    """
    model = recipe.model
    vocabulary = recipe.tokenizer.vocabulary if tokenizer is None else len(tokenizer)
    if model.start_from is None:
        eos = None if tokenizer is None else tokenizer.eos_token_id
        made = fresh_model(model, vocabulary=vocabulary, eos=eos)
    else:
        made = given_model(model)
        if tokenizer is not None and rows_of(made) < vocabulary:
            raise RequestError(
                f"model.start_from {model.start_from!r} has {rows_of(made)} tokens, the tokenizer "
                f"{vocabulary}; name its own tokenizer by tokenizer.path"
            )
        if model.deepen_to is not None:
            made = deepened(made, model.deepen_to)
    check_rows_fit(recipe, made.config, whose(model))
    if model.recompute:
        recompute_layers(made, whose(model), row_tokens=recipe.row_tokens)
    return made


def to_avoid(label_P: Tensor) -> Tensor:
    """Labels that `cross_entropy_or_unlikelihood` makes less likely: -1 - id, so that id 0 can be one."""
    return ~label_P


def cross_entropy_or_unlikelihood(logits_CV: Tensor, _target: Tensor | None, label_C: Tensor) -> dict[str, Tensor]:
    """-log q(label) in nats, and -log(1 - q(label)) where a label is one `to_avoid`.

    Welleck et al. 2020, "Neural Text Generation with Unlikelihood Training" (arXiv 1908.04319), equation 6: tokens
    that stand in a repetition of the model's own continuation are made less likely. Both terms are reported as well,
    each zero where it is not meant.

    Shapes: C positions of a chunk, V vocabulary.
    """
    avoid_C = label_C < 0
    id_C = torch.where(avoid_C, to_avoid(label_C), label_C)
    ce_C = cross_entropy(logits_CV, None, id_C)["loss"].masked_fill(avoid_C, 0.0)
    # 1 - q as the sum of the others: finite, with a gradient, where q rounds to 1
    others_CV = logits_CV.scatter(-1, id_C[:, None], -torch.inf)
    log_rest_C = others_CV.logsumexp(-1) - logits_CV.logsumexp(-1)
    unlikelihood_C = (-log_rest_C).masked_fill(~avoid_C, 0.0)
    return {"loss": ce_C + unlikelihood_C, "ce": ce_C.detach(), "unlikelihood": unlikelihood_C.detach()}


class NextToken(StaticParts):
    """Cross-entropy of the next token, in chunks over positions; in rows that it wrote, unlikelihood of its loops."""

    def __init__(self, model: PreTrainedModel, *, chunk: int | None, unlikelihood: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.unlikelihood = unlikelihood
        head: Any = model.get_output_embeddings()
        self.head = ChunkedLoss(head, cross_entropy, chunk=chunk, shaping=Shaping.of(model))

    def forward(self, batch: Batch, _teacher_output: None = None) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_PH, label_P = labelled(hidden_states(self.model, batch, self.static), batch)
        if REPLACED not in batch:
            return self.head(hidden_PH, label_P)
        avoid_P = at_labels(batch[REPLACED][:, None].expand_as(batch["loss_mask"]), batch)
        return self.head(
            hidden_PH,
            torch.where(avoid_P, to_avoid(label_P), label_P),
            share_P=torch.where(avoid_P, self.unlikelihood, 1.0),
            loss=cross_entropy_or_unlikelihood,
        )


class TargetObjective(Objective):
    """Trains `model` on the text itself."""

    def __init__(self, recipe: TrainingRecipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        rollouts = recipe.rollouts
        super().__init__(
            NextToken(model, chunk=recipe.objective.chunk, unlikelihood=rollouts.unlikelihood),
            rollouts=LoopedRows(rollouts, model) if rollouts.share else None,
        )
        self._model, self._tokenizer = model, tokenizer

    def prepare(self, _batch: Batch) -> None:
        """A target learns from the text alone."""

    def export(self, folder: Path) -> None:
        """An ordinary `transformers` folder in bf16 safetensors, with its tokenizer."""
        half: Any = copy.deepcopy(standalone(self._model)).to(torch.bfloat16)
        half.config.use_cache = True
        with no_progress_bars():
            half.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def draft(self) -> None:
        """No drafter is trained here."""


def run(recipe: TrainingRecipe, out: Path, resume: str = "auto", _make_probe: MakeProbe | None = None) -> RunOutcome:
    """Train a target into `out/target`. Resumes as `loop/setup.py`, `resume_from`, says; nothing is probed."""
    check_recipe(recipe)
    check_start_context(recipe.model, recipe.row_tokens)
    make_deterministic(recipe.loop)
    accelerator = make_accelerator(recipe.loop, recipe.optimizer, out)
    with name_the_silent(out, accelerator, bound=recipe.loop.stall_seconds), accelerator.main_process_first():
        tokenizer = tokenizer_for(recipe.data, recipe.tokenizer, out)
        rows = prepare(recipe.data, tokenizer, out=out)
    check_rollout_prompts(recipe.rollouts, rows.train)
    objective = TargetObjective(recipe, student(recipe, None, tokenizer), tokenizer)
    return run_loop(
        objective,
        rows.train,
        rows.validation,
        plan_of(recipe),
        accelerator,
        out=out,
        export_to=out / "target",
        probe=None,
        resume=resume,
    )


def tokenizer_for(data: DataConfig, config: TokenizerConfig, out: Path) -> PreTrainedTokenizerBase:
    """The named tokenizer, or one trained once per run folder, so that a resume finds the same."""
    if config.path is not None:
        named = load_tokenizer(config.path)
        if config.chat_template is not None:
            named.chat_template = named_template(config.chat_template)
        return named
    folder = out / "tokenizer"
    if not folder.is_dir():
        name = config.chat_template
        template = None if name is None else named_template(name)
        made = train_tokenizer(training_texts(data), config.vocabulary, chat_template=template)
        replace_folder(folder, lambda staging: _save_tokenizer(made, staging))
    return load_tokenizer(str(folder))


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
