"""Losses of short runs that are kept as data, and how they are made anew.

    PYTHONPATH=tests python -m helpers.runs.golden_curves

writes the file anew: a change of any curve is a change of what is learnt.

Read next: `trainers/loop/test_golden_curves.py`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from faults import toy

FILE = Path(__file__).with_name("golden_curves.json")
STEPS = 20
METHODS = ["target", "distill", "medusa", "eagle", "eagle3", "mtp", "dflash"]
KL = {"objective": {"kl": 5.0}}
"""In place of cross-entropies, most of which is the target's own entropy here: no change of what is learnt moves that."""
GIVEN: dict[str, dict[str, Any]] = {
    "eagle": {"eagle": {"ce": 0.0}} | KL,
    "eagle3": {"eagle3": {"ce": 0.0, "passes": 3}} | KL,
    "dflash": {"block": {"size": 4, "decoder_layers": 1, "anchors": 12}},
}


def curve(out: Path, method: str, *, faster: float = 1.0, **loop: Any) -> list[float]:
    """The training loss of every step of a small run; `faster`: times its learning rate."""
    how = {"steps": STEPS, "every": STEPS, "validate_every": STEPS, "lr": faster * 3e-3} | loop
    toy.run(toy.loop_in(out, method, given=GIVEN.get(method), **how))
    found = toy.losses(out)
    return [found[step] for step in range(1, STEPS + 1)]


def kept(method: str) -> list[float]:
    """The curve of that method as it is kept."""
    curves: dict[str, list[float]] = json.loads(FILE.read_text())["curves"]
    return curves[method]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        curves = {method: curve(Path(folder) / method, method) for method in METHODS}
    lines = ",\n".join(f'  "{name}": {json.dumps([round(loss, 6) for loss in each])}' for name, each in curves.items())
    made = json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})
    FILE.write_text(f'{{\n "made_with": {made},\n "curves": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    main()
