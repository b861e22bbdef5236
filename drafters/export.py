"""Drafters in the shapes that serving engines load: a `config.json` and tensors by their names.

Weights are ours, renamed; what differs is what an engine has to be told, and each of them takes a
missing word for another default: so every one is written out. docs/results/engines.md says what has been
checked. Here is what the forms of all families share; those of one are in its own folder. Read next:
`eagle/serving.py`, one family; `folder.py`, our own folder; `launch/export.py`, which writes the serving one.

Shapes: H hidden size, V target vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..decoding.backbone.quantised import quantisation_of
from ..errors import RequestError
from .families import FAMILIES
from .folder import built_from, not_finite
from .layers.draft_vocabulary import OFFSETS, ids_of
from .layers.llama import LayerShape
from .layers.rope import PLAIN
from .projection import Shaping
from .published.weights import TargetParts
from .record import Form, function
from .weights import net_of

_log = logging.getLogger(__name__)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class ServedTarget:
    """What a serving config says of the target."""

    path: str
    """Folder or hub name."""
    architectures: list[str]
    vocabulary: int
    """Rows of its output projection."""
    layers: int
    positions: int
    """Longest context in tokens, as engines serve it."""
    bos: int | None
    eos: int | None
    words: Mapping[str, Any] = field(default_factory=dict)
    """Its config as it is, of the text alone."""
    embedding_scale: float = 1.0
    """What the target multiplies the rows of its embedding by (Gemma: the root of H)."""
    logit_scale: float = 1.0
    """What it multiplies its logits by (Cohere)."""
    logit_cap: float | None = None
    """Where it caps them behind that (Gemma 2); None: nowhere."""
    quantisation: str | None = None
    """How its weights are quantised; None where they are not."""
    whole: str | None = None
    """The larger model whose text part it is (`model_type`); None where it is all there is."""
    biased: bool = False
    """Whether its output projection adds a bias."""

    @classmethod
    def of(cls, path: str, config: Any, model: Any = None) -> ServedTarget:
        """From a target's `transformers` config, and the causal LM of it, whose shapes are enough.

        Raises:
            RequestError: it is not known what the embedding does to its rows.
        """
        whole, config = config, config.get_text_config(decoder=True)
        bos, eos = (getattr(config, f"{end}_token_id", None) for end in ("bos", "eos"))
        shaping = Shaping.named(config)
        own = [] if model is None else [type(model).__name__]
        return cls(
            path=path,
            # neither a text model inside a larger one nor one of a GGUF file names its class
            architectures=list(config.architectures or whole.architectures or own),
            vocabulary=int(config.vocab_size),
            layers=int(config.num_hidden_layers),
            positions=_positions(config),
            bos=bos,
            eos=eos[0] if isinstance(eos, list) else eos,
            words=config.to_dict(),
            embedding_scale=1.0 if model is None else _scale_of(model.get_input_embeddings()),
            logit_scale=shaping.scale,
            logit_cap=shaping.cap,
            quantisation=quantisation_of(whole),
            whole=None if config is whole else whole.model_type,
            biased=model is not None and getattr(model.get_output_embeddings(), "bias", None) is not None,
        )


_COUNTED = ("llama3", "yarn", "su", "longrope", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of scaled rotary positions whose configs have counted the factor in `max_position_embeddings`."""


