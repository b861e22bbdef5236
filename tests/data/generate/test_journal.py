"""The folder of a generation: order, kills, other settings, damage, and what ends it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.generate.journal import Journal, _changes, _finished
from draftsmith.errors import DataError, EnvironmentFailure, RequestError
from draftsmith.storage.staging import this_host

SETTINGS = {"sampling": {"temperature": 0.0, "seed": 0}, "batch": 2}
SESSION = {"versions": {"torch": "1"}}


def answered(row: int, *, shape: str = "messages") -> dict[str, Any]:
    sums = dict.fromkeys(("turns", "cut", "retokenised", "steps", "emitted", "tested", "accepted"), 1)
    return {"row": row, "shape": shape, "answer": {"messages": [f"row {row} \u2028"]}, "tokens": 5, **sums}


def rejected(row: int) -> dict[str, Any]:
    reason = {"file": "rows.jsonl", "line": row + 1, "reason": "why", "kind": "cut"}
    return {"row": row, "rejected": reason}


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_files_are_in_the_order_of_the_source(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", SETTINGS, SESSION) as journal:
        journal.add([answered(3), rejected(1)])
        journal.add([])
        journal.add([answered(0), rejected(2)])
        manifest = journal.publish()
    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == ["answers.jsonl", "manifest.json", "rejected.jsonl"]
    assert [row["messages"][0][:5] for row in lines(folder / "answers.jsonl")] == ["row 0", "row 3"]
    assert [row["line"] for row in lines(folder / "rejected.jsonl")] == [2, 3]
    assert manifest == json.loads((folder / "manifest.json").read_text())
    assert manifest["rows"] == {"answered": 2, "rejected": 2, "rejected_by_kind": {"cut": 2}}
    assert manifest["answers"] == {"turns": 2, "tokens": 10, "cut": 2, "retokenised": 2}
    assert manifest["acceptance"] == {"tau": 1.0, "alpha": 1.0, "steps": 2, "verdict": "not audited"}


def test_rows_of_several_shapes_go_to_a_file_each(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", SETTINGS, SESSION) as journal:
        journal.add([answered(0), answered(1, shape="tokens"), answered(2)])
        journal.publish()
    counts = {path.name: len(lines(path)) for path in (tmp_path / "out").glob("*.jsonl")}
    assert counts == {"answers-messages.jsonl": 2, "answers-tokens.jsonl": 1}


def test_a_half_written_line_is_cut_off(tmp_path: Path) -> None:
    """At every length that a kill may leave: whole lines count, the rest is done anew."""
    folder = tmp_path / "out"
    with Journal(folder, SETTINGS, SESSION) as journal:
        journal.add([answered(0), answered(1)])
    path = folder / ".journal.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        with Journal(folder, SETTINGS, SESSION) as journal:
            done = [number for number in range(2) if number in journal]
            assert done == list(range((length >= first) + (length == len(whole))))
            journal.add(answered(number) for number in range(2) if number not in journal)
        assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0" * 50 + b"\n")
    with Journal(folder, SETTINGS, SESSION) as journal:
        assert len(journal) == 2
    assert path.read_bytes() == whole


def test_a_kill_while_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the manifest says so, nothing is over; the next start ends with the same files."""
    folder = tmp_path / "out"
    with Journal(folder, SETTINGS, SESSION) as journal:
        journal.add([answered(0), rejected(1)])
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "_write_manifest", _killed)
            with pytest.raises(KeyboardInterrupt):
                journal.publish()
    (folder / f".staging-{this_host()}-99999999-answers.jsonl").write_text("half")
    first = (folder / "answers.jsonl").read_bytes()
    with Journal(folder, SETTINGS, SESSION) as journal:
        assert not journal.complete
        assert len(journal) == 2
        journal.publish()
    assert (folder / "answers.jsonl").read_bytes() == first
    with Journal(folder, SETTINGS, SESSION) as journal:
        assert journal.complete
    assert not list(folder.glob(".*"))


