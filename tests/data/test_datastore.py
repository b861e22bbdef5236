"""The datastore against brute force over plain lists, and what it says when it is misused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from draftsmith.data import datastore, datastore_build
from draftsmith.data.datastore import Datastore
from draftsmith.data.datastore_build import build_datastore
from draftsmith.errors import EnvironmentFailure, RequestError
from hypothesis import example, given, settings
from hypothesis import strategies as st

ALPHABET = 3
corpora = st.lists(st.lists(st.integers(0, ALPHABET - 1), max_size=14), min_size=1, max_size=12).filter(any)
queries = st.lists(st.integers(-1, ALPHABET + 1), max_size=6)
contexts = st.lists(st.integers(0, ALPHABET), max_size=8)
shard_sizes = st.integers(2, 40)


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.data.datastore_build.flush", lambda path: None)
        patch.setattr("draftsmith.storage.flush", lambda path: None)
        yield


def build(folder: Path, documents, **settings) -> Datastore:
    settings = {"vocabulary": ALPHABET, "tokenizer": "abc", **settings}
    build_datastore(documents, folder / "store", **settings)
    return Datastore(folder / "store")


@pytest.fixture
def store(tmp_path: Path) -> Datastore:
    return build(tmp_path, [[0, 1, 2, 0, 1], [0, 1, 0]])


def layout(documents: list[list[int]], shard_tokens: int) -> list[list[int]]:
    """The tokens of each shard as plain lists: whole pieces and separators, greedily."""
    shards: list[list[int]] = [[]]
    for document in documents:
        for at in range(0, len(document), shard_tokens - 1):
            piece = [*document[at : at + shard_tokens - 1], ALPHABET]
            if len(shards[-1]) + len(piece) > shard_tokens:
                shards.append([])
            shards[-1] += piece
    return shards


def occurrences(shards: list[list[int]], query: list[int]) -> list[tuple[int, int]]:
    """All places of a query of tokens, by shard and then by the suffix that starts there."""
    if not set(query) <= set(range(ALPHABET)):
        return []
    return [
        (number, start)
        for number, tokens in enumerate(shards)
        for start in sorted(range(len(tokens)), key=lambda start: tokens[start:])
        if tokens[start] != ALPHABET and tokens[start : start + len(query)] == query
    ]


def evenly(matches: list, limit: int) -> list:
    if len(matches) <= limit:
        return matches
    return [matches[i * len(matches) // limit] for i in range(limit)]


def brute_continuations(shards, context, longest, shortest, length, limit) -> list[list[int]]:
    for size in range(min(longest, len(context)), shortest - 1, -1):
        rows = []
        for number, start in occurrences(shards, context[-size:]):
            rest = shards[number][start + size :]
            row = rest[: rest.index(ALPHABET)][:length]
            if row:
                rows.append(row + [-1] * (length - len(row)))
        if rows:
            return evenly(rows, limit)
    return []


@settings(deadline=None)
@given(corpora, shard_sizes, queries, st.integers(1, 8))
@example([[0, 1], [2]], 40, [1, ALPHABET, 2], 8)  # the separator is no token to ask for
@example([[0, 1], [0, 1]], 2, [], 3)
def test_matches_are_all_occurrences(documents, shard_tokens, query, limit) -> None:
    with TemporaryDirectory() as folder:
        store = build(Path(folder), documents, shard_tokens=shard_tokens)
        shards = layout(documents, shard_tokens)
        assert [shard.tokens.tolist() for shard in store.shards] == shards
        expected = occurrences(shards, query)
        assert store.matches(query, 10**6) == expected
        assert store.matches(query, limit) == evenly(expected, limit)


@settings(deadline=None)
@given(corpora, shard_sizes, contexts, st.integers(1, 5), st.integers(0, 4), st.integers(1, 4), st.integers(1, 6))
@example([[0, 1], [2, 1, 0]], 40, [2, 0, 1], 1, 2, 2, 5)  # 0 1 only ends a document: 1 counts
def test_continuations_are_what_follows(documents, shard_tokens, context, shortest, more, length, limit) -> None:
    ranges = {"longest": shortest + more, "shortest": shortest, "length": length, "limit": limit}
    with TemporaryDirectory() as folder:
        store = build(Path(folder), documents, shard_tokens=shard_tokens)
        matches = store.continuations(context, **ranges)
        expected = brute_continuations(layout(documents, shard_tokens), context, **ranges)
        assert matches.dtype == np.int64
        assert matches.shape == (len(expected), length)
        assert matches.tolist() == expected


def test_no_border_is_crossed(tmp_path: Path) -> None:
    """Each document has tokens of its own, so anything that crosses a border shows."""
    documents = [[10 * n + i for i in range(10)] for n in range(50)]
    store = build(tmp_path, documents, vocabulary=500, shard_tokens=64)
    assert len(store.shards) > 5
    for document in documents:
        rows = store.continuations(document[:3], length=20)
        assert rows.tolist() == [document[3:] + [-1] * 13]
        assert store.continuations(document).shape == (0, 10)  # nothing follows it
        assert store.matches([document[-1], (document[-1] + 1) % 500], 9) == []


def brute_trie(rows: list[list[int]], nodes: int) -> list[tuple[tuple[int, ...], int]]:
    """Kept paths and the index of each one's parent."""
    counts: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        row = row[: row.index(-1)] if -1 in row else row
        counts.update(tuple(row[:depth]) for depth in range(1, len(row) + 1))
    kept = sorted(counts, key=lambda path: (-counts[path], len(path), path))[:nodes]
    return [(path, kept.index(path[:-1]) if len(path) > 1 else -1) for path in kept]


