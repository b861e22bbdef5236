"""Boost-tuned ensembles: round by round, the next SSM learns what those before it do not cover.

SpecInfer's collective boost-tuning (Miao et al. 2023, arXiv 2305.09781, section 3). The target
continues prompts of a corpus once; SSM k is distilled on those continuations, less what SSMs 1 to
k - 1 cover, or with less weight on it (`boosting/coverage.py`). Each round is an ordinary run in
`out/ssm-k` with checkpoints of its own, then one pass that measures what the SSM covers. Stages that
are complete are not done again, so a killed run continues where it was. Order of the file, as in
every trainer: what it requires and what is trained, the teacher's side, the run. Read next:
`boosting/coverage.py`, the mathematics; `boosting/side_by_side.py`, all SSMs in the same steps;
`data/generate/continuations.py`.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn

from ..data.features.model_hash import model_hash
from ..data.generate.continuations import Continuations, Team, Wanted, continuations
from ..data.rows.cache import Prepared
from ..decoding.backbone.backbone import Backbone
from ..drafters.model.ensemble import save_ensemble
from ..drafters.model.family import load_chain_draft
from ..errors import RequestError
from ..storage import replace_folder
from . import spine
from .boosting.coverage import acceptance, left_share, weights
from .boosting.coverage_pass import (
    Matches,
    coverage_line,
    coverage_record,
    labels_of,
    measure_matches,
    record_coverage,
    stored_matches,
)
from .boosting.members import (
    check_derived_members,
    check_members,
    check_origins,
    derived_folder,
    drafter_of,
    member_lora,
    member_model,
    member_plan,
    trained_models,
)
from .boosting.shapes import kept_for_probes as kept_for_probes  # what the pre-flight asks for
from .boosting.shapes import size_of, students
from .boosting.side_by_side import SideBySide
from .config import ModelConfig, chunk_of
from .loop.loop import Plan, Probe, RunOutcome
from .loop.objective import Batch, Objective
from .loop.setup import make_accelerator, run_loop
from .losses.chunked import Teacher
from .losses.terms import check_terms
from .losses.weighted_rows import WeightedRows
from .method_config import BoostConfig, LoraConfig
from .pruning.sizes import check_cut
from .recipe import MakeProbe, Run, TrainingRecipe
from .student.distillation import DraftStudent, teacher_of
from .student.draft import cut_from_target, make_draft, save_draft
from .student.lora import check_adapter
from .teacher.feature_cache import feature_source
from .teacher.frozen import Save, load_teacher, plan_of, prepare_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where nothing would be learnt, or origins, sizes and adapters do not fit the members."""
    check_terms(recipe.objective)
    check_adapter(recipe.lora, recipe.model, recipe.method)
    check_members(recipe.boost, recipe.lora, recipe.model)


def check_target(recipe: TrainingRecipe, target: PreTrainedModel) -> None:
    """Raise RequestError for sizes of no cut."""
    for model in trained_models(recipe.boost, recipe.model):
        check_cut(model, target)


