"""States by an engine: the handshake, every fault by its own message, on all processes; nothing left behind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from draftsmith.data.features.engine import Engine, EngineRequest
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.hidden_states import LAST
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.trainers.teacher import engine as teacher
from draftsmith.trainers.teacher.engine import EngineFeatures, documents_of
from draftsmith.trainers.teacher.features import states_of
from draftsmith.trainers.teacher.handshake import KEPT_LAYERS, drop_layers, shake
from faults import ranks
from faults.engine_ranks import LAYERS, rows_of, store_in, two_ranks, two_ranks_answered
from helpers.models.random_models import random_model
from helpers.servers import fake_engine

COUNT = 5
"""Layers of the target."""
HANDSHAKE = {  # fault: the message's own words
    fake_engine.short: "are of .* tokens, and the document has",
    fake_engine.other_ids: "is of other tokens, from position",
    fake_engine.other_prompt: "token ids and has read .* others",
    fake_engine.early: "is shifted by a layer: its state 2 is the target's state 1",
    fake_engine.late: "computes another target: its state 2 is .* of a later layer",
    fake_engine.early_last: "is not the state behind the last layer",
    fake_engine.normed: "behind the last norm, which would be applied twice",
    fake_engine.not_finite: "hold NaN or infinity",
    fake_engine.no_file: "no whole file has appeared",
    fake_engine.refused: "refuses with status 400: .*maximum context length is 7",
    fake_engine.broken: "was tried 4 times: status 500: .*EngineDeadError",
    fake_engine.no_states: "hands out no hidden states; start it with\nvllm serve",
    fake_engine.elsewhere: "is not in features.shared .* neither read nor removed",
    fake_engine.fewer_layers: "hands out 2 hidden states of 32 numbers for a token; expected 3 of 32",
}
LATER = {
    fault: HANDSHAKE[fault]
    for fault in list(HANDSHAKE)
    if fault not in (fake_engine.early, fake_engine.late, fake_engine.early_last, fake_engine.normed)
}
LATER[fake_engine.another] = "is another server than at the start: its system_fingerprint is 'vllm-0.33.0-xyz'"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers of random weights that the text depends on."""
    folder = tmp_path_factory.mktemp("engine") / "target"
    tokenizer = train_tokenizer(["the quick brown fox jumps over a lazy dog\n"] * 9, 300)
    model = random_model(
        "qwen3", vocab_size=len(tokenizer), num_hidden_layers=COUNT, hidden_size=32, num_key_value_heads=2
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, which are ones: applied twice they would do what they do once
                parameter.uniform_(0.3, 3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(target: Path) -> Any:
    return load_target(str(target))


@pytest.fixture
def cut(target: Path) -> Any:
    """What a training process has."""
    return load_target(str(target), layers=KEPT_LAYERS).model


def request_to(server: fake_engine.Engine, **how: Any) -> EngineRequest:
    given = {"timeout": 60.0, "first_wait": 0.01} | how
    return EngineRequest(server.url, server.name, server.shared, LAYERS, 32, **given)


@pytest.fixture
def serving(whole: Any, tmp_path: Path) -> Iterator[fake_engine.Engine]:
    with fake_engine.running(whole.model, tmp_path / "shared", LAYERS) as server:
        yield server


def documents(server: fake_engine.Engine) -> list[list[int]]:
    return teacher.chosen_documents(rows_of(server.model.config.vocab_size))


# ---- the part of the target that is here -------------------------------------------------------


def test_a_cut_target_is_the_whole_ones_beginning(target: Path, whole: Any, cut: Any) -> None:
    """Fewer layers are read; config and projection are the whole model's."""
    assert len(cut.model.layers) == KEPT_LAYERS
    assert cut.config.num_hidden_layers == COUNT == len(cut.config.layer_types)
    assert torch.equal(cut.lm_head.weight, whole.model.lm_head.weight)
    assert torch.equal(cut.model.layers[1].mlp.up_proj.weight, whole.model.model.layers[1].mlp.up_proj.weight)


def test_its_ends_stay_once_the_engine_is_proved(whole: Any, cut: Any) -> None:
    drop_layers(cut)
    kept = {name for name, _ in cut.named_parameters()}
    assert kept == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert torch.equal(cut.model.norm.weight, whole.model.model.norm.weight)


# ---- handshake ---------------------------------------------------------------------------------


def test_the_targets_own_engine_is_believed(serving: fake_engine.Engine, cut: Any) -> None:
    proof = shake(Engine(request_to(serving)), cut, documents(serving))
    assert proof.error < 1e-5
    assert proof.nats < 1e-4
    assert (proof.dtype, proof.fingerprint) == ("float32", serving.fingerprint)
    assert max(map(len, serving.asked)) == 17  # the longest document is tried
    assert list(serving.shared.iterdir()) == []


def test_half_precision_is_no_fault(target: Path, tmp_path: Path, cut: Any) -> None:
    """An engine in bf16 is some thousandths away, another layer much more."""
    half = load_target(str(target), dtype="bf16")
    with fake_engine.running(half.model, tmp_path / "shared", LAYERS) as server:
        proof = shake(Engine(request_to(server)), cut, documents(server))
    assert proof.dtype == "bfloat16"
    assert 1e-4 < proof.error < 0.02


@pytest.mark.parametrize("fault", HANDSHAKE, ids=lambda fault: fault.__name__)
def test_faults_at_the_start(fault: Any, serving: fake_engine.Engine, cut: Any) -> None:
    """Each by its own message, and no file is left but those that the server itself has kept."""
    serving.fault = fault
    with pytest.raises((RequestError, EnvironmentFailure)) as no:
        shake(Engine(request_to(serving, timeout=fake_engine.patience(fault.__name__))), cut, documents(serving))
    assert re.search(HANDSHAKE[fault], str(no.value), re.DOTALL), no.value
    others = [words for other, words in HANDSHAKE.items() if other is not fault and words != HANDSHAKE[fault]]
    assert not any(re.search(words, str(no.value), re.DOTALL) for words in others)
    if fault not in (fake_engine.no_states, fake_engine.elsewhere):
        assert list(serving.shared.glob("*.safetensors")) == []


def test_other_weights(serving: fake_engine.Engine, cut: Any) -> None:
    """The same sizes, served by mistake."""
    with torch.no_grad():
        cut.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    with pytest.raises(RequestError, match="computes another target"):
        shake(Engine(request_to(serving)), cut, documents(serving))


def test_another_projection(serving: fake_engine.Engine, cut: Any) -> None:
    with torch.no_grad():
        cut.lm_head.weight.copy_(cut.lm_head.weight.flip(0))
    with pytest.raises(RequestError, match="or the projection is another"):
        shake(Engine(request_to(serving)), cut, documents(serving))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"name": "else"}, "serves else, and features.served_model is 'the-target'"),
        ({"room": 30}, "has room for 30 tokens, and a document may have 30, .* start it with --max-model-len 31"),
    ],
)
def test_what_the_server_says_of_itself(how: dict[str, Any], reason: str, whole: Any, tmp_path: Path) -> None:
    with fake_engine.running(whole.model, tmp_path, LAYERS, **how) as server:
        request = EngineRequest(server.url, "the-target", tmp_path, LAYERS, 32, first_wait=0.01)
        with pytest.raises(RequestError, match=reason):
            Engine(request).check_serves(30)


