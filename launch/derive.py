"""`draftsmith derive`: a drafter made of the target itself, nothing trained.

Read next: `drafters/model/quantised.py`, `drafters/model/early_exit.py`.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ..errors import EnvironmentFailure, RequestError
from ..storage import writable_folder

if TYPE_CHECKING:
    from ..decoding.target.backbone import Backbone
    from .verbs import Derive


def derive(request: Derive) -> str:
    """Write the drafter folder, and say what it is and what it reads per token."""
    _check_flags(request)
    if request.out.exists():
        raise RequestError(f"{request.out} exists; name a new folder")
    writable_folder(request.out.parent)
    from ..decoding.target.loading import load_target

    target = load_target(request.target, revision=request.revision)
    try:
        make = _early_exit if request.kind == "early-exit" else _quantised
        what = make(request, target)
    except OSError as error:
        raise EnvironmentFailure(f"cannot write {request.out}: {error.strerror}") from error
    where = f"--target {shlex.quote(request.target)} --drafter {shlex.quote(str(request.out))}"
    return f"{request.out}: {what}\nnext: draftsmith eval {where}"


def _check_flags(request: Derive) -> None:
    """Refuse a flag that would be passed over."""
    early = request.kind == "early-exit"
    if early and request.layers is None:
        raise RequestError("early-exit needs --layers: how many of the target's layers draft")
    others = {
        "--layers": request.layers is not None and not early,
        "--bits": request.bits is not None and early,
        "--group-size": request.group_size is not None and request.bits != 4,
    }
    wrong = [flag for flag, is_set in others.items() if is_set]
    if wrong:
        raise RequestError(
            f"{wrong[0]} means nothing here; --layers is of early-exit, --bits of quantised, "
            "--group-size of quantised with --bits 4"
        )


def _early_exit(request: Derive, target: Backbone) -> str:
    from ..drafters.model.early_exit import first_layers, save_early_exit

    layers = request.layers or 0
    save_early_exit(request.out, target, layers=layers)
    share = _share(first_layers(target, layers), target)
    return f"the first {layers} layers of the target; a draft step reads {share} of its weights"


def _quantised(request: Derive, target: Backbone) -> str:
    from ..drafters.model.quantised import save_quantised

    bits = request.bits or 8
    draft = save_quantised(request.out, target, bits=bits, group_size=request.group_size)
    share = _share(draft.backbone, target)
    return f"the target in {bits} bits; a draft step reads {share} of the target's bytes"


def _share(draft: Backbone, target: Backbone) -> str:
    from ..eval.measure.speed import bytes_of

    return f"{bytes_of(draft.model) / bytes_of(target.model):.0%}"