@st.composite
def row_blocks(draw) -> np.ndarray:
    length = draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 2) | st.just(-1), min_size=length, max_size=length)
    rows = draw(st.lists(row, max_size=30))
    return np.array(rows, dtype=np.int64).reshape(-1, length)


@settings(deadline=None)
@given(row_blocks(), st.integers(0, 40))
def test_trie_keeps_the_most_frequent_prefixes(rows: np.ndarray, nodes: int) -> None:
    tokens, parents = Datastore.trie(rows, nodes)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(paths)
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    assert list(zip(paths, parents)) == brute_trie(rows.tolist(), nodes)


def test_trie_of_many_rows_with_large_ids() -> None:
    """As many rows as a look-up gives, with ids whose products need more than 32 bits."""
    rng = np.random.default_rng(0)
    rows = (2**32 - 2) - rng.geometric(0.3, (5000, 10)).astype(np.int64)
    tokens, parents = Datastore.trie(rows, 64)
    expected = brute_trie(rows.tolist(), 64)
    assert tokens == [path[-1] for path, _ in expected]
    assert parents == [parent for _, parent in expected]


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 65_535, 65_536, 151_936, 2**24 + 1, 2**32 - 1])
def test_suffixes_are_sorted_whatever_the_width_of_ids(vocabulary: int, tmp_path: Path) -> None:
    """divsufsort sorts bytes; ids that need two or four of them must still sort as numbers."""
    rng = np.random.default_rng(vocabulary)
    few = rng.integers(0, vocabulary, 4)
    documents = [
        ids.tolist() for size in range(1, 30) for ids in (rng.integers(0, vocabulary, size), rng.choice(few, size))
    ]
    store = build(tmp_path, documents, vocabulary=vocabulary)
    (shard,) = store.shards
    tokens = shard.tokens.tolist()
    assert shard.tokens.dtype == (np.uint16 if vocabulary < 2**16 else np.uint32)
    starts = [start for start, token in enumerate(tokens) if token != vocabulary]
    assert shard.suffixes.tolist() == sorted(starts, key=lambda start: tokens[start:])


def test_one_shard_or_many_give_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 20, 30).tolist() for _ in range(200)]
    (tmp_path / "many").mkdir()
    one = build(tmp_path, documents, vocabulary=20)
    many = build(tmp_path / "many", iter(documents), vocabulary=20, shard_tokens=100)
    assert (len(one.shards), len(many.shards)) == (1, 67)
    for document in documents[:40]:
        few, more = (sorted(s.continuations(document[:9]).tolist()) for s in (one, many))
        assert few == more != []


@pytest.mark.parametrize(("free", "shards"), [(96 * 1_000, 1), (96 * 100, 10)])
def test_a_shard_is_what_half_of_the_free_memory_sorts(
    free: int, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr(datastore_build, "_LEAST", 50)
    assert len(build(tmp_path, [[1] * 49] * 20).shards) == shards  # 50 tokens with the separator, 1,000 in all
    monkeypatch.setattr(datastore_build, "_LEAST", 1_000)
    assert datastore_build.sortable() == 1_000  # however little is free
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**12))
    assert datastore_build.sortable() == 2**29 - 1  # however much is


