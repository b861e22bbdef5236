"""An adapter per domain on one draft: acceptance on its domain and the other, before and after.

Without `--domain`, two kinds of the standard library's sources: its test suite, which neither the
embedded target nor `distill-tiny` was trained on, and its windowed programs (idlelib, tkinter,
turtledemo); files are split by the hash of their path (`data/rows/stdlib.py`), and prompts come from
those that nobody has seen. `--domain NAME=FILE`, once per domain, takes the rows of a JSONL file in
their place, split by the hash of the row; the adapters never see the rows that prompts are made of.
The base draft is `distill-tiny`'s; each domain's adapter is trained on it by `distill-lora-tiny`,
the second one from the folder of the first, so that one folder holds both. Then base and adapters
draft for the same prompts, switched between requests without reloading.
Intervals are bootstraps over prompts, those of differences over the same prompts of both. What was
trained or measured is kept in `--out`: a run that was cut goes on where it was, with the same
settings.

    python benchmarks/domains.py --out runs/domains
    python benchmarks/domains.py --out runs/domains-300 --base runs/distill-tiny --steps 300
    python benchmarks/domains.py --out runs/chat-domains --base runs/distill-chat \\
        --target runs/target-chat/target --domain maths=maths.jsonl --domain stories=stories.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftsmith.benchmarks.kept import is_finished, same_settings
from draftsmith.data.prompts import load_prompts, render
from draftsmith.data.rows.stdlib import split_of
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.loading import load_target
from draftsmith.drafters.model.adapters import BASE
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.environment import environment
from draftsmith.eval.measure.metrics import Counts, Interval, counts_of, difference, ratio
from draftsmith.eval.report.tables import interval as shown
from draftsmith.launch.train import train
from draftsmith.storage import write_text

DOMAINS: dict[str, tuple[str, ...] | Path] = {"tests": ("test",), "windows": ("idlelib", "tkinter", "turtledemo")}
"""Folders of the standard library, or a file of rows."""
TEMPERATURES = (0.0, 1.0)
DRAFT_LENGTH = 4
Decoded = dict[str, list[list[float]]]


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args))
    for domain, source in args.domain.items():
        write_rows(args, domain, source)
    run = trained(args)
    place = args.out / "measured.json"
    if not place.is_file():
        write_text(place, json.dumps(measure(run, args), indent=1) + "\n")
    print("\n".join(table(json.loads(place.read_text()))))


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


def trained(args: argparse.Namespace) -> Path:
    """The drafter folder that holds both adapters; every run is trained now if it is not there."""
    base = args.base or args.out / "base"
    own = {name.replace(".", "__"): value for name, value in args.set}
    if not is_finished(base):
        values = {"target__path": args.target, "probe__every_steps": "", **own}
        train("distill-tiny", out=base, **values)
    last = base / "drafter"
    for domain in args.domain:
        run = args.out / f"adapter-{domain}"
        if not is_finished(run):
            rows = args.out / "rows" / domain
            values = {
                "target__path": args.target,
                "data__source": str(rows / "train.jsonl"),
                "data__validation": str(rows / "validation.jsonl"),
                "model__start_from": str(last),
                "lora__name": domain,
                "loop__steps": args.steps,
                "loop__validate_every": args.steps,
                "probe__every_steps": "",
                "eval__prompts": str(rows / "validation.jsonl"),
            }
            train("distill-lora-tiny", out=run, **{**values, **own})
        last = run / "drafter"
    return last


# ---- measures --------------------------------------------------------------------------------


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Counts per prompt of every domain, temperature and adapter, all drafted by one model."""
    target = load_target(args.target)
    drafter = load_drafter(folder, target, draft_length=DRAFT_LENGTH)
    assert isinstance(drafter, DraftModel)
    found: dict[str, Any] = {}
    for domain in args.domain:
        source = str(args.out / "rows" / domain / "prompts.jsonl")
        asked = load_prompts(source, limit=args.limit)
        ids = [render(prompt, target.tokenizer, limit=128) for prompt in asked]
        for temperature in TEMPERATURES:
            found[f"{domain} {temperature:g}"] = decoded(target, drafter, ids, temperature, args)
    drafter.use(next(iter(args.domain)))
    evidence = AuditConfig(tokens=args.audit_tokens, sequences=args.audit_sequences, prompts=min(12, len(ids)))
    return {
        "counts": found,
        "verdict": audit(target, drafter, ids, evidence).verdict,
        "environment": environment(),
        "steps": args.steps,
        "prompts": len(ids),
        "new_tokens": args.max_new_tokens,
        "adapter_bytes": {
            name: (folder / "adapters" / name / "adapter_model.safetensors").stat().st_size
            for name in drafter.adapters
        },
        "base_bytes": (folder / "model.safetensors").stat().st_size,
    }


