"""Checks of requests that need no torch: importing it takes seconds.

Read next: `measure/run.py` and `measure/tree.py`, which do what is asked; `methods.py`, the names of methods.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from ...config import LEAST_TEMPERATURE, is_temperature
from ...data.prompt_sets import chosen_sets
from ...drafters.config import DrafterConfig
from ...drafters.families import FAMILIES
from ...drafters.hub import drafter_folder, is_fetched, shown
from ...drafters.tuned_file import Tuned, read_tuned, read_tuned_methods
from ...errors import RequestError
from ...storage import writable_folder
from ...trainers.methods import own_sections
from ..methods import SKELETON, TRAINED, need_draft, split_methods
from ..recipe.load import load_recipe, without_run
from ..recipe.model import Recipe
from ..requests import AdaptRequest, AuditRequest, ChatRequest, CompareRequest, Pair, RunPair, TreeRequest, TuneRequest
from .devices import processes

_OF_TRAINING = ("method", "features", "machine", "model", "objective", "optimizer", "checkpoint", "probe")


@dataclass(frozen=True)
class NamedFolders:
    """What a command names, nothing of it loaded."""

    methods: list[str]
    recipe: Recipe
    target: str
    drafter: Path | None
    folder: Path
    """The run's, or the one that we are in."""
    tuned: Tuned = field(default_factory=lambda: Tuned({}))
    """What of the drafter's `tuned.json` is in the recipe."""

    @property
    def plain(self) -> bool:
        """Whether plain decoding is the tuned setting of all that is named: the drafter by itself."""
        return self.tuned.plain and self.methods == [TRAINED]


def named(
    pair: RunPair, overrides: Sequence[tuple[str, str]], *, tuned: bool = False, beside: Sequence[str] = ()
) -> NamedFolders:
    """The target and drafter of a run folder, or those that --target and --drafter name.

    Args:
        tuned: take the setting of the drafter's `tuned.json`, unless `overrides` sets a value of its kind.
        beside: methods of other pairs, for which the overrides are too.

    Raises:
        RequestError: no such run, nothing named, a method without its drafter, a wrong override, or one of what only
            training, or no method that is named, reads.
        EnvironmentFailure: a drafter of the hub cannot be fetched.
    """
    _check_settled(overrides)
    method = pair.method if isinstance(pair, Pair) else TRAINED
    names = split_methods(method)
    _check_read(overrides, [*names, *beside], method)
    drafter: Path | None = None if pair.drafter is None else drafter_folder(pair.drafter)
    if drafter is None and pair.run_folder is not None:
        drafter = pair.run_folder / "drafter"
    given = {name for name, _ in overrides}
    kept = Tuned({})
    if tuned and drafter is not None and set(names) & set(need_draft()):
        kept = read_tuned(drafter).unless(given)
    recipe, folder, target = named_target(pair, [*kept.values.items(), *overrides], given)
    if drafter is None and set(names) & set(need_draft()):
        raise RequestError(f"--method {method} needs a drafter: name its folder by --drafter, or a run")
    return NamedFolders(names, recipe, target, drafter, folder, kept)


def _check_settled(overrides: Sequence[tuple[str, str]]) -> None:
    """Raise RequestError for a flag of what was settled by training: nothing that decodes would follow it."""
    for name, value in overrides:
        if name.partition(".")[0] in {*_OF_TRAINING, *own_sections()}:
            raise RequestError(
                f"--{name} is {value}, and only training reads it: nothing is trained here; leave it out, or train a "
                "drafter with it"
            )


def _check_read(overrides: Sequence[tuple[str, str]], names: Sequence[str], method: str) -> None:
    """Raise RequestError for a flag of the drafter section that none of the methods asked for reads."""
    by_method = [family for family in FAMILIES.values() if family.make or family.wrap]
    for flag, value in overrides:
        section, option = f"{flag}.".split(".")[:2]
        readers = [family.name for family in by_method if option in family.options]
        if section != "drafter" or set(names) & {*readers, *([] if readers else need_draft())}:
            continue
        found = f"--{flag} is {value}, and --method is {method}"
        if readers:
            raise RequestError(
                f"{found}: {' and '.join(readers)} alone read{'s' * (len(readers) == 1)} it; name "
                f"{'one of them' if len(readers) > 1 else readers[0]} by --method, or leave it out"
            )
        if option in DrafterConfig.model_fields:
            raise RequestError(f"{found}, which loads no drafter to follow it; leave it out, or name {TRAINED} too")


