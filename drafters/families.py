"""Every drafter family by its record: the only list of families there is.

Whoever loads, builds, probes, audits, exports or lists drafters reads this table; none has a list of
its own. A new family is a record here, one in `trainers/methods.py` if it is trained, and
its modules. Read next: `record.py`, what a record says; `registry.py`, which loads by it; `heads/family.py`,
functions of a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import RequestError
from .config import DrafterConfig
from .extras.records import EXTRAS
from .grids import BY_BLOCK, BY_DSPARK, BY_EAGLE, BY_HEADS, BY_MODEL, BY_TEXT, PROMPT_LOOKUP, SUFFIX
from .record import POLICY, Family, Form, function, own_toy


def family_of(name: str, where: str) -> Family:
    """The record of a family.

    Args:
        where: what names it, for the message.

    Raises:
        RequestError: no record has that name.
    """
    if name not in FAMILIES:
        raise RequestError(f"{where} is a drafter of family {name!r}; this version knows {', '.join(loadable())}")
    return FAMILIES[name]


def loadable() -> list[str]:
    """The families that drafter folders may name."""
    return [each.name for each in FAMILIES.values() if each.load]


def training_free() -> list[str]:
    """The families that draft without training, as `--method` names them."""
    return [each.name for each in FAMILIES.values() if each.make]


def wrapping() -> list[str]:
    """The families that draft by a loaded drafter in another way, as `--method` names them."""
    return [each.name for each in FAMILIES.values() if each.wrap]


def formats() -> list[str]:
    """Every serving format that some family is exported in."""
    return list(dict.fromkeys(form for family in FAMILIES.values() for form in family.exports))


def served() -> str:
    """Which format serves which families, in words."""
    by_format = {form: [each.title for each in FAMILIES.values() if form in each.exports] for form in formats()}
    return ", ".join(f"{form} ({', '.join(titles)})" for form, titles in by_format.items())


def _always_a_tree(_config: DrafterConfig) -> None:
    """Heads always draft a static tree."""


def _if_static(config: DrafterConfig) -> tuple[str, str] | None:
    if config.eagle.tree == "static":
        return None
    return f"its drafter.eagle.tree is {config.eagle.tree}", "add --drafter.eagle.tree static"


def _by_policy(name: str) -> Callable[[Any], str]:
    """The toy of drafts that are sampled from q, at temperatures of their own or not, or of their argmax."""
    return lambda drafter: f"{name}{_drawn(drafter)}"


def _drawn(drafter: Any) -> str:
    return " argmax" if drafter.policy == "argmax" else " tempered" if drafter.factors else ""


_CUT = "draft_vocabulary"
_DRAWN = frozenset({POLICY, "temperature_factors", _CUT})
_OF_EAGLE = _DRAWN | {"eagle"}
_OF_HEADS = frozenset({"medusa", _CUT})
_OF_SUFFIX = frozenset({"suffix"})
_OF_BLOCKS = _DRAWN | {"confidence", "block"}


def _block_toy(drafter: Any) -> str:
    if drafter.kind == "dynamic":
        return f"{drafter.family} tree"
    return f"{drafter.family}{' cut' * bool(drafter.least)}{_drawn(drafter)}"


def _drafts_of_a_block(settings: Mapping[str, Any]) -> int:
    return int(settings["size"]) - (settings["layout"] == "fill-in")


def _ensemble_toy(drafter: Any) -> str:
    return f"ensemble{_drawn(drafter.members[0])}"


def _eagle_toy(drafter: Any) -> str:
    # a dynamic tree is never sampled
    return f"{drafter.family} {drafter.kind}{'' if drafter.kind == 'dynamic' else _drawn(drafter)}"


def _hybrid_toy(drafter: Any) -> str:
    # by what the trained drafter proposes: a sampled chain or tree, or likeliest tokens on any tree
    draft = getattr(drafter, "draft", drafter)
    if not hasattr(draft, "policy") or getattr(draft, "kind", "chain") == "dynamic":
        return "suffix-hybrid likeliest"
    return f"suffix-hybrid{' static' if getattr(draft, 'kind', 'chain') == 'static' else ''}{_drawn(draft)}"


def _longest_of_suffix(config: DrafterConfig) -> int:
    stored = config.suffix.datastore is not None
    return int(function(".suffix.windows:longest_draft")(config.suffix.depth, config.suffix.factor, stored=stored))


_MEDUSA = Family(
    name="medusa",
    title="medusa",
    kind="on target",
    summary="heads on the target's last hidden state, each one token further ahead, and a static tree",
    page="medusa.md",
    build=".heads.medusa:MedusaHeads.from_settings",
    load=".heads.family:load_medusa_folder",
    proposer=".heads.family:draft_by_medusa",
    toy=own_toy("medusa"),
    exports={"vllm": Form("medusa", ".heads.family:medusa")},
    most_tokens=lambda settings: int(settings["heads"]),
    tree_unused=_always_a_tree,
    options=_OF_HEADS,
    grids=BY_HEADS,
)
_HYDRA = replace(
    _MEDUSA,
    name="hydra",
    title="hydra",
    summary="Medusa's heads, each of which also sees the tokens drafted before its own",
    page="hydra.md",
    build=".heads.hydra:HydraHeads.from_settings",
    load=".heads.family:load_hydra_folder",
    proposer=".heads.family:draft_by_hydra",
    toy=own_toy("hydra"),
    exports={"hydra": Form("hydra", ".heads.family:hydra")},
    elsewhere="no serving engine loads drafters of family 'hydra'",
)
_EAGLE = Family(
    name="eagle",
    title="eagle",
    kind="on target",
    summary="one layer drafts the target's next hidden state; EAGLE-2's dynamic tree by the same weights",
    page="eagle.md",
    build=".eagle.net:EagleNet.from_settings",
    load=".eagle.family:load_eagle_folder",
    proposer=".eagle.family:draft_by_eagle",
    options=_OF_EAGLE,
    toy=_eagle_toy,
    exports={
        "vllm": Form("eagle", ".eagle.serving:eagle_for_vllm"),
        "sglang": Form("EAGLE", ".eagle.serving:eagle_for_sglang"),
    },
    tree_unused=_if_static,
    grids=BY_EAGLE,
)
_DFLASH = Family(
    name="dflash",
    title="dflash",
    kind="on target",
    summary="a block of drafts in one pass: the target's states are keys and values of every layer",
    page="dflash.md",
    build=".block.net:BlockNet.from_settings",
    load=".block.family:load_block_folder",
    proposer=".block.family:draft_by_block",
    hidden_states=lambda settings: len(settings["layers"]) + 1,
    options=_OF_BLOCKS,
    toy=_block_toy,
    most_tokens=_drafts_of_a_block,
    whole_blocks=lambda settings: not settings["causal"],
    exports={
        "vllm": Form("dflash", ".block.family:dflash"),
        "sglang": Form("DFLASH", ".block.family:dflash_for_sglang", parallel=True),
    },
    unchecked={
        "tensorrt-llm": "TensorRT-LLM loads DFlash in its published form",
        "llama.cpp": "llama.cpp's converter reads DFlash in its published form",
        "speculators": "vLLM loads DFlash in this form too",
    },
    grids=BY_BLOCK,
)
_QUANTISED = Family(
    name="quantised",
    title="quantised",
    kind="from target",
    summary="the target's own layers with weights of 8 or 4 bits",
    page="origins.md",
    load=".model.family:load_quantised_folder",
    copies_target=True,
    options=_DRAWN - {_CUT},
    toy=_by_policy("draft-model"),
    grids=BY_MODEL,
)
_ALL = (
    Family(
        name="draft_model",
        title="draft model",
        kind="model",
        summary="a small causal LM with the target's tokenizer drafts a chain",
        page="draft-model.md",
        load=".model.family:load_draft_model",
        proposer=".model.family:draft_by_model",
        toy=_by_policy("draft-model"),
        exports={
            "vllm": Form("draft_model", same_rows=True),
            "sglang": Form("STANDALONE"),
            "tensorrt-llm": Form("DraftTarget"),
            "llama.cpp": Form("draft-simple"),
        },
        options=_DRAWN | {"adapter"},
        grids=BY_MODEL,
    ),
    Family(
        name="pard",
        title="pard",
        kind="model",
        summary="a small causal LM with the target's tokenizer drafts all its tokens in one pass, by mask tokens",
        page="pard.md",
        load=".model.family:load_pard",
        proposer=".model.family:draft_by_pard",
        toy=_by_policy("pard"),
        any_states=True,
        exports={"vllm": Form("draft_model", parallel=True, same_rows=True)},
        unchecked={"tensorrt-llm": "TensorRT-LLM has PARD"},
        elsewhere="other engines call a draft model once for every token",
        options=_DRAWN,
        grids=BY_MODEL,
    ),
    _MEDUSA,
    _HYDRA,
    replace(
        _HYDRA,
        name="hydra++",
        title="hydra++",
        summary="Hydra's heads behind a layer of their own over the whole text",
        toy=own_toy("hydra++"),
        elsewhere="no serving engine loads drafters of family 'hydra++'",
    ),
    Family(
        name="bpd",
        title="bpd",
        kind="on target",
        summary="blockwise parallel decoding: k outputs of one feed-forward layer draft a block",
        page="bpd.md",
        build=".heads.bpd:BpdHeads.from_settings",
        load=".heads.family:load_bpd_folder",
        proposer=".heads.family:draft_by_bpd",
        toy=own_toy("bpd"),
        options=frozenset({_CUT}),
        tree_unused=_always_a_tree,
    ),
    _EAGLE,
    replace(
        _EAGLE,
        name="eagle3",
        title="eagle3",
        summary="fused low, middle and high hidden states, trained over its own outputs",
        page="eagle3.md",
        build=".eagle.net3:Eagle3Net.from_settings",
        proposer=".eagle.family:draft_by_eagle3",
        hidden_states=lambda settings: len(settings["layers"]) + 1,
        exports={
            "vllm": Form("eagle3", ".eagle.serving:eagle3"),
            "sglang": Form("EAGLE3", ".eagle.serving:eagle3_for_sglang"),
            "speculators": Form("eagle3", ".eagle.serving:speculators"),
            "tensorrt-llm": Form("Eagle3", ".eagle.serving:eagle3_for_tensorrt_llm"),
            "llama.cpp": Form("draft-eagle3", ".eagle.serving:eagle3_for_llama_cpp"),
        },
    ),
    replace(
        _EAGLE,
        name="mtp",
        title="mtp",
        summary="a decoder layer over the target's last state, applied to its own states again: an MTP module",
        page="mtp.md",
        build=".mtp.net:MtpNet.from_settings",
        load=".mtp.family:load_mtp_folder",
        proposer=".mtp.family:draft_by_mtp",
        hidden_states=lambda settings: 2 if settings["state"] == "before" else 1,
        exports={"vllm": Form("mtp", ".mtp.serving:vllm")},
        elsewhere="other engines take a module out of the target's own checkpoint alone",
    ),
    Family(
        name="peagle",
        title="peagle",
        kind="on target",
        summary="EAGLE-3's network, some layers deep, drafts all its tokens in one pass",
        page="eagle3.md",
        build=".eagle.peagle:PeagleNet.from_settings",
        load=".eagle.family:load_peagle_folder",
        proposer=".eagle.family:draft_by_peagle",
        hidden_states=lambda settings: len(settings["layers"]) + 1,
        options=_DRAWN,
        toy=_by_policy("peagle"),
        exports={"vllm": Form("eagle3", ".eagle.serving:peagle", parallel=True)},
        unchecked={"speculators": "vLLM loads P-EAGLE in this form too"},
        elsewhere="other engines call EAGLE-3's network once for every token",
        grids=BY_MODEL,
    ),
    _DFLASH,
    replace(
        _DFLASH,
        name="dspark",
        title="dspark",
        summary="a block of drafts in one pass, each corrected by the token in front of it",
        build=".block.dspark:DSparkNet.from_settings",
        exports={
            "vllm": Form("dspark", ".block.family:dspark"),
            "sglang": Form("DSPARK", ".block.family:dspark_for_sglang", parallel=True),
        },
        unchecked={
            "tensorrt-llm": "TensorRT-LLM loads DSpark",
            "llama.cpp": "llama.cpp loads DSpark",
            "speculators": "vLLM loads DSpark in this form too",
        },
        grids=BY_DSPARK,
    ),
    replace(
        _DFLASH,
        name="dflash2",
        title="dflash2",
        summary="a block of drafts in one pass, each chosen among its slot's likeliest by the token in front of it",
        build=".block.selected:DFlash2Net.from_settings",
        exports={"vllm": Form("dflash", ".block.family:dflash2")},
        unchecked={"sglang": "SGLang loads DFlash 2", "speculators": "vLLM loads DFlash 2 in this form too"},
        elsewhere="neither TensorRT-LLM nor llama.cpp has DFlash 2's convolutions and selector",
    ),
    Family(
        name="ensemble",
        title="ensemble",
        kind="several models",
        summary="several draft models, whose chains merge into one tree (SpecInfer's SSMs)",
        page="boost.md",
        load=".model.family:load_ensemble",
        proposer=".model.family:draft_together",
        toy=_ensemble_toy,
        # its members' adapters are refused when it is loaded
        options=_DRAWN | {"members", "adapter"},
        grids=BY_MODEL,
    ),
    _QUANTISED,
    replace(
        _QUANTISED,
        name="early_exit",
        title="early exit",
        summary="the target's first layers, its own last norm and projection",
        load=".model.family:load_early_exit_folder",
        copies_target=False,
        options=_DRAWN,
    ),
    Family(
        name="intersection",
        title="draft, shared tokens",
        kind="model",
        summary="a draft model of another tokenizer drafts the tokens that both have",
        page="vocabularies.md",
        toy=_by_policy("intersection"),
        grids=BY_MODEL,
    ),
    Family(
        name="retokenised",
        title="draft, re-tokenised",
        kind="model",
        summary="the text of a draft model of another tokenizer is written anew in the target's tokens",
        page="vocabularies.md",
        toy=own_toy("retokenised"),
        grids=BY_TEXT,
    ),
    Family(
        name="prompt-lookup",
        title="prompt-lookup",
        kind="no training",
        summary="copies what followed the last tokens earlier in the same text",
        page="methods.md",
        make=".lookup.prompt_lookup:from_config",
        options=frozenset({"lookup"}),
        grids=PROMPT_LOOKUP,
        toy=own_toy("prompt-lookup"),
    ),
    Family(
        name="suffix",
        title="suffix",
        kind="no training",
        summary="what most often followed the end of the text: there, in earlier answers, in a datastore",
        page="suffix.md",
        make=".suffix.family:suffix",
        options=_OF_SUFFIX,
        toy=lambda drafter: "suffix tree" if getattr(drafter, "branching", False) else "suffix",
        longest=_longest_of_suffix,
        grids=SUFFIX,
    ),
    Family(
        name="suffix-hybrid",
        title="suffix hybrid",
        kind="no training",
        summary="suffix decoding where it promises more than a trained drafter keeps, and that drafter elsewhere",
        page="suffix.md",
        wrap=".suffix.family:hybrid",
        options=_OF_SUFFIX,
        toy=_hybrid_toy,
    ),
    Family(
        name="function",
        title="function",
        kind="no training",
        summary="any Python function of the tokens so far",
        page="methods.md",
        toy=own_toy("function"),
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in (*_ALL, *EXTRAS)}
"""Name -> record."""