def decoded(
    target: Backbone, drafter: DraftModel, prompts: Sequence[list[int]], temperature: float, args: argparse.Namespace
) -> Decoded:
    """Per adapter and prompt: emitted tokens, steps, sum of alpha_hat, tested positions."""
    found: Decoded = {name: [] for name in (BASE, *args.domain)}
    for number, ids in enumerate(prompts):
        for name in found:
            drafter.use(None if name == BASE else name)
            done = generate(
                target,
                drafter,
                [ids],
                warper=Warper(temperature),
                eos_ids=target.eos_ids,
                max_new_tokens=args.max_new_tokens,
                requests=[number],
            )
            found[name] += [numbers(each) for each in counts_of(done.steps)]
    return found


def numbers(counts: Counts) -> list[float]:
    alpha, tested = float(counts.alpha_hat_D.sum()), float(counts.tested_D.sum())
    return [float(counts.emitted), float(counts.steps), alpha, tested]


MEASURES = {"alpha_hat": (2, 3), "tau": (0, 1)}


def gain(mine: list[list[float]], other: list[list[float]], name: str) -> Interval:
    """After - before, with its interval over the prompts, the same ones on both sides."""
    return difference(sums(mine, name), sums(other, name))


def own(counts: list[list[float]], name: str) -> list[float | None]:
    return ratio(*sums(counts, name)).to_list()


def sums(counts: list[list[float]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tops and bottoms of every prompt, [R] each."""
    counts_RX = np.array(counts)
    top, bottom = MEASURES[name]
    return counts_RX[:, top], counts_RX[:, bottom]


def table(found: dict[str, Any]) -> list[str]:
    """Markdown: one row per domain of the prompts, temperature and measure."""
    place, bytes_of = found["environment"], found["adapter_bytes"]
    lines = [
        f"{place['processor']}, {place['threads']} threads, torch {torch.__version__}, fp32; base "
        f"draft {found['base_bytes'] / 1e6:.2f} MB, adapters "
        f"{', '.join(f'{name} {size / 1e6:.2f} MB' for name, size in bytes_of.items())}, "
        f"{found['steps']} steps each; at most {found['prompts']} prompts per domain, "
        f"{found['new_tokens']} new tokens, draft length {DRAFT_LENGTH}; 95 % intervals over "
        f"prompts, of differences paired; audit with an adapter: {found['verdict']}.",
        "",
    ]
    domains = list(bytes_of)
    head = [
        "prompts of",
        "T",
        "measure",
        "base",
        *(f"adapter {name}" for name in domains),
        *(f"{name} - base" for name in domains),
    ]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key, counts in found["counts"].items():
        domain, temperature = key.rsplit(" ", 1)
        for name in MEASURES:
            cells = [shown(own(counts[arm], name)) for arm in (BASE, *domains)]
            gains = [signed(gain(counts[arm], counts[BASE], name)) for arm in domains]
            row = [domain, temperature, name.replace("_", "-"), *cells, *gains]
            lines.append("| " + " | ".join(row) + " |")
    return lines


def signed(found: Interval) -> str:
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/domains"))
    parser.add_argument("--base", type=Path, help="a finished run of distill-tiny; default: new")
    parser.add_argument("--target", default="tiny", help="its target: a folder, or tiny")
    parser.add_argument("--domain", type=named_file, action="append", metavar="NAME=FILE")
    parser.add_argument("--steps", type=int, default=150, help="of each adapter")
    parser.add_argument("--files", type=int, default=120, help="files or rows per domain")
    parser.add_argument("--limit", type=int, default=24, help="prompts per domain")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--audit-tokens", type=int, default=6_000)
    parser.add_argument("--audit-sequences", type=int, default=500_000)
    parser.add_argument(
        "--set",
        type=lambda word: tuple(word.split("=", 1)),
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="another value for the recipes",
    )
    args = parser.parse_args()
    args.domain = dict(args.domain) if args.domain else DOMAINS
    return args


def named_file(word: str) -> tuple[str, Path]:
    name, _, path = word.partition("=")
    return name, Path(path)


if __name__ == "__main__":
    main()
