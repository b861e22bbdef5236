"""What a verify call reads of a mixture of experts, and how long it takes, by its tokens: as a chain and as a tree.

A call of one token reads the few experts that each layer's router chooses, one of N tokens all that any of them
chooses. Calls are watched: the experts that they compute are counted in each layer, and the bytes of weights follow.
Calls of all sizes, of the mixture and of a dense model that reads as much for one token, take turns, each behind
another place of held-out text. A chain holds the text's own next tokens. A tree is Medusa's of so many nodes: first
children are the text's, other children what most often followed their parent elsewhere in it. Weights are random, so
routers know nothing of the text: how much the choices of neighbouring tokens have in common is theirs, not a trained
model's.

    python benchmarks/experts.py
    python benchmarks/experts.py --nodes 1 6 --experts 8 --chosen 2 --hidden 32 --width 16 --rounds 2   # a small try

Letters: N tokens of a call, k experts of a token.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.neighbours import beside, times_as_long
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.random_models import random_model
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.data.prompts import load_prompts, render
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.experts import expert_count, experts_of
from draftsmith.decoding.backbone.hub import embedded_target, load_tokenizer
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.tree.build import Choices, tree_of_paths
from draftsmith.decoding.tree.tree import Tree, chain
from draftsmith.drafters.heads.medusa import default_paths
from draftsmith.eval.measure.speed import bytes_of, experts_read
from draftsmith.eval.measure.timing import turns
from torch import Tensor, nn

DEPTH = 4
"""Of the trees."""


class Shape(NamedTuple):
    """How the nodes of a call stand under each other, and which child of its parent each is."""

    name: str
    choices: Choices

    @property
    def tree(self) -> Tree:
        return self.choices.tree


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    text = Text(args.context, max(args.nodes))
    models = {"experts": mixture(args, text.vocabulary), "dense": dense(args, text.vocabulary)}
    shapes = [shape for count in args.nodes for shape in shapes_of(count)]
    calls = {name: Calls(model, text, args) for name, model in models.items()}
    counted = {(shape.name, len(shape.tree)): counts(calls["experts"], shape) for shape in shapes}
    arms = {
        (name, shape.name, len(shape.tree)): each.turning(shape) for shape in shapes for name, each in calls.items()
    }
    timed = turns({str(key): arm for key, arm in arms.items()}, args.rounds, device=torch.device("cpu"))
    seconds = {key: timed[str(key)] for key in arms}
    record = assembled([row(shape, counted, seconds, models, text) for shape in shapes], models["experts"], args)
    print(printed(record))
    finish(record, args.json)


# ---- models and text ------------------------------------------------------------------------------


def mixture(args: argparse.Namespace, vocabulary: int) -> Backbone:
    """Qwen3's layers with many experts."""
    own = {"num_experts": args.experts, "num_experts_per_tok": args.chosen, "moe_intermediate_size": args.width}
    return backbone("qwen3_moe", sizes(args, vocabulary) | own)


def dense(args: argparse.Namespace, vocabulary: int) -> Backbone:
    """The same with one feed-forward part as wide as the experts of a token together."""
    return backbone("qwen3", sizes(args, vocabulary) | {"intermediate_size": args.chosen * args.width})


