"""Set-up shared by all trainers that change the target while they train a drafter for it.

The weights that move are those that probes decode with: a `Backbone`'s own model, all of it or
through low-rank adapters put into its layers in place (LoRA, Hu et al. 2021, by `peft`). Such a
run writes `out/target`, the changed target as an ordinary `transformers` folder, and
`out/drafter`, which fits that target alone. Read next: `medusa2.py`, which trains this way.

Shapes: R rows, S tokens of a row, P labelled positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from ...data.rows.prepare import Prepared
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.loading import no_progress_bars
from ...drafters.folder import save_heads
from ...drafters.identity import mark_tuned
from ...drafters.model.adapters import adapted_layers
from ...drafters.projection import Projection, Shaping, check_logits
from ...errors import RequestError
from ...storage import replace_folder
from ..config import TargetConfig
from ..labels import labelled
from ..loop.loop import Probe, RunOutcome
from ..loop.objective import Batch, Objective
from ..loop.optimizer import Pace
from ..losses.chunked import ChunkedLoss, Teacher, TokenLoss, cross_entropy
from ..losses.mix import Mix
from ..method_config import TuneConfig
from ..packed.passes import hidden_states
from ..recipe import Run, TrainingRecipe
from ..student.lora import TUNED_NAME, add_adapter, without_adapters
from ..student.recomputed import recompute_layers
from .frozen import CheckTarget, Save, run_for_target, settings_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TunedTarget:
    """A target whose weights move, and the distribution that it had before."""

    def __init__(self, target: Backbone, config: TuneConfig, *, row_tokens: int, remember: bool = False) -> None:
        """Free the target's weights, or put adapters into its layers.

        Args:
            row_tokens: the length of the rows that it is trained on.
            remember: `original` will be asked for; a fully tuned target needs a copy for it.

        Raises:
            RequestError: no layer has a name of `config.layers`, or layers cannot be computed again.
        """
        self.backbone, self.config = target, config
        model: Any = target.model
        self.model: PreTrainedModel = model
        self._copy: PreTrainedModel | None = None
        model.requires_grad_(False)
        model.zero_grad()  # what somebody left there would enter the first step
        if config.recompute:
            recompute_layers(model, f"the target {target.name!r}", "tune.recompute", row_tokens=row_tokens)
        if config.how == "lora":
            add_adapter(
                model,
                TUNED_NAME,
                rank=config.rank,
                alpha=config.alpha,
                dropout=config.dropout,
                layers=config.layers,
                section="tune",
            )
        else:
            self._copy = copy.deepcopy(model).eval() if remember else None
            model.requires_grad_(True)

    @property
    def head(self) -> nn.Linear:
        """The target's output projection, never adapted: what reads it reads its weight."""
        head: Any = self.model.get_output_embeddings()
        return head

    def trained(self) -> dict[str, nn.Parameter]:
        """The weights that move, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def original(self) -> Iterator[PreTrainedModel]:
        """The target as it was before the run, for reading alone."""
        if self._copy is not None:
            yield self._copy
            return
        if self.config.how == "full":
            raise ValueError("the original of a fully tuned target is kept only on request")
        layers, training = adapted_layers(self.model), self.model.training
        self.model.eval()
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield self.model
        finally:
            for layer in layers:
                layer.enable_adapters(True)
            self.model.train(training)

    @torch.no_grad()
    def teacher(self, batch: Batch) -> Teacher:
        """The original's last hidden states at the labelled positions, and its projection."""
        with self.original() as model:
            target: Any = model
            device = batch["input_ids"].device
            if target.device != device:
                target.to(device)
            with torch.autocast(device.type, enabled=False):  # in its own precision, as decoding
                hidden_PH, _ = labelled(hidden_states(target, batch), batch)
            projection = Projection.of(target)
        return Teacher(hidden_PH, projection)

    def export(self, folder: Path) -> None:
        """The target as it is now, adapters added to their layers' weights: an ordinary folder.

        Its config carries an identity of its own, to which drafters are bound.
        """
        mark_tuned(self.model, name=self.backbone.name, identity=self._fingerprint())
        added = TUNED_NAME if self.config.how == "lora" else None
        plain: Any = without_adapters(self.model, add=added)
        with no_progress_bars():
            plain.save_pretrained(folder)
        self.backbone.tokenizer.save_pretrained(folder)

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(str(self.config.model_dump()).encode())
        for name, parameter in sorted(self.trained().items()):
            digest.update(name.encode())
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()


