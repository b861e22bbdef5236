"""`loop.compile`: which shapes parts have, what they compute, and what is said where they cannot be compiled.

Read next: `../loop/test_golden_curves.py`, longer runs.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from conftest import make_target
from draftsmith.drafters.layers.static import Static, as_it_is
from draftsmith.errors import RequestError, Stopped
from draftsmith.launch.check.check import _device
from draftsmith.launch.check.unread import check_read
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.config import LoopConfig, ObjectiveConfig, OptimizerConfig
from draftsmith.trainers.loop import compiled
from draftsmith.trainers.loop.compiled import Compiled, check_compiler, compile_parts
from draftsmith.trainers.loop.setup import make_accelerator
from draftsmith.trainers.losses.buckets import next_size, whole_chunks
from draftsmith.trainers.losses.chunked import ChunkedLoss, SharedTeacher, Teacher, _parts
from draftsmith.trainers.losses.mix import Mix
from draftsmith.trainers.methods import METHODS
from faults import compiled_ranks, ranks, toy
from helpers.models.method_objectives import build
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

PASSES = 3
COMPILED = [name for name, method in METHODS.items() if method.compiles]
SHORT = {"steps": 5, "every": 2, "validate_every": 5}
ROUNDING = 1e-5
"""How far a loss may be from the one without, relatively: fp32, sums in another order, a few steps behind each other."""


class Shapes:
    """A `Static` that compiles nothing, and remembers what torch would have compiled each part for."""

    def __init__(self) -> None:
        self.seen: dict[str, set[Any]] = defaultdict(set)
        self.parts: dict[str, set[Any]] = defaultdict(set)

    def __call__(self, name: str, part: Callable[..., Any], /) -> Callable[..., Any]:
        self.parts[name].add(part)

        def run(*given: Any) -> Any:
            leaves = [each for each in tree_leaves(given) if not isinstance(each, nn.Module)]
            told = [(*each.shape, each.requires_grad) if isinstance(each, Tensor) else repr(each) for each in leaves]
            self.seen[name].add((torch.is_grad_enabled(), *told))
            return part(*given)

        return run


# ---- shapes ---------------------------------------------------------------------------------


def bound(part: str, method: str, passes: int = 1) -> int:
    """Most shapes of a part in training; as many again in validation, whose rows are fewer."""
    heads = {"medusa": 4, "hydra": 4}.get(method, 0)
    return {
        "the loss of a chunk": 5,
        "the model's pass": 1,
        "a head": 4 * heads,
        # what goes into the first pass has another gradient than what is fed back
        "the way into attention": 2,
        "the way out of it": 2,
        "attention over a pair's own keys": passes - 1,
    }[part]


def small_objective(method: str) -> Any:
    """With chunks of few positions, and weights from which a head has something to learn."""
    if method == "target":
        return toy.objective_of(method)
    torch.manual_seed(1)
    goal = build(
        method,
        make_target("qwen3").model,
        objective=ObjectiveConfig(chunk=16),
        **({method: {"passes": PASSES}} if method in {"eagle", "eagle3", "mtp"} else {}),
    )
    with torch.no_grad():
        for each in goal.module.parameters():
            each.add_(0.05 * torch.randn_like(each))
    return goal


def other_labels(rows: toy.Asked, number: int) -> dict[str, Tensor]:
    """Three rows with another number of labels than in the batch before."""
    batch = rows.batch([number, number + 5, number + 11])
    most = torch.tensor([[3 + (5 * number + 3 * row) % 22] for row in range(3)])
    return batch | {"loss_mask": (batch["positions"] > 0) & (batch["positions"] < most)}


def learnt(goal: Any, batch: dict[str, Tensor], static: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, terms and gradients."""
    torch.manual_seed(0)  # EAGLE's noise
    goal.module.static = static
    loss, terms = goal.module(batch, goal.prepare(batch))
    loss.backward()
    found = {name: each.grad.clone() for name, each in goal.module.named_parameters() if each.grad is not None}
    goal.module.zero_grad()
    return loss.detach(), terms, found


