"""Prompts cut from rows, the target's continuations, and a folder that survives kills."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.data.generate import continuations as c
from draftsmith.data.rows.cache import Prepared
from draftsmith.data.rows.packed import Document, PackedRows, pack
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.errors import DataError, EnvironmentFailure, RequestError
from draftsmith.storage.staging import this_host
from helpers.runs.damaged_files import KINDS, damage
from safetensors.torch import load_file, save_file

WANTED = c.Wanted(samples=70, held_out=9, prompt_tokens=6, tokens=5, temperature=0.0, seed=0, weights="w")


def document(first: int, labels: list[bool]) -> Document:
    ids = (first + np.arange(len(labels))).astype(np.int32)
    return Document(ids, np.asarray(labels))


def rows_of(*documents: Document, length: int = 40) -> PackedRows:
    return pack(documents, length, pad=0, fingerprint="rows")


def texts(seed: int, count: int) -> PackedRows:
    g = np.random.default_rng(seed)
    made = [Document(g.integers(0, VOCABULARY, 40).astype(np.int32), np.ones(40, bool)) for _ in range(count)]
    return rows_of(*made)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return Prepared(texts(0, 20), texts(1, 4), report=None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def speaker() -> Backbone:
    """A target with an identity: a name, and a tokenizer of as many tokens."""
    target = make_target("qwen3")

    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {str(n): n for n in range(VOCABULARY)}

    target.__dict__["tokenizer"] = Words()
    return target


def test_prompts_of_a_text() -> None:
    """Pieces side by side, none up to the text's end: behind that nothing follows."""
    rows = rows_of(document(100, [True] * 19))
    assert list(c.prompts_in(rows, 0, 6)) == [list(range(100, 106)), list(range(106, 112)), list(range(112, 118))]
    rows = rows_of(document(100, [False, *[True] * 17]))  # a mark of the beginning in front
    assert [len(each) for each in c.prompts_in(rows, 0, 6)] == [6, 6]
    assert list(c.prompts_in(rows, 0, 18)) == []


def test_prompts_of_a_chat() -> None:
    """All that stands in front of an answer; one that would lose its beginning is left out."""
    chat = [False] * 3 + [True] * 2 + [False] * 4 + [True] * 3
    rows = rows_of(document(100, chat), document(200, [True] * 8))
    prompts = sorted(c.prompts_in(rows, 0, 9))
    assert prompts == [list(range(100, 103)), list(range(100, 109))]
    assert sorted(c.prompts_in(rows, 0, 7)) == [list(range(100, 103)), list(range(200, 207))]


def test_prompts_are_spread_over_the_rows(prepared: Prepared) -> None:
    """One of each row before a second of any; a longer list begins with the shorter one."""
    rows = prepared.train
    many = c.choose_prompts(rows, 45, 6, seed=1)
    of = {tuple(p): r for r in range(len(rows)) for p in c.prompts_in(rows, r, 6)}
    order = [of[tuple(prompt)] for prompt in many]
    assert sorted(order[:20]) == sorted(order[20:40]) == list(range(20))
    assert len(set(map(tuple, many))) == 45
    assert c.choose_prompts(rows, 7, 6, seed=1) == many[:7]
    assert c.choose_prompts(rows, 7, 6, seed=2) != many[:7]


def test_all_that_there_are(prepared: Prepared) -> None:
    assert len(c.choose_prompts(prepared.train, 10_000, 6, seed=0)) == 20 * 6
    with pytest.raises(DataError, match="none of 20 rows holds a prompt"):
        c.choose_prompts(prepared.train, 5, 40, seed=0)


def test_samples_are_the_targets_own_words(speaker: Backbone, prepared: Prepared, tmp_path: Path) -> None:
    """Labels are exactly what the target would write; held-out samples come of held-out rows."""
    samples = c.continuations(speaker, prepared, WANTED, tmp_path)
    assert (len(samples.train), len(samples.validation)) == (70, 9)
    held = {tuple(p) for r in range(4) for p in c.prompts_in(prepared.validation, r, 6)}
    for rows, from_held_out in ((samples.train, False), (samples.validation, True)):
        batch = rows.batch(range(len(rows)))
        assert batch["input_ids"].shape == (len(rows), 11)
        for row in range(0, len(rows), 8):
            ids = batch["input_ids"][row].tolist()
            assert (tuple(ids[:6]) in held) is from_held_out
            made = autoregressive(speaker, [ids[:6]], warper=Warper(0.0), max_new_tokens=5)
            assert ids[6:] == made.tokens[0]
            assert batch["loss_mask"][row].tolist() == [False] * 6 + [True] * 5


