"""Everything that only a GPU can show, in one call of seven minutes at most: figures first, then tests.

What measures is one process (`gpu_measure.py`), whose sections write their records as they go; where one of them takes
the process along, another goes on behind it. The profile and the tests are processes of their own. Everything lands in
`--out`: records, logs, `gpu.json` which says how the parts went; at the end all figures stand in a table. The
machine's own Python is used as it is: packages that it lacks are taken from wheels in `.wheels`, where there are any:

    make gpu-wheels                         # on a machine with a network: fetch them
    python3 benchmarks/gpu.py --out found   # on the machine with the GPU; then python benchmarks/tables.py
    python3 benchmarks/gpu.py --out found --sections 8b,speculation
    python benchmarks/gpu.py --rehearse     # the whole plan on a CPU, with tiny shapes: fails where a figure is lost

Read next: `common/gpu_front.py`, how a part is run and shown; `on_gpu/sections.py`, what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "common"))
# by its folder: the package is on the path of the parts alone
from gpu_front import Part, Went, add_wheels, answer_of, compact, copied_checkout, ends_of, problems_in, run  # noqa: E402

sys.path.pop()  # other names there are those of tests as well

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
ABSENT = ("datasets", "deepspeed", "torchao", "pydivsufsort")
"""What a machine with a GPU may lack, and a rehearsal pretends to."""
SECTIONS = ("card", "8b", "speculation", "4b", "1.7b", "1b", "layer", "training", "samplers", "losses", "profile")
BUDGET = 420  # seconds of all parts together
LAST_TEST = 25  # seconds to begin with, for a test that has begun, and for the record
TESTS_SECONDS = 110
WAITS = "tests/benchmarks/test_waits.py"
TESTS = (
    "tests/gpu/test_graphs.py",
    "tests/decoding/kernels",
    "tests/decoding/backbone/test_lean.py",
    "tests/gpu/test_cuda.py",
    "tests/gpu/test_unread.py",
    "tests/gpu/test_enumeration.py",
    "tests/gpu/test_families.py",
    f"{WAITS}::test_a_planted_wait_is_counted",
    f"{WAITS}::test_the_engine_waits_only_where_it_says",
)
FEW = "(draft-model or mixtral or cpu) and not compiled"
"""Of a rehearsal, which imports every file and runs these; the others take minutes on a CPU."""

# what measures comes first: a call that is cut short keeps the figures
PARTS = (
    Part("measure", ("benchmarks/gpu_measure.py",), 275, SECTIONS[:-1]),
    # by itself, behind what is timed: a profiler that has looked makes later launches dearer
    Part("profile", ("benchmarks/gpu_measure.py",), 35, SECTIONS[-1:]),
    Part("tests", ("benchmarks/gpu_tests.py",), TESTS_SECONDS),
)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.rehearse:
        return rehearse(args.out)
    with tempfile.TemporaryDirectory() as place:
        surroundings = importable(Path(place), tiny=args.tiny)
        problem = missing(surroundings, tiny=args.tiny)
        if problem is not None:
            print(f"gpu: {problem}", file=sys.stderr)
            return 2
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "progress.json").unlink(missing_ok=True)  # of an earlier run
        went = []
        until = time.monotonic() + args.seconds
        for part in chosen(args):
            went.append(run(part, args.out, surroundings, within=until - time.monotonic(), tiny=args.tiny))
            written = write_record(went, args, Path(place), surroundings)
    shown(args.out, went)
    return int(not written or any(each.outcome != "passed" for each in went))


def chosen(args: argparse.Namespace) -> list[Part]:
    """The parts that were asked for, each with its sections and files."""
    parts = []
    for part in PARTS:
        sections = tuple(name for name in part.sections if name in args.sections)
        if part.name not in args.parts or (part.sections and not sections):
            continue
        words = part.words
        if part.name == "tests":
            words += (*TESTS, "--workers", "1" if args.tiny else "8")
            words += ("--only", FEW) if args.tiny else ("--seconds", str(part.seconds - LAST_TEST))
        parts.append(Part(part.name, words, part.seconds, sections))
    return parts


def importable(place: Path, *, tiny: bool = False) -> dict[str, str]:
    """The environment of the parts: this checkout as the package, then what the machine has, then wheels."""
    (place / "draftsmith").symlink_to(ROOT)
    paths = [str(place), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    surroundings = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",  # a part that is killed keeps what it has printed
        "HF_HUB_OFFLINE": "1",
        "TRITON_INTERPRET": "0",
        # a profiler that goes while there are graphs would take them along
        "TEARDOWN_CUPTI": "0",
        "DISABLE_CUPTI_LAZY_REINIT": "1",
        **({"GPU_TESTS_ON": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if tiny else {}),
    }
    if WHEELS.is_dir() and absent_packages(surroundings):
        surroundings["PYTHONPATH"] += os.pathsep + str(add_wheels(WHEELS, place))
    return surroundings


def missing(surroundings: dict[str, str], *, tiny: bool = False) -> str | None:
    """Why nothing can be run here, and what to do; None where all is well."""
    absent = absent_packages(surroundings)
    if absent:
        return (
            f"{sys.executable} lacks {', '.join(absent)}; run `make gpu-wheels` where there is a network, and bring "
            f"the folder {WHEELS.name} along"
        )
    if not tiny and answer_of("import torch; print(torch.cuda.is_available())", surroundings) != "True":
        return "no CUDA device is visible; --rehearse runs the plan on a CPU, and `make test` shows everything else"
    return None


def absent_packages(surroundings: dict[str, str]) -> list[str]:
    """Which of the needed packages a part would not find."""
    code = (
        "import importlib.util as u\n"
        f"print(*(p for p, m in {NEEDED!r}.items() if u.find_spec(m.split('.')[0]) is None))"
    )
    return answer_of(code, surroundings).split()


def write_record(went: list[Went], args: argparse.Namespace, place: Path, surroundings: dict[str, str]) -> bool:
    """How the parts went as `gpu.json`; those that were not asked for are named. Whether it could be written."""
    by_name = {row["part"]: row for each in went for row in each.rows}
    names = [*SECTIONS, "tests"]
    command = "python3 benchmarks/gpu.py"
    if set(args.sections) != set(SECTIONS) or len(args.parts) != len(PARTS):
        command += f" --parts {','.join(args.parts)} --sections {','.join(args.sections)}"
    noted = {
        "command": command,
        "rows": [by_name.get(name, {"part": name, "outcome": "not run"}) for name in names],
        "ends": {each.part: each.end for each in went if each.outcome != "passed"},
    }
    (place / "noted.json").write_text(json.dumps(noted), encoding="utf-8")
    words = ["benchmarks/gpu_parts.py", str(place / "noted.json"), "--json", str((args.out / "gpu.json").resolve())]
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=surroundings, check=False).returncode == 0


def shown(out: Path, went: list[Went]) -> None:
    """The ends of logs of what failed, then all figures: whoever sees the end of the output alone sees these."""
    for each in went:
        if each.outcome != "passed":
            print(f"\n--- {each.part}: {each.outcome}\n{ends_of(out / f'gpu-{each.part}.log')}")
    print(f"\n{compact(out, went)}", flush=True)


def rehearse(out: Path) -> int:
    """The whole plan on a CPU, in a copy without its history, without what the other machine may lack."""
    with tempfile.TemporaryDirectory() as place:
        checkout = copied_checkout(ROOT, Path(place) / "checkout")
        lacking = Path(place) / "lacking"
        lacking.mkdir()
        names = "".join(f"sys.modules[{name!r}] = None\n" for name in ABSENT)
        (lacking / "sitecustomize.py").write_text(f"import sys\n{names}", encoding="utf-8")
        told = {"PYTHONPATH": str(lacking), "DRAFTSMITH_COMMIT": "a-rehearsal"}
        words = [str(checkout / "benchmarks" / "gpu.py"), "--tiny", "--out", str(out.resolve()), "--seconds", "3600"]
        code = subprocess.run([sys.executable, *words], cwd=checkout, env={**os.environ, **told}).returncode
    lost = problems_in(out, [*SECTIONS, "tests"])
    for problem in lost:
        print(f"rehearsal: {problem}")
    print("rehearsal: every figure would come home" if not (lost or code) else "rehearsal: figures would be lost")
    return int(bool(lost)) or code


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="where records are written")
    for flag, known in (("--parts", names), ("--sections", list(SECTIONS))):
        parser.add_argument(flag, type=lambda text: text.split(","), default=known, help="of " + ", ".join(known))
    parser.add_argument("--seconds", type=float, default=BUDGET, help="of all parts together")
    parser.add_argument("--tiny", action="store_true", help="on a CPU: checks the plan, measures nothing")
    parser.add_argument("--rehearse", action="store_true", help="the plan on a CPU as on a machine that lacks much")
    args = parser.parse_args(argv)
    for flag, given, known in (("part", args.parts, names), ("section", args.sections, list(SECTIONS))):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"no {flag} is called {', '.join(unknown)}; there are {', '.join(known)}")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
