"""Our settings of a published drafter, from its config and the shapes of its tensors.

What can be counted in the tensors is counted there: configs are known to say other numbers of heads than there are.
What is left has its default from whoever wrote the form. Whatever would make other drafts than our networks do is
refused by its word. Read next: `forms.py`, which form takes which function.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from ...errors import RequestError
from .files import Files

FUSED = ("2", "L//2", "L-3")
"""The hidden states that EAGLE-3 reads where its config does not say: of a target of L layers, in every engine."""
OF_TARGET = "the target's"
"""Sizes of a layer that no word and no tensor says, as the layer is a copy of the target's."""
_AUX = "eagle_aux_hidden_state_layer_ids"


def resolved(settings: dict[str, Any], config: Any) -> dict[str, Any]:
    """Settings whose hidden states and sizes are numbers, for a target of that `transformers` config."""
    if settings.get("prefix") == OF_TARGET:
        from ..layers.llama import LayerShape

        return settings | {"prefix": asdict(LayerShape.of(config))}
    if settings.get("layers") != [*FUSED]:
        return settings
    count = int(config.get_text_config(decoder=True).num_hidden_layers)
    return settings | {"layers": [2, count // 2, count - 3]}


def identity_of(files: Files) -> tuple[int, int | None]:
    """Hidden size and vocabulary of the target that a drafter was made for; None where it is not said."""
    words = files.layer
    if "hidden_size" not in words:
        known = ("0.0.linear.weight", "blocks.0.layers.0.weight", "hydra_lm_head.0.weight", "hydra_lm_head.0.1.weight")
        first = next(name for name in known if name in files.heads)
        return files.shape(first)[1], words.get("vocab_size", _medusa_rows(files))
    table = files.heads.get("embed_tokens.weight")
    wide = files.config.get("target_hidden_size")
    return int(wide or words["hidden_size"]), words.get("vocab_size", None if table is None else table.shape[0])


def eagle(files: Files) -> dict[str, Any]:
    """Of EAGLE-1's network; a bias is part of it where the config does not say that there is none."""
    own = layer_sizes(files)
    has_bias = "fc.bias" in files.heads and files.word("bias", default=True) is not False
    return own | ({"fc_bias": True} if has_bias else {})


def eagle3(files: Files) -> dict[str, Any]:
    """Of EAGLE-3's network."""
    own = layer_sizes(files, wide=files.config.get("target_hidden_size"))
    _check_attention(files)
    _refuse(files, "scale_embedding", of="a scale of the embedding")
    if "mask_hidden" not in files.heads and any(name.startswith("layers.1.") for name in files.heads):
        raise _cannot(files, "several layers and no mask (layers.1)")
    vocabulary = int(files.layer["vocab_size"])
    head = files.heads.get("lm_head.weight")
    drafted = vocabulary if head is None else head.shape[0]
    norms = any(name.startswith("fc_norm.") for name in files.heads)
    flags = {name: True for name in ("norm_before_residual", "norm_before_fc") if files.word(name)}
    if any(name.endswith("self_attn.q_norm.weight") for name in files.heads):
        flags["head_norms"] = True
    wide = _wider(files, own["hidden"])
    if wide or (files.word("embed_requires_grad") is True and "embed_tokens.weight" in files.heads):
        flags["own_embedding"] = True
    # alone, in the native form, the word is SpecForge's, which has none of the others: the norm in front of the head
    of_engines = norms or files.by_speculators or files.word("norm_before_residual") is not None
    fed_back = bool(files.word("norm_output")) and of_engines
    _check_head_norm(files)
    if fed_back != norms:
        flags["output_norm"] = fed_back
    return own | {
        "layers": _fused(files, wide or own["hidden"]),
        **({"target_hidden": wide} if wide else {}),
        "vocabulary": vocabulary,
        "draft_vocabulary": drafted,
        "feature_norms": norms,
        **flags,
    }


def peagle(files: Files) -> dict[str, Any]:
    """Of P-EAGLE's network."""
    deepest = max((int(name.split(".")[1]) for name in files.heads if re.match(r"layers\.\d", name)), default=0)
    mask_id(files)
    return eagle3(files) | {"decoder_layers": 1 + deepest}


def mask_id(files: Files) -> int:
    """The token whose embedding stands for what is not known yet.

    Raises:
        KeyError: the config does not say.
    """
    mask = files.word("mask_token_id", "pard_token")
    if mask is None:
        raise KeyError("mask_token_id")
    return int(mask)


def dflash(files: Files) -> dict[str, Any]:
    """Of a block drafter's network."""
    own = layer_sizes(files)
    if (scale := files.word("input_embedding_scale", default=1)) != 1:
        raise _cannot(files, f"an embedding times {scale} (input_embedding_scale)")
    decoder_layers = 1 + max(int(name.split(".")[1]) for name in files.heads if name.startswith("layers."))
    anchor_first = files.word("sample_from_anchor", default=_is_dspark(files))
    drafted = {}
    if "d2t" in files.heads and files.shape("d2t")[0] < int(files.layer["vocab_size"]):
        drafted = {"draft_vocabulary": files.shape("d2t")[0]}
    return own | {
        "layers": _states_of_block(files, own["hidden"], decoder_layers),
        "decoder_layers": decoder_layers,
        "size": int(_need(files, "block_size")),
        "layout": "anchor-first" if anchor_first else "fill-in",
        "causal": bool(files.word("is_causal", "causal", default=False)),
        **_windows_of_block(files, decoder_layers),
        # a table of its own says what the mask is, whatever the target's row holds
        "mask_token": None if "embed_tokens.weight" in files.heads else mask_id(files),
        **drafted,
    }


def dspark(files: Files) -> dict[str, Any]:
    """Of DSpark's network."""
    kind = files.word("markov_head_type", default="vanilla")
    if kind != "vanilla":
        raise _cannot(files, f"a head of type {kind!r} (markov_head_type)")
    vocabulary, rank = files.shape("markov_head.markov_w1.weight")
    return dflash(files) | {
        "vocabulary": vocabulary,
        "rank": rank,
        "confidence": "confidence_head.proj.weight" in files.heads,
    }


def dflash2(files: Files) -> dict[str, Any]:
    """Of DFlash 2's network."""
    name = "candidate_selector.predecessor_codebook"
    vocabulary, rank = files.shape(name if name in files.heads else f"{name}.weight")
    _, taps, hidden = files.shape("layers.0.attention_conv.base_kernel")
    rows, _ = files.shape("layers.0.attention_conv.kernel_projection.weight")
    own = {"vocabulary": vocabulary, "rank": rank, "taps": taps, "group": hidden * 2 * taps // rows}
    default = 16 if files.by_speculators else None
    return dflash(files) | own | {"candidates": int(_need(files, "selector_top_k", default=default))}


def medusa(files: Files) -> dict[str, Any]:
    """Of Medusa's heads, counted: a published config is known to say two of five."""
    hidden, rows = identity_of(files)[0], _medusa_rows(files)
    own = [re.fullmatch(r"(\d+)\.(\d+)\.linear\.weight|blocks\.(\d+)\.layers\.(\d+)\.weight", n) for n in files.heads]
    places = [[int(part) for part in match.groups() if part is not None] for match in own if match]
    map_rows = files.heads.get("token_map")
    vocabulary = files.word("vocab_size", default=rows if map_rows is None else None)
    return {
        "heads": 1 + max(head for head, _ in places),
        "layers": 1 + max(layer for _, layer in places),
        "hidden": hidden,
        "vocabulary": _need_value(vocabulary, "vocab_size"),
        "shared_head": not any(re.fullmatch(r"\d+\.\d+\.weight|lm_heads\.\d+\.weight", n) for n in files.heads),
        **({} if map_rows is None else {"draft_vocabulary": map_rows.shape[0]}),
    }


def hydra(files: Files) -> dict[str, Any]:
    """Of Hydra's heads, counted; the layer in front of Hydra++'s is of the target's sizes."""
    if not any(".res_connection." in name for name in files.heads):
        raise _cannot(files, "heads that do not see the tokens in front of theirs (grounded_heads false)")
    if offset := files.word("hidden_state_offset", default=0):
        raise _cannot(files, f"heads on a hidden state {offset} in front of the last (hidden_state_offset)")
    places = [re.fullmatch(r"hydra_mlp\.(\d+)\.\d+\.linear\.weight", name) for name in files.heads]
    counts = Counter(int(match[1]) for match in places if match)
    hidden, vocabulary = identity_of(files)
    prefix = any(name.startswith("prefix_embeding_layer.") for name in files.heads)
    return {
        "heads": len(counts),
        "layers": counts[0],
        "hidden": hidden,
        "vocabulary": vocabulary,
        "prefix": OF_TARGET if prefix else None,
        "as_published": True,
    }


def mtp(files: Files) -> dict[str, Any]:
    """Of an MTP module."""
    own = layer_sizes(files)
    there = "mtp.layers.0.self_attn." if "mtp.fc.weight" in files.heads else "mtp_layers.0.self_attn."
    if any(".experts." in name for name in files.heads):
        raise _cannot(files, "a feed-forward part of a mixture of experts")
    if files.shape(f"{there}q_proj.weight")[0] != own["heads"] * own["head_size"]:
        raise _cannot(files, "a gate on what attention puts out")
    return own | {
        "rotary": own["head_size"],
        "query_norm": f"{there}q_norm.weight" in files.heads,
        "bias": f"{there}q_proj.bias" in files.heads,
    }


def mtp_of_mimo(files: Files) -> dict[str, Any]:
    """Of an MTP module whose class leaves out the embedding of position 0."""
    return mtp(files) | {"blank_first": True}


def _wider(files: Files, hidden: int) -> int | None:
    """The target's hidden size, where the drafter is narrower; None: it is as wide.

    Raises:
        RequestError: it has no embedding of its own, or does not read states of that size.
    """
    wide = files.config.get("target_hidden_size")
    if wide in (None, hidden):
        return None
    if files.shape("fc.weight")[1] % int(wide) or "embed_tokens.weight" not in files.heads:
        raise _cannot(files, _narrower(hidden, wide))
    return int(wide)


def _narrower(hidden: int, wide: Any) -> str:
    return f"hidden_size {hidden} beside a target of {wide} (target_hidden_size)"


def layer_sizes(files: Files, *, wide: int | None = None) -> dict[str, Any]:
    """The fields of `LayerShape`: the drafter's own, which need not be the target's.

    Args:
        wide: the hidden size that its target may have beside the drafter's.
    """
    from ..layers.rope import PLAIN_THETA, rope_words, scaling_in

    words = files.layer
    hidden, heads = int(words["hidden_size"]), int(words["num_attention_heads"])
    theirs = files.config.get("target_hidden_size")
    if theirs not in (None, hidden, wide):
        raise _cannot(files, _narrower(hidden, theirs))
    if words.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _cannot(files, f"the activation {words['hidden_act']!r}")
    positions = SimpleNamespace(
        rope_parameters=words.get("rope_parameters") or words.get("rope_scaling"),
        max_position_embeddings=words.get("max_position_embeddings"),
    )
    rope = rope_words(positions)
    return {
        "hidden": hidden,
        "intermediate": int(words["intermediate_size"]),
        "heads": heads,
        "kv_heads": int(words.get("num_key_value_heads") or heads),
        "head_size": int(words.get("head_dim") or hidden // heads),
        # its trainers' default: the config of a drafter for Llama 2 or Vicuna does not say it
        "rope_theta": float(rope.get("rope_theta") or words.get("rope_theta") or PLAIN_THETA),
        "eps": float(words.get("rms_norm_eps") or 1e-6),
        "rope_scaling": scaling_in(rope, positions),
    }


def _fused(files: Files, hidden: int) -> Sequence[Any]:
    """The hidden states that EAGLE-3 reads, low to high; `FUSED` where the config does not say."""
    count, rest = divmod(files.shape("fc.weight")[1], hidden)
    nested = files.config.get("eagle_config")
    behind = nested.get(_AUX) if isinstance(nested, Mapping) else files.config.get("target_layer_ids")
    if (said := files.config.get(_AUX)) is None and behind is not None:
        said = [layer + 1 for layer in behind]  # counted by the layer behind which they stand
    layers = list(FUSED if said is None else said)
    if rest or len(layers) != count:
        raise RequestError(
            f"{files.folder / 'config.json'} names the hidden states {layers}, and fc.weight reads "
            f"{files.shape('fc.weight')[1]} numbers of a target of hidden size {hidden}; expected one state for each "
            f"{hidden} of them: name them as {_AUX} there"
        )
    return layers


def _check_head_norm(files: Files) -> None:
    """Raise RequestError where SpecForge's word says that its head reads the layer's output without a norm.

    Engines, to which that word says what is fed back, have another one beside it, or other names of tensors.
    """
    native = not files.by_speculators and any(name.startswith("midlayer.") for name in files.heads)
    if native and files.word("norm_output") is False and files.word("norm_before_residual") is None:
        raise _cannot(
            files,
            "no norm in front of its head (norm_output false, which says so to SpecForge; of what is fed back it "
            "speaks to engines, where norm_before_residual stands beside it)",
        )


def _states_of_block(files: Files, hidden: int, decoder_layers: int) -> list[int]:
    """The hidden states that a block drafter reads."""
    if files.by_speculators and (said := files.word("aux_hidden_state_layer_ids")) is not None:
        return list(said)
    behind = files.word("target_layer_ids")
    if behind is None:
        L, n = int(_need(files, "num_target_layers")), files.shape("fc.weight")[1] // hidden
        if n != decoder_layers:  # its readers take a state for each layer
            raise _cannot(files, f"{n} states for {decoder_layers} layers, and does not name them (target_layer_ids)")
        behind = [L // 2] if n == 1 else [round(1 + i * (L - 4) / (n - 1)) for i in range(n)]
    return [layer + 1 for layer in behind]


def _windows_of_block(files: Files, decoder_layers: int) -> dict[str, Any]:
    """The windows of a block drafter's layers; a block is causal in them where nothing is said, as readers have it."""
    kinds = list(files.layer.get("layer_types") or ())[:decoder_layers]
    if files.word("use_swa") or {*kinds} - {"full_attention", "sliding_attention"}:
        _check_attention(files)
    if "sliding_attention" not in kinds:
        return {}
    size = files.layer.get("sliding_window")
    if size is None:
        raise _cannot(files, "attention over a window whose length it does not name (sliding_window)")
    said = files.word("is_causal", "causal")
    causal = not files.word("sliding_window_non_causal", default=False) if said is None else bool(said)
    windows = [int(size) if kind == "sliding_attention" else None for kind in kinds]
    return {"windows": windows, "causal_windows": causal}


def _check_attention(files: Files) -> None:
    """Raise RequestError for layers that do not see the whole text."""
    own = files.layer.get("layer_types") or ()
    kinds = {*own[: files.layer.get("num_hidden_layers")]} - {"full_attention"}
    if kinds or files.word("use_swa"):
        raise _cannot(files, f"attention over a window ({', '.join(sorted(map(str, kinds))) or 'use_swa'})")


def _is_dspark(files: Files) -> bool:
    named = [*map(str, files.config.get("architectures") or ()), str(files.config.get("speculators_model_type"))]
    return any(re.search("dspark", each, re.IGNORECASE) for each in (*named, str(files.word("projector_type"))))


def _medusa_rows(files: Files) -> int | None:
    """Rows of the first head's own projection."""
    known = r"0\.\d+\.weight|lm_heads\.0\.weight|lm_head\.weight|hydra_lm_head\.0\.(1\.)?weight"
    match = [name for name in files.heads if re.fullmatch(known, name)]
    return files.shape(match[0])[0] if match else None


def _need(files: Files, name: str, default: Any = None) -> Any:
    return _need_value(files.word(name, default=default), name)


def _need_value(value: Any, name: str) -> Any:
    if value is None:
        raise KeyError(name)
    return value


def _refuse(files: Files, name: str, *, of: str) -> None:
    """Raise RequestError where the config switches on what our network does not have."""
    if files.word(name):
        raise _cannot(files, f"{of} ({name})")


def _cannot(files: Files, what: str) -> RequestError:
    return RequestError(
        f"{files.folder / 'config.json'} describes a drafter with {what}, which no network here computes: read "
        "without it, it would draft nonsense. An engine that knows it can be measured by `draftsmith eval --server`"
    )
