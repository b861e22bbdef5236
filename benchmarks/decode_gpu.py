"""What decoding on a CUDA device costs: bandwidth, verify and draft costs, waits.

Random weights of Llama-2-7B's shape in bf16, made on the device. Arms take turns within a section,
figures are medians of CUDA events. Bytes of a token are the fewest that it needs: the weights (of
an untied embedding one row, left out) and the keys and values of the text so far.

    python benchmarks/decode_gpu.py --out decode_gpu.json
    python benchmarks/decode_gpu.py --tiny                # on a CPU: checks the script
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.common.replayed import recorded
from draftsmith.benchmarks.common.waits import Watch, WatchCopies, Watched
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.target.attention import use_grouped_attention
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.kv_cache import KVCache
from draftsmith.decoding.tree.tree import chain
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.eval.measure.environment import environment
from draftsmith.eval.measure.speed import Costs, bytes_of
from draftsmith.eval.measure.timing import Call, interleaved
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model

NODES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = tuple(range(1, 9))
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
GREEDY = Warper(0.0)
SAMPLED = Warper(0.8, top_k=50, top_p=0.95)
SHARE_GOAL, VERIFY_GOAL = 0.82, 1.15
TINY_NOTE = "tiny CPU mode: checks the script, measures nothing"


@dataclass(frozen=True)
class Sizes:
    """Where it runs, the shape of the target, and how much is measured."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 32
    intermediate: int = 11008
    vocabulary: int = 32000
    context: int = 1024
    new_tokens: tuple[int, int] = (32, 544)
    """Two answers; a token's time is their difference, so prefill and recording drop out."""
    copied_bytes: int = 2_000_000_000
    rounds: int = 15
    whole_rounds: int = 5
    """Rounds of whole answers, which take seconds each."""
    repeats: int = 10
    """Calls between two events, back to back, so that launching one hides behind another."""
    watched_steps: int = 8

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def prompt(self) -> list[int]:
        """As many token ids as the context has."""
        return [1 + machine * 7919 % (self.vocabulary - 1) for machine in range(self.context)]


TINY = Sizes(
    device="cpu",
    dtype=torch.float32,
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    intermediate=64,
    vocabulary=61,
    context=8,
    new_tokens=(2, 6),
    copied_bytes=2**16,
    rounds=2,
    whole_rounds=1,
    repeats=1,
    watched_steps=4,
)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("decode_gpu: no CUDA device is visible; --tiny checks the script on a CPU", file=sys.stderr)
        return 2
    sizes = TINY if args.tiny else _sizes(args)
    target, draft = random_model(sizes, sizes.layers), random_model(sizes, 1)
    results: dict[str, Any] = {
        "note": TINY_NOTE if args.tiny else "",
        "environment": environment(),
        "cuda": torch.version.cuda,
        "sizes": asdict(sizes) | {"dtype": str(sizes.dtype)},
    }
    show_head(results, sizes)
    # a section that fails leaves those before it printed and written
    sections: tuple[tuple[str, Callable[[], Any], Callable[[Any], None]], ...] = (
        ("baseline", lambda: measure_baseline(sizes, target), show_baseline),
        ("costs", lambda: relative(measure_forwards(sizes, target, draft)), show_costs),
        ("surface", lambda: surface(costs_of(results["costs"]["seconds"])), show_surface),
        ("waits", lambda: count_waits(sizes, target, draft), show_waits),
    )
    for name, measure, show in sections:
        results[name] = measure()
        show(results[name])
        if args.out:
            args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    finish(assembled(results, sizes, args), args.json)
    if args.tiny:
        print(f"\n{TINY_NOTE}")
    return 0