def student(
    recipe: TrainingRecipe, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> nn.Module:
    """What is trained at the same time: all SSMs where they are trained side by side, else the largest."""
    if recipe.lora.rank is not None:  # adapters on one base, one after another
        return make_draft(recipe, recipe.model, recipe.lora, target, tokenizer)
    drafts = students(recipe, target, tokenizer)
    if recipe.boost.order == "side_by_side":
        return nn.ModuleList(drafts)
    return max(drafts, key=size_of)


class SsmObjective(spine.DrafterObjective):
    """Trains one SSM to have the distribution of the frozen `target` on what is left for it."""

    def __init__(self, student: DraftStudent, target: PreTrainedModel, save: Save) -> None:
        super().__init__(student, student.draft, target, save)
        self._student = student

    def set_steps(self, steps: int) -> None:
        """How many steps the round has: the mix moves over a share of them."""
        self._student.set_steps(steps)

    def begin_step(self, step: int, _seed: int) -> None:
        """Minimise that step's mix."""
        self._student.begin_step(step)

    def prepare(self, batch: Batch) -> Teacher:
        """The target's last hidden states at the labelled positions."""
        return teacher_of(self._target, super().prepare(batch).hidden_RSH, batch)


def run(recipe: TrainingRecipe, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> RunOutcome:
    """Boost-tune SSMs into `out/drafter`, an ensemble.

    Raises:
        RequestError: origins or sizes that do not fit the members; `resume` is a path.
    """
    check_recipe(recipe)
    check_resume(out, resume)
    run_ = Run(recipe, out, resume, make_probe)
    accelerator, target = load_teacher(run_, spine.check_target)
    check_derived_members(recipe.boost, target)
    check_origins(recipe.boost, recipe.model, target)
    rows = prepare_rows(run_, accelerator, target)
    samples = _samples(target, rows, recipe.boost, out, accelerator)
    boosting = Boosting(run_, target, rows, samples)
    if recipe.boost.order == "side_by_side":
        return boosting.together(accelerator)
    return boosting.in_turn(accelerator)


class Boosting:
    """One run: the SSMs one after another, or side by side."""

    def __init__(self, run: Run, target: Backbone, rows: Prepared, samples: Continuations) -> None:
        self.run, self.recipe, self.out, self.plan = run, run.recipe, run.out, plan_of(run.recipe)
        self.boost = run.recipe.boost
        self.chunk = chunk_of(run.recipe.objective.chunk, target.vocabulary)
        self.target, self.samples = target, samples
        self.label_RS = labels_of(samples.train)
        # what the feature cache and the loop know as rows
        self.rows = replace(rows, train=samples.train, validation=samples.validation)
        self.matches: list[Matches] = []
        self.earlier: list[nn.Module] = []
        self.probe = None if run.make_probe is None else run.make_probe(target)

    def in_turn(self, accelerator: Accelerator) -> RunOutcome:
        """All rounds, those that are complete passed over, and the ensemble of them."""
        outcome, steps = RunOutcome(0, float("nan"), None), 0
        for number in range(1, self.boost.members + 1):
            weighted = self.left(number)
            if weighted is None:
                break
            derived = derived_folder(self.boost, number)
            if derived is not None:
                self.adopt(number, derived, accelerator)
            elif stored_matches(self.out / f"ssm-{number}") is None:
                outcome = self.train(number, weighted, accelerator)
            steps += 0 if derived else self.plan.loop.steps
            self.take(drafter_of(self.out, number), number, accelerator)
            self.publish(accelerator)
        return replace(outcome, steps=steps)

    def together(self, accelerator: Accelerator) -> RunOutcome:
        """All SSMs in one loop, then what each of them covers."""
        _check_not_sharded(accelerator)
        plan, drafters = self.plan, self.out / "drafter"
        numbers = range(1, self.boost.members + 1)
        objective = SideBySide([self.student_of(number) for number in numbers], self.target, self.boost)
        with self.features(objective, accelerator):
            outcome = run_loop(
                objective,
                self.samples.train,
                self.samples.validation,
                plan,
                accelerator,
                out=self.out,
                export_to=drafters,
                probe=self.probe,
                resume=self.run.resume,
            )
        for number in numbers:
            self.take(drafters / f"ssm-{number}", number, accelerator)
            self.report(accelerator)
        return outcome

    def take(self, folder: Path, number: int, accelerator: Accelerator) -> None:
        """A trained SSM: measure what it covers where that is not known yet, keep it for probes."""
        own = self.out / f"ssm-{number}"
        matches, decodes = stored_matches(own), self.decodes_again(number)
        if matches is None or decodes:
            model = load_chain_draft(folder, self.target).backbone.model
            matches = matches or measure_matches(
                model, self.samples, own, accelerator, chunk=self.chunk, vocabulary=self.target.vocabulary
            )
            self.earlier += [model] * decodes
        self.matches.append(matches)

    def decodes_again(self, number: int) -> bool:
        """Whether probes of later rounds need SSM `number`; an adapter is in the model in training
        with all those before it."""
        in_turn = self.boost.order == "in_turn" and number < self.boost.members
        return in_turn and self.probe is not None and self.recipe.lora.rank is None

    def left(self, number: int) -> WeightedRows | None:
        """What the next SSM learns; None where too little is left."""
        accepted = [acceptance(each.train, self.label_RS, self.boost) for each in self.matches]
        share = left_share(accepted, self.label_RS)
        weighted = WeightedRows(self.samples.train, weights(accepted, self.label_RS, self.boost))
        if self.boost.weights == "none" or number == 1:
            return weighted
        if share < self.boost.stop_share or not len(weighted):
            _log.info(
                "%.1f%% of the labels are left uncovered, less than boost.stop_share (%.1f%%): "
                "the ensemble has %d SSMs",
                100 * share,
                100 * self.boost.stop_share,
                number - 1,
            )
            return None
        _log.info(
            "SSM %d of %d: %.1f%% of the labels are left uncovered, it learns from %d of %d samples",
            number,
            self.boost.members,
            100 * share,
            len(weighted),
            len(self.samples.train),
        )
        return weighted

    def adopt(self, number: int, folder: Path, accelerator: Accelerator) -> None:
        """Take an SSM that is made from the target as it stands: the next ones learn its rest."""
        own = drafter_of(self.out, number)
        if accelerator.is_main_process and not own.is_dir():
            replace_folder(own, partial(_copy, folder))
        accelerator.wait_for_everyone()

    def train(self, number: int, weighted: WeightedRows, accelerator: Accelerator) -> RunOutcome:
        """The run of one SSM, in a folder of its own."""
        own = self.out / f"ssm-{number}"
        plan = member_plan(self.plan, number)
        own.mkdir(exist_ok=True)
        if number > 1:  # an accelerator prepares one model
            accelerator = make_accelerator(plan.loop, plan.optimizer, own)
        torch.manual_seed(plan.loop.seed)  # fresh weights must not depend on what was drawn before
        save = partial(save_draft, target=self.target, lora=member_lora(self.recipe.lora, number))
        objective = SsmObjective(self.student_in_turn(number, own, plan), self.target.model, save)
        with self.features(objective, accelerator):
            outcome = run_loop(
                objective,
                weighted,
                self.samples.validation,
                plan,
                accelerator,
                out=own,
                export_to=drafter_of(self.out, number),
                probe=self.probe_together(),
                resume="auto",
            )
        accelerator.free_memory()  # it would hold the model beside the next one
        return outcome

    def student_in_turn(self, number: int, own: Path, plan: Plan) -> DraftStudent:
        """SSM `number` of a round, an adapter on it if the recipe asks for one."""
        model = self.initial_model(number)
        pruned = cut_from_target(
            self.recipe, model, self.target.model, self.samples.validation, out=own, seed=plan.loop.seed
        )
        return self.student(model, member_lora(self.recipe.lora, number), pruned)

    def student_of(self, number: int) -> DraftStudent:
        """SSM `number` of those that are trained together; its weights depend on its own seed alone."""
        torch.manual_seed(member_plan(self.plan, number).loop.seed)
        return self.student(member_model(self.recipe.model, self.boost, number, self.out), LoraConfig(), None)

    def student(self, model: ModelConfig, lora: LoraConfig, pruned: PreTrainedModel | None) -> DraftStudent:
        target = self.target.model
        draft = make_draft(self.recipe, model, lora, target, self.target.tokenizer, pruned=pruned)
        return DraftStudent(draft, target, self.recipe.objective)

    def features(self, objective: Objective, accelerator: Accelerator) -> AbstractContextManager[None]:
        """The target's states, from one cache for all SSMs where the recipe asks for one."""
        return feature_source(
            objective,
            self.recipe.features,
            self.target,
            self.rows,
            self.recipe.data,
            out=self.out,
            accelerator=accelerator,
        )

    def initial_model(self, number: int) -> ModelConfig:
        """What SSM `number` is initialised from: an adapter is put beside those before it."""
        if self.recipe.lora.rank is None or number == 1:
            return member_model(self.recipe.model, self.boost, number, self.out)
        before = str(drafter_of(self.out, number - 1))
        return self.recipe.model.model_copy(update={"start_from": before})

    def probe_together(self) -> Probe | None:
        """Decoding with the SSM that is trained and all before it: the best checkpoint is the
        ensemble's best."""
        probe = self.probe
        if probe is None or self.recipe.lora.rank is not None:
            return probe
        return lambda module: probe(nn.ModuleList([*self.earlier, module]))

    def publish(self, accelerator: Accelerator) -> None:
        """The ensemble of the SSMs so far, and what they cover."""
        if accelerator.is_main_process:
            numbers = range(1, len(self.matches) + 1)
            members, adapters = [drafter_of(self.out, number) for number in numbers], list[str]()
            if self.recipe.lora.rank is not None:  # the last folder has the base and all adapters
                members, adapters = members[-1:], [f"ssm-{number}" for number in numbers]
            replace_folder(
                self.out / "drafter", lambda folder: save_ensemble(folder, members, self.target, adapters=adapters)
            )
        self.report(accelerator)

    def report(self, accelerator: Accelerator) -> None:
        """Record what the last SSM covers, and log it."""
        if accelerator.is_main_process:
            draft, count = self.plan.probe.draft_length, len(self.matches)
            values = coverage_record(self.matches, self.samples, self.boost, draft=draft)
            record_coverage(self.out / "metrics.jsonl", count, values)
            _log.info("%s", coverage_line(count, self.boost.members, values, self.boost))
        accelerator.wait_for_everyone()


def _copy(folder: Path, new: Path) -> None:
    shutil.copytree(folder, new, dirs_exist_ok=True)


def _samples(
    target: Backbone, rows: Prepared, boost: BoostConfig, out: Path, accelerator: Accelerator
) -> Continuations:
    named = boost.continuations
    folder = out / "continuations" if named is None else Path(named).expanduser()
    wanted = Wanted(
        samples=boost.samples,
        held_out=boost.held_out,
        prompt_tokens=boost.prompt_tokens,
        tokens=boost.continuation,
        temperature=boost.temperature,
        seed=boost.seed,
        weights=model_hash(target.model),
    )
    team = Team(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)
    return continuations(target, rows, wanted, folder, team)


def check_resume(out: Path, resume: str) -> None:
    """Raise RequestError for a `--resume` that a run of many stages cannot follow."""
    if resume not in ("auto", "never"):
        raise RequestError(
            f"--resume {resume}: a run of method boost has checkpoints of every SSM; use auto, "
            "which goes on with the stage that is not complete"
        )
    if resume == "never" and any(out.glob("ssm-*")):
        raise RequestError(f"{out} holds SSMs and --resume is never; use --resume auto to go on, or another --out")


def _check_not_sharded(accelerator: Accelerator) -> None:
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        raise RequestError(
            "boost.order is side_by_side, in which SSMs read each other's projections, and ZeRO-3 "
            "cuts them into pieces; use ZeRO-2, or boost.order in_turn"
        )
