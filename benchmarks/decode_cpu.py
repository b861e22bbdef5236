"""Our engine against transformers' on a CPU: same weights, interleaved; batches; where time goes.

1. For every prompt all arms take turns, greedy, batch of one: plain, draft model, prompt
   lookup. Ratios are of tokens per second, with 95 % bootstrap intervals over prompts; every arm
   must write the same tokens.
2. Eight prompts at once against one after another, in our engine.
3. The overhead ledger: what share of decoding passes outside the models' forwards, with a random
   target of 30 M parameters and a draft of a tenth.

    python benchmarks/decode_cpu.py --drafter runs/distill-tiny/drafter
    python benchmarks/decode_cpu.py --prompts 2 --max-new-tokens 16 --drafter ...
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftsmith.data.prompts import load_prompts, render
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.target.attention import use_grouped_attention
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.loading import load_target
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.family import load_draft_model
from draftsmith.eval.measure.environment import environment
from draftsmith.eval.measure.metrics import ratio
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from transformers import AutoModelForCausalLM

GREEDY = Warper(0.0)
LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2}
Arm = Callable[[list[int]], list[int]]


def main() -> None:
    args = _arguments()
    target = load_target(args.target)
    drafter = load_draft_model(Path(args.drafter), target, draft_length=args.draft_length)
    prompts = [
        render(prompt, target.tokenizer, limit=args.prompt_tokens)
        for prompt in load_prompts("stdlib", limit=args.prompts)
    ]
    arms = make_arms(target, drafter, args.max_new_tokens)
    seconds, same = run(arms, prompts, args.rounds)
    show(seconds, same, args)
    show_batches(target, drafter, prompts, args)
    show_ledger(args)


def make_arms(target: Backbone, drafter: DraftModel, limit: int) -> dict[str, Arm]:
    """The decoders, each from prompt ids to new ids."""
    # models of their own, as anybody loads them: ours attend by another function
    model: Any = AutoModelForCausalLM.from_pretrained(target.name, dtype=torch.float32, use_safetensors=True)
    assistant: Any = AutoModelForCausalLM.from_pretrained(drafter.backbone.name, use_safetensors=True)
    # as many drafted tokens as ours, no early stop: both decoders do the same work
    assistant.generation_config.num_assistant_tokens = drafter.draft_length
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    lookup = PromptLookup(draft_length=10, longest=2)

    def theirs(ids: list[int], **how: object) -> list[int]:
        tensor = torch.tensor([ids])
        done = model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **how,
        )
        return done[0, len(ids) :].tolist()

    def ours(ids: list[int], proposer: Proposer) -> list[int]:
        return generate(target, proposer, [ids], warper=GREEDY, max_new_tokens=limit).tokens[0]

    return {
        "ours, autoregressive": lambda ids: autoregressive(target, [ids], warper=GREEDY, max_new_tokens=limit).tokens[
            0
        ],
        "transformers, generate": theirs,
        "ours, speculative": lambda ids: ours(ids, drafter),
        "transformers, assisted": lambda ids: theirs(ids, assistant_model=assistant),
        "ours, prompt lookup": lambda ids: ours(ids, lookup),
        "transformers, prompt lookup": lambda ids: theirs(ids, **LOOKUP),
    }


def run(arms: dict[str, Arm], prompts: list[list[int]], rounds: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
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
    machine = environment()
    print(
        f"{machine['processor']}, {machine['threads']} threads, torch {torch.__version__}, "
        f"transformers {machine['versions']['transformers']}"
    )
    print(
        f"{count} prompts, {args.max_new_tokens} new tokens, draft length {args.draft_length}, "
        f"{args.rounds} interleaved rounds, prefill included, fp32, T = 0"
    )
    for name, each in seconds.items():
        speed = args.max_new_tokens * args.rounds * count / each.sum()
        print(f"{name:28} {speed:8.1f} tokens/s   same tokens on {same[name]} of {count} prompts")
    for ours, theirs, bar in (
        ("ours, autoregressive", "transformers, generate", 1.1),
        ("ours, speculative", "transformers, assisted", 1.5),
        ("ours, prompt lookup", "transformers, prompt lookup", 1.2),
        ("ours, speculative", "ours, autoregressive", 0.0),
    ):
        figures = ratio(seconds[theirs], seconds[ours])
        wanted = f" (at least {bar}x)" if bar else ""
        print(f"{ours} / {theirs}: {figures.value:.2f}x [{figures.low:.2f}, {figures.high:.2f}]{wanted}")


def show_batches(target: Backbone, drafter: DraftModel, prompts: list[list[int]], args: argparse.Namespace) -> None:
    """Eight prompts at once against the same eight one by one, in turn; prefill left out."""
    eights = [prompts[at : at + 8] for at in range(0, len(prompts), 8)]
    common = {"warper": GREEDY, "max_new_tokens": args.max_new_tokens}
    together, alone = np.zeros(len(eights)), np.zeros(len(eights))
    for _ in range(args.rounds):
        for number, some in enumerate(eights):
            together[number] += generate(target, drafter, some, **common).decode_seconds
            alone[number] += sum(generate(target, drafter, [ids], **common).decode_seconds for ids in some)
    figures = ratio(alone, together)
    interval = f" [{figures.low:.2f}, {figures.high:.2f}]" if len(eights) > 1 else ""
    print(f"speculative, batch of 8 / one by one: {figures.value:.2f}x{interval} (at least 2.5x)")


def show_ledger(args: argparse.Namespace) -> None:
    """Share of decoding outside the forwards of target and draft."""
    target, draft = _random(512, 8), _random(256, 2)
    print(
        f"overhead ledger: random target of {_millions(target):.1f} M parameters, draft of "
        f"{_millions(draft):.1f} M, batch of 1, fp32"
    )
    arms: dict[str, Proposer] = {
        "draft model, T = 0": DraftModel(draft, target.vocabulary, draft_length=args.draft_length),
        "draft model, T = 1": DraftModel(draft, target.vocabulary, draft_length=args.draft_length),
        "prompt lookup, T = 0": PromptLookup(draft_length=10),
    }
    prompt = list(range(1, 129))
    for name, proposer in arms.items():
        warper = Warper(1.0) if name.endswith("1") else GREEDY
        shares = []
        for _ in range(args.rounds + 1):
            with _timed(target, draft) as inside:
                done = generate(target, proposer, [prompt], warper=warper, max_new_tokens=args.max_new_tokens)
            # the first forwards are the prefills, timed apart
            shares.append(1 - sum(inside[2 if proposer.draft_steps else 1 :]) / done.decode_seconds)
        share = float(np.median(shares[1:]))
        step = 1e3 * done.decode_seconds / done.target_calls
        print(f"{name:24} {share:6.1%} outside forwards of {step:.1f} ms a step (at most 15 %)")


@contextmanager
def _timed(*backbones: Backbone) -> Iterator[list[float]]:
    """Seconds of every forward of the models."""
    seconds: list[float] = []
    plain: list[Any] = [each._run for each in backbones]

    def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            start = time.perf_counter()
            done = forward(*args, **how)
            seconds.append(time.perf_counter() - start)
            return done

        return call

    for each, forward in zip(backbones, plain, strict=True):
        each._run = watched(forward)  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        for each, forward in zip(backbones, plain, strict=True):
            each._run = forward  # type: ignore[method-assign]


def _random(hidden: int, layers: int) -> Backbone:
    torch.manual_seed(0)
    sizes = ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=hidden // 64,
        kv_heads=hidden // 64,
        head_size=64,
        intermediate=3 * hidden,
        max_positions=1024,
    )
    model = fresh_model(sizes, vocabulary=4096, eos=None).eval().requires_grad_(False)
    use_grouped_attention(model)
    return Backbone(model, name="random")


def _millions(backbone: Backbone) -> float:
    return sum(p.numel() for p in backbone.model.parameters()) / 1e6


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
