"""Boost-tuned ensembles: round by round, the next SSM learns what those before it do not cover.

SpecInfer's collective boost-tuning (Miao et al. 2023, arXiv 2305.09781, section 3). The target
continues prompts of a corpus once; SSM k is distilled on those continuations, less what SSMs 1 to
k - 1 cover, or with less weight on it (`coverage.py`). Each round is an ordinary run in
`out/ssm-k` with checkpoints of its own, then one pass that says what the SSM covers. Stages that
are complete are not done again, so a killed run goes on where it was. Read next: `coverage.py`,
the mathematics; `side_by_side.py`, all SSMs in the same steps; `data/generate/continuations.py`.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch
from accelerate import Accelerator
from torch import nn

from ..data.generate.continuations import Continuations, Team, Wanted, continuations
from ..data.rows.cache import Prepared
from ..decoding.target.backbone import Backbone
from ..drafters.folder import check_trainable_model, read_entry, save_draft_model
from ..drafters.identity import TargetIdentity
from ..drafters.model.ensemble import save_ensemble
from ..drafters.registry import load_chain_draft
from ..errors import RequestError
from ..storage import replace_folder
from . import distill
from .boosting import side_by_side
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
    check_members,
    derived_folder,
    drafter_of,
    member_lora,
    member_model,
    member_plan,
    own_member,
)
from .config import FROM_TARGET, BoostConfig, LoraConfig, ModelConfig, ObjectiveConfig
from .loop.loop import Outcome, Plan, Probe
from .loop.objective import Objective
from .loop.setup import make_accelerator, run_loop
from .losses.weighted_rows import WeightedRows
from .pruning.layers import prune
from .student.lora import save_adapted
from .teacher.feature_cache import feature_source, model_hash
from .teacher.frozen import Given, begin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


def run(
    *, model: ModelConfig, objective: ObjectiveConfig, boost: BoostConfig, lora: LoraConfig, **given: Unpack[Given]
) -> Outcome:
    """Boost-tune SSMs into `out/drafter`, an ensemble.

    Raises:
        RequestError: origins or sizes that do not fit the members; `resume` is a path.
    """
    check_members(boost, lora, model)
    check_resume(given["out"], given["resume"])
    accelerator, target, rows = begin(given)
    _check_member_targets(boost, target)
    _check_origins(boost, model, target)
    samples = _samples(target, rows, boost, given, accelerator)
    run = Boosting(model, objective, boost, given, target, rows, samples, lora)
    return run.together(accelerator) if boost.order == "side_by_side" else run.in_turn(accelerator)


class Boosting:
    """One run: the SSMs one after another, or side by side."""

    def __init__(
        self,
        model: ModelConfig,
        objective: ObjectiveConfig,
        boost: BoostConfig,
        given: Given,
        target: Backbone,
        rows: Prepared,
        samples: Continuations,
        lora: LoraConfig | None = None,
    ) -> None:
        self.lora = lora or LoraConfig()
        self.model, self.objective, self.boost, self.given = model, objective, boost, given
        self.target, self.samples, self.out = target, samples, given["out"]
        self.label_RS = labels_of(samples.train)
        # what the feature cache and the loop know as rows
        self.rows = replace(rows, train=samples.train, validation=samples.validation)
        self.found: list[Matches] = []
        self.earlier: list[nn.Module] = []
        make_probe = given["make_probe"]
        self.probe = None if make_probe is None else make_probe(target)

    def in_turn(self, accelerator: Accelerator) -> Outcome:
        """All rounds, those that are complete passed over, and the ensemble of them."""
        outcome, steps = Outcome(0, float("nan"), None), 0
        for number in range(1, self.boost.members + 1):
            weighted = self.left(number)
            if weighted is None:
                break
            derived = derived_folder(self.boost, number)
            if derived is not None:
                self.adopt(number, derived, accelerator)
            elif stored_matches(self.out / f"ssm-{number}") is None:
                outcome = self.train(number, weighted, accelerator)
            steps += 0 if derived else self.given["plan"].loop.steps
            self.take(drafter_of(self.out, number), number, accelerator)
            self.publish(accelerator)
        return replace(outcome, steps=steps)

    def together(self, accelerator: Accelerator) -> Outcome:
        """All SSMs in one loop, then what each of them covers."""
        _check_not_sharded(accelerator)
        plan, drafters = self.given["plan"], self.out / "drafter"
        numbers = range(1, self.boost.members + 1)
        goal = side_by_side.build(
            [
                (member_model(self.model, self.boost, number, self.out), member_plan(plan, number).loop.seed)
                for number in numbers
            ],
            self.objective,
            self.boost,
            self.target,
        )
        with self.features(goal, accelerator):
            outcome = run_loop(
                goal,
                self.samples.train,
                self.samples.validation,
                plan,
                accelerator,
                out=self.out,
                export_to=drafters,
                probe=self.probe,
                resume=self.given["resume"],
            )
        for number in numbers:
            self.take(drafters / f"ssm-{number}", number, accelerator)
            self.report(accelerator)
        return outcome

    def take(self, folder: Path, number: int, accelerator: Accelerator) -> None:
        """A trained SSM: find what it covers where that is not known yet, keep it for probes."""
        place = self.out / f"ssm-{number}"
        matches, decodes = stored_matches(place), self.decodes_again(number)
        if matches is None or decodes:
            model = load_chain_draft(folder, self.target).backbone.model
            matches = matches or measure_matches(
                model, self.samples, place, accelerator, chunk=self.objective.chunk, vocabulary=self.target.vocabulary
            )
            self.earlier += [model] * decodes
        self.found.append(matches)

    def decodes_again(self, number: int) -> bool:
        """Whether probes of later rounds need SSM `number`; an adapter is in the model in training
        with all those before it."""
        in_turn = self.boost.order == "in_turn" and number < self.boost.members
        return in_turn and self.probe is not None and self.lora.rank is None

    def left(self, number: int) -> WeightedRows | None:
        """What the next SSM learns; None where too little is left."""
        accepted = [acceptance(each.train, self.label_RS, self.boost) for each in self.found]
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
        place = drafter_of(self.out, number)
        if accelerator.is_main_process and not place.is_dir():
            replace_folder(place, lambda new: _copy(folder, new))
        accelerator.wait_for_everyone()

    def train(self, number: int, weighted: WeightedRows, accelerator: Accelerator) -> Outcome:
        """The run of one SSM, in a folder of its own."""
        given, place = self.given, self.out / f"ssm-{number}"
        plan = member_plan(given["plan"], number)
        place.mkdir(exist_ok=True)
        if number > 1:  # an accelerator prepares one model
            accelerator = make_accelerator(plan.loop, plan.optimizer, place)
        torch.manual_seed(plan.loop.seed)  # fresh weights must not depend on what was drawn before
        made, lora = self.made_of(number), member_lora(self.lora, number)
        goal = distill.build(
            made,
            self.objective,
            self.target.model,
            self.target.tokenizer,
            partial(self.save, lora=lora),
            lora,
            pruned=self.cut(made, place, plan),
        )
        with self.features(goal, accelerator):
            outcome = run_loop(
                goal,
                weighted,
                self.samples.validation,
                plan,
                accelerator,
                out=place,
                export_to=drafter_of(self.out, number),
                probe=self.probe_together(),
                resume="auto",
            )
        accelerator.free_memory()  # it would hold the model beside the next one
        return outcome

    def cut(self, made: ModelConfig, place: Path, plan: Plan) -> PreTrainedModel | None:
        """An SSM cut from the target, where it begins there; see `pruning/layers.py`."""
        if made.start_from != FROM_TARGET:
            return None
        return prune(
            made,
            self.target.model,
            self.samples.validation,
            out=place,
            seed=plan.loop.seed,
            micro_rows=plan.loop.micro_rows,
            chunk=self.objective.chunk,
        )

    def features(self, goal: Objective, accelerator: Accelerator) -> AbstractContextManager[None]:
        """The target's states, from one cache for all SSMs where the recipe asks for one."""
        return feature_source(
            goal,
            self.given["features"],
            self.target,
            self.rows,
            self.given["data"],
            out=self.out,
            accelerator=accelerator,
        )

    def made_of(self, number: int) -> ModelConfig:
        """What SSM `number` goes on from: an adapter is put beside those before it."""
        if self.lora.rank is None or number == 1:
            return member_model(self.model, self.boost, number, self.out)
        before = str(drafter_of(self.out, number - 1))
        return self.model.model_copy(update={"start_from": before})

    def save(self, module: nn.Module, folder: Path, lora: LoraConfig) -> None:
        """An SSM by itself is an ordinary draft model, or one with adapters, its own in use."""
        if lora.rank is None:
            save_draft_model(module, folder, self.target)
        else:
            save_adapted(module, folder, self.target, lora)

    def probe_together(self) -> Probe | None:
        """Decoding with the SSM that is trained and all before it: the best checkpoint is the
        ensemble's best."""
        probe = self.probe
        if probe is None or self.lora.rank is not None:
            return probe
        return lambda module: probe(nn.ModuleList([*self.earlier, module]))

    def publish(self, accelerator: Accelerator) -> None:
        """The ensemble of the SSMs so far, and what they cover."""
        if accelerator.is_main_process:
            numbers = range(1, len(self.found) + 1)
            places, adapters = [drafter_of(self.out, number) for number in numbers], list[str]()
            if self.lora.rank is not None:  # the last folder has the base and all adapters
                places, adapters = places[-1:], [f"ssm-{number}" for number in numbers]
            replace_folder(
                self.out / "drafter", lambda folder: save_ensemble(folder, places, self.target, adapters=adapters)
            )
        self.report(accelerator)

    def report(self, accelerator: Accelerator) -> None:
        """Record what the last SSM covers, and say it."""
        if accelerator.is_main_process:
            draft, count = self.given["plan"].probe.draft_length, len(self.found)
            values = coverage_record(self.found, self.samples, self.boost, draft=draft)
            record_coverage(self.out / "metrics.jsonl", count, values)
            _log.info("%s", coverage_line(count, self.boost.members, values, self.boost))
        accelerator.wait_for_everyone()


