"""What else decodes a target on a CPU: transformers and llama.cpp beside our decoder, the same prompts in turn.

Every prompt is decoded by each of them before the next one: plain decoding, drafters and methods as they were tuned,
transformers' `generate` (by itself, with its prompt lookup, with an assistant) in the same precision, and llama.cpp's
server with a GGUF file, where one is named. T = 0, one prompt at a time, as many tokens everywhere. Tokens per second;
their ratio to our plain decoding with 95 % bootstrap intervals over prompts; on how many prompts the text is ours.

    python benchmarks/other_decoders.py --target smollm2/target --drafters smollm2/eagle3 --prompts prompts.jsonl
    python benchmarks/other_decoders.py --count 2 --max-new-tokens 8      # checks the script
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Record, figure, table_of
from draftsmith.benchmarks.target_dtypes import GREEDY, add_prompts, generated, plain, prompts_of
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.eval.measure.metrics import ratio
from draftsmith.launch.check.early import NamedFolders, check_compare
from draftsmith.launch.measure.compare import arm_of
from draftsmith.launch.measure.loaded import load_named_target
from draftsmith.launch.requests import CompareRequest

Decode = Callable[[list[int], int], list[int]]
"""Token ids of a prompt, and how many are to follow."""
OURS = "draftsmith, plain"
HEADS = {"decoder": "{decoder}", "tokens/s": "{rate}", "times our plain decoding": "{ratio}", "same tokens": "{same}"}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    values = [("target.dtype", args.dtype), ("eval.max_new_tokens", str(args.max_new_tokens))]
    pairs = check_compare(CompareRequest(args.target, tuple(args.drafters), args.method, args.tuned), values)
    target = load_named_target(pairs[0])
    with ExitStack() as held:
        decoders = ours(target, pairs) | transformers_own(target, args)
        if args.llama_server is not None:
            address = held.enter_context(llama_server(args))
            decoders["llama.cpp"] = lambda ids, limit: by_llama(address, ids, limit)
        rows = measured(decoders, prompts_of(target, args), args.max_new_tokens)
    record = assembled(rows, args)
    print(printed(record))
    finish(record, args.json)


def ours(target: Backbone, pairs: Sequence[NamedFolders]) -> dict[str, Decode]:
    """Plain decoding, and each drafter and method as it was tuned."""
    decoders: dict[str, Decode] = {OURS: lambda ids, limit: plain(target, ids, limit)}
    for pair in pairs:
        for name in pair.methods:
            arm = arm_of(pair, name, target)
            arm.at(pair.recipe.eval.draft_length if arm.sweeps else None)
            decoders[f"draftsmith, {arm.name}"] = drafted(target, arm.drafter)
    return decoders


def drafted(target: Backbone, drafter: Any) -> Decode:
    def decode(ids: list[int], limit: int) -> list[int]:
        return generate(target, drafter, [ids], warper=GREEDY, max_new_tokens=limit, eos_ids=[]).tokens[0]

    return decode


def transformers_own(target: Backbone, args: argparse.Namespace) -> dict[str, Decode]:
    """`generate` in its ways, with the target's weights."""
    ways: dict[str, dict[str, Any]] = {"generate": {}}
    if args.lookup_tokens:
        ways[f"prompt lookup, {args.lookup_tokens} tokens"] = {"prompt_lookup_num_tokens": args.lookup_tokens}
    if args.assistant is not None:
        from transformers import AutoModelForCausalLM

        assistant = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=target.model.dtype)
        ways["assisted generation"] = {"assistant_model": assistant}
    return {f"transformers, {name}": partial(generated, target, **how) for name, how in ways.items()}


@contextmanager
def llama_server(args: argparse.Namespace) -> Iterator[str]:
    """The address of llama.cpp's server of the GGUF file, on as many threads as we take.

    Raises:
        SystemExit: it ended before it answered.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    words = ["-m", args.gguf, "--port", str(port), "-c", "2048", "-np", "1", "-t", str(args.threads), "--offline"]
    process = subprocess.Popen([args.llama_server, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not answers(f"{address}/health"):
            if process.poll() is not None:
                raise SystemExit(f"{args.llama_server} ended with {process.returncode} before it answered")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def by_llama(address: str, ids: list[int], limit: int) -> list[int]:
    """Greedy text of llama.cpp's server, which goes on behind the end of a text as all others do here."""
    asked = {"prompt": ids, "n_predict": limit, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    body = json.dumps({**asked, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        tokens: list[int] = json.load(reply)["tokens"]
    return tokens


def measured(decoders: dict[str, Decode], prompts: list[list[int]], limit: int) -> list[dict[str, Cell]]:
    """A row per decoder; all of them decode a prompt before the next one, and the first one twice."""
    seconds = {name: np.zeros(len(prompts)) for name in decoders}
    same = dict.fromkeys(decoders, 0)
    for number, ids in enumerate([prompts[0], *prompts]):
        written = {}
        for name, decode in decoders.items():
            start = time.perf_counter()
            written[name] = decode(ids, limit)
            if number:  # the first one warms up
                seconds[name][number - 1] = time.perf_counter() - start
                same[name] += written[name] == written[OURS]
    return [
        {
            "decoder": name,
            "rate": limit * len(prompts) / float(seconds[name].sum()),
            "ratio": figure(ratio(seconds[OURS], seconds[name]).to_list()),
            "same": f"{same[name]} of {len(prompts)}",
        }
        for name in decoders
    ]


def assembled(rows: list[dict[str, Cell]], args: argparse.Namespace) -> Record:
    return record_of(
        args,
        title="Decoders beside each other on a CPU",
        target=target_weights(args.target),
        setup=f"{args.count} prompts, {args.max_new_tokens} tokens each whatever they say, T = 0, one at a time, all "
        f"decoders in turn, threads: {args.threads}; target in {args.dtype}, llama.cpp's in its file's own "
        "quantisation, whose texts are those of other weights.",
        intervals="95 % bootstrap intervals over prompts",
        formats={"rate": ".1f", "ratio": ".2f"},
        rows=rows,
        tables={"other-decoders": table_of(HEADS)},
        notes=args.note,
    )


def path_or_none(text: str) -> Path | None:
    """`none` takes back what stands before it."""
    return None if text == "none" else Path(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny", help="folder, or `tiny`")
    parser.add_argument("--drafters", nargs="*", default=[], help="runs and folders, each as it was tuned")
    parser.add_argument("--method", default="prompt-lookup", help="as of `draftsmith compare`")
    parser.add_argument("--tuned", type=path_or_none, help="as of `draftsmith compare`")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--lookup-tokens", type=int, default=4, help="of transformers' prompt lookup; 0 leaves it out")
    parser.add_argument("--assistant", type=path_or_none, help="a draft model's folder, for assisted generation")
    parser.add_argument("--llama-server", type=path_or_none, metavar="PROGRAM", help="llama.cpp's, with --gguf")
    parser.add_argument("--gguf", type=path_or_none, metavar="FILE", help="the target's own file")
    add_prompts(parser, prompt_tokens=512)
    parser.add_argument("--note", action="append", default=[], help="what else a reader has to know")
    args = parser.parse_args()
    if (args.llama_server is None) != (args.gguf is None):
        parser.error("--llama-server and --gguf go together")
    return args


if __name__ == "__main__":
    main()