def named_target(pair: RunPair, values: Sequence[tuple[str, str]], given: Collection[str]) -> tuple[Recipe, Path, str]:
    """The recipe, the folder and the target that a command names.

    Args:
        values: of the recipe, over its own.
        given: those of them that were typed.

    Raises:
        RequestError: no such run, nothing named, a wrong value.
    """
    if pair.run_folder is not None:
        folder, saved = pair.run_folder, pair.run_folder / "run.yaml"
        if not saved.is_file():
            raise RequestError(
                f"{folder} is no run folder: run.yaml is missing; name the --out of a training "
                "run, or use --target and --drafter"
            )
        recipe = load_recipe(str(saved), values).recipe
        check_trust(recipe, saved, said="target.trust_remote_code" in given, flag="--target.trust_remote_code true")
        return recipe, folder, pair.target or tuned_target(folder, recipe) or recipe.target.path
    if pair.target is not None:
        return without_run(values), Path(), pair.target
    raise RequestError(
        "no target is named: name a run folder, or --target and --drafter, or --target and a "
        "--method that needs no drafter"
    )


def check_trust(recipe: Recipe, saved: Path, *, said: bool, flag: str) -> None:
    """Refuse to run a target's code because a run folder says so: it may come from elsewhere.

    Args:
        said: whether the command itself says what is trusted, as by `flag`.

    Raises:
        RequestError: it does not, and the folder's recipe trusts.
    """
    if recipe.target.trust_remote_code and not said:
        raise RequestError(
            f"{saved} trusts the code that comes with its target {recipe.target.path!r}, and a run folder is no "
            f"reason to run it: say so yourself by {flag}, if you have read that code"
        )


def tuned_target(folder: Path, recipe: Recipe) -> str | None:
    """The target that a run has changed and its drafter fits; None where it was frozen."""
    tuned = folder / "target"
    return str(tuned) if recipe.record.has_target and tuned.is_dir() else None


def check_least(request: object, **least: float) -> None:
    """Raise RequestError for a flag that is set to less than its least value, or is no finite number."""
    for name, smallest in least.items():
        value = getattr(request, name)
        if value is not None and not smallest <= value < inf:
            raise RequestError(f"--{name.replace('_', '-')} is {value}; expected {smallest} or more")
        if name == "temperature" and not is_temperature(value):
            raise RequestError(f"--temperature is {value}; expected 0, or at least {LEAST_TEMPERATURE:g}")


def check_audit(request: AuditRequest, overrides: Sequence[tuple[str, str]]) -> NamedFolders | None:
    """What is audited; None with --survey, which takes no pair.

    Raises:
        RequestError: flags that exclude each other, or that would be passed over.
    """
    asked = {
        "--plant": request.plant is not None,
        "--decoder hf": request.decoder == "hf",
        "--determinism": request.determinism,
        "--survey": request.survey,
    }
    flags = [flag for flag, is_set in asked.items() if is_set]
    if len(flags) > 1:
        raise RequestError(f"{' and '.join(flags)} exclude each other; leave all but one out")
    if request.survey:
        if request.run_folder or request.target or request.drafter:
            raise RequestError("--survey decodes over tables: leave out run, target and drafter")
        without_run(overrides)
        return None
    if flags and request.method != "trained":
        raise RequestError(f"{flags[0]} takes the trained drafter alone: leave out --method")
    pair = named(request, overrides, tuned=True)
    if SKELETON in split_methods(request.method):
        raise RequestError(f"{SKELETON} is not lossless: there is nothing to audit")
    return pair


_IN_A_TEAM = "where the target needs them all, `eval` measures, in a team, a setting that is named by flags"


