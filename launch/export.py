"""`draftsmith export`: a trained drafter as a folder that a serving engine loads.

Read next: `drafters/export.py`, what the engines expect; `engines.py`, how they are started.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..drafters.config import BRANCHING, CHAIN_TREE
from ..drafters.families import FAMILIES, family_of
from ..drafters.grids import BY_EAGLE, NO_FACTORS
from ..drafters.hub import drafter_folder
from ..drafters.temperatures import FACTORS
from ..drafters.tuned_file import DRAFT_LENGTH, Tuned, read_tuned
from ..errors import RequestError
from ..eval.tune.settings import in_words
from ..storage import replace_folder, writable_folder
from .check.early import check_trust, tuned_target
from .engines import DRAWS, HOT_IDS, TAKES_TREES, DynamicTree, Start, command
from .recipe.load import load_recipe, without_run
from .recipe.model import Recipe

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..drafters.export import Export as Exported
    from ..drafters.export import ServedTarget
    from .requests import ExportRequest


_log = logging.getLogger(__name__)
_TAKES_IDS = (("eagle", "sglang"),)
"""Families, and the formats whose engine takes the tokens that they draft from a file."""


def export(request: ExportRequest) -> str:
    """Write the folder and return what to do with it.

    Raises:
        RequestError: no run folder, a drafter that nobody loads or made for another target, or a
            folder that is there. EnvironmentFailure: nobody may write where it is to be.
    """
    source = _source(request)
    folder, recipe, out = source.folder, source.recipe, source.out
    if out.exists():
        raise RequestError(f"{out} exists; name a new folder by --out")
    writable_folder(out.parent)

    from ..decoding.backbone.hub import load_config, load_tokenizer
    from ..decoding.backbone.loading import load_model
    from ..drafters.export import export_of, served_form
    from ..drafters.folder import read_entry
    from ..drafters.identity import TargetIdentity
    from ..drafters.projection import Shaping, scaled_weight
    from ..drafters.published.sizes import resolved
    from ..drafters.published.weights import TargetParts

    entry = read_entry(folder)
    family = entry["family"]
    any_states = family_of(family, str(folder)).any_states
    path, as_it_is = _where_it_lies(source.target), served_form(family, request.format).make is None
    revision, trust = recipe.target.revision, request.trust_remote_code
    config = load_config(path, revision=revision, trust_remote_code=trust)
    tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust)
    settings = resolved(entry["settings"], config)
    identity = TargetIdentity.of_parts(config, tokenizer, name=path, revision=revision)
    entry["identity"].check_same(identity, str(folder), any_states=any_states)
    target, place = served_target(path, config, trust=trust), str((folder if as_it_is else out).resolve())
    asked = _asked(recipe, (family, request.format), tokenizer, target)
    start = start_of(folder, recipe, settings, (family, request.format), target=target, out=place, ids=asked)
    lines = command(request.format, start)  # refused before anything is written
    if as_it_is:
        return (
            f"{folder} is an ordinary transformers model, and {request.format} needs no other, so nothing was "
            f"written: load it as it is, with\n{lines}"
        )

    @cache
    def model() -> Any:
        return load_model(path, revision=revision, trust_remote_code=trust)

    def table() -> Tensor:
        return model().get_input_embeddings().weight

    def projection() -> Tensor:
        return model().get_output_embeddings().weight

    head = scaled_weight(model()).detach() if settings.get("shared_head") else None
    shaping = Shaping(target.logit_scale, target.logit_cap)
    own = TargetParts(table, projection, target.layers, target.embedding_scale, shaping)
    words: dict[str, Any] = {"dtype": request.dtype, "head_VH": head, "tokens": start.tokens, "table": table}
    words |= {"ids": asked, "own": own}
    made = export_of(folder, family, settings, target, request.format, **words)
    replace_folder(out, lambda folder: _fill(folder, made))
    return f"{out}: load it with\n{lines}"


@dataclass(frozen=True)
class _Source:
    """What is exported, and where to."""

    folder: Path
    """Of the drafter."""
    recipe: Recipe
    target: str
    out: Path


def _source(request: ExportRequest) -> _Source:
    """The run's drafter, or the one that is named by itself.

    Raises:
        RequestError: neither, both, or no run folder; a run that trusts its target's code.
    """
    if request.drafter is not None:
        if request.run_folder is not None or request.target is None or request.out is None:
            raise RequestError("--drafter is exported by itself: name --target and --out beside it, and no run")
        recipe = without_run()
        return _Source(drafter_folder(request.drafter), recipe, request.target, request.out)
    run = request.run_folder
    if run is None:
        raise RequestError("nothing to export: name a run folder, or --drafter with --target and --out")
    recipe = run_recipe(run)
    check_trust(recipe, run / "run.yaml", said=request.trust_remote_code, flag="--trust-remote-code")
    target = request.target or tuned_target(run, recipe) or recipe.target.path
    return _Source(run / "drafter", recipe, target, request.out or run / request.format)


def run_recipe(run: Path) -> Recipe:
    """The recipe of a run; RequestError where the folder is no run's."""
    if not (run / "run.yaml").is_file():
        raise RequestError(f"{run} is no run folder: run.yaml is missing; name the --out of a run")
    return load_recipe(str(run / "run.yaml")).recipe


