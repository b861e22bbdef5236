"""Drafter checkpoints: `config.json`, safetensors weights, a model card. Never pickle.

The folder is an ordinary `transformers` model too (its `config.json` carries one extra entry), so
a draft model can be served by anything that loads a causal LM. Read next: `registry.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..decoding.backbone.loading import no_progress_bars
from ..decoding.no_model import check_no_form_for_engines
from ..errors import RequestError, TrainingFailed
from ..storage.formats import DRAFTER
from .families import FAMILIES
from .identity import TargetIdentity
from .published.forms import OURS, published, unknown
from .published.sizes import identity_of, resolved
from .record import Kind

if TYPE_CHECKING:
    from torch import nn

    from ..decoding.backbone.backbone import Backbone

ENTRY = OURS
REMEDY = "copy the drafter's folder again or train it anew"
_NAME = re.compile(r"\w[\w.+-]*")  # of a folder beside the config: no path


def save_draft_model(
    module: nn.Module,
    folder: Path,
    target: Backbone,
    *,
    settings: dict[str, Any] | None = None,
    family: str = "draft_model",
) -> None:
    """Write weights (fp32), config with the target's identity, tokenizer and card.

    `settings`: its adapters, and which of them drafts by default (`adapters.py`).
    """
    identity = TargetIdentity.of(target)
    check_exportable(module)
    model: Any = module
    with no_progress_bars():
        model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    entry = {"format": DRAFTER.number, "family": family, "target": identity.to_dict()}
    config[ENTRY] = entry | ({"settings": settings} if settings else {})
    path.write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(_card(module, identity), encoding="utf-8")


def save_heads(module: nn.Module, folder: Path, target: Backbone, *, family: str, settings: dict[str, Any]) -> None:
    """Write a drafter that rides on the target: its own weights (fp32), sizes, identity and card.

    Args:
        module: what is trained; weights that belong to the target are not among its parameters.
        settings: what is needed to build the module again, as JSON.
    """
    from safetensors.torch import save_file

    check_exportable(module)
    folder.mkdir(parents=True, exist_ok=True)
    identity = TargetIdentity.of(target)
    # whole numbers and truth values, such as a draft vocabulary's, keep their type
    weights = {
        name: (t.float() if t.is_floating_point() else t).detach().contiguous().cpu()
        for name, t in module.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_entry(folder, target, family=family, settings=settings)
    (folder / "README.md").write_text(_card(module, identity), encoding="utf-8")


def write_entry(folder: Path, target: Backbone, *, family: str, settings: dict[str, Any]) -> None:
    """Write a `config.json` with the drafter's family, settings and target."""
    identity = TargetIdentity.of(target).to_dict()
    entry = {"format": DRAFTER.number, "family": family, "target": identity, "settings": settings}
    (folder / "config.json").write_text(json.dumps({ENTRY: entry}, indent=2) + "\n")


def write_card(folder: Path, target: Backbone, what: str) -> None:
    """Write the card of a drafter without weights; `what` is a sentence that describes it."""
    (folder / "README.md").write_text(_card_of(what, TargetIdentity.of(target)), encoding="utf-8")


def not_finite(tensors: Mapping[str, Any]) -> str | None:
    """The first tensor of some weights that holds NaN or infinity; None where none does."""
    return next((name for name, each in tensors.items() if each.is_floating_point() and not _is_finite(each)), None)


def _is_finite(tensor: Any) -> bool:
    if tensor.device.type == "meta":
        return True
    return bool((tensor if tensor.element_size() > 1 else tensor.float()).isfinite().all())  # fp8 has no isfinite


def check_exportable(module: nn.Module) -> None:
    """Raise TrainingFailed for a drafter that holds NaN or infinity: nobody could use it."""
    name = not_finite(module.state_dict())
    if name is not None:
        raise TrainingFailed(
            f"the drafter is not exported: {name} of its weights holds NaN or infinity. Go on from an earlier "
            "checkpoint with a smaller optimizer.lr, or look at the rows in metrics.jsonl before it"
        )


def read_settings(folder: str | Path, target: Backbone, *families: str) -> tuple[str, dict[str, Any]]:
    """Family and sizes of a `save_heads` folder, if it is of one of `families` and for `target`.

    Raises:
        RequestError: it is not; the message names the field that differs.
    """
    entry = read_entry(Path(folder))
    if entry["family"] not in families:
        expected = " or ".join(map(repr, families))
        raise RequestError(f"{folder} is a drafter of family {entry['family']!r}; expected {expected}")
    entry["identity"].check_same(TargetIdentity.of(target), str(folder))
    return entry["family"], resolved(entry["settings"], target.model.config)