def test_a_look_up_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are mapped, and a look-up in two million tokens reads a few hundred windows."""
    corpus = np.random.default_rng(0).integers(0, 50_000, (1000, 2000))
    store = build(tmp_path, corpus, vocabulary=50_000)
    (shard,) = store.shards
    for array in (shard.tokens, shard.suffixes):
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable
    read = []
    window = datastore.DatastoreShard.window

    def counted(self, at: int, size: int) -> list[int]:
        read.append(size)
        return window(self, at, size)

    monkeypatch.setattr(datastore.DatastoreShard, "window", counted)
    rows = store.continuations(corpus[500, 100:200])
    assert rows.tolist() == [corpus[500, 200:210].tolist()]
    searches = 2 * 5  # lower and upper end, for 4 lengths of 15 and once more for the one found
    assert len(read) <= searches * 21  # log2 of two million
    assert max(read) == 17


def test_the_manifest_tells_what_is_there(tmp_path: Path) -> None:
    documents = [[0, 1, 2], [], [1] * 9, [2, 0]]
    manifest = build_datastore(documents, tmp_path / "deep" / "store", vocabulary=3, tokenizer="abc", shard_tokens=6)
    folder = tmp_path / "deep" / "store"
    assert manifest == json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert [path.name for path in folder.parent.iterdir()] == ["store"]
    assert manifest["format"] == 1
    assert (manifest["vocabulary"], manifest["tokenizer"]) == (3, "abc")
    # the long document is cut into 5 + 4 tokens
    assert (manifest["documents"], manifest["tokens"]) == (4, 14)
    assert [shard["tokens"] for shard in manifest["shards"]] == [3, 5, 4, 2]
    names = {name for shard in manifest["shards"] for name in shard["sha256"]}
    assert names == {path.name for path in folder.glob("*.npy")}
    assert len(names) == 8
    store = Datastore(folder, tokenizer="abc")
    store.verify()


@pytest.mark.parametrize("name", ["tokens-00000.npy", "suffixes-00000.npy"])
def test_a_damaged_file_is_named(store: Datastore, name: str) -> None:
    path = store.folder / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    opened = Datastore(store.folder)  # same size: only the checksum can tell
    with pytest.raises(RequestError, match=f"{name} does not match its checksum"):
        opened.verify()
    path.write_bytes(content[:-4])
    with pytest.raises(RequestError, match=rf"shard 0 .*{name}.* is damaged.*build"):
        Datastore(store.folder)
    path.unlink()
    with pytest.raises(RequestError, match=rf"shard 0 .*{name}.* is damaged.*build"):
        Datastore(store.folder)
    with pytest.raises(RequestError, match=f"{name} does not match its checksum"):
        opened.verify()


def test_another_tokenizer(store: Datastore) -> None:
    Datastore(store.folder, tokenizer="abc")
    with pytest.raises(RequestError, match="tokenizer is 'abc', expected 'xyz'"):
        Datastore(store.folder, tokenizer="xyz")


def test_not_a_datastore(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(RequestError, match=r"is no datastore: it has no manifest\.json"):
            Datastore(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 7}, "format is 7, expected 1"),
        ({"vocabulary": "3"}, "vocabulary is '3', expected int"),
        ({"tokenizer": None}, "tokenizer is None, expected str"),
        ({"shards": {}}, "shards is {}, expected list"),
        ({"shards": []}, r"shards is \[\], expected list"),
        ({"shards": [{}]}, "shard 0 .* is damaged"),
        ({"shards": [{"tokens": 7, "documents": 2, "sha256": {}}]}, "shard 0 .* is damaged"),
        ({"shards": [{"tokens": 8, "documents": 2, "sha256": {}}]}, "lacks its checksums"),
    ],
)
def test_a_manifest_that_cannot_be_used(store: Datastore, change: dict, message: str) -> None:
    (store.folder / "manifest.json").write_text(json.dumps({**store.manifest, **change}))
    with pytest.raises(RequestError, match=message):
        Datastore(store.folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "\ud800"])
def test_a_manifest_that_is_no_object(store: Datastore, text: str) -> None:
    (store.folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(RequestError, match=r"manifest\.json.*build the datastore again"):
        Datastore(store.folder)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="exists already; name a new folder"):
        build_datastore([[0]], tmp_path, vocabulary=3, tokenizer="abc")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "holds no token"),
        ([[], []], "holds no token"),
        ([[0], [0, 3, 1]], "document 2 has token id 3, expected 0 to 2"),
        ([[0, -1]], "document 1 has token id -1"),
        ([[2**70]], "document 1 is an array of object"),
        ([[0.5]], "document 1 is an array of float64"),
        ([["a"]], "document 1 is an array of <U1"),
        ([[[0, 1]]], "with 2 axes"),
    ],
)
def test_a_corpus_that_cannot_be_used(tmp_path: Path, documents: list, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(tmp_path, documents)
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken():
        yield from [[0, 1, 2]] * 10  # some shards are written already
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, broken(), shard_tokens=8)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"vocabulary": 0}, {"vocabulary": 2**32}, {"shard_tokens": 1}])
def test_sizes_that_cannot_work(tmp_path: Path, wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(RequestError, match=f"{name} is {wrong[name]}, expected"):
        build(tmp_path, [[0]], **wrong)


def test_only_building_needs_the_sorter(store: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    assert store.matches([0, 1], 9) == [(0, 6), (0, 0), (0, 3)]
    with pytest.raises(EnvironmentFailure, match="pip install pydivsufsort"):
        build_datastore([[0]], tmp_path / "other", vocabulary=3, tokenizer="abc")


@pytest.mark.parametrize("wrong", [{"shortest": 0}, {"shortest": 3, "longest": 2}, {"length": 0}, {"limit": 0}])
def test_ranges_that_mean_nothing(store: Datastore, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected 1 <= shortest <= longest"):
        store.continuations([0, 1], **wrong)
