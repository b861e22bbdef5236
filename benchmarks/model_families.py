"""What works with which family of models: decoding, training, probing and audits, on small random weights.

For every family a model of two to four layers is made, with a tokenizer, and saved as users have theirs. Then

- greedy text is compared with `transformers`' own `generate`: plain, and with prompt lookup drafting for it;
- a draft model, Medusa heads and EAGLE-3 are trained for some steps by the recipes' command, with probes;
- what was trained is audited on the model.

Weights are random, so that acceptance means nothing; what is shown is that every part runs and that the output
stays the model's. A family that a method refuses has the reason in its cell. Families that the installed
`transformers` does not have are left out and named.

    python benchmarks/model_families.py
    python benchmarks/model_families.py --families llama,qwen3_next --methods medusa
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from draftsmith.benchmarks.common.acceptance import audited
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.random_models import (
    DEEPSEEK,
    EXPERTS,
    GROUPED,
    RECURRENT,
    WINDOWED,
    in_int8,
    random_model,
)
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.common.runs import add_audit, names_of, parser_of
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import auto_class
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import DraftsmithError
from draftsmith.launch.cli import main as command
from transformers import PreTrainedTokenizerBase

TEXT = "".join(f"def f{n}(x, y):\n    return x * {n} + y  # {n % 7} of {n % 5}\n" for n in range(120))
NEW_TOKENS, PROMPTS = 24, 4
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # name of the config, and with "-int8" behind it of one whose checkpoint is rounded -> models that people know by
    # it, settings
    "llama": ("Llama 2, 3", GROUPED),
    "mistral": ("Mistral, sliding window", GROUPED | WINDOWED["mistral"]),
    "qwen2": ("Qwen2, Qwen2.5", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", GROUPED),
    "qwen3_moe": ("Qwen3 MoE", GROUPED | EXPERTS | {"num_experts": 4}),
    "gemma2": ("Gemma 2, capped logits", GROUPED | WINDOWED["gemma2"]),
    "gemma3_text": ("Gemma 3", GROUPED | WINDOWED["gemma3_text"]),
    "gpt_oss": ("gpt-oss, sinks", GROUPED | WINDOWED["gpt_oss"]),
    "llama4_text": ("Llama 4, chunked", GROUPED | WINDOWED["llama4_text"]),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi": ("Phi 2, biased logits", {}),
    "phi3": ("Phi 3, Phi 4", {"num_key_value_heads": 2}),
    "cohere": ("Command R, scaled logits", {"num_key_value_heads": 2}),
    "granite": ("Granite 3, scaled logits", {"num_key_value_heads": 2}),
    "olmo2": ("OLMo 2", {"num_key_value_heads": 2}),
    "deepseek_v3": ("DeepSeek-V3, keys and values of low rank", DEEPSEEK),
    "gpt2": ("GPT-2", {}),
    "gpt_neox": ("Pythia", {}),
    "gemma3": ("Gemma 3 that sees images, on text", {}),
    "qwen3_vl": ("Qwen3-VL, on text", {}),
    "qwen3-int8": ("Qwen3, a checkpoint in int8 (torchao)", GROUPED),
    **{
        name: (known, RECURRENT[name])
        for name, known in {
            "lfm2": "LFM2",
            "lfm2_moe": "LFM2 MoE",
            "lfm3": "LFM3",
            "kimi_linear": "Kimi Linear",
            "bailing_hybrid": "Ling 3.0",
            "qwen3_next": "Qwen3-Next",
            "qwen3_5_text": "Qwen3.5",
            "qwen3_5_moe_text": "Qwen3.5 MoE",
            "olmo_hybrid": "OLMo hybrid",
            "nemotron_h": "Nemotron-H",
            "falcon_h1": "Falcon-H1",
            "granitemoehybrid": "Granite 4",
            "bamba": "Bamba",
            "zamba2": "Zamba2",
        }.items()
    },
}
METHODS = {
    "distill": ["distill-tiny", "--model.layers", "1", "--model.hidden", "32", "--model.heads", "2"]
    + [
        "--model.kv_heads",
        "1",
        "--model.head_size",
        "16",
        "--model.intermediate",
        "32",
        "--model.architecture",
        "qwen3",
    ],
    "medusa": ["medusa-tiny", "--medusa.heads", "2"],
    "eagle3": ["eagle3-tiny", "--eagle3.passes", "2", "--eagle3.vocabulary", "128", "--eagle3.layers", "[0,1,2]"],
}
STEPS = 2
SMALL = {
    "loop.steps": STEPS,
    "loop.batch_rows": 2,
    "loop.micro_rows": 2,
    "loop.validate_rows": 2,
    "loop.validate_every": STEPS,
    "loop.precision": "fp32",
    "data.sequence_length": 64,
    "checkpoint.every_steps": STEPS,
    "optimizer.warmup_steps": 0,
    "probe.every_steps": STEPS,
    "probe.prompts": 2,
    "probe.max_new_tokens": 8,
}


def main() -> None:
    args = arguments()
    rows: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory() as place:
        texts = Path(place) / "texts.jsonl"
        texts.write_text("".join(json.dumps({"text": TEXT[at:]}) + "\n" for at in range(0, 2000, 50)))
        tokenizer = train_tokenizer([TEXT], 400)
        for name in args.families:
            rows.append(tried(name, tokenizer, texts, Path(place) / name, args))
    record = assembled(rows, args)
    print(printed(record))
    finish(record, args.json)


def tried(
    name: str, tokenizer: PreTrainedTokenizerBase, texts: Path, folder: Path, args: argparse.Namespace
) -> dict[str, Cell]:
    """A family's row."""
    known, settings = FAMILIES[name]
    row: dict[str, Cell] = {"family": name, "known": known}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    save(name, folder / "target", settings | sizes)
    tokenizer.save_pretrained(folder / "target")
    target = load_target(str(folder / "target"))
    ids = tokenizer(TEXT)["input_ids"]
    prompts = [list(ids[at : at + 24]) for at in range(0, 24 * PROMPTS, 24)]
    row["greedy"], row["drafted"] = (f"{count} of {PROMPTS}" for count in equal_texts(target, folder, prompts))
    for method in args.methods:
        row[method], row[f"{method}_audit"] = trained(method, folder, texts, prompts, target, args)
    return row