def random_model(sizes: Sizes, layers: int) -> Backbone:
    """A causal LM with random weights, made on the device in the type that it decodes in."""
    config = ModelConfig(
        architecture="llama",
        layers=layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.hidden // sizes.heads,
        intermediate=sizes.intermediate,
        tied=False,
        max_positions=sizes.context + sizes.new_tokens[1] + 256,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(sizes.dtype)
    try:
        with torch.device(sizes.device):
            model: Any = fresh_model(config, vocabulary=sizes.vocabulary, eos=None)
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(False).eval()
    use_grouped_attention(model)
    return Backbone(model, name="random weights")


# --- bandwidth


def copy_between(sizes: Sizes) -> Call:
    """A device-to-device copy of `copied_bytes`: as many are read, and as many written."""
    source = torch.randint(256, (sizes.copied_bytes,), dtype=torch.uint8, device=sizes.device)
    to = torch.empty_like(source)

    def copy() -> None:
        for _ in range(sizes.repeats):
            to.copy_(source)

    return copy


def kv_bytes(sizes: Sizes, tokens: float) -> float:
    """Bytes of the keys and values of `tokens` tokens, in all layers."""
    of_a_token = 2 * sizes.layers * sizes.kv_heads * (sizes.hidden // sizes.heads)
    return tokens * of_a_token * sizes.dtype.itemsize


@torch.inference_mode()
def measure_baseline(sizes: Sizes, target: Backbone) -> dict[str, float]:
    """Whole autoregressive answers, every step a replay, beside the bandwidth of a copy."""
    short, long = sizes.new_tokens

    def answer(count: int) -> Call:
        return lambda: autoregressive(
            target, [sizes.prompt], warper=GREEDY, max_new_tokens=count, static=True, graphs=sizes.cuda
        )

    arms = {"copy": copy_between(sizes), "short": answer(short), "long": answer(long)}
    times = interleaved(arms, sizes.whole_rounds, device=target.device)
    per_token = (times["long"] - times["short"]) / (long - short)
    needed = bytes_of(target.model) + kv_bytes(sizes, sizes.context + (short + long) / 2)
    return bandwidths(needed, per_token, 2 * sizes.copied_bytes * sizes.repeats, times["copy"])


def bandwidths(needed: float, per_token: float, copied: float, copy_seconds: float) -> dict[str, float]:
    """What a token reads, how fast it is read, and which share that is of what a copy attains."""
    achieved, attainable = needed / per_token, copied / copy_seconds
    return {
        "tokens_per_second": 1 / per_token,
        "bytes_per_token": needed,
        "bytes_per_second": achieved,
        "attainable_bytes_per_second": attainable,
        "share": achieved / attainable,
    }


# --- what a verify call and a draft step cost


@torch.inference_mode()
def measure_forwards(sizes: Sizes, target: Backbone, draft: Backbone) -> dict[str, float]:
    """Seconds of a forward by nodes ("1", "2", ...) and of a draft step, all behind one context."""
    nodes = sorted({*NODES, *(length + 1 for length in LENGTHS)})
    arms = {}
    for backbone, counts in ((target, nodes), (draft, [1])):
        # one KV cache for all: every forward sees the same slots, so nodes are all that differs
        kv_cache = KVCache(1, sizes.context + nodes[-1], static=True)
        backbone.prefill([sizes.prompt], kv_cache)
        for count in counts:
            name = str(count) if backbone is target else "draft"
            arms[name] = recorded(_forward(sizes, backbone, count, kv_cache), target.device)
    return interleaved(arms, sizes.rounds, device=target.device, repeats=sizes.repeats)


def _forward(sizes: Sizes, backbone: Backbone, nodes: int, kv_cache: KVCache) -> Call:
    tokens = torch.tensor([sizes.prompt[:1] * nodes], device=sizes.device)
    lengths = torch.tensor([sizes.context], device=sizes.device)
    return lambda: backbone.forward(tokens, lengths, chain(nodes - 1), kv_cache)


def costs_of(forwards: dict[str, float]) -> Costs:
    """The costs of the speed model: a verify call behind K drafted tokens has K + 1 nodes."""
    one = forwards["1"]
    return Costs(one, forwards["draft"] / one, {k: forwards[str(k + 1)] / one for k in LENGTHS})


def relative(forwards: dict[str, float]) -> dict[str, Any]:
    """T(N)/T(1) and c, beside the seconds that they come from."""
    one = forwards["1"]
    return {
        "seconds": forwards,
        "verify": {str(n): forwards[str(n)] / one for n in NODES},
        "draft": forwards["draft"] / one,
    }


def expected_tokens(alpha: float, length: int) -> float:
    """tau of a chain whose tokens are accepted independently (Leviathan et al. 2023, eq. 1)."""
    return (1 - alpha ** (length + 1)) / (1 - alpha)


def surface(costs: Costs) -> dict[str, dict[str, float]]:
    """Predicted speed-up, tau / (c_v + K c), by acceptance and chain length."""
    return {
        str(alpha): {str(k): costs.predicted_speedup(expected_tokens(alpha, k), k) for k in LENGTHS}
        for alpha in ALPHAS
    }


# --- where a step waits for the device


class WatchedDraft(Watched, DraftModel):
    """A draft model that opens the watch for some steps."""


def count_waits(
    sizes: Sizes, target: Backbone, draft: Backbone, *, static: bool = True, family: type[WatchedDraft] = WatchedDraft
) -> dict[str, Any]:
    """Operations of steady speculative steps that make the host wait, by name and place.

    Steps are sampled and run without graphs, so that every operation shows.
    """
    steps, watch = sizes.watched_steps, Watch(cuda=sizes.cuda)
    drafter = family(draft, sizes.vocabulary, draft_length=4).observe_with(watch, steps)
    room = (steps + 4) * drafter.nodes  # enough if every draft is accepted
    try:
        with watch, WatchCopies(watch):
            generate(target, drafter, [sizes.prompt], warper=SAMPLED, max_new_tokens=room, static=static, graphs=False)
    finally:
        watch.open = False
    # the steps that were seen, not those asked for: an unwatched run would count 0 as well
    return {"steps": drafter.watched, "count": watch.waits.total(), "places": dict(watch.waits)}


# --- tables


def show_head(results: dict[str, Any], sizes: Sizes) -> None:
    machine = results["environment"]
    if results["note"]:
        print(results["note"])
    where = ", ".join(machine["devices"]) if sizes.cuda else machine["processor"]
    print(
        f"{where}, CUDA {results['cuda']}, torch {torch.__version__}, "
        f"transformers {machine['versions']['transformers']}"
    )
    print(
        f"{sizes.layers} layers, hidden {sizes.hidden}, {sizes.heads} heads ({sizes.kv_heads} "
        f"for keys), MLP {sizes.intermediate}, vocabulary {sizes.vocabulary}, {sizes.dtype}, "
        f"context {sizes.context}, {sizes.rounds} interleaved rounds"
    )


def show_baseline(figures: dict[str, float]) -> None:
    print("\nAutoregressive baseline, every step a replayed graph")
    print(f"speed      {figures['tokens_per_second']:9.1f} tokens/s")
    print(f"needed     {figures['bytes_per_token'] / 1e9:9.3f} GB per token")
    print(f"attainable {figures['attainable_bytes_per_second'] / 1e9:9.1f} GB/s, of a copy, read and written")
    print(
        f"achieved   {figures['bytes_per_second'] / 1e9:9.1f} GB/s, "
        f"{figures['share']:.1%} of attainable (at least {SHARE_GOAL:.0%})"
    )


def show_costs(figures: dict[str, Any]) -> None:
    print("\nVerify call of N nodes, T(N)/T(1), and one step of a draft of one layer")
    for nodes, ratio in figures["verify"].items():
        goal = f" (at most {VERIFY_GOAL})" if nodes == str(NODES[-1]) else ""
        milliseconds = figures["seconds"][nodes] * 1e3
        print(f"N = {nodes:>3}   {milliseconds:9.3f} ms   {ratio:6.3f}{goal}")
    print(f"draft     {figures['seconds']['draft'] * 1e3:9.3f} ms   c = {figures['draft']:.4f}")


def show_surface(figures: dict[str, dict[str, float]]) -> None:
    print("\nPredicted speed-up, tau / (c_v + K c), * the best K")
    print("alpha " + "".join(f"{f'K = {k}':>9}" for k in LENGTHS))
    for alpha, by_length in figures.items():
        best = max(by_length.values())
        cells = (f"{value:8.2f}{'*' if value == best else ' '}" for value in by_length.values())
        print(f"{alpha:5} " + "".join(cells))


def show_waits(figures: dict[str, Any]) -> None:
    print(f"\nHost synchronisations in {figures['steps']} steady speculative steps: {figures['count']} (at most 0)")
    for machine, count in figures["places"].items():
        print(f"{count:5} x {machine}")


# --- record


def assembled(results: dict[str, Any], sizes: Sizes, args: argparse.Namespace) -> Record:
    """The figures with their goals, and for each acceptance rate the chain that pays most."""
    baseline, costs, waits = results["baseline"], results["costs"], results["waits"]
    verify = costs["verify"]
    most = str(NODES[-1])
    between = [str(nodes) for nodes in NODES[1:-1]]
    figures = [
        ("attainable bandwidth", "", f"{baseline['attainable_bytes_per_second'] / 1e9:,.0f} GB/s"),
        ("autoregressive baseline, replayed as a CUDA graph", "", f"{baseline['tokens_per_second']:.1f} tokens/s"),
        ("share of attainable bandwidth", f"at least {SHARE_GOAL:.0%}", f"{baseline['share']:.1%}"),
        (f"verify call, T({most})/T(1), replayed", f"at most {VERIFY_GOAL}", f"{verify[most]:.3f}"),
        (f"T(N)/T(1) for N = {', '.join(between)}", "", ", ".join(f"{verify[each]:.3f}" for each in between)),
        ("c of a one-layer draft of the same width", "", f"{costs['draft']:.4f}"),
        ("host synchronisations per steady speculative step", "0", f"{waits['count'] / waits['steps']:g}"),
    ]
    rows: list[dict[str, Cell]] = [
        {"part": "calls", "quantity": quantity, "goal": goal, "measured": measured}
        for quantity, goal, measured in figures
    ]
    for alpha, by_length in results["surface"].items():
        best = max(by_length, key=lambda length: by_length[length])
        there = f"{by_length[best]:.2f}"
        rows.append({"part": "surface", "acceptance_rate": alpha, "best_length": best, "speedup_there": there})
    return record_of(
        args,
        title="Decoding on a GPU",
        target=None,
        setup=f"{TINY_NOTE + '. ' if args.tiny else ''}Random weights in {sizes.dtype}: {sizes.layers} layers, hidden "
        f"{sizes.hidden}, {sizes.heads} heads ({sizes.kv_heads} for keys), MLP {sizes.intermediate}, vocabulary "
        f"{sizes.vocabulary}; batch 1, context {sizes.context:,}. Medians of {sizes.rounds} interleaved rounds. Bytes "
        "of a token are the fewest that it needs, attainable is a copy on the device, bytes read and written.",
        rows=rows,
        tables={
            "decode-gpu": table_of({"": "{quantity}", "goal": "{goal}", " ": "{measured}"}, {"part": "calls"}),
            "surface": table_of(
                {
                    "alpha": "{acceptance_rate}",
                    "best K of 1 to 8": "{best_length}",
                    "speed-up there": "{speedup_there}",
                },
                {"part": "surface"},
            ),
        },
    )


def _sizes(args: argparse.Namespace) -> Sizes:
    short = Sizes.new_tokens[0]
    return Sizes(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        kv_heads=args.kv_heads or args.heads,
        intermediate=args.intermediate,
        vocabulary=args.vocabulary,
        context=args.context,
        new_tokens=(short, short + args.new_tokens),
        rounds=args.rounds,
        copied_bytes=int(args.copy_gb * 1e9),
    )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("layers", "hidden", "heads", "intermediate", "vocabulary", "context", "rounds"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--new-tokens", type=int, default=512, help="tokens that are timed")
    parser.add_argument("--copy-gb", type=float, default=2.0)
    parser.add_argument("--tiny", action="store_true", help=TINY_NOTE)
    parser.add_argument("--out", type=Path, help="write the results as JSON as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