def read_entry(folder: Path, hint: str = "") -> dict[str, Any]:
    """The draftsmith part of a drafter's config, or what stands for it in a folder that others wrote.

    Args:
        hint: what else would help where there is none, the end of the message.

    Raises:
        RequestError: not a drafter folder, or of a format that this version does not read.
    """
    path = folder / "config.json"
    try:
        if path.exists() and not path.is_file():
            raise TypeError("it is no file")
        entry = json.loads(path.read_text())[ENTRY]
        family, identity = entry["family"], TargetIdentity(**entry["target"])
        settings = entry.get("settings", {})
        if not isinstance(family, str) or not isinstance(settings, dict):
            raise TypeError("its family is no word, or its settings are no table")
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"{folder} holds no drafter: {path.name} is missing; "
            "expected the `drafter` folder of a finished training run"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        foreign = isinstance(error, KeyError) and error.args == (ENTRY,)
        if foreign and (entry := _published_entry(folder)) is not None:
            return entry
        if foreign and not unknown(folder):
            check_no_form_for_engines(folder)
        raise RequestError(
            f"{path} does not describe a drafter ({error}){unknown(folder) if foreign else ''}; expected an entry "
            f"{ENTRY!r} with family and target, as training writes it{hint}"
        ) from error
    DRAFTER.check(entry.get("format"), path, remedy="train the drafter anew with this version")
    return {"family": family, "identity": identity, "settings": settings}


def _published_entry(folder: Path) -> dict[str, Any] | None:
    """The same for a drafter in a form that others publish; None where it is none."""
    found = published(folder)
    if found is None:
        return None
    with built_from(folder / "config.json", f"a drafter in the form of {found.form.title}"):
        settings, (hidden, vocabulary) = found.form.settings(found.files), identity_of(found.files)
    identity = TargetIdentity(found.says_target, None, hidden, vocabulary, None)
    return {"family": found.form.family, "identity": identity, "settings": settings}


@contextmanager
def built_from(path: Path, what: str) -> Iterator[None]:
    """Inside, something is built from a config's values.

    Raises:
        RequestError: the config lacks a setting, or has one that nothing can be built from.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        # RuntimeError: torch's, for sizes below none and beyond all memory
        reason = f"{error} is missing" if isinstance(error, KeyError) else f"{error!s:.300}"
        raise RequestError(f"{path} does not hold the sizes of {what}: {reason}: {REMEDY}") from error


def names_in(settings: Mapping[str, Any], key: str, folder: Path) -> list[str]:
    """The names that a drafter's settings list; none where they do not speak of it.

    Raises:
        RequestError: it is no list of names, each once, of folders that stand beside it.
    """
    names = settings.get(key, [])
    plain = isinstance(names, list) and all(isinstance(name, str) and _NAME.fullmatch(name) for name in names)
    if not plain or len(set(names)) < len(names):
        raise RequestError(
            f"{folder / 'config.json'} says that its {key} are {names!r:.100}; expected a list of names: {REMEDY}"
        )
    return names


def is_drafter(folder: Path) -> bool:
    """Whether a folder is a drafter's, ours or a published one; another may be a model of a library, or a name."""
    try:
        return ENTRY in json.loads((folder / "config.json").read_text()) or published(folder) is not None
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def derived_family(folder: Path) -> str | None:
    """The family of a draft that is made from the target when it is loaded; None for others."""
    family = read_entry(folder)["family"] if is_drafter(folder) else None
    return family if kind_of(family) == "from target" else None


def kind_of(family: str | None) -> Kind | None:
    """The kind of a family; None where no record has that name."""
    return FAMILIES[family].kind if family in FAMILIES else None


def check_trainable_model(start_from: str) -> None:
    """Raise RequestError for a drafter that is no model of its own where one is to be trained."""
    folder = Path(start_from)
    family = read_entry(folder)["family"] if is_drafter(folder) else "draft_model"
    if kind_of(family) == "from target":
        raise RequestError(
            f"model.start_from {start_from!r} is a drafter of family {family!r}, made from the "
            "target when it is loaded: it has no weights to train. It drafts as it is (draftsmith "
            "eval --drafter), and can be an SSM of an ensemble (boost.start_from)"
        )
    if kind_of(family) != "model":
        hint = f"one of its members, as {folder / 'ssm-1'}" if kind_of(family) == "several models" else "a draft"
        raise RequestError(
            f"model.start_from {start_from!r} is a drafter of family {family!r}, no model by "
            f"itself; name {hint}, or any causal LM of the target's tokenizer"
        )


def adapters_of(folder: Path) -> list[str]:
    """The adapters of a drafter folder; none for what is no drafter folder."""
    if not is_drafter(folder):
        return []
    return names_in(read_entry(folder)["settings"], "adapters", folder)


def _card(module: nn.Module, identity: TargetIdentity) -> str:
    size = sum(p.numel() for p in module.parameters())
    return _card_of(f"A drafter of {size:,} parameters of its own.", identity)


def _card_of(what: str, identity: TargetIdentity) -> str:
    return f"""---
library_name: transformers
tags: [speculative-decoding, draftsmith]
---
# Drafter for {identity.name}

{what} For speculative decoding with the target
`{identity.name}` (revision {identity.revision or "not pinned"}, vocabulary {identity.vocabulary},
hidden size {identity.hidden_size}). Its tokenizer is the target's (SHA-256
`{identity.tokenizer and identity.tokenizer[:16]}`).

    draftsmith eval --target TARGET --drafter THIS_FOLDER

Acceptance and speed depend on the prompts and the machine; `draftsmith eval` measures both and
`draftsmith audit` proves that the output is the target's own.
"""