def _positions(config: Any) -> int:
    """The longest context that engines serve a target with: of other kinds they multiply it by the factor.

    Where a drafter's own positions are not scaled its config has to say the product, or drafts end before the text.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # of all layers, or of each kind
    known = "gemma3" in config.model_type  # engines take its number as it is
    factors = [each.get("factor") for each in kinds if each.get("rope_type", "default") not in _COUNTED and not known]
    return int(config.max_position_embeddings * max((factor for factor in factors if factor), default=1))


def _scale_of(embedding: nn.Module) -> float:
    if type(embedding) is nn.Embedding:
        return 1.0
    scale = getattr(embedding, "scalar_embed_scale", None)
    if not isinstance(scale, float):
        raise RequestError(
            f"the target's embedding is a {type(embedding).__name__}, and what it does to its rows "
            "is not known; engines hand a drafter the rows alone"
        )
    return scale


@dataclass(frozen=True)
class Export:
    """What is to be written: `config.json` and the tensors of `model.safetensors`."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    of_target: Mapping[str, Any] = field(default_factory=dict)
    """Words that the engine has to find in the target's own config, and does not."""
    uncapped: float | None = None
    """Where the target caps its logits, and the engine, which has no word for it, not those of drafts."""
    hot_ids: Tensor | None = None
    """The draft vocabulary, where the engine takes it from a file of its own."""
    own_mask: bool = False
    """Whether the mask is a row of the folder's own table, which readers but vLLM leave out without an error."""


@dataclass(frozen=True)
class Served:
    """What a form may need beside drafter and target."""

    head_VH: Tensor | None
    """The target's output projection."""
    tokens: int
    """Drafted tokens per target call."""
    table: Callable[[], Tensor] | None = None
    """Reads the target's embedding [V, H], the rows alone."""
    ids: Sequence[int] | None = None
    """The tokens that are to be drafted, of those that the drafter can; None: all of them."""


def served_form(family: str, form: str) -> Form:
    """How a family is served in a form.

    Raises:
        RequestError: no engine loads the family, or not in this form, or one does and it was not checked here; the
            message says which.
    """
    record = FAMILIES.get(family)
    if record is None or not record.exports:
        served = [each.name for each in FAMILIES.values() if each.exports]
        raise RequestError(
            f"no serving engine loads drafters of family {family!r}; exported can be {', '.join(served)}"
        )
    if form not in record.exports:
        known = " or ".join(record.exports)
        why = f". It cannot be loaded: {record.elsewhere}" if record.elsewhere else ""
        if form in record.unchecked:
            why = f". It might be loaded: {record.unchecked[form]}, and what comes of it has not been checked here"
        raise RequestError(f"--format is {form!r}, in which no {family} drafter is exported; expected {known}{why}")
    return record.exports[form]


def export_of(
    folder: Path,
    family: str,
    settings: dict[str, Any],
    target: ServedTarget,
    form: str,
    *,
    dtype: str = "bf16",
    head_VH: Tensor | None = None,
    tokens: int = 3,
    table: Callable[[], Tensor] | None = None,
    ids: Sequence[int] | None = None,
    own: TargetParts | None = None,
) -> Export:
    """A drafter folder in the shape `form`.

    Args:
        settings: those of its config.
        dtype: of the exported weights; integers and truth values stay what they are.
        head_VH: the target's output projection, for heads that have none of their own.
        tokens: drafted tokens per target call, for the forms that say how many.
        table: reads the target's embedding, for the forms that hold one.
        ids: the tokens that are to be drafted, for the forms that say so; None: all that the drafter can.
        own: what a folder that others wrote takes of its target.

    Raises:
        RequestError: nobody loads that, or the folder's weights are not those of its config.
    """
    make, build = _functions(family, form)
    # strictly: engines are silent about what is missing
    net = net_of(folder, lambda: build(settings), f"a drafter of family {family!r}", own)
    made = make(net, target, Served(head_VH, tokens, table, ids))
    _say_undrafted(net, made, form)
    tensors = {
        name: (t.to(DTYPES[dtype]) if t.is_floating_point() else t).contiguous() for name, t in made.tensors.items()
    }
    odd = not_finite(tensors)
    if odd is not None:
        raise RequestError(f"{odd} of {folder} is beyond the range of {dtype}; export it with --dtype bf16 or fp32")
    name = str(DTYPES[dtype]).removeprefix("torch.")
    # transformers 5 reads `dtype`, older readers `torch_dtype`
    return replace(made, config={**made.config, "dtype": name, "torch_dtype": name}, tensors=tensors)


