"""The refusal of objectives that teach nothing or contradict themselves; nothing is computed here.

Read next: `mix.py`, the terms.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import RequestError
from ..config import ObjectiveConfig
from .mix import TERMS, Mix


def check_terms(
    objective: ObjectiveConfig, *, own: Mapping[str, float] | None = None, positions: int = 1, counted_by: str = ""
) -> None:
    """Raise RequestError when an objective teaches nothing, or weighs positions that there are not.

    Args:
        own: weights of the method's own terms by the names that recipes give them; where there are
            such terms the KL is off unless the recipe sets it.
        positions: how many tokens ahead a step learns together, each with a weight.
        counted_by: the field that says how many; empty: there is none, and the method weighs no positions.
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
    if objective.positions == "d-pace" and objective.pace_floor == 0:
        raise RequestError(
            "objective.pace_floor is 0 with objective.positions d-pace: far positions would learn nothing until near "
            "ones are right; expected more than 0"
        )
    if objective.positions != "geometric" and positions < 2:
        found = "weighs all that it learns alike: leave it out"
        if counted_by:
            found = f"learns one, by {counted_by}: raise that, or leave objective.positions out"
        raise RequestError(
            f"objective.positions is {objective.positions}, which weighs the drafts that a step learns together, and "
            f"this run {found}"
        )
