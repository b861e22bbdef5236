"""Train any module by a loss of one's own, with the one loop: `draftsmith.fit`.

What a recipe says of a run is said by arguments here; the loop, its checkpoints, probes and records are the same.
Read next: `trainers/teacher/own.py`, module and loss as the loop sees them; `trainers/loop/loop.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from .api import ids_of
from .config import Section, changed
from .data.config import DataConfig
from .data.prompts import load_prompts
from .data.rows.encode import Encoder
from .data.rows.packed import PackedRows, pack
from .data.rows.prepare import prepare
from .data.rows.raw import BadRow
from .data.rows.shapes import Text, Tokens
from .decoding.request import STATES, check_target, whole, whole_numbers
from .drafters.families import FAMILIES
from .errors import DataError, RequestError, Stopped, TrainingFailed
from .eval.measure.probe import tau_probe
from .launch.recipe.values import value_path
from .storage import check_identity_file, check_name, hold, read_tensors, writable_folder, write_tensors, write_text
from .trainers.config import CheckpointConfig, LoopConfig, OptimizerConfig, ProbeConfig
from .trainers.loop.loop import Plan, RunOutcome
from .trainers.loop.setup import make_accelerator, make_deterministic, own_kernels, run_loop
from .trainers.teacher.frozen import Save, saver
from .trainers.teacher.own import Loss, OwnObjective, check_adds_up

if TYPE_CHECKING:
    from torch import nn

    from .api import Prompts
    from .decoding.backbone.backbone import Backbone
    from .decoding.proposal import Proposer


_WEIGHTS = "model.safetensors"
_REPORTED = {"log_every", "trackers", "stall_seconds"}
"""Fields that may change before a run goes on."""


class _Settings(NamedTuple):
    """The recipe sections of such a run."""

    loop: LoopConfig = LoopConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    probe: ProbeConfig = ProbeConfig()
    data: DataConfig = DataConfig()

    @classmethod
    def of(cls, steps: int, changes: Mapping[str, Any]) -> _Settings:
        """The defaults with some fields changed, named as for `draftsmith.train`."""
        sections: dict[str, Section] = cls()._asdict()
        known = [f"{section}.{name}" for section, kind in sections.items() for name in type(kind).model_fields]
        values: dict[str, dict[str, Any]] = {section: {} for section in sections}
        values["loop"]["steps"] = steps
        for name, value in changes.items():
            section, _, field = value_path(name, known).partition(".")
            if section not in values or not field:
                raise RequestError(
                    f"{name} is no argument of fit and no field of {', '.join(sections)}; expected one as "
                    "lr=1e-3, batch_rows=8, sequence_length=256 or checkpoint_every_steps=50"
                )
            values[section][field] = value
        rows = values["loop"].get("batch_rows", LoopConfig().batch_rows)
        if isinstance(rows, int):
            values["loop"].setdefault("micro_rows", math.gcd(rows, 16))
        values["optimizer"].setdefault("warmup_steps", min(50, int(steps) // 10))
        return cls(*(changed(section, values[name]) for name, section in sections.items()))  # type: ignore[arg-type]


def fit(
    target: Backbone,
    net: nn.Module,
    loss: Loss,
    rows: str | Path | DataConfig | PackedRows | Sequence[str | Sequence[int]],
    *,
    steps: int = 200,
    drafter: Callable[[Any], Proposer] | None = None,
    layers: Sequence[int] = (-1,),
    prompts: Prompts | None = None,
    out: str | Path | None = None,
    resume: str = "auto",
    **changes: Any,
) -> Proposer:
    """Train a module to draft for a frozen target, by a loss of your own, and return the drafter.

    Args:
        net: any module; its weights are trained in place, and end as the best of the run.
        loss: `loss(net, batch, states)` returns the loss summed over labels, or sums by name with `loss` among them
            (`trainers/teacher/own.py` says what it is given). A mean is refused: it is called on a few rows first.
        rows: `stdlib`, a file or folder of rows, a DataConfig, packed rows, or a list of texts or of token ids. A
            part is held out.
        steps: optimiser steps.
        drafter: makes the drafter of the net; by default the net drafts itself.
        layers: which hidden states of the target the loss is given, -1 the last; () for none, which saves its passes.
        prompts: that probes decode; by default held-out library files. The weights with the best tau are kept.
        out: folder of checkpoints and `metrics.jsonl`. A run that was stopped goes on there, and a finished one is
            read again; where the net, the loss or an argument is another one, that is refused. None: nothing is kept.
        resume: `auto`, `never`, or a checkpoint's path.
        changes: fields of `loop`, `optimizer`, `checkpoint`, `probe` and `data`, as `lr=3e-3`,
            `batch_rows=8`, `sequence_length=128`, `probe_every_steps=100`.

    Raises:
        RequestError: a wrong argument, or a folder with another run. Stopped: a signal ended the run.
        TrainingFailed: the loss is not finite, step after step.
    """
    check_target(target)
    _check_net(net, loss, drafter)
    layers = whole_numbers(layers, "layers", STATES)
    settings = _Settings.of(whole(steps, "steps", least=1), changes)
    make = drafter or _itself(net)
    with _folder(out) as folder, own_kernels():
        train, held_out = rows_of(rows, target, settings.data)
        make_deterministic(settings.loop)
        accelerator = make_accelerator(settings.loop, settings.optimizer, folder)
        asked = load_prompts("stdlib", limit=settings.probe.prompts) if prompts is None else prompts
        ids = [each[-128:] if prompts is None else each for each in ids_of(target, asked)]
        probe = tau_probe(target, ids, make_proposer=make, max_new_tokens=settings.probe.max_new_tokens)
        objective = OwnObjective(net, loss, target.model, _save(net, target), layers=layers)
        net.to(accelerator.device)
        check_adds_up(objective, train)
        identity = _identity(settings, net, loss, layers, train)
        if not check_identity_file(folder / "fit.json", identity, remedy=f"Name another folder than {folder}"):
            write_text(folder / "fit.json", json.dumps(identity, indent=1) + "\n")
        plan = Plan(*settings[:4], identity)
        export_to = folder / "drafter"
        how: dict[str, Any] = {"out": folder, "export_to": export_to, "probe": probe, "resume": resume}
        try:
            outcome = run_loop(objective, train, held_out, plan, accelerator, **how)
        except Stopped as stopped:
            raise Stopped(_stopped(stopped, out)) from None
        _check_learnt(outcome)
        net.load_state_dict(read_tensors(export_to / _WEIGHTS, remedy="train it again"))
    return make(net.eval())


def _stopped(stopped: Stopped, out: str | Path | None) -> str:
    """What a run that was stopped has left, and how to go on."""
    when = str(stopped).partition(" with a checkpoint")[0]
    if out is None:
        return (
            f"{when}; the net has what it has learnt, and nothing else is kept: name a folder, out=..., to go on there"
        )
    return f"{when} with a checkpoint in {out}; the same call goes on from it"


def _check_learnt(outcome: RunOutcome) -> None:
    """Raise TrainingFailed for a run that has skipped every step: too short for the loop to end it before."""
    if outcome.skipped == outcome.steps:
        raise TrainingFailed(
            f"step {outcome.steps - 1}: the run ends, and all of its {outcome.steps} steps were skipped, as loss or "
            "gradient is not finite: nothing was learnt; look at what the loss function returns, or lower lr"
        )


def _check_net(net: Any, loss: Any, drafter: Any) -> None:
    """Raise RequestError for what cannot be trained, or by no function."""
    if isinstance(net, type) or not hasattr(net, "state_dict"):
        raise RequestError(f"net is {net!r:.60}; expected a torch module that is made, as Step()")
    if not any(each.requires_grad for each in net.parameters()):
        raise RequestError(
            f"net, a {type(net).__name__}, has no weight that is trained; expected one with requires_grad, and not "
            "the target's own model, which is frozen"
        )
    for name, value in (("loss", loss), ("drafter", drafter)):
        if value is not None and not callable(value) or name == "loss" and value is None:
            made = "loss(net, batch, states)" if name == "loss" else "drafter(net), as a drafter's class"
            raise RequestError(f"{name} is {value!r:.60}; expected a function {made}")


def _itself(net: nn.Module) -> Callable[[Any], Proposer]:
    if not hasattr(net, "propose"):
        raise RequestError(
            f"{type(net).__name__} does not draft by itself, as it has no `propose`; expected drafter=, a function "
            "that makes a drafter of it (draftsmith.Drafter says what it has to write)"
        )
    return lambda trained: trained


@contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    """The run's folder, held against others; one that is gone afterwards where none is named."""
    if out is None:
        with TemporaryDirectory(prefix="draftsmith-fit-") as made:
            yield Path(made)
        return
    folder = Path(out)
    check_name(folder)
    writable_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "run.yaml").is_file():
        raise RequestError(
            f"{folder} holds the run of a recipe; expected a folder of its own for fit: name another out"
        )
    with hold(folder):
        yield folder