def test_nobody_is_there(tmp_path: Path) -> None:
    request = EngineRequest("http://127.0.0.1:9", "the-target", tmp_path, LAYERS, 32, first_wait=0.001)
    with pytest.raises(EnvironmentFailure, match="was tried 4 times: no connection"):
        Engine(request).check_serves(30)
    with pytest.raises(RequestError, match="features.server is 'ftp://x', no URL"):
        Engine(EngineRequest("ftp://x", "the-target", tmp_path, LAYERS, 32)).check_serves(30)


def test_what_passes_is_tried_again(serving: fake_engine.Engine) -> None:
    def at_first(server: fake_engine.Engine, answer: fake_engine.Answer) -> None:
        if len(server.asked) < 3:
            fake_engine.broken(server, answer)

    serving.fault = at_first
    states = Engine(request_to(serving)).ask([1, 2, 3]).states_TNH
    assert torch.equal(states, serving.states([1, 2, 3])[:, list(LAYERS)])
    assert len(serving.asked) == 3


def test_the_file_of_a_server_without_locks(whole: Any, tmp_path: Path) -> None:
    """`use_synchronization_lock: false`: the file is read once it is whole."""
    with fake_engine.running(whole.model, tmp_path / "shared", LAYERS) as server:
        server.delay, server.locks = 0.1, False
        states = Engine(request_to(server)).ask([1, 2, 3, 4]).states_TNH
    assert torch.equal(states, server.states([1, 2, 3, 4])[:, list(LAYERS)])


# ---- answers and states from one request --------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_and_the_states_of_both(temperature: float, serving: fake_engine.Engine, whole: Any) -> None:
    """The states of all but the answer's last token, which the engine never reads."""
    engine, prompt = Engine(request_to(serving)), [5, 6, 7, 8]
    found = engine.answer(prompt, 6, temperature=temperature, seed=3)
    assert len(found.ids) == 6
    assert torch.equal(found.states_TNH, serving.states([*prompt, *found.ids[:-1]])[:, list(LAYERS)])
    again, other = (engine.answer(prompt, 6, temperature=temperature, seed=seed).ids for seed in (3, 4))
    assert again == found.ids
    assert (other == found.ids) == (temperature == 0)
    serving.eos = {found.ids[2]}
    assert (
        engine.answer(prompt, 6, temperature=temperature, seed=3).ids == found.ids[: found.ids.index(found.ids[2]) + 1]
    )
    assert list(serving.shared.iterdir()) == []


