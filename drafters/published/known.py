"""Drafters that others have published, by the target they were made for: `known.yaml`, and looking in it.

The list says what the page that it names says, and no more. Read next: `forms.py`, the forms that are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_UNTOLD = {"meta", "hf"}
"""Words of a model's name that tell no other model."""


@dataclass(frozen=True)
class KnownDrafter:
    """A drafter on the hub."""

    name: str
    target: str
    """Its name on the hub, or in the page's own words."""
    form: str
    """The title of a `PublishedForm`."""
    licence: str | None
    """As its card states it; None where it states none, or was not seen."""
    page: str
    """Which states the rest."""


def known_drafters(target: str | None = None) -> list[KnownDrafter]:
    """All of the list, or those for one target, by its name on the hub or its folder's."""
    return [each for each in _listed() if target is None or same_model(each.target, target)]


@cache
def _listed() -> list[KnownDrafter]:
    from ruamel.yaml import YAML

    content = YAML(typ="safe", pure=True).load((files(__package__) / "known.yaml").read_text(encoding="utf-8"))
    return [
        KnownDrafter(name, made_for, group["form"], content["licences"].get(name), group["page"])
        for group in content["groups"]
        for name, made_for in group["drafters"].items()
    ]


def same_model(one: str, other: str) -> bool:
    """Whether two names are of one model, in whatever order, case and punctuation their words stand."""
    return bool(_words(one)) and _words(one) == _words(other)


def _words(name: str) -> list[str]:
    """What a model's name says, without its owner and what stands in brackets."""
    own = re.sub(r"\(.*?\)", "", name).strip().rstrip("/").rpartition("/")[2].lower()
    return sorted(word for word in re.findall(r"[a-z]+|\d+", own) if word not in _UNTOLD)