@pytest.mark.parametrize("method", COMPILED)
def test_shapes_are_few_however_many_labels(method: str) -> None:
    """Every batch has another number of labels: the same loss and gradients as without, and few shapes."""
    goal, rows, static = small_objective(method), toy.Asked(), Shapes()
    counts = set()
    for number in range(8):
        batch = other_labels(rows, number)
        counts.add(int(batch["loss_mask"].sum()))
        (loss, terms, wanted), (same, others, found) = (learnt(goal, batch, each) for each in (as_it_is, static))
        assert float(same) == pytest.approx(float(loss), rel=1e-6)
        for name, value in terms.items():
            assert float(others[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-5), name
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert len(counts) == 8
    assert all(len(parts) == 1 for parts in static.parts.values()), "a part is one function, at every call"
    for name, seen in static.seen.items():
        assert 1 <= len(seen) <= bound(name, method, PASSES), name


@pytest.mark.parametrize("chunk", [1, 7, 16, 300])
def test_chunks_of_any_number_of_labels_have_few_sizes(chunk: int) -> None:
    sizes = set()
    for count in range(1, 3 * chunk + 1):
        whole = whole_chunks(count, chunk)
        assert count <= whole < count + max(1, chunk // 8) + 1
        sizes |= {part.stop - part.start for part in _parts(whole, chunk)}
    assert len(sizes) <= 5
    assert {next_size(count, 50) for count in range(51)} == {13, 26, 39, 52}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [1, 5, 16, 23])
def test_what_stands_behind_counts_nowhere(count: int, shared: bool) -> None:
    """Shares, reported shares, and a teacher whose logits several comparisons use."""
    g = torch.Generator().manual_seed(count)
    head = nn.Linear(8, 30)
    loss = ChunkedLoss(head, Mix(kl=1.0, tv=0.5, ce=0.2), chunk=16)
    states = torch.randn(count, 8, generator=g)
    projection = loss.projection.rows(slice(30))
    at = torch.arange(count) // 2
    teacher = SharedTeacher.of(states, projection, at) if shared else Teacher(states, projection)
    hidden = torch.randn(count, 8, generator=g).requires_grad_()
    label = torch.randint(0, 30, (count,), generator=g)
    share, told = torch.rand(count, generator=g), torch.rand(count, generator=g)

    def made(static: Static) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        loss.static = static
        value, terms = loss(hidden, label, teacher, share, report_weight_P=told)
        return value, terms, list(torch.autograd.grad(value, [hidden, head.weight, head.bias]))

    (plain, terms, wanted), (same, others, found) = made(as_it_is), made(Shapes())
    torch.testing.assert_close(same, plain)
    torch.testing.assert_close(others, terms)
    torch.testing.assert_close(found, wanted)


# ---- torch's compiler -----------------------------------------------------------------------


def run(out: Path, method: str, *, stop_at: int | None = None, **loop: Any) -> Any:
    made = toy.loop_in(out, method, **loop)
    toy.run(made, stop_at=stop_at)
    return made


def far(found: dict[int, float], wanted: dict[int, float]) -> float:
    assert found.keys() == wanted.keys()
    return max(abs(found[step] / wanted[step] - 1) for step in wanted)


def check_counts(made: Any, method: str) -> None:
    """What torch says it has compiled is what the log says, whole, and within the bound."""
    said = torch._dynamo.utils.counters
    assert not said["graph_break"]
    assert said["stats"]["unique_graphs"] == made.compiled.graphs.total() > 0
    for name, count in made.compiled.graphs.items():
        assert count <= 2 * bound(name, method, {"eagle3": 7, "mtp": 3}.get(method, 1)), name


def check_compiled_run(folder: Path, method: str) -> None:
    """Losses, graphs, and the form of checkpoints."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = run(folder / "plain", method, **SHORT)
    mine = run(folder / "mine", method, compile=True, **SHORT)
    assert plain.compiled is None
    check_counts(mine, method)
    assert far(toy.losses(folder / "mine"), toy.losses(folder / "plain")) < ROUNDING
    assert mine.objective.module.state_dict().keys() == plain.objective.module.state_dict().keys()
    assert toy.state_files(folder / "mine", 5).keys() == toy.state_files(folder / "plain", 5).keys()


def check_resumed(folder: Path, method: str) -> None:
    """A stopped run of the same goes on to the same bits."""
    with pytest.raises(Stopped):
        run(folder / "stopped", method, stop_at=2, compile=True, **SHORT)
    run(folder / "stopped", method, compile=True, **SHORT)
    assert toy.state_files(folder / "stopped", 5) == toy.state_files(folder / "mine", 5)


@pytest.mark.slow
def test_a_compiled_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without inductor, whose kernels take minutes on a CPU: the graphs are torch's own, what runs them is not."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    caplog.set_level(logging.INFO)
    check_compiled_run(tmp_path, "distill")
    assert re.search(r"compiled \d graphs so far: the loss of a chunk \d, the model's pass \d", caplog.text)
    caplog.clear()
    run(tmp_path / "mine", "distill", **SHORT | {"steps": 7})
    assert "compile True before and False now" in caplog.text
    assert len(toy.losses(tmp_path / "mine")) == 7


@pytest.mark.slow
@pytest.mark.parametrize("method", COMPILED)
def test_a_compiled_run_of_every_method(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    check_compiled_run(tmp_path, method)
    check_resumed(tmp_path, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["distill", "medusa", "eagle", "eagle3"])
def test_inductor_computes_the_same(method: str, tmp_path: Path) -> None:
    check_compiled_run(tmp_path, method)
    check_resumed(tmp_path, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["distill", "medusa", "eagle3"])
def test_half_precision(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bf16 on both sides; what is rounded between them differs."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    for name in ("plain", "mine"):
        run(tmp_path / name, method, compile=name == "mine", precision="bf16", **SHORT)
    assert far(toy.losses(tmp_path / "mine"), toy.losses(tmp_path / "plain")) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_two_processes(parts: int, tmp_path: Path) -> None:
    """DDP adds up the gradients of what is compiled, with rows of each process's own and with shared ones."""
    for name in ("plain", "mine"):
        ranks.run(2, compiled_ranks.train, tmp_path / name, name == "mine", parts)
    assert far(toy.losses(tmp_path / "mine"), toy.losses(tmp_path / "plain")) < ROUNDING
    for rank in range(2):
        told = json.loads((tmp_path / "mine" / f"graphs-{rank}").read_text())
        assert not told["breaks"]
        assert len(told["graphs"]) == 4
        assert all(count <= 2 * bound(name, "eagle3", 7) for name, count in told["graphs"].items())


def test_what_torch_cannot_take_is_an_error_that_names_it() -> None:
    def torn(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(RequestError, match=r"torch.compile cannot take a torn part: .*Leave loop.compile out"):
        Compiled("eager")("a torn part", torn)(torch.ones(2))


# ---- refusals -------------------------------------------------------------------------------


@pytest.fixture
def no_compiler() -> Iterator[None]:
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        yield


@pytest.mark.usefixtures("no_compiler")
def test_a_cpu_without_a_compiler(tmp_path: Path) -> None:
    """Said by the run before anything else, and by `draftsmith check`; without `loop.compile` nobody asks."""
    wanted = r"needs a C\+\+ compiler on a CPU: none of no-such-compiler runs here\. Install g\+\+"
    with pytest.raises(RequestError, match=wanted):
        check_compiler(LoopConfig(compile=True), on_cpu=True)
    check_compiler(LoopConfig(), on_cpu=True)
    if not torch.cuda.is_available():
        with pytest.raises(RequestError, match=wanted):
            make_accelerator(LoopConfig(compile=True), OptimizerConfig(), tmp_path)
        with pytest.raises(RequestError, match=wanted):
            _device(load_recipe("medusa-tiny", [("loop.compile", "true")]).recipe)


def test_a_python_without_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(RequestError, match=r"Python.h is missing\. Install them .*python3-dev"):
        check_compiler(LoopConfig(compile=True), on_cpu=True)


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(RequestError, match=r"needs Triton on a GPU, .*pip install triton"):
        check_compiler(LoopConfig(compile=True), on_cpu=False)


def test_methods_without_parts_are_refused() -> None:
    on = LoopConfig(compile=True)
    for name in METHODS:
        if name in COMPILED:
            check_read(Recipe(method=name, loop=on))
        else:
            with pytest.raises(RequestError, match=rf"loop.compile is True, and method `{name}`.*train with `target`"):
                check_read(Recipe(method=name, loop=on))
    for module in (nn.Linear(2, 2), toy.objective_of("pard", pard={"drafts": 2}).module):
        with pytest.raises(
            RequestError, match="this method has no parts that are compiled; methods target, distill, "
        ):
            compile_parts(module, on)


@pytest.mark.parametrize(
    ("method", "values", "said"),
    [
        ("distill", {"objective": {"kl": 0.0, "tv": 1.0}}, r"moves over 0.3 of the steps .*from_kl_share 0"),
        ("distill", {"objective": {"tv": 1.0, "from_kl_share": 0.5}}, r"moves over 0.5 of the steps"),
        ("distill", {"data": {"sequence_length": 4096}}, r"rows have 4096 tokens.*--data.sequence_length 2048"),
        ("target", {"data": {"sequence_length": 4096}}, r"rows have 4096 tokens.*--data.sequence_length 2048"),
    ],
)
def test_what_would_be_compiled_anew_at_each_batch(method: str, values: dict[str, Any], said: str) -> None:
    recipe = Recipe(method=method, loop={"compile": True}, **values)
    with pytest.raises(RequestError, match=said):
        METHODS[method].code().check_recipe(recipe)
    METHODS[method].code().check_recipe(Recipe(method=method, **values))


def test_graphs_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = Compiled("eager")
    for more in ({}, {"loss": 2}, {}, {"layer": 1}, {}):
        made.graphs.update(more)
        made.tell()
    assert caplog.messages == ["compiled 2 graphs so far: loss 2", "compiled 3 graphs so far: layer 1, loss 2"]


def test_deepspeed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the launch, and by `check` for a machine that is described with it."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(RequestError, match="loop.compile is on, and DeepSpeed holds the weights"):
        make_accelerator(LoopConfig(compile=True, precision="fp32"), OptimizerConfig(), tmp_path)
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    with pytest.raises(RequestError, match="loop.compile is on, and DeepSpeed holds the weights"):
        _device(load_recipe("medusa-8b", [("loop.compile", "true")]).recipe)
