"""Which hidden state "layer i" is, and how it is taken while a model runs.

State 0 is the embedding, state i the output of the i-th layer, and the last state, also called `LAST`, is what the
output projection reads, after the last norm. So `hidden_states` counts in `transformers`. It has no number for the
input of that norm, which is `UNNORMED` here. Drafters are
trained on these states and decode from them, so both take them here.
Read next: `backbone.py`, which decodes; `trainers/teacher/features.py`, which trains.

Shapes: B rows, N tokens, H hidden size, F numbers of several states side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RequestError

LAST = -1
"""The state that the output projection reads, after the last norm, of a model of any depth."""
UNNORMED = -2
"""What the last layer puts out, in front of the last norm."""


class HiddenStates:
    """The states of some layers in one forward pass; other states are not kept."""

    def __init__(self, layers: Sequence[int], count: int) -> None:
        """`layers`: numbers of the states, in any order; `count`: layers of the model.

        Raises:
            RequestError: the model has no such state.
        """
        beyond = [layer for layer in layers if layer not in (LAST, UNNORMED) and not 0 <= layer <= count]
        if beyond:
            raise RequestError(
                f"hidden state {beyond[0]} is asked for; a model of {count} layers has the states 0, its "
                f"embedding, to {count}, after its last norm. Name one of these"
            )
        self._numbers = [count if layer == LAST else layer for layer in layers]
        self._count = count
        self._taken: dict[int, Tensor] = {}

    def take(self, number: int, state_BNH: Tensor) -> None:
        """Keep a state if it is asked for; a later forward pass takes its place."""
        if number in self._numbers:
            self._taken[number] = state_BNH

    @property
    def in_order(self) -> tuple[Tensor, ...]:
        """One [B, N, H] for each of the layers asked for."""
        return tuple(self._taken[number] for number in self._numbers)

    @property
    def side_by_side(self) -> Tensor | None:
        """All of them, [B, N, F]; None if no layer was asked for."""
        return torch.cat(self.in_order, -1) if self._numbers else None

    @contextmanager
    def taken_from(self, decoder: nn.Module) -> Iterator[None]:
        """Take them from the forward pass of `decoder` inside the block.

        `output_hidden_states` would hold all states until the end. State i is the input of layer i + 1, and is taken
        there.

        Raises:
            RequestError: the states between the layers are asked for, and the layers are in no list.
        """
        between = sorted({number for number in self._numbers if number not in (self._count, UNNORMED)})
        blocks = layers_of(decoder, self._count) if between or UNNORMED in self._numbers else nn.ModuleList()
        hooks = [
            blocks[number].register_forward_pre_hook(self._before(number), with_kwargs=True) for number in between
        ]
        if UNNORMED in self._numbers:
            hooks.append(blocks[-1].register_forward_hook(self._behind))
        if self._count in self._numbers:
            hooks.append(decoder.register_forward_hook(lambda _decoder, _given, out: self.take(self._count, out[0])))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _behind(self, _block: nn.Module, _given: Any, out: Any) -> None:
        self.take(UNNORMED, out[0] if isinstance(out, tuple) else out)

    def _before(self, number: int) -> Callable[..., None]:
        def hook(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.take(number, args[0] if args else kwargs["hidden_states"])

        return hook


def decoder_of(model: Any) -> Any:
    """The part of a causal LM of `transformers` before its output projection."""
    decoder = model.get_decoder()
    # Llama 4 hands out the whole: its decoder has another name than its class says
    return decoder.model if decoder is model else decoder


def check_states(layers: Sequence[int], model: Any, where: object) -> None:
    """Raise RequestError, which begins with `where`, when a model lacks one of the states that a drafter reads."""
    try:
        HiddenStates(layers, layer_count(model))
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error


def layer_count(model: Any) -> int:
    """How many layers a model of `transformers`, or its decoder, has."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


@torch.no_grad()
def last_norm(decoder: Any) -> nn.Module:
    """The norm after a decoder's last layer, by whatever name its class has for it.

    Raises:
        RequestError: the decoder's output comes from none of its parts.
    """
    made: list[tuple[nn.Module, Any]] = []
    hooks = [
        each.register_forward_hook(lambda module, _given, out: made.append((module, out)))
        for each in decoder.children()
    ]
    try:
        ids_11 = torch.zeros(1, 1, dtype=torch.long, device=decoder.device)
        last = decoder(input_ids=ids_11, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    norm = next((module for module, out in reversed(made) if out is last), None)
    if norm is None:
        raise RequestError(
            f"{type(decoder).__name__} ends with no norm of its own, which would have to be applied here"
        )
    return norm


def layers_of(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The decoder's layers, by whatever name its class has for them.

    Raises:
        RequestError: they are in no list of its own.
    """
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise RequestError(
        f"{type(decoder).__name__} keeps its {count} layers in no list of its own, so the states "
        "between them cannot be taken, nor its layers cut over processes; take a method that reads the last state "
        "alone, and leave target.sharding"
    )