def check_alone(command: str, why: str, instead: str = _IN_A_TEAM) -> None:
    """Raise RequestError where a command that decides by itself was launched as several processes.

    `eval` and `audit` take the same steps on each; these do not, and would write over each other or wait for ever.
    """
    if (count := processes()) > 1:
        raise RequestError(
            f"{count} processes were launched, and {command} {why}; start it in one process, by "
            f"`draftsmith {command}`; {instead}"
        )


def check_adapt(request: AdaptRequest, overrides: Sequence[tuple[str, str]]) -> None:
    """Raise where there is no run, no rollout, or a wrong value."""
    check_alone("adapt", "decides by what one process measures", "`train` goes on from a drafter in many")
    check_least(request, steps=1, minutes=0.01, rows=1, prompts=2, temperature=0, poll=0)
    run = request.run_folder
    if not (run / "run.yaml").is_file() or not (run / "drafter").is_dir():
        raise RequestError(f"{run} is no finished run of a drafter; expected a folder with run.yaml and drafter/")
    if not request.rollouts.exists():
        raise RequestError(f"{request.rollouts} is not there; expected a JSONL file of rollouts, or a folder of them")
    recipe = load_recipe(str(run / "run.yaml"), overrides).recipe
    if recipe.tunes_target or not recipe.record.has_target:
        raise RequestError(
            f"{run} is a run of {recipe.method}, which trains the target itself; expected a run of a drafter for a "
            "target that stays as it is within a run"
        )


def check_tree(request: TreeRequest, overrides: Sequence[tuple[str, str]]) -> None:
    """Raise where nothing can be measured as asked, or the tree not be written."""
    check_alone("tree", "chooses by what each of them measures")
    check_least(request, depth=1, texts=1, temperature=0)
    if request.depth > 1_000:
        raise RequestError(f"--depth is {request.depth}; expected at most 1,000")
    drafter = named(request, overrides).drafter
    if request.out is None and drafter is not None and is_fetched(drafter):
        raise RequestError(f"{shown(drafter)} is of the hub, and nothing is written beside it; name a file by --out")
    if request.out is None:
        writable_folder(drafter or Path())
    elif request.out.is_dir():
        raise RequestError(f"--out {request.out} is a folder; name a file, tree.json in it say")
    else:
        writable_folder(request.out.parent)


def check_tune(request: TuneRequest, overrides: Sequence[tuple[str, str]]) -> list[NamedFolders]:
    """The pairs that are tuned, the first one with every method, the others with their drafter alone.

    Raises:
        RequestError: several processes, nothing named, a number out of its range, a value that tune chooses
            itself, Skeleton-of-Thought, or other targets.
    """
    check_alone("tune", "chooses by clocks, which differ between them")
    check_least(request, batch=1, best=1, temperature=0)
    check_least(request, limit=8 * request.batch)
    if SKELETON in split_methods(request.method):
        raise RequestError(f"{SKELETON} writes other answers: there is no setting of it to tune; leave it out")
    _check_not_chosen(overrides)
    run, *others = request.runs or (None,)
    beside = [*split_methods(request.method), *([TRAINED] if others else [])]
    first = named(Pair(run, request.target, request.drafter, request.method), overrides, beside=beside)
    if request.prompts is not None and _words(request.prompts) & _words(first.recipe.eval.second_prompts or ""):
        raise RequestError(
            f"--prompts {request.prompts} are eval.second_prompts, which tell whether a setting holds on prompts that "
            "nothing was chosen on; name others"
        )
    pairs = [first, *(named(Pair(each, request.target), overrides, beside=beside) for each in others)]
    for other, folder in zip(pairs[1:], others, strict=True):
        if _target_of(other) != _target_of(first):
            raise RequestError(
                f"{folder} has the target {other.target}, and {run} has {first.target}; expected runs on one target: "
                "tune the others by themselves"
            )
    if run is None and request.prompts is None:
        raise RequestError(
            "without a run nothing says which rows were held out from the drafter; name prompts by --prompts"
        )
    for folder in others:
        if request.runs.count(folder) > 1:
            raise RequestError(f"{folder} is named twice; expected each run once")
    for folder in (pair.drafter for pair in pairs if pair.drafter is not None):
        if not folder.is_dir():
            raise RequestError(
                f"there is no folder {folder}, beside whose weights the setting would be kept: the run has not "
                "finished, or trains no drafter. `draftsmith train RECIPE --out RUN` goes on with a run; a target is "
                "named by --target"
            )
        if not is_fetched(folder):
            writable_folder(folder)
    return pairs


