"""EAGLE-3's training step beside SpecForge's own code, on equal weights and the same numbers.

`--against` names a checkout of SpecForge (github.com/sgl-project/SpecForge, tried at a6b6b02). Its model, its
training-time test and its plain loss run here in place of its Triton kernel, which a CPU has not; nothing of it is
compiled. First the two are compared: the loss of every pass, and the gradient of every weight. Then both take the
step in turn, forward and backward without an optimiser; the target's logits are part of it on both sides. Last the
most memory that torch held.

    python benchmarks/eagle3_step.py --against path/to/SpecForge
    python benchmarks/eagle3_step.py --against path/to/SpecForge --shapes 128x64x512 --rounds 2     # checks the script
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.peak import peak_bytes
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Cell, Record, figure, table_of
from draftsmith.drafters.eagle.net3 import Eagle3Net, Eagle3Shape
from draftsmith.drafters.projection import Projection
from draftsmith.eval.measure.metrics import ratio
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.eagle3 import Eagle3Student
from draftsmith.trainers.loop.objective import Batch
from draftsmith.trainers.teacher.output import TeacherOutput
from torch import Tensor, nn

PASSES, CHUNK = 7, 256
HEADS, HEAD = 8, 64
MOST_TIME, MOST_MEMORY = 0.8, 0.4
CLOSE = 1e-4
"""Most that two fp32 sums over the vocabulary may differ by, as a share."""


class Shape(NamedTuple):
    """Sizes of a step: a row of so many tokens, the hidden size, tokens that can be drafted; the target has twice
    as many."""

    tokens: int
    hidden: int
    drafted: int

    @classmethod
    def parsed(cls, text: str) -> Shape:
        return cls(*(int(part) for part in text.split("x")))


class Given(NamedTuple):
    """What both sides are given: a row, the target's states and weights."""

    batch: Batch
    states_SH: Tensor
    fused_SF: Tensor
    embeds_VH: Tensor
    head_VH: Tensor


class Side(NamedTuple):
    """One implementation: what takes a step, and what has gradients then."""

    step: Callable[[], list[float]]
    """Forward and backward; the mean loss of every pass."""
    module: nn.Module


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.disable = True
    sys.path.insert(0, str(args.against))
    rows = [row_of(shape, args) for shape in args.shapes]
    record = assembled(rows, args)
    print(printed(record))
    finish(record, args.json)


def row_of(shape: Shape, args: argparse.Namespace) -> dict[str, Cell]:
    """Both sides at a shape: equal numbers, the ratio of the time, that of the memory."""
    given = made(shape)
    sides = {"ours": ours(shape, given), "theirs": theirs(shape, given)}
    differ = check_equal(sides)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            began = time.perf_counter()
            side.step()
            seconds[name].append(time.perf_counter() - began)
    bytes_of = {name: peak_bytes(lambda side=side: void(side.step), "cpu") for name, side in sides.items()}  # type: ignore[misc]
    ours_R, theirs_R = (np.array(seconds[name]) for name in sides)
    return {
        "shape": f"S = {shape.tokens:,}, H = {shape.hidden}, U = {shape.drafted:,}",
        "ours_s": float(np.median(ours_R)),
        "theirs_s": float(np.median(theirs_R)),
        "time": figure(ratio(ours_R, theirs_R).to_list()),
        "ours_gb": bytes_of["ours"] / 1e9,
        "theirs_gb": bytes_of["theirs"] / 1e9,
        "memory": bytes_of["ours"] / bytes_of["theirs"],
        "differ": f"{differ:.0e}",
    }


def void(step: Callable[[], list[float]]) -> None:
    step()


# ---- what both are given ----------------------------------------------------------------------


def made(shape: Shape) -> Given:
    """Random weights and states; the likeliest tokens can be drafted, so that no position is left out."""
    S, H, V = shape.tokens, shape.hidden, 2 * shape.drafted
    draw = torch.Generator().manual_seed(0)
    head_VH = torch.randn(V, H, generator=draw) / H**0.5 * 3
    head_VH[shape.drafted :] *= 0.3
    ids_S = torch.randint(0, shape.drafted, (S,), generator=draw)
    counts_S = torch.ones(S, dtype=torch.bool)
    counts_S[0] = False
    batch = {
        "input_ids": ids_S[None],
        "loss_mask": counts_S[None],
        "positions": torch.arange(S)[None],
        "documents": torch.zeros(1, S, dtype=torch.long),
    }
    states_SH, fused_SF = torch.randn(S, H, generator=draw), torch.randn(S, 3 * H, generator=draw)
    return Given(batch, states_SH, fused_SF, torch.randn(V, H, generator=draw), head_VH)


def ours(shape: Shape, given: Given) -> Side:
    """This package's network and loss."""
    torch.manual_seed(0)
    recipe = load_recipe(
        "eagle3-tiny", [("eagle3.passes", str(PASSES)), ("eagle3.decay", "1.0"), ("objective.chunk", str(CHUNK))]
    ).recipe
    draft = Eagle3Net(sizes_of(shape), range(shape.drafted))
    student = Eagle3Student(draft, Projection(given.head_VH, None), recipe)
    embeds_SH = F.embedding(given.batch["input_ids"].roll(-1, 1), given.embeds_VH)
    teacher = TeacherOutput(given.states_SH[None], embeds_SH, given.fused_SF[None])

    def step() -> list[float]:
        draft.zero_grad()
        loss, _ = student(given.batch, teacher)
        (loss / shape.tokens).backward()
        return [float(loss.detach()) / shape.tokens]

    return Side(step, draft)


