"""What the form of a published drafter leaves open, and the ways in which others have read it.

A number of a layer means the state in front of it to some engines and the one behind it to others; flags have other
defaults in other readers; words are left out. Each reading is a change of our settings: the first one is how the
folder is read here, with the reason. Which one is right no file says; acceptance does, as a drafter that is read
wrongly drafts worse. Read next: `sizes.py`, which takes the first; `launch/measure/readings.py`, which measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .forms import Published, need_tensors
from .sizes import FUSED
from .weights import choices, tensor_of


@dataclass(frozen=True)
class Reading:
    """One way to read a drafter."""

    what: str
    source: str
    """Why, or by whom, it is read so."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of our settings."""
    ids: bool = False
    """Whether the draft vocabulary's map holds the ids themselves, where offsets fit as well."""


def readings_of(found: Published, settings: Mapping[str, Any], target: Any) -> list[Reading]:
    """Every reading, that of `--drafter` first.

    Args:
        settings: those that it is read with, for its target.
        target: the target's config, of `transformers`.
    """
    own = target.get_text_config(decoder=True)
    return [
        Reading("as it is read here", _source(found)),
        *_of_states(settings, int(own.num_hidden_layers)),
        *_of_flags(found, settings),
        *_of_slots(found, settings),
        *_of_map(found, int(own.vocab_size)),
        *_of_positions(found, settings, own),
    ]


def _source(found: Published) -> str:
    """How the hidden states are counted, by whose words."""
    files, states = found.files, found.form.states
    if states == "of layers":
        return "states by their number" if files.by_speculators else "states by the layer behind which they stand"
    if states is None:
        return f"as {found.form.title} has it"
    if files.config.get("eagle_aux_hidden_state_layer_ids") is not None:
        return "states by their number, as vLLM and speculators count"
    nested = isinstance(files.config.get("eagle_config"), Mapping) or files.config.get("target_layer_ids") is not None
    return "states by the layer behind which they stand" if nested else f"states {', '.join(FUSED)}, every default"


def _of_states(settings: Mapping[str, Any], count: int) -> list[Reading]:
    """The states one earlier and one later."""
    layers = settings.get("layers")
    if not isinstance(layers, list):
        return []
    ways = ((-1, "a number that was taken for the state in front of its layer"), (1, "the other way round"))
    moved = [([layer + by for layer in layers], why) for by, why in ways]
    return [
        Reading(f"hidden states {', '.join(map(str, each))}", why, {"layers": each})
        for each, why in moved
        if min(each) >= 0 and max(each) < count
    ]


def _of_flags(found: Published, settings: Mapping[str, Any]) -> list[Reading]:
    made = []
    for name, why in found.form.flags.items():
        other = not settings.get(name, settings["feature_norms"] if name == "output_norm" else False)
        made.append(Reading(f"{name} {str(other).lower()}", why, {name: other}))
    if found.form.before_norm:
        before = "states in front of the last norm, as speculators trains"
        made.append(Reading("state before", before, {"state": "before"}))
    return made


def _of_slots(found: Published, settings: Mapping[str, Any]) -> list[Reading]:
    """A shift by one: whether the first slot drafts already, where no word says so."""
    if "layout" not in settings or found.files.word("sample_from_anchor") is not None:
        return []
    other = "fill-in" if settings["layout"] == "anchor-first" else "anchor-first"
    return [Reading(f"layout {other}", "readers differ where sample_from_anchor is missing", {"layout": other})]


def _of_map(found: Published, vocabulary: int) -> list[Reading]:
    """The ids themselves in place of offsets, where both fit and no `t2d` tells."""
    names = need_tensors(found)
    if "d2t" not in names or "t2d" in names:
        return []
    fitting = choices(found.form, tensor_of(found, names["d2t"]).long(), None, vocabulary)
    return [Reading("d2t as ids", "writers that put the ids there", ids=True)] * (len(fitting) > 1)


def _of_positions(found: Published, settings: Mapping[str, Any], target: Any) -> list[Reading]:
    """The target's own angle, where the drafter's config does not say any."""
    words = found.files.layer
    rope = words.get("rope_parameters") or {}
    theta = (getattr(target, "rope_parameters", None) or {}).get("rope_theta")
    if "rope_theta" not in settings or words.get("rope_theta") or rope.get("rope_theta"):
        return []
    if not isinstance(theta, (int, float)) or theta == settings["rope_theta"]:
        return []
    return [Reading(f"rope_theta {theta:g}", "the target's, as the config says none", {"rope_theta": float(theta)})]
