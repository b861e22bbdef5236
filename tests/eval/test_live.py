"""On a terminal a stage shows how far it is and how long it takes; elsewhere nothing is written."""

from __future__ import annotations

import sys

import pytest
from draftsmith.bars import live


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_on_a_terminal_alone(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with live("auditing", 4, " tokens") as line:
        for _ in range(4):
            line.update()
        shown = str(line) if terminal else ""
    written = capsys.readouterr().err
    assert ("auditing: 100%" in shown) == terminal
    assert ("auditing" in written) == terminal