class TunedStudent(nn.Module):
    """A drafter's loss module and the target beneath it, as one for whatever wraps the two."""

    def __init__(self, student: nn.Module, tuned: TunedTarget, *, distils: bool, chunk: int | None) -> None:
        """`distils`: the target is held to the distribution that it had, by KL, not to the text's tokens."""
        super().__init__()
        self.student = student
        self.target = tuned.model
        loss: TokenLoss = Mix(kl=1.0) if distils else cross_entropy
        self.language = ChunkedLoss(tuned.head, loss, chunk=chunk, shaping=Shaping.of(tuned.model))
        self._names = ("loss", "kl", "ce", "alpha") if distils else ("loss", "ce")
        self.tune = tuned.config
        self._rests = False
        self.train()  # a loaded target comes without dropout

    def begin_step(self, step: int) -> None:
        """To be called with every step's number: the target rests in the first ones."""
        self._rests = step < self.tune.rest_steps

    @property
    def is_resting(self) -> bool:
        """Whether this step trains the drafter alone."""
        return self.training and self._rests

    def pace(self, name: str) -> Pace:
        """How fast a parameter learns, for the optimiser."""
        if name.startswith("student."):
            return Pace(self.tune.head_lr_ratio)
        return Pace(first_step=self.tune.rest_steps)

    def states(self, batch: Batch) -> Tensor:
        """The target's last hidden states [R, S, H], with a gradient unless it rests."""
        if not self.is_resting:
            return hidden_states(self.target, batch)
        with torch.no_grad():
            hidden_RSH = hidden_states(self.target, batch)
        # what wraps the module in several processes waits for a gradient of every parameter
        moving = [p.sum() for p in self.target.parameters() if p.requires_grad]
        return hidden_RSH + 0.0 * torch.stack(moving).sum()

    def language_loss(
        self, hidden_RSH: Tensor, batch: Batch, teacher: Teacher | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The target's own loss summed over labels, and its terms, named `lm_...`."""
        hidden_PH, label_P = labelled(hidden_RSH, batch)
        loss, terms = self.language(hidden_PH, label_P, teacher)
        # the loop adds up the same names on every process, whatever the batch held there
        zero = loss.detach() * 0
        return loss, {f"lm_{name}": terms.get(name, zero) for name in self._names}


def check_tuned(recipe: TrainingRecipe) -> None:
    """Raise RequestError for sections that a target which moves cannot follow."""
    check_precision(recipe.tune, recipe.target)
    if recipe.features.source != "online":
        raise RequestError(
            f"features.source is {recipe.features.source}, and this {recipe.method} trains the target, so its states "
            "do not stay what they are; use features.source online"
        )


def run_tuned(
    build: Callable[[TunedTarget, Prepared], Objective], run: Run, *, check_target: CheckTarget, remember: bool = False
) -> RunOutcome:
    """Train what `build` makes of the tuned target into `out/drafter` and `out/target`.

    Args:
        check_target: as for `run_for_target`.
        remember: the objective needs the distribution that the target had before the run.
    """
    make_probe = run.make_probe

    def make(target: Backbone, rows: Prepared) -> Objective:
        _check_not_sharded()
        tuned = TunedTarget(target, run.recipe.tune, row_tokens=run.recipe.row_tokens, remember=remember)
        check_logits(tuned.model)  # an adapter on the projection would change what heads are taught
        return build(tuned, rows)

    def make_still(target: Backbone) -> Probe:
        assert make_probe is not None
        return _decoding_still(target, make_probe(target))

    changed = replace(run, make_probe=None if make_probe is None else make_still)
    return run_for_target(make, changed, check_target=check_target)


def tuned_saver(tuned: TunedTarget, family: str, out: Path) -> Save:
    """How a drafter that rides on the tuned target is written: behind the target itself.

    A kill between the two leaves a drafter that its identity keeps from the newer target.
    """

    def save(module: nn.Module, folder: Path) -> None:
        replace_folder(out / "target", tuned.export)
        net: Any = module
        save_heads(module, folder, tuned.backbone, family=family, settings=settings_of(net.config))

    return save


def _decoding_still(target: Backbone, probe: Probe) -> Probe:
    """The probe with the target's dropout off, which the loop knows nothing of."""

    def probe_still(module: nn.Module) -> dict[str, float]:
        training = target.model.training
        target.model.eval()
        try:
            return probe(module)
        finally:
            target.model.train(training)

    return probe_still


def check_precision(tune: TuneConfig, target: TargetConfig) -> None:
    """Raise RequestError where the weights that would move are too coarse for small steps."""
    if tune.how == "full" and target.dtype != "fp32":
        raise RequestError(
            f"tune.how is full and target.dtype is {target.dtype}, in which small steps of a "
            "weight are lost; set target.dtype to fp32, or tune.how to lora"
        )


def _check_not_sharded() -> None:
    plugin = getattr(AcceleratorState(), "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise RequestError(
            "a tuned target decodes in probes as it is, which ZeRO-3 cuts into pieces; "
            "use ZeRO-2, or tune.how: lora on more memory"
        )
