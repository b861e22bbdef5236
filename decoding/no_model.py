"""What a folder without a model is: its files tell, where transformers would speak of its own classes.

Read next: `backbone/hub.py`, which asks when something cannot be loaded; `drafters/folder.py`, which asks of drafters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import RequestError
from .gguf.file import SUFFIX

_FORMS = (
    ("DFlash2", "a DFlash 2 drafter"),
    ("DFlash", "a DFlash drafter"),
    ("DSpark", "a DSpark drafter"),
    ("Eagle3", "an EAGLE-3 drafter"),
    ("LMEagle", "an EAGLE drafter"),
    ("MedusaModel", "a Medusa drafter"),
)
"""What is part of the class that a config names, the longer words first."""
_KEYS = (("dflash_config", "a DFlash drafter"), ("draft_vocab_size", "an EAGLE-3 drafter"))
_MEDUSA = "medusa_num_heads"


def what_it_is(place: Path, *, of_config: bool) -> str:
    """Why no model can be loaded from `place`, in a few words; empty if its files do not tell.

    Args:
        of_config: whether it is read for its config, which it may not have, and not for its tokenizer alone.
    """
    if place.is_file():
        if place.suffix.lower() == SUFFIX:
            return ""
        return f"it is a file; name the folder that it is in ({place.parent})"
    if not place.is_dir():
        return ""
    has_config = (place / "config.json").is_file()
    if (place / "run.yaml").is_file() and not has_config:
        return _of_a_run(place)
    if (place / "adapter_config.json").is_file() and not has_config:
        return "it holds an adapter of peft (adapter_config.json) and no model; name one that it is merged into"
    if not of_config:
        return ""
    if not has_config:
        return "it holds no config.json"
    form = for_engines(place)
    if form is not None:
        return f"it is {form} in a form for serving engines, and no causal LM"
    raw = _config_of(place)
    known = raw is None or raw.get("model_type")
    return "" if known else "its config.json names no model_type, so its class is not known"


def check_no_form_for_engines(folder: Path) -> None:
    """Raise RequestError for a drafter as serving engines load it whose tensors are in no form that is read."""
    form = for_engines(folder)
    if form is not None:
        there = sorted(path.name for path in folder.iterdir())
        raise RequestError(
            f"{folder / 'config.json'} describes {form} in a form for serving engines, which is not read: beside it "
            f"lies {', '.join(there[:4])}{', ...' * (len(there) > 4)}, and no safetensors file with the tensors of "
            "such a drafter. Copy the whole folder, or name the `drafter` folder of the run that it was exported "
            "from; `draftsmith eval --server` measures an engine that drafts with it"
        )


def for_engines(folder: Path) -> str | None:
    """Which drafter a folder holds in the form that engines and other trainers load; None if it seems to hold none."""
    raw = _config_of(folder)
    if raw is None:
        return None
    if isinstance(raw.get("speculators_model_type"), str):
        return f"a drafter of type {raw['speculators_model_type']!r:.40}, as speculators writes it,"
    names = raw.get("architectures")
    named = next((str(name) for name in names), "") if isinstance(names, list) else ""
    form = next((form for word, form in _FORMS if word in named), None)
    form = form or next((form for key, form in _KEYS if key in raw), None)
    if form is None and _MEDUSA in raw:
        form = "a Medusa drafter"
    if form == "an EAGLE-3 drafter" and "pard_token" in raw:
        return "a P-EAGLE drafter"
    return form or _by_tensors(folder)


def _by_tensors(folder: Path) -> str | None:
    """Drafters under the name of an ordinary class: vLLM's EAGLE, and MTP modules."""
    from ..storage import tensor_heads

    file = folder / "model.safetensors"
    if not file.is_file():
        return None
    try:
        names = list(tensor_heads(file, remedy=""))
    except RequestError:
        return None  # whoever reads the weights says what is wrong with them
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
        return "an EAGLE drafter"
    return "an MTP module" if names and all(name.startswith(("mtp.", "model.mtp_layers.")) for name in names) else None


def _config_of(folder: Path) -> dict[str, Any] | None:
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return raw if isinstance(raw, dict) else None


def _of_a_run(folder: Path) -> str:
    """That a folder is a training run's, and which of its folders is meant: its own target, if it has tuned one."""
    made = [folder / name for name in ("target", "drafter") if (folder / name / "config.json").is_file()]
    return f"it is the folder of a run; name {made[0]}" if made else "it is the folder of an unfinished run"
