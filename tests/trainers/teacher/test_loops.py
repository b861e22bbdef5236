"""Rows that a model writes, of which its loops alone count: which tokens, and that training on them leaves fewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.loops import in_loop
from draftsmith.decoding.backbone.loading import load_model, load_target
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.recipe.model import Recipe
from draftsmith.launch.train import train
from draftsmith.trainers.method_config import RolloutsConfig
from draftsmith.trainers.target import check_recipe
from draftsmith.trainers.teacher.loops import check_loops, only_loops

PROMPT = "import os\nimport sys\n"


def test_loops_of_written_rows_count_and_nothing_else_of_them() -> None:
    """Two continuations in the first row, the second in a loop behind a prompt that begins it; a row of text."""
    text = [1, 2, 3, 4, 5, 6, 9, 8, 9, 8, 9, 8, 9, 7]
    batch = {
        "input_ids": torch.tensor([text, [9, 8] * 7]),
        "documents": torch.tensor([[0] * 6 + [1] * 8] * 2),
        "loss_mask": torch.tensor([[False, True, True, True, True, True] + [False] + [True] * 7, [True] * 14]),
        "replaced": torch.tensor([True, False]),
    }
    new = only_loops(batch)
    # the prompt's own 9 is not the model's: what it wrote is 8 9 8 9 8 9 7
    assert new["loss_mask"][0].tolist() == [False] * 7 + [True] * 6 + [False]
    assert torch.equal(new["loss_mask"][1], batch["loss_mask"][1])


@pytest.mark.parametrize(
    ("values", "said"),
    [({"share": 0.5}, "nothing to learn from its own"), ({"unlikelihood": 2.0}, "rollouts.share is 0")],
)
def test_one_without_the_other_is_refused(values: dict[str, float], said: str) -> None:
    config = RolloutsConfig(**values)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=said):
        check_loops(config)
    with pytest.raises(RequestError, match=said):
        check_recipe(Recipe(method="target", rollouts=config))


def looping(folder: Path, text: Path, steps: int, recipe: str = "target-tiny", **values: Any) -> Path:
    """A small target, from the embedded one's tokenizer, trained on `text` for so many steps."""
    settings = {
        "data.source": text,
        "data.validation": text,
        "data.sequence_length": 64,
        "tokenizer.path": "tiny",
        "model.layers": 1,
        "model.hidden": 64,
        "loop.steps": steps,
        "loop.batch_rows": 4,
        "loop.micro_rows": 2,
        "loop.validate_rows": 2,
        "optimizer.warmup_steps": 0,
        **{name.replace("__", "."): value for name, value in values.items()},
    }
    resolved = load_recipe(recipe, [(name, str(value)) for name, value in settings.items()])
    train(resolved, out=folder)
    return folder / "target"


def loop_of(model: Path) -> tuple[list[int], list[int]]:
    """A prompt and a small target's greedy continuation of it, which is a loop."""
    target = load_target(str(model))
    ids = target.tokenizer(PROMPT)["input_ids"]
    done = autoregressive(target, [ids], warper=Warper(0.0), max_new_tokens=32, eos_ids=())
    assert all(in_loop(done.tokens[0]))
    return ids, list(done.tokens[0])


def likelihood(model: Path, prompt: list[int], answer: list[int]) -> float:
    """The mean of q(token) over the answer."""
    with torch.inference_mode():
        logits_SV = load_model(str(model))(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return float(logits_SV.softmax(-1).gather(1, torch.tensor(answer)[:, None]).mean())


def test_training_makes_a_loop_less_likely(tmp_path: Path) -> None:
    """Beside the same steps on the text alone, which make it likelier: its tokens are the commonest ones.

    Whether a greedy text leaves its loops is seen on a real target, whose card says it: a small one goes from loop to
    loop.
    """
    text = tmp_path / "text.jsonl"
    names = ["os", "re", "sys", "json", "math", "time", "string", "random"]
    texts = ["".join(f"import {name}\n" for name in [*names[at:], *names[:at]]) for at in range(8)] * 8
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    stuck = looping(tmp_path / "stuck", text, 10)
    loop = loop_of(stuck)
    on = {"model__start_from": stuck, "optimizer__lr": 4e-3}
    away = {"rollouts__prompt_tokens": 8, "rollouts__new_tokens": 24, "rollouts__unlikelihood": 20}
    alone = {"rollouts__share": 0, "rollouts__unlikelihood": 0}
    freed, still = (
        likelihood(looping(tmp_path / name, text, 10, "target-unlooped", **on, **how), *loop)
        for name, how in (("freed", away), ("still", alone))
    )
    assert still > likelihood(stuck, *loop)
    assert freed < still / 2
