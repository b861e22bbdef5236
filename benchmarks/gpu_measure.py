"""Sections of the plan for a GPU, in one process: what is imported, made and warmed up serves all of them.

    python benchmarks/gpu_measure.py --out found --sections card,8b
    python benchmarks/gpu_measure.py --out found --tiny      # on a CPU: checks the sections

Read next: `on_gpu/sections.py`, the sections; `gpu.py`, which runs this.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    import torch
    from draftsmith.benchmarks.on_gpu import sections
    from draftsmith.benchmarks.on_gpu.setting import Setting, tiny

    if not args.tiny and not torch.cuda.is_available():
        print("gpu_measure: no CUDA device is visible; --tiny checks the sections on a CPU", file=sys.stderr)
        return 2
    known = {section.name: section for section in sections.SECTIONS}
    unknown = sorted(set(args.sections or known) - set(known))
    if unknown:
        print(f"gpu_measure: no section is called {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    setting = replace(tiny(args.out) if args.tiny else Setting(args.out), own_kernels=not args.torch_alone)
    return sections.run([known[name] for name in args.sections or known], setting)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where records are written")
    parser.add_argument("--sections", type=lambda text: text.split(","), help="all by default")
    parser.add_argument("--tiny", action="store_true", help="on a CPU: checks the sections, measures nothing")
    parser.add_argument("--torch-alone", action="store_true", help="without kernels of our own")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