def check_compare(request: CompareRequest, overrides: Sequence[tuple[str, str]]) -> list[NamedFolders]:
    """What is compared: each drafter as it was tuned, by itself and within methods that take one, then the others.

    Raises:
        RequestError: nothing is named, something twice, a method without the drafter that it takes, or a --tuned that
            no method reads.
    """
    check_alone("compare", "measures by clocks, which differ between them")
    methods = [] if request.method is None else split_methods(request.method)
    around = [name for name in methods if name in need_draft()]
    free = [name for name in methods if name not in around]
    if odd := {TRAINED, SKELETON} & set(methods):
        raise RequestError(f"--method names {odd.pop()}, which compare takes from no drafter by itself; name others")
    if around and not request.drafters:
        raise RequestError(f"--method names {around[0]}, which is made around a drafter; name some by --drafters")
    if not request.drafters and not methods:
        raise RequestError("nothing is named to compare; name runs or drafters' folders by --drafters, or --method")
    for each in request.drafters:
        if request.drafters.count(each) > 1:
            raise RequestError(f"--drafters names {each} twice; expected each once")
    if request.tuned is not None and not free:
        raise RequestError(f"--tuned {request.tuned} is for methods without a drafter; name them by --method")
    beside = [*methods, *([TRAINED] if request.drafters else [])]
    pairs = []
    for each in request.drafters:
        run = Path(each) if (Path(each) / "run.yaml").is_file() else None
        pair = Pair(run, request.target, None if run else each, ",".join([TRAINED, *around]))
        pairs.append(named(pair, overrides, tuned=True, beside=beside))
    tuned = {} if request.tuned is None else read_tuned_methods(request.tuned)
    given = {name for name, _ in overrides}
    for method in free:
        kept = tuned.get(method, Tuned({})).unless(given)
        made = named(Pair(None, request.target, None, method), [*kept.values.items(), *overrides], beside=beside)
        pairs.append(replace(made, tuned=kept))
    return pairs


def _words(prompts: str) -> set[str]:
    return {word.strip() for word in prompts.split(",") if word.strip()}


def check_prompts(words: str | None) -> None:
    """Raise RequestError for --prompts that name no set and no file."""
    if words is not None:
        chosen_sets(words)


def _check_not_chosen(overrides: Sequence[tuple[str, str]]) -> None:
    """Raise RequestError for a value that would be passed over, as tune tries several of it or has a flag."""
    chosen = {name for family in FAMILIES.values() for grid in family.grids for name in grid.chosen}
    flags = {"batch": "batch", "limit": "limit", "prompts": "prompts", "temperatures": "temperature"}
    for name, _ in overrides:
        if name in chosen:
            raise RequestError(f"--{name} is chosen by tune; leave it out")
        flag = flags.get(name.removeprefix("eval."))
        if flag is not None and name.startswith("eval."):
            raise RequestError(f"--{name} says nothing here; say --{flag}")


def _target_of(pair: NamedFolders) -> tuple[str, str | None, str]:
    """What is loaded: a folder by its whole path, revision and precision."""
    path, config = Path(pair.target), pair.recipe.target
    return str(path.resolve()) if path.exists() else pair.target, config.revision, config.dtype


def check_chat(request: ChatRequest, overrides: Sequence[tuple[str, str]]) -> NamedFolders:
    """The pair that answers.

    Raises:
        RequestError: several processes, nothing named, several methods or none that decodes, or a number out of its
            range.
    """
    check_alone("chat", "answers one keyboard")
    check_least(request, max_new_tokens=1, temperature=0)
    names = split_methods(request.method)
    if len(names) > 1 or SKELETON in names:
        raise RequestError(f"--method is {request.method}; chat shows one method that decodes, trained say")
    return named(request, overrides, tuned=True)
