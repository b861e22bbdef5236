"""Builds sdist and wheel, looks into both, and runs the wheel in empty environments. `make dist` calls this.

For each Python of 3.11 to 3.13 that this machine has: an environment outside the repository, the wheel, and
`draftsmith quickstart --steps 20` from there; then the wheel by uv, in both of its ways. The Dockerfile is linted.

    python .ci/dist.py                    # every Python there is
    python .ci/dist.py --pythons 3.11
    python .ci/dist.py --pythons none     # build, look, and uv
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
MOST_BYTES = 24_000_000
"""Of one file: the embedded target alone takes 19 MB of it."""
OUTSIDE = ("tests", "benchmarks", "quickstart", "smollm2", "runs")
NEEDED = (
    "recipes/eagle-tiny.yaml",
    "recipes/bases/",
    "recipes/assets/tiny-target/model.safetensors",
    "launch/share/",
    "eval/report/report.html.j2",
    "py.typed",
)


def main() -> None:
    args = arguments()
    run([beside("hadolint"), str(ROOT / "Dockerfile")])
    shutil.rmtree(args.out, ignore_errors=True)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(args.out), str(ROOT)])
    files = sorted(args.out.iterdir())
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)])
    faults = [f"{file.name}: {fault}" for file in files for fault in faults_of(file.stat().st_size, names_in(file))]
    if faults:
        raise SystemExit("\n".join(faults))
    (wheel,) = args.out.glob("*.whl")
    for version in args.pythons:
        python = python_of(version)
        print(f"Python {version}: {python or 'not on this machine, left out'}", flush=True)
        if python is not None:
            tried(wheel, python)
    tried_by_uv(wheel)
    print("\n".join(f"{file.stat().st_size / 1e6:5.1f} MB  {file}" for file in files))


def names_in(file: Path) -> list[str]:
    """What an sdist or a wheel holds, behind the folder that all of it is in."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    else:
        with tarfile.open(file) as archive:
            names = archive.getnames()
    return [name.partition("/")[2] for name in names]


def faults_of(size: int, names: Iterable[str]) -> Iterator[str]:
    """What a file of a release has that it should not, and what it lacks."""
    known = list(names)
    if size > MOST_BYTES:
        yield f"{size / 1e6:.1f} MB; expected at most {MOST_BYTES / 1e6:.0f}"
    for name in known:
        if name.split("/")[0] in OUTSIDE or "__pycache__" in name or ".venv" in name:
            yield f"holds {name}, which is no part of a release"
    for needed in NEEDED:
        if not any(name.startswith(needed) for name in known):
            yield f"lacks {needed}"


def python_of(version: str) -> str | None:
    """That Python on this machine; None where there is none."""
    if sys.version.startswith(f"{version}."):
        return sys.executable
    for found in (shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        if found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(found)
    return None


def tried(wheel: Path, python: str) -> None:
    """Install the wheel where nothing else is, and run it from there."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-dist-") as place:
        run([python, "-m", "venv", f"{place}/env"])
        pip = [f"{place}/env/bin/python", "-m", "pip", "install", "--quiet", "--no-compile"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        # torch first: some packages look for it while they are built
        run([*pip, *constraints, "torch", "setuptools", "wheel"])
        run(["env", "DS_BUILD_OPS=0", *pip, *constraints, str(wheel)])
        run([f"{place}/env/bin/draftsmith", "quickstart", "--steps", "20"], cwd=place)


def tried_by_uv(wheel: Path) -> None:
    """Both lines of docs/install.md. What pip was told of indexes goes along: uv does not read it."""
    of_pip = {"UV_FIND_LINKS": "find-links", "UV_DEFAULT_INDEX": "index-url", "UV_CONSTRAINT": "constraint"}
    told = {name: value for name, key in of_pip.items() if (value := pip_setting(key))}
    with tempfile.TemporaryDirectory(prefix="draftsmith-uv-") as place:
        own = {"VIRTUAL_ENV": f"{place}/env", "UV_CACHE_DIR": f"{place}/cache"}
        environment = {"DS_BUILD_OPS": "0", "UV_SYSTEM_CERTS": "1"} | own | told
        run([beside("uv"), "venv", "--quiet", "--python", sys.executable, f"{place}/env"], cwd=place)
        install = [beside("uv"), "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        run([*install, str(wheel.resolve())], cwd=place, environment=environment)
        run([f"{place}/env/bin/draftsmith", "doctor"], cwd=place)
        words = [beside("uvx"), "--quiet", "--python", sys.executable, "--from", str(wheel.resolve())]
        run([*words, "draftsmith", "doctor"], cwd=place, environment=environment)


def pip_setting(key: str) -> str:
    """What pip was told on this machine; empty where nothing was."""
    command = [sys.executable, "-m", "pip", "config", "get"]
    asked = (subprocess.run([*command, f"{of}.{key}"], capture_output=True, text=True) for of in (":env:", "global"))
    return next((done.stdout.strip() for done in asked if done.returncode == 0), "")


def beside(name: str) -> str:
    """A program of this environment."""
    return str(Path(sys.executable).with_name(name))


def run(words: list[str], cwd: str | None = None, environment: Mapping[str, str] | None = None) -> None:
    """A command that has to succeed."""
    print("+", *words, flush=True)
    if code := subprocess.run(words, cwd=cwd, env=os.environ | (environment or {}), check=False).returncode:
        raise SystemExit(code)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--pythons", nargs="+", default=list(PYTHONS), choices=[*PYTHONS, "none"], metavar="VERSION")
    args = parser.parse_args()
    args.pythons = [each for each in args.pythons if each != "none"]
    return args


if __name__ == "__main__":
    main()