def rows_of(rows: Any, target: Backbone, data: DataConfig) -> tuple[PackedRows, PackedRows]:
    """Rows to learn from, and rows held out.

    Raises:
        RequestError: these are no rows, or too few to hold some out. DataError: as of `prepare`.
    """
    if isinstance(rows, PackedRows):
        return _split(rows, data.validation_share)
    if isinstance(rows, (str, Path)):
        rows = changed(data, {"source": str(rows)})
    if isinstance(rows, DataConfig):
        found = prepare(rows, target.tokenizer, out=None)
        return found.train, found.validation
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise RequestError(f"rows is {rows!r:.60}; expected `stdlib`, a file or folder, or texts or token ids")
    return _packed(list(rows), target, data)


def _split(rows: PackedRows, share: float) -> tuple[PackedRows, PackedRows]:
    """Packed rows in two, the second an even spread of them."""
    if len(rows) < 2:
        raise RequestError(f"there are {len(rows)} packed rows; expected at least 2, as some are held out")
    every = max(2, min(len(rows), round(1 / share)))
    parts = [[at for at in range(len(rows)) if (at % every == every - 1) == held] for held in (False, True)]
    kept = [(rows.ids_RS[at], rows.in_loss_RS[at], rows.document_RS[at], rows.fingerprint) for at in parts]
    return PackedRows(*kept[0]), PackedRows(*kept[1])