def _killed(_self: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampling": {"temperature": 0.5, "seed": 0}}, "sampling.temperature is 0.0 there and 0.5 here"),
        ({"batch": 3}, "batch is 2 there and 3 here"),
        ({"more": 1}, "more is None there and 1 here"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    with Journal(tmp_path, SETTINGS, SESSION) as journal:
        journal.add([answered(0)])
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(RequestError, match=field):
        Journal(tmp_path, SETTINGS | change, SESSION)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_other_versions_are_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for session in (SESSION, SESSION, {"versions": {"torch": "2"}}):
        with Journal(tmp_path, SETTINGS, session):
            pass
    assert json.loads((tmp_path / "manifest.json").read_text())["sessions"] == [SESSION, {"versions": {"torch": "2"}}]
    assert caplog.text.count("both are in manifest.json") == 1
    assert "versions.torch was 1 and is 2 now;" in caplog.text


def test_another_address_is_named_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for server in ("http://one/v1", "http://two/v1"):
        with Journal(tmp_path, SETTINGS, {**SESSION, "server": server}):
            pass
    assert "server was http://one/v1 and is http://two/v1 now; both are in manifest.json" in caplog.text
    assert "versions" not in caplog.text


def test_what_asking_showed_stays_the_same(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS, SESSION) as journal:
        journal.settle("told_off", ["top_k", "min_p"], "the same server")
        journal.settle("told_off", ["top_k", "min_p"], "the same server")
    assert json.loads((tmp_path / "manifest.json").read_text())["told_off"] == ["top_k", "min_p"]
    with (
        Journal(tmp_path, SETTINGS, SESSION) as journal,
        pytest.raises(RequestError, match="told_off was top_k, min_p .* and is none now.* Go on with the same server"),
    ):
        journal.settle("told_off", [], "the same server")


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="holds files, but no manifest"):
        Journal(tmp_path, SETTINGS, SESSION)
    for content in ("{", "[]", '{"files": {}}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(RequestError, match="no manifest of a generation"):
            Journal(tmp_path, SETTINGS, SESSION)
    (tmp_path / "manifest.json").write_text('{"format": 9, "state": "running"}')
    with pytest.raises(RequestError, match="format is 9, expected 1"):
        Journal(tmp_path, SETTINGS, SESSION)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        Journal(tmp_path, SETTINGS, SESSION),
        pytest.raises(EnvironmentFailure, match="another process"),
        Journal(tmp_path, SETTINGS, SESSION),
    ):
        pass


def test_a_finished_folder_that_was_changed(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS, SESSION) as journal:
        journal.add([answered(0)])
        journal.publish()
    (tmp_path / "answers.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="not what manifest.json describes"), Journal(tmp_path, SETTINGS, SESSION):
        pass


@pytest.mark.parametrize(
    ("entries", "reason"), [([rejected(0)], "none of 1 rows .*rows.jsonl:1: why"), ([], "no row")]
)
def test_nothing_answered(tmp_path: Path, entries: list[dict[str, Any]], reason: str) -> None:
    for _ in range(2):  # and again, when it is run again
        with Journal(tmp_path, SETTINGS, SESSION) as journal:
            journal.add(each for each in entries if each["row"] not in journal)
            with pytest.raises(DataError, match=reason):
                journal.publish()
        assert (tmp_path / "rejected.jsonl").exists() == bool(entries)
    assert json.loads((tmp_path / "manifest.json").read_text())["state"] == "running"


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message; what was done before is there when it goes on."""

    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    def fill() -> None:
        with Journal(tmp_path, SETTINGS, SESSION) as journal:
            journal.add([answered(0)])
            monkeypatch.setattr("draftsmith.data.generate.journal.flush", full)
            journal.add([answered(1)])

    with pytest.raises(EnvironmentFailure, match="No space left .* run the same command again"):
        fill()
    monkeypatch.undo()
    with Journal(tmp_path, SETTINGS, SESSION) as journal:
        assert 0 in journal


def test_of_many_changes_the_others_are_counted() -> None:
    before, now = ({f"v{n}": n + by for n in range(6)} for by in (0, 1))
    said = _changes(before, now)
    assert said.count(" was ") == 4
    assert said.endswith("and 2 more")


def test_what_a_drafter_did_is_a_share_of_calls_and_of_tested_drafts() -> None:
    counts = Counter(steps=4, emitted=10, tested=12, accepted=6, answered=3, turns=5, tokens=11, cut=1)
    drafted = {"tau": 2.5, "alpha": 0.5, "steps": 4, "verdict": "not audited"}
    made = _finished(counts, Counter(server=2, answer=1))
    assert made["acceptance"] == drafted
    assert made["rows"] == {"answered": 3, "rejected": 3, "rejected_by_kind": {"answer": 1, "server": 2}}
    assert made["answers"] == {"turns": 5, "tokens": 11, "cut": 1, "retokenised": 0}
    assert _finished(Counter(steps=4, emitted=4), Counter())["acceptance"]["alpha"] is None
    assert _finished(Counter(tokens=4), Counter())["acceptance"] is None
