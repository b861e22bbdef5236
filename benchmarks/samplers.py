"""What a sampler costs on a CUDA device: ours, in plain torch, and FlashInfer.

Logits to the warped distribution, and to one token per row. Arms take turns, figures are medians of CUDA
events.

    python benchmarks/samplers.py --out samplers.json
    python benchmarks/samplers.py --tiny                  # on a CPU: checks the script
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.common.replayed import recorded
from draftsmith.decoding.sampling import Warper, draw
from draftsmith.eval.measure.environment import environment
from draftsmith.eval.measure.timing import Call, interleaved
from torch import Tensor

SAMPLED = Warper(0.8, top_k=50, top_p=0.95)
TINY_NOTE = "tiny CPU mode: checks the script, measures nothing"
MISSING, NO_CUDA = "not installed", "needs CUDA"


@dataclass(frozen=True)
class Sizes:
    """Where it runs, and how much is measured."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 15
    repeats: int = 10
    """Calls between two events, back to back, so that launching one hides behind another."""
    batches: tuple[int, ...] = (1, 5, 8)
    vocabularies: tuple[int, ...] = (32000, 151_936)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


TINY = Sizes("cpu", torch.float32, rounds=2, repeats=1, batches=(1, 2), vocabularies=(61, 128))


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("samplers: no CUDA device is visible; --tiny checks the script on a CPU", file=sys.stderr)
        return 2
    sizes = TINY if args.tiny else Sizes()
    results: dict[str, Any] = {
        "note": TINY_NOTE if args.tiny else "",
        "environment": environment(),
        "cuda": torch.version.cuda,
        "sizes": asdict(sizes) | {"dtype": str(sizes.dtype)},
    }
    where = results["environment"]["devices" if sizes.torch_device.type == "cuda" else "processor"]
    print(results["note"] or f"CUDA {results['cuda']}")
    print(f"{where}, torch {torch.__version__}, {sizes.rounds} interleaved rounds")
    results["samplers"] = list(measure(sizes))
    show(results["samplers"])
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    finish(assembled(results["samplers"], sizes, args), args.json)
    return 0


@torch.inference_mode()
def measure(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Seconds of warping and of warping and drawing, by batch and vocabulary."""
    for vocabulary in sizes.vocabularies:
        for batch in sizes.batches:
            yield {"batch": batch, "vocabulary": vocabulary, **_row(sizes, batch, vocabulary)}


def _row(sizes: Sizes, batch: int, vocabulary: int) -> dict[str, float | str]:
    g = torch.Generator(sizes.torch_device).manual_seed(0)
    logits_BV = 4 * torch.randn(batch, vocabulary, generator=g, device=sizes.torch_device)
    uniform_B = torch.rand(batch, generator=g, device=sizes.torch_device, dtype=torch.float64)
    arms, absent = sampler_arms(logits_BV.to(sizes.dtype), uniform_B, SAMPLED)
    times: dict[str, float | str] = {}
    times |= interleaved(arms, sizes.rounds, device=sizes.torch_device, repeats=sizes.repeats)
    if sizes.torch_device.type == "cuda":  # a graph of many calls: what is left is the kernels' own time
        own = {name: call for name, call in arms.items() if not name.startswith("flashinfer")}
        many = {f"{name}, replayed": _many(call, sizes) for name, call in own.items()}
        figures = interleaved(many, sizes.rounds, device=sizes.torch_device)
        times |= {name: seconds / sizes.repeats for name, seconds in figures.items()}
    return times | absent


def _many(call: Call, sizes: Sizes) -> Call:
    return recorded(lambda: [call() for _ in range(sizes.repeats)], sizes.torch_device)


def sampler_arms(logits_BV: Tensor, uniform_B: Tensor, warper: Warper) -> tuple[dict[str, Call], dict[str, str]]:
    """What can be measured here, and why the rest cannot.

    `warp`: logits to the distribution; `token`: logits to one token per row. Logits are of one buffer, as
    warm in the cache as the head leaves them.
    """
    arms: dict[str, Call] = {
        "torch warp": lambda: warper(logits_BV),
        "torch token": lambda: draw(warper(logits_BV), uniform_B),
    }
    theirs = _flashinfer_arms(logits_BV, warper)
    if isinstance(theirs, str):
        return arms, {f"flashinfer {what}": theirs for what in ("warp", "token")}
    return arms | {f"flashinfer {what}": call for what, call in theirs.items()}, {}


def _flashinfer_arms(logits_BV: Tensor, warper: Warper) -> dict[str, Call] | str:
    """FlashInfer's own random numbers; it has no temperature, so that is torch's here."""
    try:
        from flashinfer import sampling as theirs
    except ImportError:
        return MISSING
    if not logits_BV.is_cuda:
        return NO_CUDA

    def scaled() -> Tensor:
        return logits_BV.float() / warper.temperature

    def warp() -> Tensor:
        probs_BV = theirs.top_k_mask_logits(scaled(), warper.top_k).softmax(-1)
        return theirs.top_p_renorm_probs(probs_BV, warper.top_p)

    def token() -> Tensor:
        return theirs.top_k_top_p_sampling_from_logits(scaled(), warper.top_k, warper.top_p)

    try:
        warp()
        token()
    except (OSError, RuntimeError, TypeError) as error:
        # it compiles at the first call; where it cannot, a column is lost and not the run
        return f"failed: {str(error).strip().splitlines()[0] if str(error) else error!r}"
    return {"warp": warp, "token": token}


def show(figures: list[dict[str, Any]]) -> None:
    print(f"Samplers, microseconds a call, {SAMPLED}; eager unless replayed")
    for row in figures:
        print(f"batch {row['batch']}, vocabulary {row['vocabulary']}")
        for name, seconds in row.items():
            if name not in ("batch", "vocabulary"):
                text = seconds if isinstance(seconds, str) else f"{seconds * 1e6:.1f}"
                print(f"    {name:24} {text:>12}")


def assembled(figures: list[dict[str, Any]], sizes: Sizes, args: argparse.Namespace) -> Record:
    """Microseconds from logits to one token for each row, a row per batch and vocabulary."""
    arms = {"torch": "torch token", "flashinfer": "flashinfer token"}
    rows: list[dict[str, Cell]] = []
    for each in figures:
        cells = {column: _microseconds(each[arm]) for column, arm in arms.items()}
        rows.append({"batch": str(each["batch"]), "vocabulary": f"{each['vocabulary']:,}", **cells})
    heads = {"batch": "{batch}", "vocabulary": "{vocabulary}", "torch": "{torch}", "FlashInfer": "{flashinfer}"}
    return record_of(
        args,
        title="Samplers",
        target=None,
        setup=f"{TINY_NOTE + '. ' if args.tiny else ''}Logits in {sizes.dtype} to one token for each row, {SAMPLED}; "
        f"medians of {sizes.rounds} interleaved rounds, eager.",
        rows=rows,
        tables={"samplers": table_of(heads)},
    )


def _microseconds(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure * 1e6:.1f} us"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help=TINY_NOTE)
    parser.add_argument("--out", type=Path, help="write the results as JSON as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
