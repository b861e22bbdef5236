"""Hidden states on disk: bits, bounds and errors, damage, kills, and what is refused."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from draftsmith.data.features.shards import decode, encode, token_bytes
from draftsmith.data.features.store import FeatureStore, row_keys
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.storage import sha256
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

N, S, H = 2, 12, 32
ROW = S * token_bytes(N, H, "fp32")
IDENTITY = {"target": "tiny", "tokenizer": "abc", "template": "none", "layers": [2, -1], "rows": 1}


def states(number: int) -> Tensor:
    """The states of a row, which are a function of its number."""
    g = torch.Generator().manual_seed(number)
    return torch.randn(N, S, H, generator=g) * torch.logspace(-3, 3, S)[:, None]


def make(folder: Path, *, rows: int = 1000, **changes) -> FeatureStore:
    """A store with room for about `rows` rows and the heads of their shards."""
    arguments = {"max_bytes": rows * (ROW + 400) + 10_000, "row_bytes": ROW, **changes}
    return FeatureStore(folder, arguments.pop("identity", IDENTITY), **arguments)


def fill(store: FeatureStore, numbers: range) -> None:
    for number in numbers:
        store.add(str(number), encode(states(number), "fp32"))


def kept_rows(store: FeatureStore, numbers: range) -> set[int]:
    """Which rows are kept; what is kept must be right."""
    kept = set()
    for number in numbers:
        row = store.read(str(number))
        if row is not None:
            assert torch.equal(decode(row, torch.float32), states(number))
            kept.add(number)
    return kept


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# ---- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_made_of_it_at_first(dtype, of, tmp_path: Path) -> None:
    """A filling epoch uses the rounded values, so they have to come back bit for bit."""
    first = encode(states(0).to(of), dtype)
    store = make(tmp_path)
    store.add("row", first)
    store.close()
    again = make(tmp_path).read("row")
    assert again is not None
    assert torch.equal(decode(again, of), decode(first, of))
    exact = dtype == "fp32" or (dtype == "bf16" and of == torch.bfloat16)
    assert torch.equal(decode(again, of), states(0).to(of)) == exact


def test_the_error_of_fp8_is_bounded() -> None:
    """Half a step: 1/16 of a value, or 1/1024 of the scale where that is more."""
    x = torch.cat([states(number) for number in range(8)])
    x[0, 0] = 0  # a token of zeros stays zeros
    x[1, 1, 5:] = 1e-30  # far below its token's largest value
    back = decode(encode(x, "fp8"), torch.float32)
    scale = x.abs().amax(-1, keepdim=True) / 448
    bound = torch.maximum(x.abs() / 16, scale / 1024) * (1 + 1e-5)
    assert bool(((back - x).abs() <= bound).all())
    assert float(((back - x).abs() / bound.clamp_min(1e-38)).max()) > 0.9, "the bound is tight"
    relative = (back - x).norm() / x.norm()
    assert 0.01 < float(relative) < 0.04
    # a scale for the row as a whole would lose the small tokens
    scale = x[2].abs().max() / 448
    one = (x[2] / scale).to(torch.float8_e4m3fn).float() * scale
    assert float((one[1] - x[2, 1]).norm() / x[2, 1].norm()) > 0.4
    assert float((back[2, 1] - x[2, 1]).norm() / x[2, 1].norm()) < 0.04


def test_the_largest_value_does_not_overflow() -> None:
    """Beyond 448 torch's e4m3 is NaN, and a quotient may round up."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 20_000, 1, generator=g) * 10 ** (20 * torch.rand(1, 20_000, 1, generator=g))
    back = decode(encode(x, "fp8"), torch.float32)
    assert bool(((back - x).abs() <= 1e-6 * x.abs()).all())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_bytes_of_a_token(dtype) -> None:
    row = encode(states(0), dtype)
    size = sum(tensor.numel() * tensor.element_size() for tensor in row.values())
    assert size == S * token_bytes(N, H, dtype)


@pytest.mark.parametrize("name", ["input_ids", "positions", "documents"])
def test_each_of_what_the_states_depend_on_makes_another_key(name: str) -> None:
    """And what says nothing of them makes none."""
    batch = {each: torch.arange(6).view(2, 3) for each in ("input_ids", "positions", "documents", "loss_mask")}
    one, two = row_keys(batch)
    assert one != two
    other = {**batch, name: batch[name] + torch.tensor([[0, 0, 0], [0, 0, 1]])}
    assert row_keys(other)[0] == one
    assert row_keys(other)[1] != two
    assert row_keys({**batch, "loss_mask": 1 - batch["loss_mask"]}) == [one, two]


def test_keys_are_of_what_the_states_depend_on() -> None:
    ids = torch.arange(24).view(2, 12)
    documents = torch.zeros_like(ids)
    batch = {"input_ids": ids, "positions": torch.arange(12).expand(2, 12), "documents": documents}
    first, second = row_keys(batch)
    assert first != second
    assert row_keys({name: t[1:] for name, t in batch.items()}) == [second]
    assert row_keys({**batch, "loss_mask": ids > 3}) == [first, second]
    documents = documents.clone()
    documents[0, -1] = -1
    assert row_keys({**batch, "documents": documents})[1] == second
    assert row_keys({**batch, "documents": documents})[0] != first