def served_target(name: str, config: Any, *, trust: bool = False) -> ServedTarget:
    """What engines are told of the target, by the name that they are started with.

    Raises:
        RequestError: the config is of no causal LM, or of one that a drafter's form cannot follow.
    """
    from ..decoding.backbone.hub import skeleton
    from ..drafters.export import ServedTarget

    return ServedTarget.of(name, config, skeleton(config, trust))


def start_of(
    folder: Path,
    recipe: Recipe,
    settings: dict[str, Any],
    served: tuple[str, str],
    *,
    target: ServedTarget,
    out: str,
    ids: Sequence[int] | None = None,
) -> Start:
    """How an engine is started on `out`, made of the drafter in `folder`; no weight is read for it.

    Args:
        settings: the drafter's own.
        served: its family, and the serving format.
        ids: the tokens that are to be drafted; None: all that the drafter can.

    Raises:
        RequestError: the format cannot hold the drafter, or its engine not draft with it for this target.
    """
    from ..drafters.export import shapes_of

    family, form = served
    record = FAMILIES[family].exports[form]
    # first, as it holds the settings to what a network can be built from
    made = None if record.make is None else shapes_of(folder, family, settings, target, form, ids=ids)
    start = replace(_drafts(folder, recipe, settings, served, target=target.path, out=out), parallel=record.parallel)
    if made is None:
        _check_trained_rows(settings)
        if record.same_rows:
            _check_rows(folder, form, target)
        if record.parallel:
            _check_mask(folder)
        return start
    if made.uncapped is not None and start.sampled and form in DRAWS:
        _log.info(
            "the target caps its logits at %g, for which %s has no word: above T = 0 it draws drafts from logits "
            "without the cap, and fewer are accepted",
            made.uncapped,
            form,
        )
    if made.own_mask:
        _log.info(
            "the drafter's mask is no row of the target's embedding, so the folder holds a table of its own "
            "(embed_tokens), which vLLM alone reads: the classes of z-lab, SpecForge and speculators leave it out "
            "without an error and draft from another mask. Set block.mask_token for a drafter that is to be exchanged"
        )
    behind = made.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    return replace(start, behind_layers=behind, of_target=made.of_target, hot_ids=made.hot_ids is not None)


def _asked(
    recipe: Recipe, served: tuple[str, str], tokenizer: PreTrainedTokenizerBase, target: ServedTarget
) -> Sequence[int] | None:
    """The ids of `drafter.draft_vocabulary`, for the engine that takes them from a file; the others are told of."""
    asked = recipe.drafter.draft_vocabulary
    if asked is None:
        return None
    if served not in _TAKES_IDS:
        shown = f"{len(asked)} ids" if isinstance(asked, list) else asked
        _log.info("%s drafts all tokens: left out is drafter.draft_vocabulary (%s)", served[1], shown)
        return None
    from ..drafters.registry import resolved
    from .drafted import with_ids

    config = with_ids(recipe, tokenizer, target.vocabulary)
    return resolved(config, target.vocabulary).draft_ids


def _check_trained_rows(settings: Mapping[str, Any]) -> None:
    """Raise RequestError for a draft model of which engines would draft by rows that were never trained."""
    if settings.get("draft_vocabulary") is not None:
        raise RequestError(
            f"the draft model was trained to draft {settings['draft_vocabulary']:,} tokens (model.vocabulary), and "
            "engines draft by all rows of its projection, the others of which are untrained; train one without "
            "model.vocabulary. `draftsmith eval` decodes with this one"
        )


def _check_rows(folder: Path, form: str, target: ServedTarget) -> None:
    """Raise RequestError for a draft model of more rows or fewer than the target's, which the engine would refuse."""
    from ..decoding.backbone.hub import load_config

    rows = load_config(str(folder)).get_text_config(decoder=True).vocab_size
    if rows != target.vocabulary:
        raise RequestError(
            f"the draft model's vocabulary has {rows} rows, that of the target {target.path!r} {target.vocabulary}, "
            f"and {form} drafts with as many rows as the target's alone: train one with as many. A PARD draft has a "
            "row more where pard.mask_token names no id that texts never use. `draftsmith eval` decodes with this one"
        )


def _check_mask(folder: Path) -> None:
    """Raise RequestError for a draft of one pass whose config does not name its mask: no engine would load it."""
    from ..decoding.backbone.hub import load_config
    from ..drafters.model.pard import need_mask

    need_mask(load_config(str(folder)), folder)


