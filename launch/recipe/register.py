"""A family and a method of one's own, known in this process: `draftsmith.register`.

Read next: `drafters/families.py` and `trainers/methods.py`, the records; `model.py`, which makes recipes of them.
"""

from __future__ import annotations

from ...drafters.families import FAMILIES
from ...drafters.record import Family
from ...errors import RequestError
from ...trainers.methods import METHODS, Method, own_sections
from .load import forget_fields
from .model import Recipe, rebuild

_SHIPPED = frozenset((*FAMILIES, *METHODS))
_FIXED = frozenset(Recipe.model_fields) - frozenset(own_sections())


def register(family: Family | None = None, method: Method | None = None) -> None:
    """Make a family of drafters, a method that trains one, or both known in this process.

    Recipes, verbs, probes, the audit and exports know them from now on, as if they stood in the package
    (docs/extending.md). Functions of a record may be named as "module:function" or be given themselves. Registered
    again, as when a cell of a notebook runs again, a record takes the place of the one before.

    Raises:
        RequestError: what is no record, a name that the package has, a section that another method has, or a method of
            no known family.
    """
    for name, record, kind in (("family", family, Family), ("method", method, Method)):
        if not isinstance(record, kind | None):
            raise RequestError(
                f"{name} is {record!r:.60}; expected a draftsmith.{kind.__name__}, as register(family, method)"
            )
    if family is None and method is None:
        raise RequestError("there is nothing to register; expected a family, a method, or both")
    for record in (family, method):
        if record is not None and record.name in _SHIPPED:
            raise RequestError(f"{record.name!r} is a family or method of the package; expected a name of its own")
    if method is not None:
        _check_method(method, family)
    if family is not None:
        FAMILIES[family.name] = family
    if method is not None:
        METHODS[method.name] = method
        rebuild()
        forget_fields()


def _check_method(method: Method, family: Family | None) -> None:
    known = {*FAMILIES, *([family.name] if family else [])}
    if method.family is not None and method.family not in known:
        raise RequestError(
            f"method {method.name!r} trains family {method.family!r}, which is not known; expected one of "
            f"{', '.join(known)}, or its record beside the method's"
        )
    for name, kind in method.sections.items():
        others = [each.name for each in METHODS.values() if each.sections.get(name, kind) is not kind]
        others = [each for each in others if each != method.name] + ["all methods"] * (name in _FIXED)
        if others:
            raise RequestError(
                f"section {name!r} of method {method.name!r} is one of {others[0]} already, of another class; "
                "expected a name of its own"
            )