# ---- size ------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    asked=st.lists(st.integers(0, 30), min_size=20, max_size=80),
    rows=st.integers(2, 20),
    patience=st.sampled_from([0, 5, 10_000]),
    reopen=st.sets(st.integers(0, 79), max_size=2),
)
def test_the_bound_holds_at_all_times_and_every_row_is_right(
    asked: list[int], rows: int, patience: int, reopen: set[int], tmp_path_factory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    bound = rows * (ROW + 400) + 10_000
    store = make(folder, rows=rows, patience=patience)
    for at, number in enumerate(asked):
        row = store.read(str(number))
        if row is None:
            store.add(str(number), encode(states(number), "fp32"))
        else:
            assert torch.equal(decode(row, torch.float32), states(number))
        size = sum(path.stat().st_size for path in folder.glob("*") if path.suffix != ".json")
        assert size <= bound
        assert store.bytes <= size
        if at in reopen:
            store.close()
            store = make(folder, rows=rows, patience=patience)
    store.close()


def test_without_patience_the_shard_read_longest_ago_goes(tmp_path: Path) -> None:
    store = make(tmp_path, rows=16)
    fill(store, range(16))
    held = kept_rows(store, range(16))
    assert len(held) >= 12
    first, *others = sorted(held)
    kept_rows(store, range(first, first + 1))  # now another one is the oldest
    fill(store, range(100, 108))
    store.close()
    again = make(tmp_path, rows=16)
    assert again.read(str(first)) is not None
    assert again.read(str(others[0])) is None
    assert len(kept_rows(again, range(100, 108))) == 8


def test_rows_in_use_are_not_pushed_out(tmp_path: Path) -> None:
    """Random epochs over more rows than fit: as many are found as there is room for."""
    store = make(tmp_path, rows=20, patience=80)
    g = torch.Generator().manual_seed(0)
    hits = []
    for _ in range(4):
        before = len(hits)
        for number in torch.randperm(40, generator=g).tolist():
            hits.append(store.read(str(number)) is not None)
            if not hits[-1]:
                store.add(str(number), encode(states(number), "fp32"))
        share = sum(hits[before:]) / 40
    assert share >= 0.45
    written = shards(tmp_path)
    for _ in range(5):  # other rows alone: what is stored is in nobody's way any more
        for number in range(100, 120):
            if store.read(str(number)) is None:
                store.add(str(number), encode(states(number), "fp32"))
    assert kept_rows(store, range(100, 120)) == set(range(100, 120))
    assert len(set(written) & set(shards(tmp_path))) < len(written) / 2


def test_a_smaller_bound_evicts_at_once(tmp_path: Path) -> None:
    store = make(tmp_path, rows=40, patience=10_000)
    fill(store, range(30))
    store.close()
    assert kept_rows(make(tmp_path / "other", rows=40), range(30)) == set()
    less = make(tmp_path, rows=10, patience=10_000)
    assert less.bytes <= 10 * (ROW + 400) + 10_000
    assert 5 <= len(kept_rows(less, range(30))) <= 13


def test_a_bound_below_one_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="one row take.*raise it"):
        make(tmp_path, max_bytes=ROW, row_bytes=ROW)


# ---- damage and kills ---------------------------------------------------------------------------