def _packed(texts: Sequence[Any], target: Backbone, data: DataConfig) -> tuple[PackedRows, PackedRows]:
    """Texts or token ids as rows; some of them are held out."""
    if len(texts) < 2:
        raise RequestError(f"rows holds {len(texts)} texts; expected at least 2, as some are held out")
    records = [_record(each, f"row {number} of {len(texts)}") for number, each in enumerate(texts, 1)]
    documents = []
    for number, each in enumerate(Encoder.of(target.tokenizer, data)(records), 1):
        if isinstance(each, BadRow):
            raise DataError(f"row {number} of {len(texts)}: {each}")
        documents.append(each.documents)
    every = max(2, min(len(texts), round(1 / data.validation_share)))
    made = []
    for held in (False, True):
        mine = [one for at, own in enumerate(documents) if (at % every == every - 1) == held for one in own]
        made.append(pack(mine, data.sequence_length, pad=0, fingerprint="given", together=data.packing))
        if not len(made[-1]):
            raise RequestError(
                f"the {len(texts)} rows make none that is {'held out' if held else 'trained on'}: they are empty; "
                "expected texts or token ids of several tokens"
            )
    return made[0], made[1]


def _record(given: Any, place: str) -> Text | Tokens:
    return Text(given) if isinstance(given, str) else Tokens(whole_numbers(given, place, "a text or token ids"))


def _save(net: Any, target: Backbone) -> Save:
    """A drafter's folder where its family is registered, so that `load_drafter` reads it; else the weights alone."""
    family = getattr(net, "family", "")
    if family in FAMILIES and FAMILIES[family].load is not None:
        return saver(target, family)
    return lambda module, folder: write_tensors(
        folder / _WEIGHTS, {name: each.detach().cpu().contiguous() for name, each in module.state_dict().items()}
    )


def _identity(
    settings: _Settings, net: nn.Module, loss: Loss, layers: Sequence[int], train: PackedRows
) -> dict[str, Any]:
    """What a run computes hangs on, as far as it can be told: sizes, sources of the code, settings and rows."""
    shapes = {name: list(each.shape) for name, each in net.state_dict().items()}
    return {
        "loop": settings.loop.model_dump(mode="json", exclude=_REPORTED),
        "optimizer": settings.optimizer.model_dump(mode="json"),
        "probe": settings.probe.model_dump(mode="json"),
        "layers": list(layers),
        "rows": train.content_hash(),
        "weights": _hash(json.dumps(shapes)),
        "code of the net": _hash(_source(type(net))),
        "code of the loss": _hash(_source(loss)),
    }


def _source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # typed at a prompt, or an object that is called
        return str(getattr(code, "__qualname__", type(code).__qualname__))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