def test_an_answer_of_one_token(serving: fake_engine.Engine) -> None:
    """The prompt's states are all there are."""
    found = Engine(request_to(serving)).answer([5, 6, 7], 1, temperature=0, seed=0)
    assert len(found.ids) == 1
    assert len(found.states_TNH) == 3


def test_an_engine_that_hands_out_the_prompts_states_alone(serving: fake_engine.Engine) -> None:
    """Older ones do not know the switch."""

    def old(_engine: fake_engine.Engine, answer: fake_engine.Answer) -> None:
        answer.states_TNH, answer.ids = answer.states_TNH[:4], answer.ids[:4]

    serving.fault = old
    with pytest.raises(
        RequestError, match="hands out the states of the prompt alone: it does not know include_output"
    ):
        Engine(request_to(serving)).answer([5, 6, 7, 8], 6, temperature=0, seed=0)


@pytest.mark.parametrize("fault", LATER, ids=lambda fault: fault.__name__)
def test_faults_of_an_answer(fault: Any, serving: fake_engine.Engine, cut: Any, tmp_path: Path) -> None:
    """The same ones, in the same words."""
    source = source_of(serving, cut, tmp_path / "store", timeout=fake_engine.patience(fault.__name__))
    serving.fault = fault
    with pytest.raises((RequestError, EnvironmentFailure)) as no:
        source.answers([[5, 6, 7, 8]], [0], tokens=4, temperature=0)
    assert re.search(LATER[fault], str(no.value), re.DOTALL), no.value
    source.close()


# ---- a source of states ------------------------------------------------------------------------


def source_of(
    server: fake_engine.Engine, cut: Any, folder: Path, dtype: Any = "fp32", accelerator: Any = None, **how: Any
) -> EngineFeatures:
    return EngineFeatures(
        (3, LAST),
        cut,
        Engine(request_to(server, **how)),
        server.fingerprint,
        store_in(folder),
        dtype,
        accelerator=accelerator or Accelerator(cpu=True),
        requests=8,
    )


def test_documents_are_asked_for_alone(serving: fake_engine.Engine, whole: Any, cut: Any, tmp_path: Path) -> None:
    """Each once, side by side; the states are the packed row's, and padding has none."""
    rows = rows_of(whole.model.config.vocab_size)
    batch = rows.batch([0, 3, 5])
    source = source_of(serving, cut, tmp_path / "store")
    found = source(batch)
    expected = states_of(whole.model.get_decoder(), batch, (3, LAST))
    real = batch["documents"] >= 0
    for mine, theirs in zip(found, expected, strict=True):
        # a few roundings of states that reach 69, of which processors make different ones
        torch.testing.assert_close(mine[real], theirs[real], rtol=2e-5, atol=5e-6 * float(theirs[real].abs().max()))
        assert not mine[~real].any()
    assert sorted(map(len, serving.asked)) == [9, 9, 9, 17, 17, 17]
    assert serving.busiest > 1
    assert all(map(torch.equal, source(batch), found))
    assert len(serving.asked) == 6  # the second time from the store
    source.close()
    assert list(serving.shared.iterdir()) == []


def test_the_next_batch_is_asked_for_ahead(serving: fake_engine.Engine, cut: Any, tmp_path: Path) -> None:
    source = source_of(serving, cut, tmp_path / "store")
    batch = rows_of(cut.config.vocab_size).batch([1, 2])
    source.expect(batch)
    assert source._expected is not None
    source._reader.submit(lambda: None).result()  # type: ignore[union-attr] # what was begun has ended
    assert len(serving.asked) == 4
    source(batch)
    assert len(serving.asked) == 4
    source.close()


