"""Make the embedded target anew: `make tiny-target`.

Trains `recipes/target-tiny.yaml` on the standard library, makes it deeper by `recipes/target-deep.yaml` on that and
on the sources of packages that are installed with this one, and puts weights, tokenizer, resolved recipe, loss curve
and model card into `recipes/assets/tiny-target/`. Read next: `train.py`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ..data.rows.stdlib import stdlib_texts
from ..errors import EnvironmentFailure
from ..storage import write_text
from .recipe.load import load_recipe
from .train import train

_PACKAGES = ("accelerate", "datasets", "fsspec", "huggingface_hub", "networkx", "peft", "pydantic", "rich")
"""Whose sources the second stage reads beside the standard library's: a deeper model learns a small text by heart."""
_STAGES = ("target-tiny", "target-deep")
_ASSET = Path(__file__).parent.parent / "recipes" / "assets" / "tiny-target"


def main() -> None:
    """Train (or go on training), then replace the asset."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runs = Path("runs")
    write_text(runs / "target-deep.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts()))
    for name in _STAGES:
        train(name, out=runs / name)
    install(runs / _STAGES[-1], _ASSET)


def texts() -> Iterator[str]:
    """What the second stage reads: the library's training split, and the packages' modules but their tests."""
    yield from filter(None, (text for _, text in stdlib_texts("train")))
    for package in _PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise EnvironmentFailure(
                f"{package} is not installed, whose sources the target reads: `make test` installs it"
            )
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            if not {"tests", "test", "_vendor"}.intersection(path.parts):
                yield from filter(None, [path.read_text(encoding="utf-8", errors="replace")])


def install(run: Path, asset: Path) -> None:
    """Copy a finished run into the package and write its card."""
    shutil.rmtree(asset, ignore_errors=True)
    shutil.copytree(run / "target", asset)
    for name in ("run.yaml", "metrics.jsonl"):
        shutil.copyfile(run / name, asset / name)
    (asset / "README.md").write_text(card(asset), encoding="utf-8")


def card(asset: Path) -> str:
    """The model card, its figures read from the run's own records."""
    from ..eval.measure.environment import environment

    records = [json.loads(line) for line in (asset / "metrics.jsonl").read_text().splitlines()]
    validation = [each for each in records if each["kind"] == "validation"][-1]
    recipe = load_recipe(str(asset / "run.yaml")).recipe
    config = json.loads((asset / "config.json").read_text(encoding="utf-8"))
    tokens = recipe.loop.steps * recipe.loop.batch_rows * recipe.data.sequence_length
    versions, used = environment()["versions"], ("torch", "transformers", "tokenizers")
    return f"""---
library_name: transformers
license: apache-2.0
tags: [speculative-decoding, draftsmith]
---
# tiny-target: the target that ships with draftsmith

A causal LM of the Qwen3 architecture ({config["num_hidden_layers"]} layers, hidden size
{config["hidden_size"]}, vocabulary {config["vocab_size"]}) trained on the sources of the Python standard library and
of {len(_PACKAGES)} open packages ({", ".join(_PACKAGES)}), so that every part of draftsmith can be tried
offline. It writes plausible Python and knows nothing else.

- As deep as models that people serve, so that a call of it costs many times what a layer does, and a drafter may pay.
  Two stages: 8 layers from scratch (`target-tiny`), then {config["num_hidden_layers"]}, the new ones beginning as
  identities (`target-deep`).
- Held-out loss {validation["validation_loss"]:.3f} nats per token over held-out library files (split by a hash of the
  module's path), after {recipe.loop.steps} steps and {tokens / 1e6:.1f} M tokens of the second stage.
- `run.yaml` is its resolved recipe, `metrics.jsonl` its loss curve; `make tiny-target` makes both stages anew. The
  first one alone is the target that the tables of 0.1.0 were measured on.
- Versions: {", ".join(f"{name} {versions[name]}" for name in used)}.
- The training text is under the licences of Python (PSF) and of those packages (Apache-2.0, BSD, MIT); the
  weights come under Apache-2.0.
"""


if __name__ == "__main__":
    main()
