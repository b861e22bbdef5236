"""When steps are recorded, what keeps them from it and says so, and that nothing of a request outlives it.

On a pretended GPU (`tests/pretended_cuda/graphs.py`); `tests/gpu/test_graphs.py` asks a real one, and
`tests/drafters/test_on_cuda.py` every proposer.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import VOCABULARY, make_drafter, make_target
from draftsmith.benchmarks.common.random_models import GROUPED, RECURRENT, WINDOWED
from draftsmith.decoding import engine, graphs
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache, few_sizes
from draftsmith.decoding.engine import Generation, autoregressive, generate
from draftsmith.decoding.graphs import RecordedUniforms, _say
from draftsmith.decoding.rules.acceptance import accept_greedy
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.lookup.function import CallableDrafter
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.errors import RequestError
from helpers.models.random_models import random_model, ready
from pretended_cuda.device import PretendedCuda
from pretended_cuda.graphs import Graph
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7, 9, 2], [11, 4]]
GREEDY, SAMPLED = Warper(0.0), Warper(0.9)
NEW = 10
TARGETS: dict[str, dict[str, Any]] = {
    name: GROUPED | settings
    for name, settings in (RECURRENT | WINDOWED).items()
    if name == "llama4_text" or not ("moe" in name or {"num_experts", "num_local_experts"} & settings.keys())
}
"""Those without a mixture of experts, which counts tokens by a kernel that CPUs have no twin of."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are long soon: on the pretended device every operation takes its time."""
    monkeypatch.setattr(graphs, "LEAST_TOKENS", NEW)


@pytest.fixture
def there(cuda: PretendedCuda) -> Backbone:
    """A target on the pretended GPU."""
    made = make_target("qwen3")
    made.model.to("cuda")
    return made


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graph of every replay."""
    seen: list[Graph] = []
    whole = Graph.replay
    monkeypatch.setattr(Graph, "replay", lambda graph: (seen.append(graph), whole(graph)))
    return seen


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was said of steps that are launched one by one."""
    _say.cache_clear()
    caplog.set_level(logging.WARNING, "draftsmith.decoding.graphs")
    return lambda: [each.getMessage() for each in caplog.records if "launched one by one" in each.getMessage()]


def small(target: Backbone) -> DraftModel:
    return make_drafter(target, noise=0.1, draft_length=1)


def written(target: Backbone, drafter: Any = None, **how: Any) -> Generation:
    common = {"warper": GREEDY, "max_new_tokens": NEW} | how
    return generate(target, drafter or small(target), PROMPTS, **common)


def test_long_answers_are_replayed_unasked(there: Backbone, replays: list[Graph], said: Callable) -> None:
    eager = written(there, graphs=False)
    assert not replays
    assert eager.recording_seconds == 0
    replayed = written(there)
    assert replayed.tokens == eager.tokens
    assert len({*map(id, replays)}) == 2
    assert replayed.recording_seconds > 0
    assert 0 < replayed.propose_seconds < replayed.decode_seconds
    assert not said()


def test_short_answers_are_not(there: Backbone, replays: list[Graph]) -> None:
    written(there, max_new_tokens=NEW - 1)
    autoregressive(there, PROMPTS, warper=GREEDY, max_new_tokens=NEW - 1)
    assert not replays
    autoregressive(there, PROMPTS, warper=GREEDY, max_new_tokens=5, graphs=True)
    assert replays


@pytest.mark.parametrize("warper", [GREEDY, SAMPLED])
def test_the_baseline_is_replayed_unasked(warper: Warper, there: Backbone, replays: list[Graph]) -> None:
    common: dict[str, Any] = {"warper": warper, "max_new_tokens": NEW, "seed": 3, "eos_ids": [3]}
    eager = autoregressive(there, PROMPTS, graphs=False, **common)
    replayed = autoregressive(there, PROMPTS, **common)
    assert replayed.tokens == eager.tokens
    assert len({*map(id, replays)}) == 1
    assert replayed.recording_seconds > 0


def test_a_watcher_sees_replayed_text_as_it_is_written(there: Backbone, replays: list[Graph]) -> None:
    shown: list[list[list[int]]] = []
    done = written(there, watch=lambda tokens, _origins: shown.append(tokens))
    assert replays
    assert shown[-1] == done.tokens
    assert len(shown) == done.target_calls + 2  # the prefill's, and of a host that sees one step late


