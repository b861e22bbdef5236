"""A drafter that follows its target from within a trainer: `draftsmith.adapt.Callback`, for `transformers` and TRL.

    from draftsmith.adapt import Callback

    fresh = Callback("runs/mine", out="runs/fresh", every=200, values={"loop.batch_rows": 8})
    trainer = GRPOTrainer(model, reward_funcs=[reward, fresh.record], callbacks=[fresh], ...)

Every so many steps the model is saved as it is, and `draftsmith adapt` makes a round in a process of its own, which
leaves the trainer's random numbers, settings and memory alone. Read next: `launch/train/adapt.py`, a round.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .errors import RequestError
from .storage import replace_folder

_OF_A_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BEGIN_SO = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "OMPI_COMM_", "PMI_", "MV2_COMM_")
"""Variables by which a launch tells its processes how to train together: a round trains alone."""
_log = logging.getLogger(__name__)


class Callback(TrainerCallback):
    """Makes a round of `draftsmith adapt` every so many steps of a trainer that tunes the target."""

    def __init__(
        self,
        run: str | Path,
        *,
        out: str | Path,
        every: int = 100,
        rollouts: str | Path | None = None,
        flags: Sequence[str] = (),
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """What follows, and when.

        Args:
            run: a finished run of a drafter for the target as it was.
            out: the folder of the adapted run; the target is saved in it, too.
            every: steps of the trainer between two rounds.
            rollouts: where rows come from; by default what `record` writes.
            flags: of `draftsmith adapt`, as `["--steps", "50", "--rows", "128"]`.
            values: of the recipe, as `{"optimizer.lr": 1e-4}`.
        """
        if every < 1:
            raise RequestError(f"every is {every}; expected 1 or more steps between two rounds")
        self._run, self._out, self._every = Path(run), Path(out), every
        self._recorded = self._out / "recorded" / "rollouts.jsonl"
        self._rollouts = self._recorded.parent if rollouts is None else Path(rollouts)
        self._flags = [*flags, *(f"--{name}={value}" for name, value in (values or {}).items())]

    def record(self, prompts: Sequence[Any], completions: Sequence[Any], **_more: Any) -> list[None]:
        """A reward function of TRL that writes down what was generated, and rewards nothing.

        Args:
            prompts: texts, or lists of messages.
            completions: as many of the same kind.
        """
        self._recorded.parent.mkdir(parents=True, exist_ok=True)
        rows = (row_of(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True))
        with self._recorded.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return [None] * len(prompts)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **_more: Any,
    ) -> None:
        """A round behind every `every` steps, by the main process; what goes wrong in it is said and stops nothing."""
        if state.global_step % self._every or not state.is_world_process_zero:
            return
        if any(parameter.numel() == 0 for parameter in model.parameters()):
            raise RequestError(
                "the model lies in pieces over processes (ZeRO-3, FSDP), and is not here to be saved; save it as your "
                "trainer does, and run `draftsmith adapt RUN --target FOLDER --rollouts FOLDER --watch` beside it"
            )
        replace_folder(self.target, lambda staging: self._save(model, processing_class, staging))
        command = [sys.executable, "-m", "draftsmith.launch.cli", "adapt", str(self._run), "--out", str(self._out)]
        command += ["--target", str(self.target), "--rollouts", str(self._rollouts), *self._flags]
        alone = {name: value for name, value in os.environ.items() if not _is_of_a_launch(name)}
        done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
        told = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        _log.log(
            logging.INFO if done.returncode == 0 else logging.WARNING,
            "step %d: draftsmith adapt ended with code %d: %s",
            state.global_step,
            done.returncode,
            next((line for line in reversed(told) if line.startswith(("round", "draftsmith:"))), "nothing was said"),
        )

    @property
    def target(self) -> Path:
        """The folder that the model is saved in before a round."""
        return self._out / "target"

    @property
    def drafter(self) -> Path:
        """The folder of the drafter in use, which an engine loads again."""
        return self._out / "drafter"

    @staticmethod
    def _save(model: Any, tokenizer: Any, folder: Path) -> None:
        getattr(model, "module", model).save_pretrained(folder)
        if tokenizer is None:
            raise RequestError("the trainer has no processing_class; expected the target's tokenizer there")
        tokenizer.save_pretrained(folder)


def row_of(prompt: Any, completion: Any) -> dict[str, Any]:
    """A rollout as a row that `data.source` reads."""
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": completion}
    return {"messages": [*prompt, *completion]}


def _is_of_a_launch(name: str) -> bool:
    return name in _OF_A_LAUNCH or name.startswith(_BEGIN_SO)
