"""An adapter per domain on one draft: acceptance on its domain and the other, before and after.

Without `--domain`, two kinds of the standard library's sources: its test suite, which neither the
embedded target nor `distill-tiny` was trained on, and its windowed programs (idlelib, tkinter,
turtledemo); files are split by the hash of their path (`data/rows/sources.py`), and prompts come from
those that nobody has seen. `--domain NAME=FILE`, once per domain, takes the rows of a JSONL file in
their place, split by the hash of the row; the adapters never see the rows that prompts are made of.
The base draft is `distill-tiny`'s; each domain's adapter is trained on it by `distill-lora-tiny`,
the second one from the folder of the first, so that one folder holds both. Then base and adapters
draft for the same prompts, switched between requests without reloading.
Intervals are bootstraps over prompts, those of differences over the same prompts of both. What was
trained or measured is kept in `--out`: a run that was cut goes on where it was, with the same
settings. Everything is trained once a seed of `--seeds`; prompts and rows are the same for all.

    python benchmarks/domains.py --out runs/domains
    python benchmarks/domains.py --out runs/domains-300 --base runs/distill-tiny --steps 300
    python benchmarks/domains.py --out runs/domains-3 --seeds 0,1,2 --json domains.json
    python benchmarks/domains.py --out runs/chat-domains --base runs/distill-chat \\
        --target runs/target-chat/target --domain maths=maths.jsonl --domain stories=stories.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import Sums, audited, decoded, gain, mean
from draftsmith.benchmarks.common.kept import same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, named_by_seed, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.benchmarks.common.runs import add_audit, by_seed, kept, parser_of, settings_of, trained
from draftsmith.data.prompts import load_prompts, render
from draftsmith.data.rows.sources import split_of
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.model.adapters import BASE
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.registry import load_drafter
from draftsmith.storage import write_text

DOMAINS: dict[str, tuple[str, ...] | Path] = {"tests": ("test",), "windows": ("idlelib", "tkinter", "turtledemo")}
"""Folders of the standard library, or a file of rows."""
TEMPERATURES = (0.0, 1.0)
DRAFT_LENGTH = 4
MEASURES = ("alpha_hat", "tau")


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("seeds", "json"))
    for domain, source in args.domain.items():
        write_rows(args, domain, source)
    measured = []
    for part in by_seed(args):
        folder = train_all(part)
        measured.append(kept(part.out / "measured.json", partial(measure, folder, part)))
    record = assembled(measured, args)
    print(printed(record))
    finish(record, args.json)


# ---- rows ------------------------------------------------------------------------------------


def write_rows(args: argparse.Namespace, domain: str, source: tuple[str, ...] | Path) -> None:
    """Rows to train on, held-out ones and prompts of a domain, as JSONL."""
    for split in ("train", "validation", "prompts"):
        path = args.out / "rows" / domain / f"{split}.jsonl"
        if path.is_file():
            continue
        rows = list(rows_of(source, split) if isinstance(source, Path) else texts(source, split))
        if split == "train":  # files by a hash: the first ones are no sample of the others
            rows = sorted(rows, key=lambda row: digest(row["id"]))[: args.files]
        if split == "prompts" and not isinstance(source, Path):
            rows = list(prompts(rows))
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def rows_of(file: Path, split: str) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file that belong to a split: a twentieth is held out, another prompts."""
    for line in file.read_text(encoding="utf-8").split("\n"):
        number = digest(line)[0] % 20
        if line and split == {0: "prompts", 1: "validation"}.get(number, "train"):
            yield {"id": digest(line).hex()[:12], **json.loads(line)}


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def texts(folders: Sequence[str], split: str) -> Iterator[dict[str, str]]:
    """The files of a domain's folders that belong to a split."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            module = path.relative_to(root).as_posix()
            if split_of(module) == split:
                text = path.read_text(encoding="utf-8", errors="replace")
                if text.strip():
                    yield {"id": module, "text": text}


def prompts(rows: Sequence[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Stretches of held-out files, ending at six places of each file."""
    for row in rows:
        text = row["text"]
        for part in range(1, 7):
            cut = text.rfind("\n", 0, len(text) * part // 7) + 1
            start = text.find("\n", max(0, cut - 1200)) + 1
            if cut - start >= 300:
                yield {"id": f"{row['id']}@{cut}", "text": text[start:cut]}


# ---- drafts ----------------------------------------------------------------------------------


def train_all(args: argparse.Namespace) -> Path:
    """The drafter folder that holds both adapters; every run is trained now if it is not there."""
    common = {"target.path": args.target, "probe.every_steps": ""}
    base = args.base or trained("distill-tiny", args.out / "base", common | settings_of(args))
    last = base / "drafter"
    for domain in args.domain:
        rows = args.root / "rows" / domain
        values = {
            **common,
            "data.source": rows / "train.jsonl",
            "data.validation": rows / "validation.jsonl",
            "model.start_from": last,
            "lora.name": domain,
            "loop.steps": args.steps,
            "loop.validate_every": args.steps,
            "eval.prompts": rows / "validation.jsonl",
        }
        last = trained("distill-lora-tiny", args.out / f"adapter-{domain}", values | settings_of(args)) / "drafter"
    return last


# ---- measures --------------------------------------------------------------------------------


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Sums per prompt of every domain, temperature and adapter, all drafted by one model."""
    target = load_target(args.target)
    drafter = load_drafter(folder, target, draft_length=DRAFT_LENGTH)
    assert isinstance(drafter, DraftModel)
    measured: dict[str, Any] = {}
    for domain in args.domain:
        source = str(args.root / "rows" / domain / "prompts.jsonl")
        ids = [render(prompt, target.tokenizer, limit=128) for prompt in load_prompts(source, limit=args.limit)]
        for temperature in TEMPERATURES:
            measured[f"{domain} {temperature:g}"] = by_adapter(target, drafter, ids, temperature, args)
    drafter.use(next(iter(args.domain)))
    adapters = {name: folder / "adapters" / name / "adapter_model.safetensors" for name in drafter.adapters}
    return {
        "sums": measured,
        "verdict": audited(target, drafter, ids, args, at_most=12).verdict,
        "prompts": len(ids),
        "adapter_bytes": {name: path.stat().st_size for name, path in adapters.items()},
        "base_bytes": (folder / "model.safetensors").stat().st_size,
        "drafter": str(folder),
    }


def by_adapter(
    target: Backbone, drafter: DraftModel, prompts: Sequence[list[int]], temperature: float, args: argparse.Namespace
) -> dict[str, Sums]:
    """Sums of every prompt by adapter, the base's too."""
    measured = {}
    for name in (BASE, *args.domain):
        drafter.use(None if name == BASE else name)
        measured[name] = decoded(target, drafter, prompts, temperature, max_new_tokens=args.max_new_tokens, batch=1)
    return measured


# ---- the record -------------------------------------------------------------------------------


def assembled(measured: Sequence[dict[str, Any]], args: argparse.Namespace) -> Record:
    """One row per domain of the prompts, temperature and measure."""
    first = measured[0]
    domains = list(first["adapter_bytes"])
    sizes = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in first["adapter_bytes"].items())
    verdict = ", ".join(sorted({part["verdict"] for part in measured}))
    heads = {"prompts of": "{domain}", "T": "{T}", "measure": "{measure}", "base": "{base}"}
    heads |= {f"adapter {name}": f"{{{name}}}" for name in domains}
    heads |= {f"{name} - base": f"{{{name}_less_base}}" for name in domains}
    return record_of(
        args,
        title="An adapter per domain",
        target=target_weights(args.target),
        drafters=drafter_weights(named_by_seed("draft", [Path(part["drafter"]) for part in measured], args.seeds)),
        setup=f"Base draft {first['base_bytes'] / 1e6:.2f} MB, adapters {sizes}, {args.steps} steps each; at most "
        f"{first['prompts']} prompts per domain, {args.max_new_tokens} new tokens, draft length {DRAFT_LENGTH}, fp32.",
        intervals="95 % bootstrap intervals over prompts, of differences paired",
        audit={"verdict": verdict},
        formats=dict.fromkeys(["base", *domains], ".2f") | {f"{name}_less_base": "+.3f" for name in domains},
        rows=[row_of(key, name, measured, domains) for key in first["sums"] for name in MEASURES],
        tables={"domains": table_of(heads)},
        notes=[f"audit with an adapter: {verdict}"],
    )


