"""Make the embedded target anew: `make tiny-target`.

Trains `recipes/target-tiny.yaml` on the standard library, makes it deeper by `recipes/target-deep.yaml` on that and
on the sources of packages that are installed with this one, and has it leave its loops by
`recipes/target-unlooped.yaml`. Of the last two stages the weights between where each began and where it ended are
kept: they foretell held-out text better than the ends (Wortsman et al. 2022, arXiv 2109.01903). Weights, tokenizer,
resolved recipe, loss curve and model card go into `recipes/assets/tiny-target/`. Read next: `train/run.py`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.rows.sources import stdlib_texts
from ..errors import EnvironmentFailure
from ..storage import write_text
from .recipe.load import load_recipe
from .recipe.model import Recipe
from .train import train

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PACKAGES = ("accelerate", "datasets", "fsspec", "huggingface_hub", "networkx", "peft", "pydantic", "rich")
"""Whose sources the second stage reads beside the standard library's: a deeper model learns a small text by heart."""
_PROMPTS, _WRITTEN = 24, 64
"""Prompts, and tokens behind each, of the greedy text that is looked through for loops."""
_STAGES = ("target-tiny", "target-deep", "target-unlooped")
_WAY = {"target-deep": 0.5, "target-unlooped": 0.3}
"""How far each stage's weights are kept: the last no further than its loops ask for, as it costs held-out loss."""
_KEPT = "kept"
"""Folder of a stage's run that holds them."""
_ASSET = Path(__file__).parent.parent / "recipes" / "assets" / "tiny-target"


def main() -> None:
    """Train (or go on training), then replace the asset."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runs = Path("runs")
    write_text(runs / f"{_STAGES[1]}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts()))
    for name in _STAGES:
        train(name, out=runs / name)
        keep_part(runs / name)
    install(runs / _STAGES[-1], _ASSET)


def texts() -> Iterator[str]:
    """What the second stage reads: the library's training split, and the packages' modules but their tests."""
    yield from filter(None, (text for _, text in stdlib_texts("train")))
    for package in _PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise EnvironmentFailure(f"{package} is not installed, and the target reads its sources: pip install it")
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            if not {"tests", "test", "_vendor"}.intersection(path.parts):
                yield from filter(None, [path.read_text(encoding="utf-8", errors="replace")])


def keep_part(run: Path) -> None:
    """Write what is kept of a stage into the run's folder, with its tokenizer; nothing of a stage from scratch."""
    from ..decoding.backbone.loading import load_model, no_progress_bars
    from ..trainers.student.deeper import deepened

    recipe = load_recipe(str(run / "run.yaml")).recipe
    if recipe.model.start_from is None:
        return
    began = load_model(recipe.model.start_from)
    if recipe.model.deepen_to is not None:
        began = deepened(began, recipe.model.deepen_to)
    made = between(began, load_model(str(run / "target")), _WAY[recipe.name])
    shutil.rmtree(run / _KEPT, ignore_errors=True)
    shutil.copytree(run / "target", run / _KEPT)
    with no_progress_bars():
        made.save_pretrained(run / _KEPT)


def install(run: Path, asset: Path) -> None:
    """Put what is kept of the last stage into the package and write its card."""
    from ..decoding.backbone.loading import load_model

    recipe = load_recipe(str(run / "run.yaml")).recipe
    shutil.rmtree(asset, ignore_errors=True)
    shutil.copytree(run / _KEPT, asset)
    for name in ("run.yaml", "metrics.jsonl"):
        shutil.copyfile(run / name, asset / name)
    model = load_model(str(asset))
    loss = held_out_loss(model, recipe, asset)
    (asset / "README.md").write_text(card(recipe, model.config, loss, loop_share(asset)), encoding="utf-8")


def between(began: PreTrainedModel, ended: PreTrainedModel, way: float) -> PreTrainedModel:
    """A model of two models' weights, in bf16: `way` 0 has those of the first, 1 those of the second."""
    import torch

    made: Any = ended
    with torch.no_grad():
        for mine, other in zip(ended.parameters(), began.parameters(), strict=True):
            mine.lerp_(other, 1 - way)
    made.to(torch.bfloat16)
    made.config.use_cache = True
    return ended


