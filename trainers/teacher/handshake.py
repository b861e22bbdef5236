"""The proof that an engine computes the recipe's target, before the first step and without the whole target here.

A target that is cut behind its first layers gives the state behind them, which the engine's has to
be; its last norm and its projection turn the engine's last state into the engine's own next token
and log-probabilities. A state that is one layer off loses some per cent of acceptance at most, so no
measure of the drafter would tell. What lies between is not proved, but its order is. Read next:
`engine.py`, which trains on the states.

Shapes: T tokens of a document, N hidden states of a token, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...data.features.engine import Engine, States
from ...decoding.backbone.hidden_states import decoder_of, last_norm
from ...drafters.projection import Projection
from ...errors import RequestError
from ..packed.masks import row_masks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT_LAYERS = 2
"""Of the target, in the process that trains, for the proof alone: enough to tell a state from those beside it."""
_FAR = 0.05  # of a state's length; bf16 is 0.7 % away, another layer 29 % and more
_NATS = 0.25  # bf16 rounds logits of 32 to a quarter; without the norm they are another distribution
_SHARE = 0.95  # of the tokens that have to be that near: some are rounded worse


class Proof(NamedTuple):
    """What an engine was found to be."""

    fingerprint: str | None
    """Its own word for itself, the same for every answer of a server."""
    dtype: str
    """Of its states."""
    error: float
    """Relative distance of the early state, the median over tokens."""
    nats: float
    """Distance of the log-probabilities, the median over tokens."""


@torch.no_grad()
def shake(engine: Engine, cut: PreTrainedModel, documents: Sequence[Sequence[int]]) -> Proof:
    """Hold an engine's answers to some documents to the cut target.

    Args:
        cut: the target's first layers, its last norm and projection.
        documents: token ids; a long one among them, as what goes wrong in chunks goes wrong there.

    Raises:
        RequestError: the engine's states are not the target's; the message says in what.
    """
    count = _kept(cut)
    norm = last_norm(decoder_of(cut))
    replies = [engine.ask(ids, logprobs=True) for ids in documents]
    errors, nats = [], []
    for ids, reply in zip(documents, replies, strict=True):
        own_NTH = _first_states(cut, norm, ids)
        early_TH = reply.states_TNH[:, engine.request.layers.index(count)].to(own_NTH)
        errors.append(_check_early(early_TH, own_NTH, engine))
        nats.append(_check_last(reply, ids, norm, cut, engine))
    fingerprints = {reply.fingerprint for reply in replies}
    if len(fingerprints) > 1:
        raise RequestError(
            f"{engine.request.public_url} answers for several servers ({', '.join(map(str, fingerprints))}); name one"
        )
    dtype = str(replies[0].states_TNH.dtype).removeprefix("torch.")
    return Proof(replies[0].fingerprint, dtype, max(errors), max(nats))


def _kept(cut: PreTrainedModel) -> int:
    """How many layers are here."""
    decoder: Any = decoder_of(cut)
    return min(KEPT_LAYERS, int(decoder.config.get_text_config(decoder=True).num_hidden_layers))


def _blocks(cut: PreTrainedModel) -> nn.ModuleList:
    return next(each for each in decoder_of(cut).children() if isinstance(each, nn.ModuleList))


def drop_layers(cut: PreTrainedModel) -> None:
    """Keep of a cut target its embedding, last norm and projection alone."""
    del _blocks(cut)[:]


def _first_states(cut: PreTrainedModel, norm: nn.Module, ids: Sequence[int]) -> Tensor:
    """The states 0 to that behind the last layer that is here, in front of the norm, [N, T, H]."""
    decoder: Any = decoder_of(cut)
    ids_1T = torch.tensor([list(ids)], device=cut.device)
    positions_1T = torch.arange(len(ids), device=cut.device)[None]
    states: list[Tensor] = []
    blocks = _blocks(cut)

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    hooks = [each.register_forward_pre_hook(keep, with_kwargs=True) for each in (*blocks, norm)]
    try:
        with torch.autocast(cut.device.type, enabled=False):
            decoder(
                input_ids=ids_1T,
                attention_mask=row_masks(cut.config, torch.zeros_like(ids_1T), positions_1T),
                position_ids=positions_1T,
                use_cache=False,
            )
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(states).float()


def _check_early(found_TH: Tensor, own_NTH: Tensor, engine: Engine) -> float:
    """The distance of an early state; RequestError where it is another one."""
    count = len(own_NTH) - 1
    far_N = [_distance(found_TH, own_TH) for own_TH in own_NTH]
    if far_N[count].near:
        return far_N[count].middle
    nearest = min(range(count + 1), key=lambda number: far_N[number].middle)
    if nearest != count and far_N[nearest].near:
        raise RequestError(
            f"{engine.request.public_url} is shifted by a layer: its state {count} is the target's state {nearest}, "
            f"as the recipe and vLLM count them (0 is the embedding); start it with eagle_aux_hidden_state_layer_ids "
            f"{list(engine.request.layers)}"
        )
    raise RequestError(
        f"{engine.request.public_url} computes another target: its state {count} is {far_N[count].middle:.1%} away "
        f"from that of target.path, computed here (expected at most {_FAR:.0%}). It is of other weights, or of a "
        f"later layer: see what it serves, and that eagle_aux_hidden_state_layer_ids is {list(engine.request.layers)}"
    )


class _Distance(NamedTuple):
    middle: float
    near: bool


def _distance(found_TH: Tensor, own_TH: Tensor) -> _Distance:
    """How far states are from others, as shares of their lengths."""
    far_T = (found_TH - own_TH).norm(dim=-1) / own_TH.norm(dim=-1).clamp_min(1e-9)
    return _Distance(float(far_T.median()), float((far_T <= _FAR).double().mean()) >= _SHARE)


def _check_last(reply: States, ids: Sequence[int], norm: nn.Module, cut: PreTrainedModel, engine: Engine) -> float:
    """The distance of the last state's log-probabilities; RequestError where they are not the engine's own."""
    last_TH = reply.states_TNH[:, -1].to(device=cut.device, dtype=cut.dtype)
    far = _far_from(reply, ids, norm(last_TH), cut)
    if far.near:
        return far.middle
    url = engine.request.public_url
    if _far_from(reply, ids, last_TH, cut).near:
        raise RequestError(
            f"{url} hands out its last state behind the last norm, which would be applied twice; take an engine that "
            "hands it out in front of it, as vLLM does from 0.18 on"
        )
    raise RequestError(
        f"{url}: its last state, with the target's last norm and projection, is {far.middle:.2f} nats away from the "
        f"engine's own log-probabilities (expected at most {_NATS:g}). It is not the state behind the last layer, or "
        f"the projection is another: see that eagle_aux_hidden_state_layer_ids ends with {engine.request.layers[-1]}"
    )


def _far_from(reply: States, ids: Sequence[int], normed_TH: Tensor, cut: PreTrainedModel) -> _Distance:
    """Log-probabilities of the document's tokens, and of the next one, beside the engine's own."""
    token_T = torch.tensor([*ids[1:], ids[0]], device=cut.device)
    # in fp32: half precision would round the logits to what is looked for
    logits_TV = Projection.of(cut).in_dtype(torch.float32).logits(normed_TH)
    logprob_T = logits_TV.gather(1, token_T[:, None])[:, 0] - logits_TV.logsumexp(-1)
    far_T = (logprob_T[:-1].cpu() - torch.tensor(reply.logprobs)).abs()
    behind = logits_TV[-1]
    agrees = reply.next_token is not None and float(behind.max() - behind[reply.next_token]) <= _NATS
    middle = float(far_T.median()) if len(far_T) else 0.0
    return _Distance(middle, agrees and float((far_T <= _NATS).double().mean()) >= _SHARE)