def sizes_of(shape: Shape) -> Eagle3Shape:
    return Eagle3Shape(
        hidden=shape.hidden,
        intermediate=4 * shape.hidden,
        heads=max(1, shape.hidden // HEAD),
        kv_heads=max(1, shape.hidden // HEAD),
        head_size=HEAD,
        rope_theta=10_000.0,
        eps=1e-6,
        layers=(0, 1, 2),
        vocabulary=2 * shape.drafted,
        draft_vocabulary=shape.drafted,
    )


def theirs(shape: Shape, given: Given) -> Side:
    """SpecForge's network and training-time test, with the weights that ours has at the start."""
    from specforge.algorithms.eagle3 import model as algorithm
    from specforge.core import loss as losses
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    class Plain:
        """The reference loss, called as the Triton kernel is."""

        apply = staticmethod(losses._compute_loss)

    algorithm.LogSoftmaxLoss = Plain
    sizes = sizes_of(shape)
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=HEAD,
        rms_norm_eps=sizes.eps,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=shape.tokens + PASSES,
        pad_token_id=0,
    )
    config.draft_vocab_size, config.pretraining_tp = sizes.draft_vocabulary, 1
    draft = LlamaForCausalLMEagle3(config)
    torch.manual_seed(0)
    own = Eagle3Net(sizes, range(shape.drafted)).state_dict()
    missing, left = draft.load_state_dict(own, strict=False)
    if left or set(missing) != {"embed_tokens.weight"}:
        raise SystemExit(f"this SpecForge has other weights: it lacks {left}, and has {missing}")
    draft.embed_tokens.weight = nn.Parameter(given.embeds_VH, requires_grad=False)
    model = algorithm.OnlineEagle3Model(draft, length=PASSES)

    def shifted(x: Tensor) -> Tensor:
        return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), 1)

    # a position counts where a label stands behind the state that it is compared with
    counts_1S1 = shifted(shifted(given.batch["loss_mask"]))[..., None].float()

    def step() -> list[float]:
        draft.zero_grad()
        with torch.no_grad():
            target_1SV = shifted(F.linear(given.states_SH, given.head_VH)[None])
        losses_of_passes, *_ = model(
            input_ids=shifted(given.batch["input_ids"]),
            attention_mask=torch.ones_like(given.batch["input_ids"]),
            target=target_1SV,
            loss_mask=counts_1S1,
            hidden_states=given.fused_SF[None],
        )
        total = torch.stack(losses_of_passes).sum()
        total.backward()
        return [float(total.detach())]

    return Side(step, draft)


def check_equal(sides: dict[str, Side]) -> float:
    """The largest difference of loss and gradients, as a share; both steps are warm then.

    Raises:
        SystemExit: they are not the same step.
    """
    losses = {name: side.step() for name, side in sides.items()}
    mine, other = (dict(side.module.named_parameters()) for side in sides.values())
    shares = [abs(a - b) / abs(b) for a, b in zip(losses["ours"], losses["theirs"], strict=True)]
    for name, weight in mine.items():
        a, b = weight.grad, other[name].grad
        assert a is not None and b is not None  # noqa: PT018
        shares.append(float((a - b).norm() / b.norm()))
    if max(shares) > CLOSE:
        raise SystemExit(f"the two are not the same step: loss and gradients differ by {max(shares):.2g} ({shares})")
    return max(shares)


# ---- the record -------------------------------------------------------------------------------


def assembled(rows: Sequence[dict[str, Cell]], args: argparse.Namespace) -> Record:
    heads = {
        "step": "{shape}",
        "ours": "{ours_s} s",
        "SpecForge": "{theirs_s} s",
        f"time, ours / theirs (goal {MOST_TIME})": "{time}",
        f"memory, ours / theirs (goal {MOST_MEMORY})": "{memory} ({ours_gb} of {theirs_gb} GB)",
        "loss and gradients differ by": "{differ}",
    }
    return record_of(
        args,
        title="EAGLE-3's step beside SpecForge's",
        target=None,
        needs=["a checkout of SpecForge; measured at a6b6b02, its plain loss in place of its Triton kernel"],
        setup=f"fp32, one row of S tokens, {PASSES} passes, chunks of {CHUNK}, a target of 2 U tokens, random "
        f"weights, equal on both sides; {args.threads} thread(s), {args.rounds} interleaved rounds.",
        intervals="95 % bootstrap intervals over rounds",
        formats={
            "ours_s": ".2f",
            "theirs_s": ".2f",
            "time": ".2f",
            "memory": ".2f",
            "ours_gb": ".2f",
            "theirs_gb": ".2f",
        },
        rows=list(rows),
        tables={"eagle3-step": table_of(heads)},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="a checkout of SpecForge")
    parser.add_argument(
        "--shapes",
        type=lambda text: [Shape.parsed(part) for part in text.split(",")],
        default=[Shape(1024, 512, 16_000), Shape(2048, 256, 8_000)],
        metavar="SxHxU,...",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
