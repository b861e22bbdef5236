"""A draft model before it is trained: fresh, given, or with an adapter; on the meta device its shapes alone.

`distill` and `boost` make their drafts here, in a run as in the pre-flight: what is built under
`torch.device("meta")` reads configs and no weights. Read next: `architecture.py`, fresh models;
`distillation.py`, the loss; `lora.py`, adapters.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...data.rows.packed import PackedRows
from ...decoding.backbone.attention import use_own_attention
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hub import is_here, load_config, load_sizes, load_tokenizer, skeleton
from ...decoding.backbone.loading import load_model
from ...decoding.backbone.temperature import use_positions
from ...decoding.backbone.weights import check_held, check_weight_files
from ...drafters.folder import check_trainable_model, save_draft_model
from ...drafters.layers.draft_vocabulary import ids_of
from ...drafters.layers.named_ids import SETTING, write_ids
from ...drafters.projection import check_logits
from ...drafters.weights import check_finite
from ...errors import RequestError
from ..config import FROM_TARGET, ModelConfig, chunk_of
from ..method_config import LoraConfig
from ..packed.lengths import check_rows_fit
from ..pruning.layers import prune
from ..pruning.sizes import pruned_config
from ..recipe import TrainingRecipe
from .architecture import fresh_model
from .lora import adapt, adapt_shapes, save_adapted
from .recomputed import recompute_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def in_shapes() -> bool:
    """Whether models are built as shapes alone: under `torch.device("meta")`."""
    return torch.get_default_device().type == "meta"


def make_draft(
    recipe: TrainingRecipe,
    model: ModelConfig,
    lora: LoraConfig,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    pruned: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """The draft that `model` describes, with a fresh adapter where `lora` asks for one.

    Args:
        model: the recipe's, or that of one SSM.
        tokenizer: the target's; None in the pre-flight of a target that is not here.
        pruned: the draft, where it was cut from the target.

    Raises:
        RequestError: as for `draft_model`, `recompute_layers` and `adapt`, or rows do not fit the draft's context.
    """
    draft = pruned or draft_model(model, target, tokenizer)
    check_rows_fit(recipe, draft.config, whose(model))
    if model.recompute:
        recompute_layers(draft, whose(model), row_tokens=recipe.row_tokens)
    if in_shapes():
        return adapt_shapes(draft, lora, model)
    adapt(draft, lora, model)
    return draft


def draft_model(
    model: ModelConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedModel:
    """Fresh weights over the target's vocabulary, or the model that `start_from` names.

    A draft cut from the target is made here in shapes alone; `pruning/layers.py` cuts weights.

    Args:
        tokenizer: the target's; None in the pre-flight of a target that is not here.

    Raises:
        RequestError: the given model is none to train, means other tokens than the target, or makes
            its logits in a way that training does not know.
    """
    if model.start_from is None:
        like = target.config.get_text_config(decoder=True)
        eos = None if tokenizer is None else tokenizer.eos_token_id
        return fresh_model(model, vocabulary=rows_of(target), eos=eos, like=like)
    if model.start_from == FROM_TARGET and in_shapes():
        return skeleton(pruned_config(model, target.config, type(target).__name__))
    check_trainable_model(model.start_from)
    if tokenizer is not None and not _is_described(model):
        check_same_tokens(model.start_from, tokenizer)
    draft = given_model(model)
    if tokenizer is not None and rows_of(draft) < len(tokenizer):
        raise RequestError(
            f"model.start_from {model.start_from!r} has an output projection of {rows_of(draft)} "
            f"rows, the target's tokenizer has {len(tokenizer)} tokens: it cannot say all of them"
        )
    return draft


def given_model(model: ModelConfig) -> PreTrainedModel:
    """The model that `start_from` names; in shapes, and where it is not here, of `model.sizes`.

    Raises:
        RequestError: there is none, or it makes its logits in a way that training does not know.
    """
    path = model.start_from or ""
    check_trainable_model(path)
    if in_shapes():
        described = None if model.sizes is None else load_sizes(model.sizes)
        here = described is None or not _is_described(model)
        given = skeleton(load_config(path) if here else described)
        if here:
            check_weight_files(path)
            check_held(given, path)
    else:
        given = load_model(path)
        check_finite(given, Path(path))
    use_own_attention(given)
    use_positions(given)
    check_logits(given, f"model.start_from {path!r}")
    return given


def whose(model: ModelConfig) -> str:
    """What a message calls the draft, and where the recipe names it."""
    if model.start_from is None:
        return "a model from scratch (model.max_positions)"
    return f"model.start_from {model.start_from!r}"


def check_same_tokens(start_from: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """A draft must mean the same tokens by the same numbers; the first difference is named."""
    mine, theirs = load_tokenizer(start_from).get_vocab(), tokenizer.get_vocab()
    if mine == theirs:
        return
    token = min(
        (token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token)),
        key=lambda token: theirs.get(token, mine.get(token, 0)),
    )
    raise RequestError(
        f"model.start_from {start_from!r} has another tokenizer than the target: token "
        f"{token!r} is {mine.get(token, 'missing')} there and {theirs.get(token, 'missing')} in "
        "the target. Take a draft of the same family, or leave start_from out; as it is it may "
        "draft by --drafter.vocabulary auto"
    )


def cut_from_target(
    recipe: TrainingRecipe, model: ModelConfig, target: PreTrainedModel, held_out: PackedRows, *, out: Path, seed: int
) -> PreTrainedModel | None:
    """A draft cut from the target as `model` says, None where it begins otherwise; `out` keeps the search for the cut
    (`pruning/layers.py`)."""
    if model.start_from != FROM_TARGET:
        return None
    chunk = chunk_of(recipe.objective.chunk, len(target.get_output_embeddings().weight))
    return prune(model, target, held_out, out=out, seed=seed, micro_rows=recipe.loop.micro_rows, chunk=chunk)


def save_draft(draft: nn.Module, folder: Path, *, target: Backbone, lora: LoraConfig) -> None:
    """Write a drafter folder: an ordinary draft model, or one with adapters, its own in use."""
    ids_U = ids_of(draft)
    if lora.rank is not None:
        save_adapted(draft, folder, target, lora)
    elif ids_U is None:
        save_draft_model(draft, folder, target)
    else:
        save_draft_model(draft, folder, target, settings={SETTING: len(ids_U)})
        write_ids(folder, ids_U)


def rows_of(model: PreTrainedModel) -> int:
    """Rows of the output projection: the vocabulary, padding included."""
    return int(model.get_output_embeddings().weight.shape[0])


def _is_described(model: ModelConfig) -> bool:
    """Whether the pre-flight goes by `model.sizes`: shapes are asked for, and the model is not here."""
    return in_shapes() and model.sizes is not None and not is_here(model.start_from or "")