def _copy(folder: Path, new: Path) -> None:
    shutil.copytree(folder, new, dirs_exist_ok=True)


def _check_member_targets(boost: BoostConfig, target: Backbone) -> None:
    """Raise RequestError for an SSM that is made from another target than this one."""
    for number in range(1, boost.members + 1):
        folder = derived_folder(boost, number)
        if folder is not None:
            entry = read_entry(folder)
            entry["identity"].check_same(TargetIdentity.of(target), str(folder))


def _check_origins(boost: BoostConfig, model: ModelConfig, target: Backbone) -> None:
    """Raise RequestError for a model that no SSM can go on from, before rounds are spent."""
    origins = [model.start_from or ""]
    origins += [
        origin
        for number, origin in enumerate(boost.start_from, 1)
        if own_member(origin) is None and derived_folder(boost, number) is None
    ]
    for origin in {*origins} - {"", FROM_TARGET}:
        check_trainable_model(origin)
        distill.check_same_tokens(origin, target.tokenizer)


def _samples(
    target: Backbone, rows: Prepared, boost: BoostConfig, given: Given, accelerator: Accelerator
) -> Continuations:
    named = boost.continuations
    folder = given["out"] / "continuations" if named is None else Path(named).expanduser()
    wanted = Wanted(
        boost.samples,
        boost.held_out,
        boost.prompt_tokens,
        boost.continuation,
        boost.temperature,
        boost.seed,
        model_hash(target.model),
    )
    team = Team(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)
    return continuations(target, rows, wanted, folder, team)


def check_resume(out: Path, resume: str) -> None:
    """Raise RequestError for words that a run of many stages cannot follow."""
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
