"""What each SSM of a boosted ensemble is made of: origin, size, seed, adapter.

Read next: `boost.py`, which trains them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...decoding.backbone.backbone import Backbone
from ...drafters.folder import adapters_of, check_trainable_model, derived_family, read_entry
from ...drafters.identity import TargetIdentity
from ...errors import RequestError
from ..config import FROM_TARGET, ModelConfig
from ..loop.loop import Plan
from ..method_config import BoostConfig, LoraConfig
from ..student.draft import check_same_tokens

_SEEDS_APART = 1000


def check_members(boost: BoostConfig, lora: LoraConfig, model: ModelConfig) -> None:
    """Raise RequestError where origins and sizes do not fit the members, or each other."""
    if lora.rank is not None:
        _check_beside_adapters(boost, model)
    if model.start_from is not None and sum(map(bool, boost.start_from)) >= boost.members:
        raise RequestError(
            f"model.start_from is {model.start_from!r}, and boost.start_from names the origin of each of "
            "the SSMs: nothing would read it; leave one of the two out"
        )
    for name in ("start_from", "layers"):
        count = len(getattr(boost, name))
        if count > boost.members:
            raise RequestError(
                f"boost.{name} has {count} entries, and boost.members is {boost.members}; expected "
                "at most one for each"
            )
    for number, layers in enumerate(boost.layers, 1):
        origin = member_model(model, boost, number, Path()).start_from
        if layers is not None and origin not in (None, FROM_TARGET):
            raise RequestError(
                f"boost.layers gives SSM {number} {layers} layers, and it is initialised from {origin}, "
                "which has its own; write null for it, or let it begin from nothing or from "
                f"{FROM_TARGET!r}"
            )
    if all(derived_folder(boost, number) for number in range(1, boost.members + 1)):
        raise RequestError(
            f"boost.start_from: all {boost.members} SSMs are made from the target when they are "
            "loaded: there is nothing to train; let one learn"
        )
    if boost.order == "side_by_side":
        _check_cuts(boost, model)
    for number, origin in enumerate(boost.start_from, 1):
        earlier = own_member(origin)
        if boost.order == "side_by_side" and derived_folder(boost, number) is not None:
            raise RequestError(
                f"boost.start_from: SSM {number} is {origin}, made from the target when it is "
                "loaded, and with order side_by_side all are trained together; use in_turn"
            )
        if earlier is None:
            continue
        if boost.order == "side_by_side":
            raise RequestError(
                f"boost.start_from: SSM {number} is initialised from {origin}, and with order "
                "side_by_side there is none that is trained before; use in_turn"
            )
        if not 0 < earlier < number:
            raise RequestError(f"boost.start_from: SSM {number} is initialised from {origin}; expected one before it")
        if derived_folder(boost, earlier) is not None:
            raise RequestError(
                f"boost.start_from: SSM {number} is initialised from {origin}, which is made from the "
                "target when it is loaded and has no weights of its own"
            )


def check_derived_members(boost: BoostConfig, target: Backbone) -> None:
    """Raise RequestError for an SSM that is made from another target than this one."""
    for number in range(1, boost.members + 1):
        folder = derived_folder(boost, number)
        if folder is not None:
            entry = read_entry(folder)
            entry["identity"].check_same(TargetIdentity.of(target), str(folder))


def check_origins(boost: BoostConfig, model: ModelConfig, target: Backbone) -> None:
    """Raise RequestError for a model that no SSM can be initialised from, before rounds are spent."""
    origins = [model.start_from or ""]
    origins += [
        origin
        for number, origin in enumerate(boost.start_from, 1)
        if own_member(origin) is None and derived_folder(boost, number) is None
    ]
    for origin in {*origins} - {"", FROM_TARGET}:
        check_trainable_model(origin)
        check_same_tokens(origin, target.tokenizer)


def _check_cuts(boost: BoostConfig, model: ModelConfig) -> None:
    for number in range(1, boost.members + 1):
        if member_model(model, boost, number, Path()).start_from == FROM_TARGET:
            raise RequestError(
                f"SSM {number} begins at {FROM_TARGET!r}, by boost.start_from or model.start_from, "
                "and with order side_by_side none is cut from the target; use in_turn"
            )


def _check_beside_adapters(boost: BoostConfig, model: ModelConfig) -> None:
    given = [name for name in ("start_from", "layers") if getattr(boost, name)]
    if given:
        raise RequestError(
            f"boost.{given[0]} is set, and lora.rank too: all SSMs are adapters on the one base "
            "that model.start_from names; leave one of the two out"
        )
    if boost.order == "side_by_side":
        raise RequestError(
            "lora.rank is set, and boost.order is side_by_side: adapters on one base are trained "
            "one after another; use in_turn"
        )
    there = [] if model.start_from is None else adapters_of(Path(model.start_from))
    if there:
        raise RequestError(
            f"model.start_from {model.start_from!r} has adapters ({', '.join(there)}), which would "
            "draft in the probes beside the ensemble's own; name a base without"
        )


def member_lora(lora: LoraConfig, number: int) -> LoraConfig:
    """The adapter of SSM `number`, named after it."""
    return lora.model_copy(update={"name": f"ssm-{number}"})


def member_model(model: ModelConfig, boost: BoostConfig, number: int, out: Path) -> ModelConfig:
    """What SSM `number` (from 1) is made of: `model`, but for its own origin and size."""
    changed: dict[str, object] = {}
    if number <= len(boost.start_from) and boost.start_from[number - 1]:
        origin = boost.start_from[number - 1]
        earlier = own_member(origin)
        changed["start_from"] = origin if earlier is None else str(drafter_of(out, earlier))
    if number <= len(boost.layers) and boost.layers[number - 1] is not None:
        changed["layers"] = boost.layers[number - 1]
    return model.model_copy(update=changed)


def trained_models(boost: BoostConfig, model: ModelConfig) -> list[ModelConfig]:
    """What each SSM that is trained is made of, as if it were distilled alone.

    One that is initialised from another of the run is of that one's make; one that is derived from
    the target as it stands is not trained.
    """
    models: dict[int, ModelConfig] = {}
    for number in range(1, boost.members + 1):
        origin = boost.start_from[number - 1] if number <= len(boost.start_from) else ""
        if derived_folder(boost, number) is not None:
            continue
        earlier = own_member(origin)
        models[number] = member_model(model, boost, number, Path()) if earlier is None else models[earlier]
    return list(models.values())


def derived_folder(boost: BoostConfig, number: int) -> Path | None:
    """The folder of a quantised copy or an early exit that is SSM `number` as it stands."""
    origin = boost.start_from[number - 1] if number <= len(boost.start_from) else ""
    folder = Path(origin).expanduser()
    return folder if origin and derived_family(folder) is not None else None


def member_plan(plan: Plan, number: int) -> Plan:
    """The plan of SSM `number`: the first one's seed is the run's, the others' are far from it."""
    seed = plan.loop.seed + _SEEDS_APART * (number - 1)
    return replace(plan, loop=plan.loop.model_copy(update={"seed": seed}))


def own_member(origin: str) -> int | None:
    """Number of the run's own SSM that `ssm-J` names; None for any other origin."""
    word, _, number = origin.partition("-")
    return int(number) if word == "ssm" and number.isdecimal() else None


def drafter_of(out: Path, number: int) -> Path:
    """Where SSM `number` is exported."""
    return out / f"ssm-{number}" / "drafter"