def test_numbers_are_fresh_in_every_replay(there: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a step that replays the numbers that it was recorded with writes another text."""
    right = written(there, warper=SAMPLED)
    assert right.tokens == written(there, warper=SAMPLED, graphs=False).tokens
    monkeypatch.setattr(RecordedUniforms, "restart", lambda self: setattr(self, "_taken", 0))
    assert written(there, warper=SAMPLED).tokens != right.tokens


@pytest.mark.one_in(9)
@pytest.mark.parametrize("family", TARGETS)
def test_targets_of_other_kinds_are_replayed(family: str, cuda: PretendedCuda, replays: list[Graph]) -> None:
    """States, windows and caps, computed from what lies where the recording found it."""
    model = random_model(family, **TARGETS[family])
    model.to("cuda")
    target = ready(model)
    prompts = [[(7 * n * n + 3) % VOCABULARY for n in range(21)], [7, 3, 50, 9, 22]]
    common: dict[str, Any] = {"warper": GREEDY, "max_new_tokens": 8}
    texts = [
        generate(target, PromptLookup(draft_length=2, device="cuda"), prompts, graphs=graphs, **common).tokens
        for graphs in (False, True)
    ]
    assert texts[0] == texts[1]
    assert len(replays) >= 4


# --- what keeps steps from it


def by_function(*given: Any) -> Any:
    return accept_greedy(*given)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"rule": by_function}, "the acceptance rule is a function"),
        ({"drafter": CallableDrafter(lambda ids: ids[-2:], draft_length=2, device="cuda")}, "CallableDrafter decides"),
    ],
)
def test_what_may_decide_on_the_host_is_said_once(
    how: dict[str, Any], reason: str, there: Backbone, replays: list[Graph], said: Callable
) -> None:
    eager = written(there, graphs=False)
    for _ in range(2):
        assert written(there, **how).tokens == eager.tokens
    assert not replays
    assert [reason in each for each in said()] == [True]
    with pytest.raises(RequestError, match=f"graphs were asked for, and {reason}"):
        written(there, graphs=True, **how)


def test_shapes_that_the_host_reads_are_no_graph(there: Backbone) -> None:
    with pytest.raises(RequestError, match="graphs were asked for, and static is False"):
        written(there, static=False, graphs=True)


class Reading(DraftModel):
    """Reads a number of the device in some of its calls, and does not say so."""

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self.calls, self.reads = 0, range(1, 10_000)

    def propose(self, last_B: Tensor, *rest: Any) -> Any:
        self.calls += 1
        if self.calls in self.reads:
            int(last_B[0])
        return super().propose(last_B, *rest)


def reading(target: Backbone) -> Reading:
    return Reading(small(target).backbone, target.vocabulary, draft_length=1)


def test_a_step_that_waits_is_found_before_it_is_recorded(
    there: Backbone, replays: list[Graph], said: Callable
) -> None:
    eager = written(there, graphs=False, warper=SAMPLED)
    for _ in range(2):
        assert written(there, reading(there), warper=SAMPLED).tokens == eager.tokens
    assert not replays
    (line,) = said()
    assert "a step waits for the device at " in line
    assert "test_graphs.py:" in line
    with pytest.raises(RequestError, match=r"graphs were asked for, and a step waits for the device at .*test_graphs"):
        written(there, reading(there), graphs=True)


def test_what_cannot_be_recorded_says_what_to_do(there: Backbone) -> None:
    """A step that waits in its third call alone, which no rehearsal sees."""
    drafter = reading(there)
    drafter.reads = range(3, 4)
    with pytest.raises(RequestError, match="could not be recorded as a CUDA graph: .*capturing.* Give graphs=False"):
        written(there, drafter)
    assert written(there).tokens == written(there, graphs=False).tokens


# --- memory


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[KVCache]]:
    """Every KV cache of the engine's."""
    made: list[weakref.ref[KVCache]] = []

    def noted(*given: Any, **how: Any) -> KVCache:
        kv_cache = KVCache(*given, **how)
        made.append(weakref.ref(kv_cache))
        return kv_cache

    monkeypatch.setattr(engine, "KVCache", noted)
    return made


def test_the_kv_cache_is_free_when_a_request_ends(
    target: Backbone, drafter: DraftModel, no_collector: None, kept: list[weakref.ref[KVCache]]
) -> None:
    done = [
        generate(target, drafter, PROMPTS, warper=GREEDY, max_new_tokens=6, watch=lambda *_: None),
        autoregressive(target, PROMPTS, warper=GREEDY, max_new_tokens=6),
    ]
    assert len(kept) == len(done)
    assert [each() for each in kept] == [None, None]


def test_recordings_are_free_with_it(
    there: Backbone, no_collector: None, kept: list[weakref.ref[KVCache]], replays: list[Graph]
) -> None:
    drafter = small(there)
    done = [written(there, drafter), autoregressive(there, PROMPTS, warper=GREEDY, max_new_tokens=NEW)]
    recorded = [weakref.ref(each) for each in replays]
    replays.clear()
    assert len(recorded) > 6
    assert {each() for each in (*kept, *recorded)} == {None}
    assert len(kept) == len(done)


def test_static_capacities_are_of_few_sizes() -> None:
    assert [few_sizes(slots) for slots in (1, 128, 129, 1000, 1025, 2048)] == [128, 128, 256, 1024, 1152, 2048]
    assert [few_sizes(slots) for slots in (2049, 2305, 4097, 40_000)] == [2304, 2560, 4608, 40_960]
    assert len({few_sizes(slots) for slots in range(1, 8193)}) == 32
    assert all(slots <= few_sizes(slots) <= max(128, slots * 9 / 8 + 128) for slots in range(1, 9000))
    assert KVCache(1, 130, static=True).capacity == 256
    assert KVCache(1, 130).capacity == 130


def test_a_wider_capacity_changes_no_text(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = {"warper": SAMPLED, "max_new_tokens": 12, "seed": 1}
    few = generate(target, make_drafter(target), PROMPTS, static=True, **common)
    monkeypatch.setattr("draftsmith.decoding.backbone.kv_cache.few_sizes", lambda slots: slots)
    assert generate(target, make_drafter(target), PROMPTS, static=True, **common).tokens == few.tokens
