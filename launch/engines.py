"""How each serving engine is started on an exported folder, or on a draft model as it is.

What is printed works from any directory: every path is whole, every word quoted for a shell.
Read next: `export.py`, which prints it; docs/results/engines.md, what was run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RequestError


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's dynamic tree."""

    depth: int
    children: int
    """Of a node, and nodes of a depth that have some."""
    nodes: int
    """Of a verify call, the root included."""


TAKES_TREES = ("sglang",)
"""The formats whose engine is told of a tree; the others draft chains."""
HOT_IDS = "hot_token_id.json"
"""A list of the ids that are drafted, beside an export whose engine takes them from a file."""
DRAWS = ("vllm", "speculators")
"""The formats whose engine draws drafts from q where it is told so; the others take the likeliest tokens."""


@dataclass(frozen=True)
class Start:
    """What an engine has to be told."""

    target: str
    """Folder or hub name."""
    folder: str
    """Of the drafter, or its name on the hub."""
    method: str
    """As the engine calls the family."""
    tokens: int
    """Drafted tokens per target call."""
    sampled: bool
    """Whether drafts are drawn from q at temperatures above 0, where engines take the argmax unasked."""
    parallel: bool = False
    """Whether the engine has to be told that all drafts come out of one pass."""
    of_target: Mapping[str, Any] = field(default_factory=dict)
    """Words that vLLM has to find in the target's config, and does not."""
    behind_layers: Sequence[int] | None = None
    """The target's layers behind which the drafter reads, where they are not every engine's default."""
    tree: DynamicTree | None = None
    """None: a chain."""
    hot_ids: bool = False
    """Whether the folder names the tokens that are drafted (`HOT_IDS`)."""


def command(form: str, start: Start) -> str:
    """The lines that start the engine of a serving format.

    Raises:
        RequestError: the engine cannot be started on this target.
    """
    return "\n".join(f"  {line}" for line in (COMMANDS | BY_AUTHORS)[form](start))


def _vllm(start: Start) -> list[str]:
    """The method is named, or it would be guessed from the path."""
    config = {"method": start.method, "model": start.folder, "num_speculative_tokens": start.tokens}
    one_pass = {"parallel_drafting": True} if start.parallel else {}
    told = ["--hf-overrides", json.dumps(dict(start.of_target))] if start.of_target else []
    return [" ".join([_serve(start.target, config | one_pass | _drawn(start)), *map(shlex.quote, told)])]


def _speculators(start: Start) -> list[str]:
    """The folder names target, method and length; for how drafts are drawn the format has no word."""
    return [_serve(start.folder, _drawn(start))]


def _drawn(start: Start) -> dict[str, Any]:
    return {"draft_sample_method": "probabilistic"} if start.sampled else {}


def _serve(model: str, config: Mapping[str, Any]) -> str:
    return shlex.join(["vllm", "serve", model, *(["--speculative-config", json.dumps(config)] if config else [])])


def _sglang(start: Start) -> list[str]:
    """SGLang counts the root among the draft's tokens, and expands a tree as EAGLE-2 does."""
    steps = 1 if start.parallel else start.tokens
    children, nodes = (1, start.tokens + 1) if start.tree is None else (start.tree.children, start.tree.nodes)
    words = ["python", "-m", "sglang.launch_server", "--model-path", start.target]
    words += ["--speculative-algorithm", start.method, "--speculative-draft-model-path", start.folder]
    words += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(children)]
    words += ["--speculative-num-draft-tokens", str(nodes)]
    if not start.hot_ids:
        return [shlex.join(words)]
    # its form is a pickle, which is not ours to write: whoever starts it makes it of the list
    ids, hot = Path(start.folder) / HOT_IDS, Path(start.folder) / "hot_token_id.pt"
    made = f"import json, torch; torch.save(json.load(open({str(ids)!r})), {str(hot)!r})"
    return [shlex.join(["python", "-c", made]), shlex.join([*words, "--speculative-token-map", str(hot)])]


def _tensorrt_llm(start: Start) -> list[str]:
    """Its options are a YAML file, of which JSON is a part; hidden states are named nowhere else."""
    config: dict[str, Any] = {
        "decoding_type": start.method,
        "max_draft_len": start.tokens,
        "speculative_model": start.folder,
    }
    if start.behind_layers is not None:
        config["eagle3_layers_to_capture"] = list(start.behind_layers)
    options = shlex.quote(json.dumps({"speculative_config": config}))
    return [f"echo {options} > options.yaml", f"trtllm-serve {shlex.quote(start.target)} --config options.yaml"]


def _llama_cpp(start: Start) -> list[str]:
    """Both models through llama.cpp's own converter, which takes what both share from the target's folder."""
    place = Path(start.target)
    if place.is_file():
        raise RequestError(
            f"llama.cpp's converter takes the drafter's tokenizer from a folder, and {place} is a file; write one by "
            f"`draftsmith convert {place} --out FOLDER`, and name it by --target"
        )
    if not place.is_dir():
        raise RequestError(
            f"llama.cpp's converter reads the target from a folder, and {start.target!r} is none here; "
            "download it, and name its folder by --target"
        )
    shared = [] if start.method == "draft-simple" else ["--target-model-dir", start.target]
    models = {name: Path(start.folder).with_name(f"{name}.gguf") for name in ("target", "drafter")}
    convert = ["python", "convert_hf_to_gguf.py"]
    serve = ["llama-server", "-m", str(models["target"]), "-md", str(models["drafter"])]
    serve += ["--spec-type", start.method, "--spec-draft-n-max", str(start.tokens)]
    return [
        shlex.join([*convert, start.target, "--outfile", str(models["target"])]),
        shlex.join([*convert, start.folder, *shared, "--outfile", str(models["drafter"])]),
        shlex.join(serve),
    ]


def _hydra(start: Start) -> list[str]:
    """It reads a pickle, which is not ours to write: whoever starts it makes it of the weights."""
    weights, pickle = (Path(start.folder) / name for name in ("model.safetensors", "hydra_lm_head.pt"))
    made = (
        "import torch; from safetensors.torch import load_file; "
        f"torch.save(load_file({str(weights)!r}), {str(pickle)!r})"
    )
    words = ["python", "-m", "hydra.inference.cli", "--model", start.folder, "--base-model", start.target]
    return [shlex.join(["python", "-c", made]), shlex.join(words)]


COMMANDS: dict[str, Callable[[Start], list[str]]] = {
    "vllm": _vllm,
    "speculators": _speculators,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm,
    "llama.cpp": _llama_cpp,
}
"""Serving format -> lines of a shell."""
BY_AUTHORS: dict[str, Callable[[Start], list[str]]] = {"hydra": _hydra}
"""The same for the code of a paper's authors, which loads that paper's drafters alone."""