def held_out_loss(model: PreTrainedModel, recipe: Recipe, tokenizer: Path) -> float:
    """Nats per token on `loop.validate_rows` held-out rows of the recipe."""
    import torch

    from ..data.rows.prepare import prepare
    from ..decoding.backbone.hub import load_tokenizer
    from ..trainers.labels import labelled
    from ..trainers.loop.order import RowOrder
    from ..trainers.packed.passes import hidden_states

    rows = prepare(recipe.data, load_tokenizer(str(tokenizer)), out=None).validation
    loop, head = recipe.loop, model.get_output_embeddings()
    chosen = RowOrder(len(rows), min(loop.validate_rows, len(rows)), loop.seed).step(0)
    total = count = 0.0
    with torch.inference_mode():
        for at in range(0, len(chosen), loop.micro_rows):
            batch = rows.batch(chosen[at : at + loop.micro_rows])
            hidden_PH, label_P = labelled(hidden_states(model, batch), batch)
            total += float(torch.nn.functional.cross_entropy(head(hidden_PH), label_P, reduction="sum"))
            count += len(label_P)
    return total / count


def loop_share(asset: Path) -> float:
    """The share of the greedy text that stands in loops, behind the prompts that evaluation decodes too."""
    from ..data.prompts import load_prompts
    from ..decoding.backbone.loading import load_target
    from ..decoding.engine import autoregressive
    from ..decoding.sampling import Warper
    from ..eval.config import EvalConfig
    from ..eval.measure.metrics import degeneracy
    from ..eval.measure.requests import first_turns, make_requests

    target = load_target(str(asset))
    room = target.context - _WRITTEN - 1
    config = EvalConfig(limit=_PROMPTS, max_new_tokens=_WRITTEN, prompt_tokens=min(128, room))
    prompts = load_prompts(config.prompts, limit=config.limit, seed=config.seed)
    ids = first_turns(make_requests(target, prompts, config))
    done = autoregressive(target, ids, warper=Warper(0.0), max_new_tokens=_WRITTEN, eos_ids=target.eos_ids)
    return degeneracy(done.tokens).loop_share


def card(recipe: Recipe, config: Any, loss: float, looped: float) -> str:
    """The model card.

    Args:
        loss: nats per held-out token.
        looped: the share of its greedy text in loops.
    """
    from ..eval.measure.environment import environment

    tokens = recipe.loop.steps * recipe.loop.batch_rows * recipe.data.sequence_length
    versions, used = environment()["versions"], ("torch", "transformers", "tokenizers")
    return f"""---
library_name: transformers
license: apache-2.0
tags: [speculative-decoding, draftsmith]
---
# tiny-target: the target that ships with draftsmith

A causal LM of the Qwen3 architecture ({config.num_hidden_layers} layers, hidden size {config.hidden_size}, vocabulary
{config.vocab_size}) trained on the sources of the Python standard library and of {len(_PACKAGES)} open packages
({", ".join(_PACKAGES)}), so that every part of
draftsmith can be tried offline. It writes plausible Python and knows nothing else.

- As deep as models that people serve, so that a call of it costs many times what a layer does, and a drafter may pay.
  Three stages: 8 layers from scratch (`target-tiny`), then {config.num_hidden_layers}, the new ones beginning as
  identities (`target-deep`), then away from the loops of its own text, by unlikelihood (`{recipe.name}`:
  {recipe.loop.steps} steps, {tokens / 1e6:.1f} M tokens). The second's weights are halfway between its beginning and
  its end, the third's {10 * _WAY["target-unlooped"]:.0f} tenths of the way.
- Held-out loss {loss:.3f} nats per token over held-out library files (split by a hash of the module's path).
- Of its greedy text, {_WRITTEN} tokens behind each of {_PROMPTS} prompts from held-out library files,
  {100 * looped:.0f} % stands in loops: stretches that repeat a period of up to 16 tokens three times or more.
- `run.yaml` is the last stage's resolved recipe, `metrics.jsonl` its loss curve; `make tiny-target` makes all three
  anew. The first one alone is the target that the tables of 0.1.0 were measured on; after the second it was
  `312fea7be8c3`, which some tables name.
- Versions: {", ".join(f"{name} {versions[name]}" for name in used)}.
- The training text is under the licences of Python (PSF) and of those packages (Apache-2.0, BSD, MIT); the weights
  come under Apache-2.0.

Depth, width and vocabulary were chosen by what a layer costs beside a call: in models that people serve a drafter's
layer takes a thirtieth of one.

<!-- run: proportions -->
<!-- end -->

<!-- table: proportions -->
<!-- end -->
"""


if __name__ == "__main__":
    main()