def filled(folder: Path) -> FeatureStore:
    store = make(folder, rows=64)
    fill(store, range(64))
    store.close()
    assert len(shards(folder)) > 10
    return make(folder, rows=64)


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "head"])
def test_a_damaged_shard_is_named_dropped_and_made_again(how: str, tmp_path: Path, caplog) -> None:
    store = filled(tmp_path)
    whole = kept_rows(store, range(64))
    store.close()
    victim = shards(tmp_path)[3]
    content = bytearray(victim.read_bytes())
    if how == "flip":
        content[-5] ^= 1
    elif how == "head":
        content[20:40] = b"x" * 20
    victim.write_bytes(content[: {"cut": len(content) // 2, "empty": 0}.get(how, len(content))])
    if how == "head":
        (tmp_path / "index-000.json").unlink()
    with caplog.at_level(logging.WARNING):
        store = make(tmp_path, rows=64)
        left = kept_rows(store, range(64))
    assert left < whole
    assert victim.name in caplog.text
    assert "computed again" in caplog.text
    assert not victim.exists()
    fill(store, range(64))
    store.close()
    assert kept_rows(make(tmp_path, rows=64), range(64)) >= left


def test_the_index_is_made_anew_from_the_shards(tmp_path: Path) -> None:
    store = filled(tmp_path)
    whole = kept_rows(store, range(64))
    store.close()
    index = tmp_path / "index-000.json"
    listed = json.loads(index.read_text())["shards"]
    assert listed.keys() == {path.name for path in shards(tmp_path)}
    # none, broken, or older than the newest shard, as a kill between the two writes leaves it
    for text in (None, "{", json.dumps({"identity": "x", "shards": {}})):
        index.unlink() if text is None else index.write_text(text)
        again = make(tmp_path, rows=64)
        assert kept_rows(again, range(64)) == whole
        again.close()


def test_a_missing_shard_is_no_error(tmp_path: Path) -> None:
    store = filled(tmp_path)
    whole = kept_rows(store, range(64))
    shards(tmp_path)[0].unlink()
    left = kept_rows(store, range(64))
    assert left < whole
    store.close()
    assert kept_rows(make(tmp_path, rows=64), range(64)) == left


def test_names_carry_the_checksum(tmp_path: Path) -> None:
    filled(tmp_path)
    assert all(path.stem.endswith(sha256(path)) for path in shards(tmp_path))


def _fill_for_ever(folder: Path) -> None:
    store = make(folder, rows=600)
    number = 0
    while True:
        fill(store, range(number, number + 1))
        number += 1


@pytest.mark.fault
def test_a_kill_leaves_whole_shards(tmp_path: Path) -> None:
    """SIGKILL in the middle of writing, three times over."""
    spawn = multiprocessing.get_context("fork")
    known: set[int] = set()
    for count in (2, 5, 10):
        process = spawn.Process(target=_fill_for_ever, args=(tmp_path,))
        process.start()
        while len(shards(tmp_path)) < count:
            assert process.is_alive()
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        store = make(tmp_path, rows=600)
        now = kept_rows(store, range(600))
        assert known <= now
        known = now
        assert not list(tmp_path.glob(".staging-000-*"))
        store.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFailure, match="cannot use the feature cache"):
        make(tmp_path / "file")


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device")

    store = make(tmp_path)
    fill(store, range(3))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(EnvironmentFailure, match=r"No space left.*features.max_gb.*--resume auto"):
        store.close()


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("field", sorted(IDENTITY))
def test_another_cache_is_refused_by_name(field: str, tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.close()
    with pytest.raises(RequestError, match=f"was made for something else: {field} is .* there"):
        make(tmp_path, identity=IDENTITY | {field: "other"})
    assert make(tmp_path, rows=64).read("3") is not None


def test_all_that_differs_is_named(tmp_path: Path) -> None:
    make(tmp_path).close()
    with pytest.raises(RequestError, match="tokenizer is abc there and x here; layers is"):
        make(tmp_path, identity=IDENTITY | {"tokenizer": "x", "layers": [1, 2, 3, -1]})


def test_shards_of_another_cache_are_not_taken_up(tmp_path: Path) -> None:
    """Copied there by hand, and not by the command line."""
    filled(tmp_path / "a").close()
    (tmp_path / "b").mkdir()
    for path in shards(tmp_path / "a"):
        path.rename(tmp_path / "b" / path.name)
    other = make(tmp_path / "b", rows=64, identity=IDENTITY | {"target": "other"})
    assert kept_rows(other, range(64)) == set()


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    store = make(tmp_path)
    with pytest.raises(RequestError, match="used by another run"):
        make(tmp_path)
    store.close()
    make(tmp_path)


def test_processes_of_one_run_share_a_folder(tmp_path: Path) -> None:
    """Each writes its own rows within its part of the bound, and reads those of all."""
    stores = [make(tmp_path, rows=60, rank=rank, world=2) for rank in range(2)]
    for rank, store in enumerate(stores):
        fill(store, range(rank, 60, 2))
        store.close()
    stores = [make(tmp_path, rows=60, rank=rank, world=2) for rank in range(2)]
    assert kept_rows(stores[0], range(60)) == kept_rows(stores[1], range(60))
    assert len(kept_rows(stores[0], range(60))) > 48
    assert sum(store.bytes for store in stores) == sum(p.stat().st_size for p in shards(tmp_path))
    stores[0].add("new", encode(states(1), "fp32"))
    stores[0].close()
    assert stores[1].read("new") is not None, "written after the other had opened"
    stores[1].close()
    alone = make(tmp_path, rows=60)
    assert len(kept_rows(alone, range(60))) > 48


def test_the_bound_is_of_all_processes_together(tmp_path: Path) -> None:
    """Each offers more than fits the whole of it, so each keeps a part, and all together no more than is allowed."""
    stores = [make(tmp_path, rows=30, rank=rank, world=3) for rank in range(3)]
    for rank, store in enumerate(stores):
        fill(store, range(100 * rank, 100 * rank + 40))
        store.close()
    on_disk = sum(path.stat().st_size for path in shards(tmp_path))
    (alone,) = [make(tmp_path / "alone", rows=30)]
    assert 0 < on_disk <= alone._max_bytes
    fill(alone, range(40))
    alone.close()
    assert on_disk > 0.6 * sum(path.stat().st_size for path in shards(tmp_path / "alone"))


def test_a_reader_in_a_thread(tmp_path: Path) -> None:
    """Rows are read while others are written and evicted: never a wrong one."""
    store = make(tmp_path, rows=20)
    fill(store, range(20))
    problems: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                kept_rows(store, range(40))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test fails by it
            problems.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for turn in range(4):
        fill(store, range(20 * (turn % 2), 20 * (turn % 2) + 20))
    done.set()
    thread.join()
    store.close()
    assert not problems
