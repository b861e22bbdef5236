"""Calls that are timed in turns, each of which may fail without taking another along.

On CUDA a call is recorded as a graph, as the engine replays it; where that fails it is timed as it is launched, and
where it does not run at all it is left out. Either is said. Read next: `calls.py`.
"""

from __future__ import annotations

from draftsmith.benchmarks.common.replayed import recorded
from draftsmith.benchmarks.on_gpu.setting import Setting
from draftsmith.eval.measure.timing import Call, interleaved


class Arms:
    """Calls by name, and what went wrong with them."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.calls: dict[str, Call] = {}
        self.problems: list[str] = []

    def add(self, name: str, call: Call, *, replay: bool = True) -> None:
        """Time that call too, replayed if it can be."""
        if replay:
            try:
                self.calls[name] = recorded(call, self._setting.device)
                return
            except Exception as error:  # noqa: BLE001
                # whatever it is, an eager figure is worth more than none
                self.problems.append(f"{name}: not recorded as a graph, so eager: {why(error)}")
        try:
            call()
        except Exception as error:  # noqa: BLE001
            self.problems.append(f"{name}: {why(error)}")
            return
        self.calls[name] = call

    def times(self) -> dict[str, float]:
        """Median seconds of a call of each."""
        setting = self._setting
        return interleaved(self.calls, setting.rounds, device=setting.device, repeats=setting.repeats)


def why(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
