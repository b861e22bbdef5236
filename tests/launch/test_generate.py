"""`draftsmith generate`: the target's own answers, whatever helps it and whatever stops it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.generate import decoded, progress
from draftsmith.data.generate.journal import Journal
from draftsmith.data.rows.prepare import prepare
from draftsmith.data.rows.records import RecordReader
from draftsmith.data.rows.sources import open_sources
from draftsmith.data.rows.templates import named_template, render_chat
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import embedded_target, load_tokenizer
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.config import old_names
from draftsmith.drafters.tuned_file import write_tuned
from draftsmith.launch.cli import main
from faults.signalled import Stage, signalled
from helpers.runs import killed_process
from safetensors.torch import load_file, save_file

Captured = pytest.CaptureFixture[str]
# the target's greedy answers to them: some end, some are empty, those to the last two are too long
NAMES = [
    "width",
    "height",
    "path",
    "index",
    "from distutils import log",
    "_blocking_on = {}",
    "other",
    "names",
    "datetime.date objects.",
    "datetime.datetime objects.",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat target whose answers end (with a line), a drafter for it, rows of every kind."""
    folder = tmp_path_factory.mktemp("generate")
    _write_target(folder / "target")
    _write_drafter(folder)
    rows = [_chat(name, turns=1 + at % 3) for at, name in enumerate(NAMES)]
    rows.insert(3, {"messages": [{"role": "user", "content": "nobody answers"}]})
    rows.insert(5, _chat("x = 1\n" * 900, turns=1))
    _write_rows(folder / "chats.jsonl", rows)
    _write_rows(folder / "pairs.jsonl", [{"prompt": f"def {name}_0(self):", "completion": "OLD"} for name in NAMES])
    _write_rows(folder / "texts.jsonl", [{"text": f"import {name}\n\nclass {name}:\n" * 4} for name in NAMES])
    return folder