def config_of(name: str) -> str:
    """The name of the config in that of a row."""
    return name.partition("-")[0]


def save(name: str, folder: Path, settings: dict[str, Any]) -> None:
    """A row's checkpoint, rounded where the row says so."""
    random_model(config_of(name), **settings).save_pretrained(folder)
    if name == config_of(name):
        return
    rounded = in_int8(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    rounded.save_pretrained(folder)


def equal_texts(target: Backbone, folder: Path, prompts: Sequence[list[int]]) -> tuple[int, int]:
    """Of how many prompts the greedy text is that of `transformers`: plain, and drafted for."""
    own = auto_class(target.model.config).from_pretrained(folder / "target", local_files_only=True).eval()
    theirs = [written_by(own, prompt) for prompt in prompts]
    plain = autoregressive(target, prompts, warper=Warper(0.0), max_new_tokens=NEW_TOKENS)
    drafted = generate(target, PromptLookup(draft_length=4), prompts, warper=Warper(0.0), max_new_tokens=NEW_TOKENS)
    return same(plain.tokens, theirs), same(drafted.tokens, theirs)


def same(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    return sum(list(a) == list(b) for a, b in zip(mine, theirs, strict=True))


@torch.no_grad()
def written_by(model: Any, prompt: list[int]) -> list[int]:
    """`generate`'s own greedy continuation."""
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(made[0, len(prompt) :].tolist())


def trained(
    method: str, folder: Path, texts: Path, prompts: list[list[int]], target: Backbone, args: argparse.Namespace
) -> tuple[str, str]:
    """How training and its probe went, and the audit of what was trained."""
    out = folder / method
    recipe, *own = METHODS[method]
    values = SMALL | {"target.path": folder / "target", "data.source": texts, "data.cache": folder / "rows"}
    flags = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    with quiet() as said:
        code = command(["train", recipe, "--out", str(out), *own, *flags])
    if code:
        return f"exit code {code}: {' '.join(said.getvalue().split())[:160]}", ""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    probes = sum(each["kind"] == "probe" for each in records)
    finite = all(each["loss"] == each["loss"] for each in records if each["kind"] == "train")
    went = f"{STEPS} steps{'' if finite else ', NOT finite'}, {probes} probe{'s' * (probes != 1)}"
    try:
        return went, audited(target, load_drafter(out / "drafter", target), prompts, args).verdict
    except DraftsmithError as error:
        return went, f"refused: {error}"


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """What a command prints, kept."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said
    logging.getLogger("draftsmith").setLevel(logging.WARNING)


def assembled(rows: list[dict[str, Cell]], args: argparse.Namespace) -> Record:
    """A row for each family."""
    heads = {
        "models": "{known}",
        "config": "`{family}`",
        "greedy text is `generate`'s": "{greedy}",
        "with drafts": "{drafted}",
    }
    names = {"distill": "a draft model", "medusa": "Medusa", "eagle3": "EAGLE-3"}
    for method in args.methods:
        heads[names[method]] = f"{{{method}}}"
        heads[f"audit of {names[method]}"] = f"{{{method}_audit}}"
    return record_of(
        args,
        title="Families of models",
        target=None,
        setup=f"Random weights of 2 to 3 layers, fp32; {PROMPTS} prompts of 24 tokens, {NEW_TOKENS} new tokens; "
        f"training of {STEPS} steps with a probe behind them; audits of {args.audit_tokens:,} tokens.",
        rows=rows,
        tables={"model-families": table_of(heads)},
    )


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--families", type=names_of(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--methods", type=names_of(METHODS), default=list(METHODS))
    add_audit(parser, tokens=500, sequences=10_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