def test_an_answer_that_ends_is_padded(
    speaker: Backbone, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = c.continuations(speaker, prepared, WANTED, tmp_path / "a").train
    end = int(whole.ids_RS[0, 8])
    monkeypatch.setattr(type(speaker), "eos_ids", property(lambda _self: (end,)))
    cut = c.continuations(speaker, prepared, WANTED, tmp_path / "b").train
    first = int(np.flatnonzero(whole.ids_RS[0, 6:] == end)[0]) + 6
    assert cut.ids_RS[0, : first + 1].tolist() == whole.ids_RS[0, : first + 1].tolist()
    assert (cut.document_RS[0, first + 1 :] == -1).all()
    assert not cut.in_loss_RS[0, first + 1 :].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_folder_goes_on(
    speaker: Backbone, prepared: Prepared, tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are there are not made again; those of a kill, by whichever process, are."""
    wanted = c.Wanted(**{**WANTED.__dict__, "temperature": temperature})
    whole = c.continuations(speaker, prepared, wanted, tmp_path / "whole")
    out = tmp_path / "cut"
    real, made = c._Part.make, []

    def make(part: c._Part, *rest) -> None:
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(part.begin)
        real(part, *rest)

    monkeypatch.setattr(c._Part, "make", make)
    with pytest.raises(KeyboardInterrupt):
        c.continuations(speaker, prepared, wanted, out)
    (out / f".staging-{this_host()}-99999999-part-00001.safetensors").write_bytes(b"half")
    made.clear()
    # the second of two processes has nothing to do but part 1, and then waits for the first
    again = c.continuations(speaker, prepared, wanted, out, c.Team(rank=1, world=2))
    assert made == [64]
    for left, right in zip(whole, again, strict=True):
        assert np.array_equal(left.ids_RS, right.ids_RS)
        assert np.array_equal(left.in_loss_RS, right.in_loss_RS)
        assert left.fingerprint == right.fingerprint


@pytest.mark.parametrize("kind", [*KINDS, "a tensor lacks", "a row lacks", "shorter rows"])
def test_a_damaged_part_is_made_anew(
    kind: str,
    speaker: Backbone,
    prepared: Prepared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That part alone, the same as before, and the log names it."""
    whole = c.continuations(speaker, prepared, WANTED, tmp_path)
    path = tmp_path / "part-00001.safetensors"
    before, held = path.read_bytes(), load_file(path)
    if kind in KINDS:
        damage(path, kind)
    elif kind == "a tensor lacks":
        save_file({name: t for name, t in held.items() if name != "labels"}, path)
    else:
        cut = (slice(1, None),) if kind == "a row lacks" else (slice(None), slice(1, None))
        save_file({name: t[cut].contiguous() for name, t in held.items()}, path)
    real, made = c._Part.make, []

    def make(part: c._Part, *rest) -> None:
        made.append(part.begin)
        real(part, *rest)

    monkeypatch.setattr(c._Part, "make", make)
    again = c.continuations(speaker, prepared, WANTED, tmp_path)
    assert made == [64]
    assert path.read_bytes() == before
    assert [each.fingerprint for each in again] == [each.fingerprint for each in whole]
    [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert str(path) in warning.getMessage()
    assert "it is made anew" in warning.getMessage()


@pytest.mark.parametrize("below", ["", "further", "further/down"])
def test_a_file_is_no_folder(below: str, speaker: Backbone, prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(RequestError, match=rf"{tmp_path / 'taken'} is a file; expected a folder"):
        c.continuations(speaker, prepared, WANTED, tmp_path / "taken" / below)
    assert (tmp_path / "taken").read_text() == "mine"


def test_other_settings_are_refused(speaker: Backbone, prepared: Prepared, tmp_path: Path) -> None:
    c.continuations(speaker, prepared, WANTED, tmp_path)
    other = c.Wanted(**{**WANTED.__dict__, "tokens": 4, "weights": "v"})
    with pytest.raises(RequestError, match="tokens is 5 there and 4 here; weights is w there and v here"):
        c.continuations(speaker, prepared, other, tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps([]))
    with pytest.raises(RequestError, match="the file is damaged"):
        c.continuations(speaker, prepared, WANTED, tmp_path)


def test_a_prompt_that_does_not_fit(speaker: Backbone, prepared: Prepared, tmp_path: Path) -> None:
    long = c.Wanted(**{**WANTED.__dict__, "tokens": 1000})
    with pytest.raises(RequestError, match="need 1006 positions"):
        c.continuations(speaker, prepared, long, tmp_path)
    assert torch.is_inference_mode_enabled() is False


def test_parts_number_their_samples_through(speaker: Backbone, prepared: Prepared, tmp_path: Path) -> None:
    """Two parts, and two processes: no number names two samples, so none draws what another one has drawn."""
    asked: list[tuple[list[list[int]], range]] = []

    def write(prompts: list[list[int]], numbers: range) -> list[list[int]]:
        asked.append((list(prompts), numbers))
        return [[1] * 5 for _ in prompts]

    for rank in (1, 0):
        with contextlib.suppress(EnvironmentFailure):  # the other one's parts are missing
            c.continuations(speaker, prepared, WANTED, tmp_path, c.Team(rank, 2, lambda: None), write=write)
    assert [part for _, part in asked] == [range(64, 79), range(64)], "each makes its own"
    assert all(len(prompts) == len(part) for prompts, part in asked)


def test_equal_prompts_are_gone_on_with_differently_wherever_they_stand(speaker: Backbone) -> None:
    """Of one part and of the next; the same sample is the same, whatever stands beside it."""
    warm = replace(WANTED, temperature=1.5, tokens=12)
    write = c.by_decoding(speaker, warm)
    prompt = [3, 4, 5]
    first, second = (write([prompt] * 3, range(at, at + 3)) for at in (0, 64))
    answers = [tuple(each) for each in (*first, *second)]
    assert len(set(answers)) == 6
    assert tuple(write([prompt], range(65, 66))[0]) == answers[4]
    other = c.by_decoding(speaker, replace(warm, seed=1))([prompt] * 3, range(3))
    assert not {tuple(each) for each in other} & set(answers)
    plain = autoregressive(
        speaker, [prompt] * 3, warper=Warper(1.5), max_new_tokens=12, seed=0, requests=range(3)
    ).tokens
    assert not {tuple(each) for each in plain} & set(answers), "who decodes with the same seed draws others"


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 71},
        {"held_out": 8},
        {"prompt_tokens": 7},
        {"tokens": 6},
        {"temperature": 0.5},
        {"seed": 1},
        {"weights": "other"},
    ],
    ids=str,
)
def test_all_that_is_wanted_is_in_the_identity(
    change: dict, speaker: Backbone, prepared: Prepared, tmp_path: Path
) -> None:
    def write(prompts: list[list[int]], _numbers: range) -> list[list[int]]:
        return [[1] * 5 for _ in prompts]

    c.continuations(speaker, prepared, WANTED, tmp_path, write=write)
    (name,) = change
    with pytest.raises(RequestError, match=f"was made for something else: {name} is"):
        c.continuations(speaker, prepared, replace(WANTED, **change), tmp_path, write=write)


def test_which_piece_of_a_row_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 3, 2 and 4 pieces that drew 7, 4 and 14: they come by their draws, each begins at its draw by their
    number (1, 0 and 2) and goes on around."""
    rows = PackedRows(*(np.array(each) for each in zip(*map(row_of_pieces, (3, 2, 4)))), "rows")
    drawn = SimpleNamespace(random_raw=lambda count: np.array([7, 4, 14], np.uint64)[:count])
    monkeypatch.setattr(c.np.random, "Philox", lambda **_how: drawn)
    taken = [(pieces, at) for pieces, at in c.choose_prompts(rows, None, 2, seed=0)]
    assert taken[:3] == [(2, 0), (3, 1), (4, 2)]
    assert taken[3:6] == [(2, 1), (3, 2), (4, 3)]
    assert taken[6:] == [(3, 0), (4, 0), (4, 1)]


def row_of_pieces(count: int) -> tuple[list[int], list[bool], list[int]]:
    """One text, cut into pairs: how many there are, and which one it is; a last token is behind all of them."""
    ids = [each for at in range(count) for each in (count, at)]
    rest = 8 - len(ids)
    return [*ids, 0, *[0] * rest], [*[True] * len(ids), True, *[False] * rest], [*[0] * len(ids), 0, *[-1] * rest]