def row_of(key: str, name: str, measured: Sequence[dict[str, Any]], domains: Sequence[str]) -> dict[str, Any]:
    """A measure of every arm on one domain's prompts at one temperature."""
    domain, temperature = key.rsplit(" ", 1)
    arms = {arm: [part["sums"][key][arm] for part in measured] for arm in (BASE, *domains)}
    return {
        "domain": domain,
        "T": float(temperature),
        "measure": name.replace("_", "-"),
        "base": mean(arms[BASE], name),
        **{arm: mean(arms[arm], name) for arm in domains},
        **{f"{arm}_less_base": gain(arms[arm], arms[BASE], name) for arm in domains},
    }


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/domains")
    parser.add_argument("--base", type=Path, help="a finished run of distill-tiny, for all seeds; default: new ones")
    parser.add_argument("--target", default="tiny", help="its target: a folder, or tiny")
    parser.add_argument("--domain", type=named_file, action="append", metavar="NAME=FILE")
    parser.add_argument("--steps", type=int, default=150, help="of each adapter")
    parser.add_argument("--files", type=int, default=120, help="files or rows per domain")
    parser.add_argument("--limit", type=int, default=24, help="prompts per domain")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    add_audit(parser, tokens=6_000, sequences=500_000)
    args = parser.parse_args()
    args.domain = dict(args.domain) if args.domain else DOMAINS
    return args


def named_file(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    return name, Path(path)


if __name__ == "__main__":
    main()
