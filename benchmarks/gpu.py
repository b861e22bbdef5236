"""Everything that only a GPU can show, in nine minutes: tests, kernels, decoding, samplers, losses, a training step.

Each part is a process with a time of its own; one that fails, or is late, takes no other along. Every part writes its
record into `--out`, tests too (how many passed, by file), and `gpu.json` says how the parts went. The machine's own
Python is used as it is: nothing is installed into it. Packages that it lacks are taken from wheels in `.wheels`, where
there are any:

    make gpu-wheels                         # on a machine with a network: fetch them
    make gpu                                # on the machine with the GPU
    python benchmarks/gpu.py --parts tests,samplers --out results
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / ".wheels"
NEEDED = {
    # package: module; what parts import. datasets, deepspeed and peft may be missing
    "accelerate": "accelerate",
    "httpx2": "httpx2",
    "hypothesis": "hypothesis",
    "jinja2": "jinja2",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pytest": "pytest",
    "rich": "rich",
    "ruamel.yaml": "ruamel.yaml",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "torch": "torch",
    "tqdm": "tqdm",
    "transformers": "transformers",
    "tyro": "tyro",
}
BUDGET = 540  # seconds of all parts together
LAST_TEST = 20  # seconds to begin with, for a test that has begun, and for the record


@dataclass(frozen=True)
class Part:
    """A process, its arguments behind `python`, and the most seconds that it may take."""

    name: str
    words: tuple[str, ...]
    seconds: int
    record: str
    """The file in `--out` that `--json` is followed by."""


def _tests(name: str, *tests: str, seconds: int) -> Part:
    """Tests, the last of which begins so early that the record is still written."""
    words = ("benchmarks/gpu_tests.py", *tests, "--seconds", str(seconds - LAST_TEST))
    return Part(name, words, seconds, f"gpu-{name}.json")


# what measures comes first: a call that is cut short keeps the figures
PARTS = (
    Part("decoding", ("benchmarks/decode_gpu.py",), 105, "decode-gpu.json"),
    Part("samplers", ("benchmarks/samplers.py",), 40, "samplers.json"),
    Part("training step", ("benchmarks/step_gpu.py",), 60, "step-gpu.json"),
    _tests("tests", *(f"tests/gpu/test_{name}.py" for name in ("cuda", "unread", "graphs", "families")), seconds=120),
    _tests("audit", "tests/gpu/test_enumeration.py", seconds=55),
    _tests("kernels", "tests/decoding/kernels", seconds=50),
    _tests("scripts", "tests/benchmarks/test_decode_gpu.py", seconds=30),
    Part("loss memory", ("benchmarks/loss_memory.py", "--device", "cuda"), 45, "loss-memory-gpu.json"),
    Part("row memory", ("benchmarks/row_memory.py", "--device", "cuda"), 35, "row-memory-gpu.json"),
)


@dataclass(frozen=True)
class Went:
    """How a part went."""

    part: str
    outcome: str
    """`passed`, `failed (exit code ...)` or `late`."""
    seconds: float
    record: str | None
    end: str
    """The last lines that it printed."""


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    with tempfile.TemporaryDirectory() as place:
        surroundings = importable(Path(place))
        problem = missing(surroundings)
        if problem is not None:
            print(f"gpu: {problem}", file=sys.stderr)
            return 2
        args.out.mkdir(parents=True, exist_ok=True)
        went = [run(part, args.out, surroundings) for part in PARTS if part.name in args.parts]
        print(table(went))
        written = write_record(went, args, Path(place), surroundings)
    return int(not written or any(each.outcome != "passed" for each in went))


def importable(place: Path) -> dict[str, str]:
    """The environment of the parts: this checkout as the package, then what the machine has, then wheels."""
    (place / "draftsmith").symlink_to(ROOT)
    paths = [str(place), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0"}
    wheels = sorted(WHEELS.glob("*.whl"))
    if wheels and absent_packages(surroundings):
        more = place / "wheels"
        words = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(more)]
        # wheels of another Python are refused by pip, which says so; what is still missing is named behind it
        subprocess.run([sys.executable, "-m", "pip", *words, *map(str, wheels)], check=False)
        surroundings["PYTHONPATH"] += os.pathsep + str(more)
    return surroundings


def missing(surroundings: dict[str, str]) -> str | None:
    """Why nothing can be run here, and what to do; None where all is well."""
    absent = absent_packages(surroundings)
    if absent:
        return (
            f"{sys.executable} lacks {', '.join(absent)}; run `make gpu-wheels` where there is a network, and bring "
            f"the folder {WHEELS.name} along"
        )
    if answer_of("import torch; print(torch.cuda.is_available())", surroundings) != "True":
        return "no CUDA device is visible; everything else is shown by `make test` on a CPU"
    return None


def absent_packages(surroundings: dict[str, str]) -> list[str]:
    """Which of the needed packages a part would not find."""
    code = (
        "import importlib.util as u\n"
        f"print(*(p for p, m in {NEEDED!r}.items() if u.find_spec(m.split('.')[0]) is None))"
    )
    return answer_of(code, surroundings).split()


def answer_of(code: str, surroundings: dict[str, str]) -> str:
    """The last line that some code prints in the environment of the parts."""
    done = subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, check=True)
    return (done.stdout.splitlines() or [""])[-1].strip()


def run(part: Part, out: Path, surroundings: dict[str, str]) -> Went:
    """A part to its end, or to that of its time; what it prints is kept in a log."""
    record = (out / part.record).resolve()
    words = [sys.executable, *part.words, "--json", str(record)]
    before = record.stat().st_mtime_ns if record.is_file() else None  # of an earlier run, or "not yet measured"
    log = out / f"gpu-{part.name.replace(' ', '-')}.log"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        try:
            code = subprocess.run(
                words, cwd=ROOT, env=surroundings, stdout=stream, stderr=subprocess.STDOUT, timeout=part.seconds
            ).returncode
            outcome = "passed" if code == 0 else f"failed (exit code {code})"
        except subprocess.TimeoutExpired:
            outcome = "late"
    print(f"gpu: {part.name}: {outcome}", flush=True)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    written = part.record if record.is_file() and record.stat().st_mtime_ns != before else None
    return Went(part.name, outcome, time.monotonic() - began, written, lines[-1][:120] if lines else "")


def write_record(went: list[Went], args: argparse.Namespace, place: Path, surroundings: dict[str, str]) -> bool:
    """How the parts went as `gpu.json`; those that were not asked for are named. Whether it could be written."""
    by_name = {each.part: each for each in went}
    noted = {
        "command": "make gpu" if len(went) == len(PARTS) else f"python benchmarks/gpu.py --parts {','.join(by_name)}",
        "rows": [
            {"part": part.name, "outcome": each.outcome, "seconds": each.seconds, "record": each.record}
            if (each := by_name.get(part.name))
            else {"part": part.name, "outcome": "not run"}
            for part in PARTS
        ],
        "ends": {each.part: each.end for each in went if each.outcome != "passed"},
    }
    (place / "noted.json").write_text(json.dumps(noted), encoding="utf-8")
    words = ["benchmarks/gpu_parts.py", str(place / "noted.json"), "--json", str((args.out / "gpu.json").resolve())]
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=surroundings, check=False).returncode == 0


def table(went: list[Went]) -> str:
    """A line for each part."""
    lines = [f"{'part':14} {'outcome':24} {'seconds':>8}  record", "-" * 70]
    for each in went:
        lines.append(f"{each.part:14} {each.outcome:24} {each.seconds:8.1f}  {each.record or '-'}")
        if each.outcome != "passed":
            lines.append(f"    {each.end}")
    return "\n".join(lines)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="where records are written")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=names, help="of " + ", ".join(names))
    args = parser.parse_args(argv)
    unknown = sorted(set(args.parts) - set(names))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(names)}")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
