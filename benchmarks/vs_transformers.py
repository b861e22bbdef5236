"""Our engine against transformers' `generate` and assisted generation: same weights, interleaved.

For every prompt all four arms take turns, greedy, batch of one. Ratios are of tokens per second,
with 95 % bootstrap intervals over prompts; every arm must write the same tokens.

    python benchmarks/vs_transformers.py --drafter quickstart/run/drafter
    python benchmarks/vs_transformers.py --prompts 2 --max-new-tokens 16 --drafter ...
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from draftsmith.data.prompts import load_prompts, render
from draftsmith.decoding.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.loading import load_target
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.draft_model import DraftModel
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.environment import environment
from draftsmith.eval.metrics import ratio
from transformers import AutoModelForCausalLM

GREEDY = Warper(0.0)
Arm = Callable[[list[int]], list[int]]


def main() -> None:
    args = _arguments()
    target = load_target(args.target)
    drafter = load_drafter(args.drafter, target, draft_length=args.draft_length)
    prompts = [
        render(prompt, target.tokenizer, limit=args.prompt_tokens)
        for prompt in load_prompts("stdlib", limit=args.prompts)
    ]
    arms = make_arms(target, drafter, args.max_new_tokens)
    seconds, same = run(arms, prompts, args.rounds)
    show(seconds, same, args)


def make_arms(target: Backbone, drafter: DraftModel, limit: int) -> dict[str, Arm]:
    """The four decoders, each from prompt ids to new ids."""
    # models of their own, as anybody loads them: ours attend by another function
    model: Any = AutoModelForCausalLM.from_pretrained(target.name, dtype=torch.float32)
    assistant: Any = AutoModelForCausalLM.from_pretrained(drafter.backbone.name)
    # as many drafted tokens as ours, no early stop: both decoders do the same work
    assistant.generation_config.num_assistant_tokens = drafter.draft_length
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0

    def theirs(ids: list[int], **how: object) -> list[int]:
        tensor = torch.tensor([ids])
        done = model.generate(
            tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=limit,
            do_sample=False, eos_token_id=None, pad_token_id=0, **how,
        )  # fmt: skip
        return done[0, len(ids) :].tolist()

    return {
        "ours, autoregressive": lambda ids: autoregressive(
            target, [ids], warper=GREEDY, max_new_tokens=limit
        ).tokens[0],
        "transformers, generate": theirs,
        "ours, speculative": lambda ids: generate(
            target, drafter, [ids], warper=GREEDY, max_new_tokens=limit
        ).tokens[0],
        "transformers, assisted": lambda ids: theirs(ids, assistant_model=assistant),
    }


def run(
    arms: dict[str, Arm], prompts: list[list[int]], rounds: int
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Seconds per arm and prompt, and on how many prompts each arm wrote the first arm's tokens."""
    seconds = {name: np.zeros(len(prompts)) for name in arms}
    same = dict.fromkeys(arms, 0)
    for call in arms.values():
        call(prompts[0])
    for number, ids in enumerate(prompts):
        written = {}
        for _ in range(rounds):
            for name, call in arms.items():
                start = time.perf_counter()
                written[name] = call(ids)
                seconds[name][number] += time.perf_counter() - start
        reference = written["ours, autoregressive"]
        for name, tokens in written.items():
            same[name] += tokens == reference
    return seconds, same


def show(seconds: dict[str, np.ndarray], same: dict[str, int], args: argparse.Namespace) -> None:
    count = len(next(iter(seconds.values())))
    place = environment()
    print(
        f"{place['processor']}, {place['threads']} threads, torch {torch.__version__}, "
        f"transformers {place['versions']['transformers']}"
    )
    print(f"{count} prompts, {args.max_new_tokens} new tokens, draft length {args.draft_length}, "
          f"{args.rounds} interleaved rounds, prefill included, fp32, T = 0")  # fmt: skip
    for name, each in seconds.items():
        speed = args.max_new_tokens * args.rounds * count / each.sum()
        print(f"{name:24} {speed:8.1f} tokens/s   same tokens on {same[name]} of {count} prompts")
    for ours, theirs, bar in (
        ("ours, autoregressive", "transformers, generate", 1.1),
        ("ours, speculative", "transformers, assisted", 1.3),
        ("ours, speculative", "ours, autoregressive", 0.0),
    ):
        found = ratio(seconds[theirs], seconds[ours])
        wanted = f" (at least {bar}x)" if bar else ""
        print(f"{ours} / {theirs}: {found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]{wanted}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