def _drafts(
    folder: Path, recipe: Recipe, settings: Mapping[str, Any], served: tuple[str, str], *, target: str, out: str
) -> Start:
    """What is drafted per call, and how: as in the recipe, or as it was tuned."""
    (family, form), tuned = served, read_tuned(folder)
    method = FAMILIES[family].exports[form].method
    tree = _tree_of(recipe, family, tuned.values)
    if tree is not None and form in TAKES_TREES:
        _log.info("a tree of %d nodes, %d deep, as %s", tree.nodes, tree.depth, _whose(tuned))
        return Start(target, out, method, tree.depth, sampled=False, tree=tree)
    chosen = tuned.values if tuned.is_chain else {}  # a tree's depth says nothing of a chain
    tokens = int(chosen.get(DRAFT_LENGTH, recipe.eval.draft_length))
    most = FAMILIES[family].most_tokens(settings)
    policy = chosen.get("drafter.policy", recipe.drafter.policy)
    if tuned.plain:
        _log.info("%s", tuned.none_pays("it is written as the recipe has it, for machines where it pays"))
    if DRAFT_LENGTH in chosen:
        _log.info("%d tokens per draft: tuned for %s", tokens, tuned.measured)
    if chosen.get(FACTORS, NO_FACTORS) != NO_FACTORS or recipe.drafter.temperature_factors:
        _log.info("engines draft at the temperature of the request: %s are left out", FACTORS)
    if most is not None:
        tokens = most if FAMILIES[family].whole_blocks(settings) else min(most, tokens)
    if not tuned.is_chain or _branches(recipe, family, chosen):
        _log.info(
            "%s is started with a chain of %d, which is not tuned; left out is the tree that the drafter has as %s; "
            "`draftsmith tune --chains` tunes a chain",
            form,
            tokens,
            "the recipe has it" if tuned.is_chain else _whose(tuned),
        )
    cut = _said(recipe, "confidence", chosen)
    if FAMILIES[family].reads("confidence") and float(cut) and tuned.is_chain:
        _log.info(
            "%s drafts all %d tokens: left out is drafter.confidence %s, which ends drafts in front of a slot in "
            "doubt, as %s",
            form,
            tokens,
            cut,
            _whose(tuned) if "drafter.confidence" in chosen else "the recipe has it",
        )
    return Start(target, out, method, tokens, sampled=FAMILIES[family].samples and policy == "sample")


def _tree_of(recipe: Recipe, family: str, chosen: Mapping[str, str]) -> DynamicTree | None:
    """EAGLE-2's tree, where the recipe or what is chosen in its place has one."""
    from ..decoding.tree.build import most_nodes

    config = recipe.drafter
    if FAMILIES[family].grids != BY_EAGLE or chosen.get("drafter.eagle.tree", config.eagle.tree) != "dynamic":
        return None
    depth = int(chosen.get(DRAFT_LENGTH, recipe.eval.draft_length))
    nodes = int(chosen.get("drafter.eagle.nodes", config.eagle.nodes))
    return DynamicTree(depth, config.eagle.top_k, min(nodes, most_nodes(depth, config.eagle.top_k)))


def _branches(recipe: Recipe, family: str, chosen: Mapping[str, str]) -> bool:
    """Whether the drafter has a tree of its own, of whatever kind, where the recipe or what is chosen says so."""
    record = FAMILIES[family]
    if any(record.reads(name) and _said(recipe, name, chosen) == shape for name, shape in BRANCHING.items()):
        return True
    static = record.tree_unused(recipe.drafter) is None and "drafter.eagle.tree" not in chosen
    return static and _said(recipe, "tree", chosen) != CHAIN_TREE


def _said(recipe: Recipe, option: str, chosen: Mapping[str, str]) -> str:
    """A value of the drafter section, as a flag gives it."""
    return chosen.get(f"drafter.{option}", str(attrgetter(option)(recipe.drafter)))


def _whose(tuned: Tuned) -> str:
    return f"tuned for {tuned.measured}: {in_words(tuned.values)}" if tuned.values else "the recipe has it"


def _where_it_lies(target: str) -> str:
    """A folder by its whole path, as an engine is started elsewhere; a name on the hub as it is."""
    from ..decoding.backbone.hub import EMBEDDED, embedded_target

    if target == EMBEDDED:
        target = embedded_target()  # a name that no engine knows
    return str(Path(target).resolve()) if Path(target).exists() else target


def _fill(folder: Path, made: Exported) -> None:
    from safetensors.torch import save_file

    if made.hot_ids is not None:
        (folder / HOT_IDS).write_text(json.dumps(made.hot_ids.tolist()) + "\n")
    save_file(made.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(made.config, indent=2) + "\n")