@pytest.mark.parametrize("fault", LATER, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("ahead", [False, True])
def test_faults_in_the_middle(fault: Any, ahead: bool, serving: fake_engine.Engine, cut: Any, tmp_path: Path) -> None:
    source = source_of(serving, cut, tmp_path / "store", timeout=fake_engine.patience(fault.__name__))
    rows = rows_of(cut.config.vocab_size)
    source(rows.batch([0]))
    serving.fault = fault
    batch = rows.batch([1])
    if ahead:
        source.expect(batch)
    with pytest.raises((RequestError, EnvironmentFailure)) as no:
        source(batch)
    assert re.search(LATER[fault], str(no.value), re.DOTALL), no.value
    source.close()


def test_a_server_that_dies(whole: Any, cut: Any, tmp_path: Path) -> None:
    with fake_engine.running(whole.model, tmp_path / "shared", LAYERS) as server:
        source = source_of(server, cut, tmp_path / "store")
        rows = rows_of(cut.config.vocab_size)
        source(rows.batch([0]))
    with pytest.raises(EnvironmentFailure, match="was tried 4 times: no connection.*--resume auto"):
        source(rows.batch([1]))
    source(rows.batch([0]))  # what is stored needs nobody
    source.close()


def test_a_document_that_does_not_begin_at_zero(cut: Any) -> None:
    batch = rows_of(cut.config.vocab_size).batch([0])
    assert [len(part.ids) for part in documents_of(batch, 0)] == [17, 9]
    with pytest.raises(RequestError, match="documents that begin at 0 alone"):
        documents_of(batch | {"positions": batch["positions"] + 1}, 0)


# ---- two processes -----------------------------------------------------------------------------


def spoil_second(fault: fake_engine.Fault, victims: set[tuple[int, ...]]) -> fake_engine.Fault:
    """A fault in some documents alone."""

    def spoil(engine: fake_engine.Engine, answer: fake_engine.Answer) -> None:
        if tuple(answer.ids) in victims:
            fault(engine, answer)

    return spoil


def said_by_two(target: Path, whole: Any, tmp_path: Path, start: Sequence[Any], later: Sequence[Any]) -> None:
    """Faults from the first request on, and faults in the second process's rows alone."""
    rows = rows_of(whole.model.config.vocab_size)
    first = {tuple(ids) for ids in teacher.chosen_documents(rows)}
    victims = {tuple(part.ids) for part in documents_of(rows.batch([1]), 0)} - first
    assert victims
    made: list[tuple[str, fake_engine.Fault | None, str]] = [("good", None, "nothing")]
    made += [(f"start-{fault.__name__}", fault, HANDSHAKE[fault]) for fault in start]
    made += [(f"later-{fault.__name__}", spoil_second(fault, victims), LATER[fault]) for fault in later]
    with ExitStack() as stack:
        servers = [
            (name, stack.enter_context(fake_engine.running(whole.model, tmp_path / name, LAYERS, fault=fault)))
            for name, fault, _ in made
        ]
        given = [(name, server.url, str(server.shared)) for name, server in servers]
        ranks.run(2, two_ranks, tmp_path / "out", str(target), given)
    for name, _, words in made:
        said = [(tmp_path / "out" / f"{name}-{rank}").read_text() for rank in (0, 1)]
        assert said[0] == said[1], (name, said)
        assert re.search(words, said[0], re.DOTALL), (name, said)


def test_both_processes_say_the_same(target: Path, whole: Any, tmp_path: Path) -> None:
    """What only one of them has met, too: otherwise the other would wait for it."""
    said_by_two(target, whole, tmp_path, [fake_engine.early], [fake_engine.other_ids])


@pytest.mark.slow
def test_both_processes_have_the_answers(target: Path, whole: Any, tmp_path: Path) -> None:
    """The same rows, each prompt sent by one of them; what only one of them meets, both say."""
    asked: dict[str, list[list[int]]] = {}
    vocabulary = whole.model.config.vocab_size
    prompts = [ids[:10] for ids in teacher_documents(vocabulary, 17)]

    def one_of_them(engine: fake_engine.Engine, answer: fake_engine.Answer) -> None:
        if list(answer.ids[:10]) == prompts[-1] and len(answer.ids) > 17:
            fake_engine.not_finite(engine, answer)

    with ExitStack() as stack:
        given = []
        for name, fault in {"good": None, "bad": one_of_them}.items():
            running = fake_engine.running(whole.model, tmp_path / name, LAYERS, fault=fault)
            server = stack.enter_context(running)
            asked[name] = server.asked
            given.append((name, server.url, str(server.shared)))
        ranks.run(2, two_ranks_answered, tmp_path / "out", str(target), given)
    good, bad = ([(tmp_path / "out" / f"{name}-{rank}").read_text() for rank in (0, 1)] for name in ("good", "bad"))
    assert good[0] == good[1]
    assert good[0].startswith("8 and 2 rows")
    sent = [ids for ids in asked["good"] if len(ids) == 10]
    assert sorted(sent) == sorted([*prompts, *prompts[:2]])
    assert bad[0] == bad[1]
    assert "hold NaN or infinity" in bad[0]


def teacher_documents(vocabulary: int, length: int) -> list[list[int]]:
    """The documents of that length, in order."""
    rows = rows_of(vocabulary)
    batch = rows.batch(range(len(rows)))
    return [part.ids for r in range(len(rows)) for part in documents_of(batch, r) if len(part.ids) == length]


@pytest.mark.slow
def test_both_processes_say_every_fault(target: Path, whole: Any, tmp_path: Path) -> None:
    said_by_two(target, whole, tmp_path, list(HANDSHAKE), list(LATER))
