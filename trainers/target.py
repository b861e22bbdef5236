"""Train a small causal LM from scratch, so that everything can be tried without a hub.

Order of the file, as in every trainer: the module, the objective, set-up.
Read next: `loop.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.config import DataConfig, TokenizerConfig
from ..data.rows.prepare import prepare, training_texts
from ..data.rows.templates import named_template
from ..data.rows.tokenizer import train_tokenizer
from ..decoding.target.hub import load_tokenizer
from ..decoding.target.loading import load_model, no_progress_bars
from ..drafters.projection import check_plain_logits
from ..errors import RequestError
from ..storage import replace_folder
from .config import ModelConfig, ObjectiveConfig
from .loop.loop import Outcome, Plan
from .loop.objective import Batch, check_start_context, hidden_states, labelled
from .loop.setup import make_accelerator, make_deterministic, run_loop
from .loop.sharding import standalone
from .losses.chunked import ChunkedLoss, cross_entropy
from .losses.mix import Mix
from .pruning.sizes import check_not_pruned
from .student.architecture import fresh_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class NextToken(nn.Module):
    """Cross-entropy of the next token, in chunks over positions."""

    def __init__(self, model: PreTrainedModel, *, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.head = ChunkedLoss(model.get_output_embeddings(), cross_entropy, chunk=chunk)

    def forward(self, batch: Batch, _teacher_output: None = None) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_PH, label_P = labelled(hidden_states(self.model, batch), batch)
        return self.head(hidden_PH, label_P)


class TargetObjective:
    """Trains `model` on the text itself."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, chunk: int) -> None:
        self.module: nn.Module = NextToken(model, chunk=chunk)
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


def build(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, chunk: int) -> TargetObjective:
    """A fresh model over the tokenizer's vocabulary, or the one `start_from` names."""
    check_not_pruned(config)
    if config.start_from is not None:
        model: Any = load_model(config.start_from)
        rows = len(model.get_output_embeddings().weight)
        if rows < len(tokenizer):
            raise RequestError(
                f"model.start_from {config.start_from!r} has {rows} tokens, the tokenizer "
                f"{len(tokenizer)}; name its own tokenizer by tokenizer.path"
            )
        check_plain_logits(model, f"model.start_from {config.start_from!r}")
    else:
        model = fresh_model(config, vocabulary=len(tokenizer), eos=tokenizer.eos_token_id)
    return TargetObjective(model, tokenizer, chunk=chunk)


def run(
    *,
    data: DataConfig,
    tokenizer: TokenizerConfig,
    model: ModelConfig,
    objective: ObjectiveConfig,
    plan: Plan,
    out: Path,
    resume: str,
) -> Outcome:
    """Train a target into `out/target`. Resumes as `setup.resume_from` says."""
    check_only_ce(objective)
    check_start_context(model, data.sequence_length)
    make_deterministic(plan.loop)
    accelerator = make_accelerator(plan.loop, plan.optimizer, out)
    with accelerator.main_process_first():
        words = tokenizer_for(data, tokenizer, out)
        rows = prepare(data, words, out=out)
    goal = build(model, words, chunk=objective.chunk)
    return run_loop(
        goal,
        rows.train,
        rows.validation,
        plan,
        accelerator,
        out=out,
        export_to=out / "target",
        probe=None,
        resume=resume,
    )


def check_only_ce(objective: ObjectiveConfig) -> None:
    """Raise RequestError where a term asks for the distribution of a target, of which there is none yet."""
    asked = [name for name in Mix.of(objective, kl=0.0).asked if name != "ce"]
    if asked:
        raise RequestError(
            f"objective.{asked[0]} compares with a target's distribution, and method `target` trains a "
            "model from the text alone; leave it out, or distil a draft with method `distill`"
        )


def tokenizer_for(data: DataConfig, config: TokenizerConfig, out: Path) -> PreTrainedTokenizerBase:
    """The named tokenizer, or one trained once per run folder, so that a resume finds the same."""
    if config.path is not None:
        return load_tokenizer(config.path)
    place = out / "tokenizer"
    if not place.is_dir():
        name = config.chat_template
        template = None if name is None else named_template(name)
        made = train_tokenizer(training_texts(data), config.vocabulary, chat_template=template)
        replace_folder(place, lambda folder: _save_tokenizer(made, folder))
    return load_tokenizer(str(place))


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
