"""Which values of a recipe's `drafter` section a family reads. No torch here.

Read next: `families.py`, whose records name them; `registry.py`, which asks before a drafter is loaded.
"""

from __future__ import annotations

from ..errors import RequestError
from .config import DEFAULT_TREE, DrafterConfig
from .families import Family

_NO_EAGLE_TREE = "which drafts no tree of EAGLE's"
# options of some families alone, and what a drafter of the others is or lacks
_LACKS = {
    "adapter": "which has no adapters",
    "members": "not an ensemble",
    "temperature_factors": "which draws nothing",
    "confidence": "which ends no draft by doubt",
    "block_tree": "no block drafter",
    "block_nodes": "no block drafter",
    "block_children": "no block drafter",
    "eagle_tree": _NO_EAGLE_TREE,
    "eagle_nodes": _NO_EAGLE_TREE,
    "eagle_top_k": _NO_EAGLE_TREE,
    "medusa_nodes": "which has no tree of heads",
}


def check_options(family: Family, config: DrafterConfig, whose: str) -> None:
    """Raise RequestError for an option that a drafter of this family would ignore; `whose`: what is of that family."""
    defaults = DrafterConfig()
    for option, lack in _LACKS.items():
        value = getattr(config, option)
        if value != getattr(defaults, option) and option not in family.options:
            raise RequestError(
                f"drafter.{option} is {value!r}, and {whose} is a drafter of family {family.name!r}, {lack}; leave "
                "it out"
            )
    unused = family.tree_unused(config) if config.tree != DEFAULT_TREE else None
    if unused is not None:
        reason, remedy = unused
        raise RequestError(
            f"drafter.tree is {config.tree!r}, a static tree, which this drafter of family {family.name!r} "
            f"does not use ({reason}); {remedy}"
        )