def without_map(net: nn.Module) -> dict[str, Tensor]:
    """A network's weights, without the map of a draft vocabulary, for which the form has no tensor."""
    return {name: tensor for name, tensor in net.state_dict().items() if name != OFFSETS}


def _say_undrafted(net: nn.Module, made: Export, form: str) -> None:
    """Say that an engine drafts by all rows of a projection of which a drafter was trained on some."""
    ids_U = ids_of(net)
    if ids_U is not None and made.hot_ids is None and not {OFFSETS, "token_map"} & made.tensors.keys():
        _log.info(
            "the drafter was trained to draft %s tokens, and %s reads no map of these: it multiplies all rows of the "
            "target's projection, which costs what the draft vocabulary saves, and may draft tokens that were never "
            "compared",
            f"{len(ids_U):,}",
            form,
        )


def shapes_of(
    folder: Path,
    family: str,
    settings: dict[str, Any],
    target: ServedTarget,
    form: str,
    *,
    ids: Sequence[int] | None = None,
) -> Export:
    """As `export_of`, of tensors that are shapes alone: what an engine has to be told, and no weight is read.

    Raises:
        RequestError: as for `export_of`, the weights apart.
    """
    make, build = _functions(family, form)
    with built_from(folder / "config.json", f"a drafter of family {family!r}"), torch.device("meta"):
        net = build(settings)
    with torch.device("meta"):
        table_VH = torch.empty(target.vocabulary, target.words.get("hidden_size") or net.config.hidden)
        return make(net, target, Served(table_VH, tokens=1, table=lambda: table_VH, ids=ids))


def _functions(family: str, form: str) -> tuple[Callable[..., Export], Callable[..., Any]]:
    """What makes the form of a network, and what builds the network."""
    make, build = served_form(family, form).make, FAMILIES[family].build
    if make is None or build is None:
        raise ValueError(f"a drafter of family {family!r} is served as it is")
    return function(make), function(build)


def check_layers(layers: Sequence[int], count: int, option: str, *, first: int = 0) -> None:
    """Raise RequestError where an engine would hand out other hidden states than `layers`.

    A format's number k means what goes into layer k of the target's `count`: there is none for the
    state behind the last norm, and each is handed out once, low to high.

    Args:
        option: of the recipe, that chose them.
        first: the lowest state that the format has a number for.
    """
    if list(layers) != sorted(set(layers)) or not all(first <= layer < count for layer in layers):
        raise RequestError(
            f"the drafter fuses the hidden states {list(layers)}, and engines hand out different "
            f"ones, low to high, from {first} to {count - 1} for this target ({count} is behind its last "
            f"norm); train one with such {option}. `draftsmith eval` decodes with it as it is"
        )


def llama_words(shape: LayerShape, target: ServedTarget) -> dict[str, Any]:
    """A Llama config of one layer, as `transformers` reads it, and serving engines after it."""
    scaling, positions = shape.rope_scaling, target.positions
    if scaling is not None:  # engines do with the drafter's number what they do with the target's
        positions = int(target.words.get("max_position_embeddings", positions))
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "vocab_size": target.vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": shape.eps,
        # the old words and the new one: engines read either
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": PLAIN}), "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos,
        "eos_token_id": target.eos,
        "pad_token_id": None,
    }


def with_mask(how: Served, target: ServedTarget, mask: int, mask_H: Tensor) -> Tensor:
    """The rows that the drafter reads, [V, H]: those of the target as its own layers read them, and the mask's.

    Where the target writes that very token, the drafts behind it are made from the mask: fewer are accepted, the text
    stays the target's.
    """
    if how.table is None:
        raise ValueError("a mask of the drafter's own is exported with the target's embedding")
    table_VH = how.table().detach().float() * target.embedding_scale
    table_VH[mask] = mask_H.float()
    return table_VH