def _chat(name: str, *, turns: int) -> dict[str, Any]:
    asked = [f"def {name}_{turn}(self):" for turn in range(turns)]
    return {
        "messages": [
            {"role": role, "content": text}
            for question in asked
            for role, text in (("user", question), ("assistant", "OLD ANSWER"))
        ]
    }


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_target(folder: Path) -> None:
    shutil.copytree(embedded_target(), folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = named_template("chatml")
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    (line,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    settings["eos_token_id"] = [tokenizer.eos_token_id, line]
    (folder / "generation_config.json").write_text(json.dumps(settings))


def _write_drafter(folder: Path) -> None:
    """The target's own weights, shaken: some of its drafts are accepted, never all."""
    import torch
    from draftsmith.drafters.folder import save_draft_model

    target = load_target(str(folder / "target"))
    draft = load_target(str(folder / "target")).model
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.008 * torch.randn(parameter.shape, generator=g))
    save_draft_model(draft, folder / "drafter", target)


@pytest.fixture(scope="module")
def target(place: Path) -> Backbone:
    return load_target(str(place / "target"))


def generate(
    place: Path, out: Path, *more: str, source: str = "chats.jsonl", cut: str = "--drop-cut", batch: str = "3"
) -> int:
    flags = {"--target": str(place / "target"), "--max-new-tokens": "16"} | ({"--batch": batch} if batch else {})
    given = dict(zip(more[::2], more[1::2]))
    words = [word for flag, value in flags.items() if flag not in given for word in (flag, value)]
    return main(["generate", "--source", str(place / source), "--out", str(out), *words, *filter(None, [cut]), *more])


def read(out: Path, name: str = "answers.jsonl") -> list[Any]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def manifest(out: Path) -> Any:
    return json.loads((out / "manifest.json").read_text())


@pytest.fixture(scope="module")
def greedy(place: Path) -> Path:
    out = place / "greedy"
    assert generate(place, out) == 0
    return out


@pytest.fixture(scope="module")
def sampled(place: Path) -> Path:
    out = place / "sampled"
    assert generate(place, out, "--temperature", "1", "--drafter", str(place / "drafter")) == 0
    return out


def test_answers_are_those_of_plain_decoding(place: Path, greedy: Path, target: Backbone) -> None:
    """Turn by turn and row by row, without batch, drafter or journal."""
    kept = {row["messages"][0]["content"]: row["messages"] for row in read(greedy)}
    assert len(kept) >= 4
    refused = {each["line"]: each for each in read(greedy, "rejected.jsonl")}
    for number, row in enumerate(read(place, "chats.jsonl"), 1):
        history: list[dict[str, str]] = []
        ended = all(row["messages"]) and number not in (4, 6)
        for message in row["messages"] if ended else []:
            if message["role"] == "user":
                history.append(message)
                continue
            text = render_chat(target.tokenizer, history, answer_next=True)
            ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
            (answer_ids,) = autoregressive(
                target, [ids], warper=Warper(0.0), max_new_tokens=16, eos_ids=target.eos_ids
            ).tokens
            answer = target.tokenizer.decode(answer_ids[:-1], skip_special_tokens=True)
            ended = answer_ids[-1] in target.eos_ids and bool(answer.strip())
            if not ended:
                break
            history.append({"role": "assistant", "content": answer})
        assert (number in refused) != ended
        if ended:
            assert kept[row["messages"][0]["content"]] == history
    assert "no assistant turn" in refused[4]["reason"]
    assert "the target has room for 2032" in refused[6]["reason"]
    kinds = manifest(greedy)["rows"]["rejected_by_kind"]
    assert (kinds["source"], kinds["prompt"]) == (1, 1)
    assert min(kinds["cut"], kinds["empty"]) >= 2


def test_rows_keep_the_order_of_the_source(place: Path, greedy: Path) -> None:
    asked = [row["messages"][0]["content"] for row in read(place, "chats.jsonl")]
    kept = [row["messages"][0]["content"] for row in read(greedy)]
    assert kept == [each for each in asked if each in kept]


@pytest.mark.parametrize("source", ["chats.jsonl", "texts.jsonl"])
def test_a_drafter_changes_the_speed_alone(place: Path, tmp_path: Path, source: str, capsys: Captured) -> None:
    for name, more in (("plain", []), ("fast", ["--drafter", str(place / "drafter")])):
        assert generate(place, tmp_path / name, *more, source=source) == 0
    assert read(tmp_path / "fast") == read(tmp_path / "plain")
    assert manifest(tmp_path / "plain")["acceptance"] is None
    acceptance = manifest(tmp_path / "fast")["acceptance"]
    assert acceptance["tau"] > 1.5
    assert 0 < acceptance["alpha"] < 1
    assert acceptance["verdict"] == "not audited"
    printed = f"drafter: {acceptance['tau']:.2f} tokens per target call (not audited)\n"
    assert printed in capsys.readouterr().out


def tuned_copy(place: Path, folder: Path, values: dict[str, str], **facts: object) -> Path:
    """The drafter, as it was tuned."""
    shutil.copytree(place / "drafter", folder)
    write_tuned(folder, values, {"temperature": 0.0, "batch": 1, "processor": "here", **facts})
    return folder


def test_a_drafter_drafts_as_it_was_tuned(
    place: Path, tmp_path: Path, greedy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = tuned_copy(place, tmp_path / "drafter", {"eval.draft_length": "2"}, pays=True, plain=False)
    for name, more in (("tuned", []), ("by hand", ["--eval.draft_length", "3"])):
        assert generate(place, tmp_path / name, "--drafter", str(drafter), *more) == 0
        said = "tuned for T = 0.0, batch 1, here: --eval.draft_length 2" in caplog.text
        caplog.clear()
        assert said is (name == "tuned")
        drafted = manifest(tmp_path / name)["drafter"]
        assert drafted["draft_length"] == (2 if said else 3)
        assert drafted.keys() >= {"policy", *old_names()}, "a folder begun by an earlier version goes on"
        assert read(tmp_path / name) == read(greedy)


def test_where_tuning_found_nothing_answers_are_decoded_plainly(
    place: Path, tmp_path: Path, greedy: Path, caplog: pytest.LogCaptureFixture, capfd: Captured
) -> None:
    """Unless a flag drafts; and what needs a draft is refused."""
    drafter = tuned_copy(place, tmp_path / "drafter", {}, pays=False, plain=True)
    more = ["--drafter", str(drafter)]
    assert generate(place, tmp_path / "plain", *more) == 0
    found = "tuning found nothing faster than plain decoding for T = 0.0, batch 1, here"
    assert f"{found}; answers are decoded plainly" in caplog.text
    caplog.clear()
    assert manifest(tmp_path / "plain")["drafter"] is None
    assert read(tmp_path / "plain") == read(greedy)
    assert generate(place, tmp_path / "no", "--corrections", *more) == 2
    assert "--corrections keeps where a draft was corrected: a flag for drafter.*" in capfd.readouterr().err
    assert generate(place, tmp_path / "drafted", *more, "--eval.draft_length", "3") == 0
    assert found not in caplog.text
    assert manifest(tmp_path / "drafted")["acceptance"]["tau"] > 1


@pytest.mark.slow
def test_a_row_does_not_feel_its_batch(place: Path, tmp_path: Path) -> None:
    for batch in ("1", "5"):
        more = ["--temperature", "1", "--top-p", "0.9", "--batch", batch]
        assert generate(place, tmp_path / batch, *more, source="texts.jsonl") == 0
    assert read(tmp_path / "1") == read(tmp_path / "5")
    more = ["--temperature", "1", "--top-p", "0.9", "--seed", "1"]
    assert generate(place, tmp_path / "other", *more, source="texts.jsonl") == 0
    assert read(tmp_path / "other") != read(tmp_path / "1")


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_the_fastest_number_of_rows_is_taken_kept_and_changes_no_answer(
    place: Path, sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decoded, "_TIMED_ROWS", 8)
    monkeypatch.setattr(decoded, "_SIZES", (2, 4))
    out, more = tmp_path / "out", ["--temperature", "1", "--drafter", str(place / "drafter")]
    with monkeypatch.context() as patched:
        patched.setattr(decoded, "_converse", interrupted)
        assert generate(place, out, *more, batch="") == 75
    together = manifest(out)["batch_rows"]
    assert together in (2, 4)
    assert f"{together} rows are decoded together, the fastest here (tokens per second by rows: 2: " in caplog.text
    monkeypatch.setattr(decoded, "fastest", lambda *_: pytest.fail("it is timed once"))
    assert generate(place, out, *more, batch="") == 0
    assert read(out) == read(sampled)
    assert manifest(out)["batch"] is None
    assert manifest(out)["batch_rows"] == together


def test_rows_are_decoded_together_as_long_as_more_of_them_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: twice the tokens of a step at 8 rows, hardly more at 16, so 32 are not tried."""
    now, tried = [0.0], []
    monkeypatch.setattr(decoded.time, "perf_counter", lambda: now[0])

    class Timed:
        drafter = None

        def decode(self, prompts: list[list[int]], streams: list[int], watch: Any) -> None:
            assert len(set(streams)) == len(streams)
            tried.append(len(prompts))
            for step in range(100):
                watch([[0] * (step + 1)] * len(prompts), [])
                now[0] += {4: 1.0, 8: 1.0, 16: 1.95}[len(prompts)]
            pytest.fail("it goes on behind the steps that are timed")

    prompts = [[1]] * 200
    assert decoded.fastest(prompts, Timed()) == 8
    assert tried == [4, 8, 16]
    assert decoded.fastest(prompts[:50], Timed()) == 8  # too few to be timed
    assert tried == [4, 8, 16]


def same_bits(out: Path, whole: Path) -> None:
    for name in ("answers.jsonl", "rejected.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert manifest(out) == manifest(whole)
    assert sorted(path.name for path in out.iterdir()) == ["answers.jsonl", "manifest.json", "rejected.jsonl"]


def test_stopped_anywhere_it_ends_with_the_same_bits(
    place: Path, sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, between and behind the batches, each time a step further, with a torn line."""
    more = ["--temperature", "1", "--drafter", str(place / "drafter")]
    add, out, starts, code = Journal.add, tmp_path / "out", 0, -1
    while code:
        left, starts = [1], starts + 1

        def tired(self: Journal, entries: Any, left: list[int] = left) -> None:
            entries = list(entries)
            if entries and not left:
                raise KeyboardInterrupt
            add(self, entries)
            del left[: len(entries)]

        with monkeypatch.context() as patched:
            patched.setattr(Journal, "add", tired)
            code = generate(place, out, *more)
        assert code in (0, 75)
        if code:
            assert not (out / "answers.jsonl").exists()
            with (out / ".journal.jsonl").open("ab") as journal:
                journal.write(b'{"row": 7, "shape": "mess')
    assert starts >= 4
    same_bits(out, sampled)


@pytest.mark.slow
@pytest.mark.fault
def test_killed_at_a_random_moment(place: Path, sampled: Path, tmp_path: Path) -> None:
    kill_often(place, sampled, tmp_path, kills=1)


@pytest.mark.fault
@pytest.mark.slow
def test_killed_twenty_times(place: Path, sampled: Path, tmp_path: Path) -> None:
    kill_often(place, sampled, tmp_path, kills=20)


def kill_often(place: Path, whole: Path, folder: Path, *, kills: int) -> None:
    words = [
        "generate",
        "--source",
        str(place / "chats.jsonl"),
        "--target",
        str(place / "target"),
        "--drafter",
        str(place / "drafter"),
        "--temperature",
        "1",
        "--batch",
        "3",
        "--max-new-tokens",
        "16",
        "--drop-cut",
    ]

    def start(out: Path) -> BaseProcess:
        return killed_process.start([*words, "--out", str(out)])

    began = time.monotonic()
    process = start(folder / "first")
    process.join()
    assert process.exitcode == 0
    seconds, moments = time.monotonic() - began, random.Random(kills)
    landed = runs = 0
    while landed < kills:
        out, runs, finished = folder / f"run-{runs}", runs + 1, False
        while not finished:
            process = start(out)
            process.join(moments.uniform(0, seconds) if landed < kills else None)
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)
                landed += 1
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            finished = process.exitcode == 0
        same_bits(out, folder / "first")
    for name in ("answers.jsonl", "rejected.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_a_finished_folder_is_left_alone(place: Path, greedy: Path, capfd: Captured) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in greedy.iterdir()}
    assert generate(place, greedy) == 0
    assert {path.name: path.stat().st_mtime_ns for path in greedy.iterdir()} == before
    printed = capfd.readouterr().out.splitlines()
    assert printed[0].startswith(f"{greedy}: ")
    assert printed[-1] == f"next: draftsmith train RECIPE --data.source {greedy}/answers.jsonl"


def test_a_target_with_other_weights_is_another_target(place: Path, tmp_path: Path, capfd: Captured) -> None:
    """Trained anew into the same folder: its name, sizes and tokenizer stay what they were."""
    own = tmp_path / "target"
    shutil.copytree(place / "target", own)
    words = ["--target", str(own)]
    assert generate(place, tmp_path / "out", *words) == 0
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    capfd.readouterr()
    assert generate(place, tmp_path / "out", *words) == 2
    assert "weights" in capfd.readouterr().err


def test_the_manifest_says_what_was_done(place: Path, sampled: Path) -> None:
    found = manifest(sampled)
    assert (found["state"], found["answered_by"]) == ("complete", "decoder")
    assert found["target"]["name"] == "target"
    assert found["target"]["vocabulary"] == 4096
    assert found["sampling"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 16, "seed": 0}
    assert found["source"]["fingerprint"] == open_sources(DataConfig(source=str(place / "chats.jsonl")))[0].identity()
    assert len(found["drafter"]["sha256"]) == 64
    assert found["rows"]["answered"] == len(read(sampled))
    assert found["rows"]["rejected"] == len(read(sampled, "rejected.jsonl"))
    assert found["acceptance"]["tau"] > 1
    assert found["sessions"][0]["versions"]["torch"]


# what training makes of it


@pytest.mark.parametrize("source", ["chats.jsonl", "pairs.jsonl", "texts.jsonl"])
def test_training_learns_the_answers_and_nothing_else(
    place: Path, tmp_path: Path, target: Backbone, source: str
) -> None:
    out = tmp_path / "out"
    assert generate(place, out, source=source) == 0
    rows, tokenizer = read(out), target.tokenizer
    config = DataConfig(
        source=str(out / "answers.jsonl"),
        sequence_length=512,
        packing=False,
        validation=str(out / "answers.jsonl"),
        cache=str(tmp_path / "cache"),
    )
    prepared = prepare(config, tokenizer, out=None)
    assert prepared.report.rejected == 0
    assert prepared.report.rows == 2 * len(rows)  # once to train, once to validate
    learnt = sorted(
        tokenizer.decode(ids[mask & (place_ >= 0)].tolist())
        for ids, mask, place_ in zip(prepared.train.ids_RS, prepared.train.in_loss_RS, prepared.train.document_RS)
    )
    assert learnt == sorted(answer for row in rows for answer in _answers_of(row, tokenizer))


def _answers_of(row: dict[str, Any], tokenizer: Any) -> list[str]:
    """What counts in the loss: each answer as it was written, its own end behind it, which the template writes not."""
    if "input_ids" in row:
        return [tokenizer.decode([i for i, m in zip(row["input_ids"], row["loss_mask"]) if m])]
    said = (
        [row["completion"]]
        if "completion" in row
        else [each["content"] for each in row["messages"] if each["role"] == "assistant"]
    )
    assert "OLD ANSWER" not in said
    turns = row["ids"]["turns"]
    for text, turn in zip(said, turns, strict=True):
        assert turn["ended"]
        assert tokenizer.decode(turn["answer"][:-1]) == text
    return [tokenizer.decode(turn["answer"]) for turn in turns]


def test_what_is_written_is_read_back(place: Path, greedy: Path) -> None:
    source, _ = open_sources(DataConfig(source=str(greedy / "answers.jsonl")))
    records = list(RecordReader(DataConfig()).read(source))
    assert [each.record.messages for each in records] == [  # type: ignore[union-attr]
        row["messages"] for row in read(greedy)
    ]


@pytest.mark.run
def test_a_run_on_the_answers(place: Path, greedy: Path, tmp_path: Path) -> None:
    words = [
        "--target.path",
        str(place / "target"),
        "--data.source",
        str(greedy / "answers.jsonl"),
        "--loop.steps",
        "1",
        "--loop.batch_rows",
        "1",
        "--loop.micro_rows",
        "1",
        "--loop.validate_rows",
        "1",
        "--data.sequence_length",
        "128",
        "--model.hidden",
        "32",
        "--model.heads",
        "1",
        "--model.kv_heads",
        "1",
        "--model.head_size",
        "32",
        "--model.intermediate",
        "32",
        "--probe.prompts",
        "1",
        "--probe.max_new_tokens",
        "6",
    ]
    assert main(["train", "distill-tiny", "--out", str(tmp_path / "run"), *words]) == 0
    assert (tmp_path / "run" / "drafter" / "model.safetensors").is_file()


# what is refused


REFUSED = [
    (2, "--temperature -1", "--temperature is -1.0; expected 0 or more"),
    (2, "--temperature inf", "--temperature is inf"),
    (2, "--top-p 0", "--top-p is 0.0"),
    (2, "--top-k -1", "--top-k is -1"),
    (2, "--max-new-tokens 0", "--max-new-tokens is 0; expected 1 or more"),
    (2, "--batch 0", "--batch is 0"),
    (2, "--limit 0", "--limit is 0"),
    (2, "--server http://localhost:1", "--server needs --model"),
    (2, "--server localhost --model x", "'localhost' is no URL"),
    (2, "--model x", "none is given"),
    (2, "--server http://localhost:1 --model x --drafter {place}/drafter", "leave out it, or"),
    (2, "--loop.steps 5", "--loop.steps has no say in generate"),
    (2, "--eval.temperatures [1]", "--eval.temperatures has no say"),
    (2, "--source {place}/none.jsonl", "there is no '{place}/none.jsonl'"),
    (2, "--target {place}/none", "cannot load the model '{place}/none'"),
    (2, "--drafter {place}/none", "{place}/none holds no drafter"),
    (2, "--max-new-tokens 2048", "the target target has 2048 positions"),
    (2, "--target tiny", "chats.jsonl:1 is a chat, but the target's tokenizer has no chat templ"),
    (2, "--out {place}", "holds files, but no manifest.json"),
    (2, "--out {place}/greedy --seed 3", "was made for something else: sampling.seed is 0 there and 3 here"),
    (2, "--out {place}/greedy --drafter {place}/drafter", "was made for something else: drafter"),
    (2, "--out {place}/greedy --data.columns '{{a: b}}'", "was made for something else: source.columns"),
    (3, "--source {place}/odd.jsonl", "the columns are question; expected messages"),
    (3, "--source {place}/empty.jsonl", "none of 1 rows was answered; the first one, "),
]


@pytest.mark.parametrize(("code", "line", "reason"), REFUSED)
def test_refusals(
    code: int, line: str, reason: str, place: Path, greedy: Path, tmp_path: Path, capfd: Captured
) -> None:
    """One message, the exit code of its kind, no traceback."""
    import shlex

    (place / "odd.jsonl").write_text('{"question": "why"}\n')
    (place / "empty.jsonl").write_text('{"prompt": "", "completion": "x"}\n')
    before = (greedy / "manifest.json").read_bytes()
    given = shlex.split(line.format(place=place))
    words = {
        "--source": str(place / "chats.jsonl"),
        "--target": str(place / "target"),
        "--out": str(tmp_path / "out"),
        "--max-new-tokens": "16",
        "--batch": "3",
    } | dict(zip(given[::2], given[1::2]))
    assert main(["generate", *(each for pair in words.items() for each in pair)]) == code
    printed = capfd.readouterr().err
    assert printed.startswith("draftsmith: ")
    assert reason.format(place=place) in printed
    assert "Traceback" not in printed
    assert (greedy / "manifest.json").read_bytes() == before


def test_help_and_typing_errors_do_not_wait_for_torch() -> None:
    code = """
import sys
from draftsmith.launch.cli import main
assert main(["generate", "--help"]) == 0
common = ["generate", "--source", "stdlib", "--out", "nowhere"]
assert main([*common, "--temperature", "-1"]) == 2
assert main([*common, "--server", "nothing", "--model", "x"]) == 2
assert main([*common, "--data.nothing", "1"]) == 2
assert not {"torch", "transformers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# a real server


@pytest.fixture
def served(place: Path, tmp_path: Path) -> Iterator[str]:
    """`transformers serve` with the target, on a free port; its address."""
    pytest.importorskip("fastapi", reason="`transformers serve` needs the dev extra")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(place / "target"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    with (tmp_path / "serve.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            while not _is_up(url):
                assert process.poll() is None, (tmp_path / "serve.log").read_text()
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as found:
            return bool(found.status == 200)
    except OSError:
        return False


def test_cut_answers_are_kept_marked_and_counted(
    place: Path, greedy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What was dropped for its length is a row, whose answer training learns without an end."""
    assert generate(place, tmp_path / "out", cut="") == 0
    found, dropped = manifest(tmp_path / "out"), manifest(greedy)["rows"]["rejected_by_kind"]["cut"]
    assert dropped >= 2
    assert found["answers"]["cut"] >= dropped
    assert "cut" not in found["rows"]["rejected_by_kind"]
    marked = [row for row in read(tmp_path / "out") if any(not m.get("ended", True) for m in row["messages"])]
    assert len(marked) == found["rows"]["answered"] - manifest(greedy)["rows"]["answered"] == dropped
    assert f"cut off by a limit of 16 tokens or less: {found['answers']['cut']} of" in capsys.readouterr().out
    rows = ["--data.source", str(tmp_path / "out" / "answers.jsonl"), "--target.path", str(place / "target")]
    assert main(["inspect", "distill-tiny", *rows, "--data.validation-share", "0.3"]) == 0
    assert re.search(r"answers +in the loss: \d+ cut off, and learnt without an end", caplog.text)


@pytest.mark.fault
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_says_what_is_kept_and_the_same_command_goes_on(
    name: str, place: Path, greedy: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def act() -> int:
        with (tmp_path / "said").open("w") as stream, contextlib.redirect_stderr(stream):
            return generate(place, out)

    assert signalled(act, signal.Signals[name], Stage(decoded, "_converse", 3)) == 75
    kept = len((out / ".journal.jsonl").read_bytes().splitlines())
    assert 6 <= kept < len(read(place, "chats.jsonl"))
    said = (tmp_path / "said").read_text().splitlines()[-1]
    assert said.startswith(f"draftsmith: {name}: stopped with {kept} rows done, ")
    assert said.endswith(f"of them answered, which {out} keeps; the same command goes on with the next")
    assert generate(place, out) == 0
    assert (out / "answers.jsonl").read_bytes() == (greedy / "answers.jsonl").read_bytes()


def test_progress_is_a_line_where_nobody_watches(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    assert generate(place, tmp_path / "out", "--limit", "7") == 0
    lines = [each.getMessage() for each in caplog.records if each.name == progress.__name__]
    assert len(lines) >= 3
    assert re.fullmatch(
        r"row=7/7 answered=\d rejected=\d cut=0 tokens=\d+ tokens_per_second=[\d.e+]+ eta=0m00s", lines[-1]
    )


def test_progress_knows_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    """By the rows of this start alone; a line is due every so many seconds, and the last one always."""
    caplog.set_level("INFO")
    now = 100.0
    shown = progress.Progress(total=10, done=4, clock=lambda: now)
    shown.tell(last=True)
    assert not caplog.records  # nothing is done yet
    now += 20
    shown.add({"tokens": 30, "cut": 1})
    shown.add({"rejected": {}})
    shown.tell()
    shown.tell()
    now += 1
    shown.add({"tokens": 12, "cut": 0})
    shown.tell()
    shown.close()
    assert [each.getMessage() for each in caplog.records] == [
        "row=6/10 answered=1 rejected=1 cut=1 tokens=30 tokens_per_second=1.5 eta=0m40s",
        "row=7/10 answered=2 rejected=1 cut=1 tokens=42 tokens_per_second=2 eta=0m21s",
    ]


def test_the_flag_of_an_earlier_version_is_explained(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert generate(place, tmp_path / "out", "--limit", "1", cut="--keep-cut") == 0
    assert "--keep-cut: answers that are cut off are kept anyway, and --drop-cut leaves them out" in caplog.text
    assert generate(place, tmp_path / "other", "--keep-cut") == 2
    assert "--keep-cut and --drop-cut are both given" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("source", ["chats.jsonl", "texts.jsonl"])
def test_transformers_serve(place: Path, served: str, tmp_path: Path, source: str) -> None:
    """Killed and started again: the greedy answers of our own decoder, what is done not repeated."""
    server = ["--server", served, "--model", str(place / "target"), "--concurrency", "2"]
    words = ["generate", "--source", str(place / source), "--target", str(place / "target"), "--max-new-tokens", "16"]
    out, own = tmp_path / "out", tmp_path / "own"
    process = killed_process.start([*words, *server, "--out", str(out)])
    journal = out / ".journal.jsonl"
    while not (journal.is_file() and journal.read_bytes().count(b"\n") >= 2):
        assert process.is_alive()
        time.sleep(0.005)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    done = journal.read_bytes().count(b"\n")
    asked = _requests(tmp_path)
    assert main([*words, *server, "--out", str(out)]) == 0
    assert main([*words, "--out", str(own)]) == 0
    rows, more = len(read(place, source)), _requests(tmp_path) - asked
    assert done < rows
    if source == "texts.jsonl":  # of the killed process, two requests may still have been under way
        assert rows - done <= more <= rows - done + 2
    expected = [_as_served(row, place) for row in read(own)] if source == "texts.jsonl" else read(own)
    assert _lines(read(out), place) == _lines(expected, place)
    assert manifest(out)["answered_by"] == "server"
    assert manifest(out)["answers"]["tokens"] == manifest(own)["answers"]["tokens"]


def _requests(folder: Path) -> int:
    """Those that were answered, not those that were refused for what they switch off."""
    return len(re.findall(r'POST /v1/\S+ HTTP/1.1" 200', (folder / "serve.log").read_text()))


def _as_served(row: dict[str, Any], place: Path) -> dict[str, Any]:
    """A row of tokens that the line end ended: the server leaves it on, so the end of the text follows as another."""
    tokenizer = load_tokenizer(str(place / "target"))
    (line,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    if row["input_ids"][-1] != line or sum(row["loss_mask"]) == 16:
        return row
    return {"input_ids": [*row["input_ids"], tokenizer.eos_token_id], "loss_mask": [*row["loss_mask"], 1]}


def _lines(rows: list[Any], place: Path) -> list[Any]:
    """Rows without ids, and without the line end that ends an answer of this target: the server leaves it on."""
    text = json.dumps([{name: each for name, each in row.items() if name != "ids"} for row in rows])
    return json.loads(text.replace('\\n"', '"'))
