"""From a folder to a drafter, by the family that its config names.

Read next: `draft_model.py`, `medusa.py`, `eagle/proposer.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RequestError
from .config import DrafterConfig
from .eagle.proposer import EAGLE_1_TREE, load_eagle
from .folder import DERIVED, REMEDY, names_in, read_entry, read_settings
from .heads.bpd import load_bpd
from .heads.hydra import load_hydra
from .heads.medusa import load_medusa
from .identity import TargetIdentity
from .model.adapters import take_up
from .model.draft_model import DraftModel
from .model.early_exit import load_early_exit
from .model.ensemble import Ensemble, join, join_adapters
from .model.quantised import load_quantised
from .tree_file import named_tree
from .vocabulary.across import load_across, says_the_same

if TYPE_CHECKING:
    from ..decoding.proposal import Proposer
    from ..decoding.target.backbone import Backbone

FAMILIES = ("draft_model", "medusa", "hydra", "hydra++", "bpd", "eagle", "eagle3", "ensemble", *DERIVED)
_ACROSS = ", or let it draft across vocabularies by --drafter.vocabulary auto"


def load_drafter(
    path: str | Path, target: Backbone, *, draft_length: int = 4, config: DrafterConfig | None = None
) -> Proposer:
    """Load a drafter checkpoint for `target`.

    Args:
        draft_length: tokens of a chain, depth of a tree by confidence.
        config: how it proposes; the defaults by default.

    Raises:
        RequestError: the folder is no drafter, its family is unknown, or it was made for another
            target; the message names the field that differs.
    """
    config = config or DrafterConfig()
    folder = Path(path)
    if config.vocabulary != "same" and not says_the_same(folder, config):
        return load_across(folder, target, draft_length=draft_length, config=config)
    family = read_entry(folder)["family"]
    if config.adapter is not None and family not in ("draft_model", "ensemble"):
        raise RequestError(
            f"drafter.adapter is {config.adapter!r}, and {folder} is a drafter of family "
            f"{family!r}, which has no adapters; leave it out"
        )
    if config.members is not None and family != "ensemble":
        raise RequestError(
            f"drafter.members is {config.members}, and {folder} is a drafter of family {family!r}, "
            "not an ensemble; leave it out"
        )
    paths = named_tree(config.tree, folder)
    if family == "medusa":
        return load_medusa(folder, target, paths=paths, nodes=config.medusa_nodes)
    if family in ("hydra", "hydra++"):
        return load_hydra(folder, target, paths=paths, nodes=config.medusa_nodes)
    if family == "bpd":
        return load_bpd(folder, target, paths=paths)
    if paths is not None:
        _check_tree(family, config)
    if family in ("eagle", "eagle3"):
        return load_eagle(
            folder,
            target,
            tree=config.eagle_tree,
            draft_length=draft_length,
            policy=config.policy,
            paths=paths or EAGLE_1_TREE,
            top_k=config.eagle_top_k,
            nodes=config.eagle_nodes,
        )
    if family == "draft_model":
        return load_draft_model(folder, target, draft_length=draft_length, config=config)
    if family in DERIVED:
        load = load_quantised if family == "quantised" else load_early_exit
        return load(folder, target, draft_length=draft_length, policy=config.policy)
    if family == "ensemble":
        return load_ensemble(folder, target, draft_length=draft_length, config=config)
    raise RequestError(f"{folder} is a drafter of family {family!r}; this version knows {', '.join(FAMILIES)}")


def _check_tree(family: str, config: DrafterConfig) -> None:
    """Raise RequestError where a static tree is named and would be passed over."""
    if family in ("eagle", "eagle3") and config.eagle_tree == "static":
        return
    eagle = family.startswith("eagle")
    what = f"its drafter.eagle_tree is {config.eagle_tree}" if eagle else "it drafts chains"
    hint = "add --drafter.eagle_tree static" if eagle else "leave it out"
    raise RequestError(
        f"drafter.tree is {config.tree!r}, a static tree, which this drafter of family {family!r} "
        f"does not use ({what}); {hint}"
    )


def load_draft_model(
    folder: Path, target: Backbone, *, draft_length: int = 4, config: DrafterConfig | None = None
) -> DraftModel:
    """Load an independent draft model for `target`; errors as for `load_drafter`."""
    from ..decoding.target.loading import load_target

    entry = read_entry(folder)
    entry["identity"].check_same(TargetIdentity.of(target), str(folder), hint=_ACROSS)
    backbone = load_target(str(folder), device=str(target.device))
    config = config or DrafterConfig()
    drafter = DraftModel(backbone, target.vocabulary, draft_length=draft_length, policy=config.policy)
    take_up(drafter.module, folder, entry["settings"], config.adapter)
    return drafter


def load_ensemble(
    folder: Path, target: Backbone, *, draft_length: int = 4, config: DrafterConfig | None = None
) -> Ensemble:
    """Load draft models that draft together, all or the first `config.members`.

    Raises:
        RequestError: as for `load_drafter`; or there are fewer members, or one drafts no chain of
            its own tokens.
    """
    config = config or DrafterConfig()
    if config.adapter is not None:
        raise RequestError(
            f"drafter.adapter is {config.adapter!r}, and {folder} is an ensemble, whose members "
            "have adapters of their own; leave it out"
        )
    _, settings = read_settings(folder, target, "ensemble")
    folders, adapters = (names_in(settings, key, folder) for key in ("members", "adapters"))
    if not folders:
        raise RequestError(
            f"{folder / 'config.json'} lists no members of the ensemble; expected the names of the "
            f"folders beside it: {REMEDY}"
        )
    names = (adapters or folders)[: config.members]
    if config.members is not None and config.members > len(names):
        raise RequestError(
            f"drafter.members is {config.members}; the ensemble {folder} has {len(names)}: {', '.join(names)}"
        )
    own = config.model_copy(update={"members": None})
    drafts = [
        load_chain_draft(folder / name, target, draft_length=draft_length, config=own)
        for name in (folders if adapters else names)
    ]
    return join_adapters(drafts[0], names) if adapters else join(drafts)


def load_chain_draft(
    folder: Path, target: Backbone, *, draft_length: int = 4, config: DrafterConfig | None = None
) -> DraftModel:
    """A member of an ensemble, whatever its origin; errors as for `load_drafter`."""
    draft = load_drafter(folder, target, draft_length=draft_length, config=config)
    if not isinstance(draft, DraftModel):
        raise RequestError(
            f"member {folder} is a drafter of family {read_entry(folder)['family']!r}; expected "
            "draft models, whose chains can be merged"
        )
    return draft