def sizes(args: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """What both have alike."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_key_value_heads": 2,
        "head_dim": args.hidden // 4,
        "max_position_embeddings": 4096,
    }


def backbone(family: str, settings: dict[str, Any]) -> Backbone:
    """A random model as the decoder runs it; embeddings as large as what layers add, or tokens would look alike."""
    model: Any = random_model(family, spread=settings["hidden_size"] ** -0.5, **settings)
    model.get_input_embeddings().weight.normal_()
    use_grouped_attention(model)
    return Backbone(model, name=family)


class Text:
    """Held-out text of the embedded target's tokenizer, and what follows what in it."""

    def __init__(self, context: int, most: int) -> None:
        tokenizer = load_tokenizer(str(embedded_target()))
        self.vocabulary = len(tokenizer)
        self.ids = [each for prompt in load_prompts("stdlib") for each in render(prompt, tokenizer, limit=context)]
        self.places = range(context, len(self.ids) - most, max(context, most))
        following: dict[int, Counter[int]] = defaultdict(Counter)
        for token, after in pairwise(self.ids):
            following[token][after] += 1
        self._following = {token: [each for each, _ in after.most_common()] for token, after in following.items()}
        self._frequent = [each for each, _ in Counter(self.ids).most_common(64)]
        self._made: dict[tuple[int, Shape], Tensor] = {}

    def tokens(self, place: int, shape: Shape) -> Tensor:
        """The nodes [1, N] of a call whose root stands at `place`; made once."""
        if (place, shape) not in self._made:
            self._made[place, shape] = torch.tensor([self._nodes(place, shape)])
        return self._made[place, shape]

    def _nodes(self, place: int, shape: Shape) -> list[int]:
        tokens, own = [self.ids[place]], [True]
        nodes = shape.tree.parents, shape.choices.ranks, shape.tree.depths
        for parent, rank, depth in zip(*(each[1:] for each in nodes), strict=True):
            follows = own[parent] and rank == 0
            true = self.ids[place + depth]
            others = [each for each in self._likely(tokens[parent]) if not (own[parent] and each == true)]
            tokens.append(true if follows else others[rank - own[parent]])
            own.append(follows)
        return tokens

    def _likely(self, token: int) -> list[int]:
        """Tokens that follow one, the most frequent first, and behind them the text's most frequent ones."""
        after = self._following.get(token, [])
        return [*after, *(each for each in self._frequent if each not in after)]


def shapes_of(count: int) -> Iterator[Shape]:
    """Calls of so many nodes: a chain, and a tree where it is another one."""
    yield Shape("chain", Choices(chain(count - 1), (0,) * count))
    choices = tree_of_paths(default_paths(DEPTH, count)) if count > 1 else None
    if choices is not None and not choices.tree.is_chain:
        yield Shape("tree", choices)


# ---- calls ------------------------------------------------------------------------------------------


class Calls:
    """Calls of a model behind each of some places of the text, which it has read."""

    def __init__(self, model: Backbone, text: Text, args: argparse.Namespace) -> None:
        self.model, self._text, self._length_1 = model, text, torch.tensor([args.context])
        self.places = [text.places[at % len(text.places)] for at in range(args.places)]
        self._caches = []
        with torch.inference_mode():
            for place in self.places:
                self._caches.append(KVCache(1, args.context + max(args.nodes)))
                model.prefill([text.ids[place - args.context : place]], self._caches[-1])

    def __call__(self, at: int, shape: Shape) -> None:
        """One of the call's shape behind the place of that number."""
        tokens_1N = self._text.tokens(self.places[at], shape)
        with torch.inference_mode():
            self.model.forward(tokens_1N, self._length_1, shape.tree, self._caches[at])

    def turning(self, shape: Shape) -> Callable[[], None]:
        """A call behind the next place each time."""
        places = cycle(range(len(self.places)))
        return lambda: self(next(places), shape)


def counts(calls: Calls, shape: Shape) -> np.ndarray:
    """Distinct experts that a call reads, the mean over layers, at every place."""
    with watched(calls.model) as seen:
        for at in range(len(calls.places)):
            calls(at, shape)
    return np.array(seen).reshape(len(calls.places), -1).mean(1)


@contextmanager
def watched(model: Backbone) -> Iterator[list[int]]:
    """How many experts each layer of each call has computed."""
    seen: list[int] = []

    def hook(_part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        chosen_Nk = next(each for each in given if not each.is_floating_point())
        seen.append(len(chosen_Nk.unique()))

    hooks = [part.register_forward_pre_hook(hook, with_kwargs=True) for _, part in experts_of(model.model)]
    try:
        yield seen
    finally:
        for each in hooks:
            each.remove()


# ---- the record ---------------------------------------------------------------------------------------


def row(
    shape: Shape,
    counted: dict[tuple[str, int], np.ndarray],
    seconds: dict[tuple[str, str, int], list[float]],
    models: dict[str, Backbone],
    text: Text,
) -> dict[str, Cell]:
    """One size and shape: experts, bytes, and time over that of a call of one token."""
    key = shape.name, len(shape.tree)
    parts = [part for _, part in experts_of(models["experts"].model)]
    of, read = expert_count(parts[0]), counted[key]
    held = sum(map(bytes_of, parts))

    def call_bytes(experts: float) -> float:
        return bytes_of(models["experts"].model) - held * (1 - experts / of)

    c_v = {name: times_as_long(seconds[name, *key], seconds[name, "chain", 1]) for name in models}
    foreseen = experts_read(models["experts"], text.ids[: text.places[-1]], [key[1]])
    assert foreseen is not None
    return {
        "N": key[1],
        "shape": shape.name,
        "read": read.mean(),
        "share": 100 * read.mean() / of,
        "mb": call_bytes(read.mean()) / 1e6,
        "bytes_calls": call_bytes(read.mean()) / call_bytes(counted["chain", 1].mean()),
        "model_calls": foreseen.growth(key[1]),
        "experts_calls": c_v["experts"],
        "dense_calls": c_v["dense"],
    }


def assembled(rows: list[dict[str, Cell]], model: Backbone, args: argparse.Namespace) -> Record:
    """All figures as a record."""
    heads = {
        "tokens": "{N}",
        "as a": "{shape}",
        "experts read in a layer": "{read} ({share} %)",
        "weights read, MB": "{mb}",
        "in calls of one": "{bytes_calls}",
        "as the speed model has it": "{model_calls}",
        "c_v": "{experts_calls}",
        "c_v, dense": "{dense_calls}",
    }
    config: Any = model.model.config
    return record_of(
        args,
        title="Verify calls of a mixture of experts",
        target=None,
        setup=f"Random weights, fp32: {args.layers} layers of {args.hidden} numbers, {args.experts} experts of "
        f"{args.width} in each, {args.chosen} to a token (Qwen3 MoE, `{config._experts_implementation}` of "
        f"transformers); the dense model has a feed-forward part of {args.chosen * args.width}. {args.places} places "
        f"of held-out stdlib text behind {args.context} tokens, {args.rounds} interleaved rounds. Routers are random "
        f"too: a trained one may choose more alike for neighbouring tokens, or less.{beside(args.threads)}",
        intervals="c_v: medians over rounds of neighbouring calls, with 95 % bootstrap intervals",
        formats={"N": ".0f", "read": ".1f", "share": ".0f", "mb": ",.1f"}
        | dict.fromkeys(("bytes_calls", "model_calls", "experts_calls", "dense_calls"), ".2f"),
        rows=rows,
        tables={"experts": table_of(heads)},
        not_measured=["trained routers; a GPU, where a call of a few tokens waits for memory alone"],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 60], help="tokens of a call")
    parser.add_argument("--experts", type=int, default=128, help="of a layer")
    parser.add_argument("--chosen", type=int, default=8, help="experts of a token")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=256, help="numbers within an expert")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=100, help="tokens before the call")
    parser.add_argument("--places", type=int, default=16, help="of the text")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
