"""Drafts of another tokenizer: what is declared is what was drawn, and the output is the target's."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from draftsmith.benchmarks.common.random_models import RECURRENT
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import DraftSampling, Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.folder import save_draft_model, save_heads
from draftsmith.drafters.model import draft_model
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.pard import Pard
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.vocabulary.foreign_draft import ForeignDraft, IntersectionDraft, RetokenisedDraft
from draftsmith.drafters.vocabulary.shared_tokens import Vocabulary, VocabularyPair
from draftsmith.errors import RequestError
from draftsmith.eval.audit import toys
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.audit.enumeration import enumerate_decoding
from draftsmith.eval.audit.toys import Toy
from draftsmith.eval.config import AuditConfig
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from helpers.models.random_models import random_model, ready
from helpers.models.sentence_piece_tokenizer import sentence_piece
from torch import Tensor

CODE = ["def add(left, right):\n    return left + right\n", "import os, sys\n"] * 20
PROSE = ["define a sum, import a letter and return it with all rights\n"] * 40
OWN = train_tokenizer(PROSE, 300)
THEIRS = train_tokenizer(CODE, 310)
PROMPTS = [THEIRS(text)["input_ids"] for text in ("def add(", "im", "    return left", "os, sys")]
KINDS = pytest.mark.parametrize("kind", [IntersectionDraft, RetokenisedDraft])


def model(rows: int, seed: int, *, positions: int = 512) -> Backbone:
    """Random weights with opinions, over a head that is padded."""
    torch.manual_seed(seed)
    sizes = ModelConfig(
        architecture="qwen3", layers=1, hidden=32, heads=2, kv_heads=1, head_size=16, max_positions=positions
    )
    made = fresh_model(sizes, vocabulary=rows, eos=None).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    return Backbone(made, name="random")


@pytest.fixture(scope="module")
def target() -> Backbone:
    made = model(len(THEIRS) + 2, seed=1)
    made.tokenizer = THEIRS
    return made


@pytest.fixture(scope="module")
def draft() -> Backbone:
    made = model(len(OWN) + 5, seed=2)
    made.tokenizer = OWN
    return made


def pair_of(draft: Backbone, target: Backbone) -> VocabularyPair:
    return VocabularyPair(
        Vocabulary.of(draft.tokenizer, draft.vocabulary), Vocabulary.of(target.tokenizer, target.vocabulary)
    )


def make(kind: type[ForeignDraft], draft: Backbone, target: Backbone, **settings: Any) -> Any:
    return kind(draft, pair_of(draft, target), target.vocabulary, **settings)


class Kept(IntersectionDraft):
    """Keeps what each row had read, and what was proposed behind it."""

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        made = super().propose(last_B, warper, uniforms)
        self.kept = [*getattr(self, "kept", []), ([list(t) for t in self.rows._texts], made)]
        return made


@pytest.mark.parametrize("warper", [Warper(1.0), Warper(0.7, top_k=5), Warper(1.0, top_p=0.8)])
@torch.inference_mode()
def test_q_is_the_draft_s_distribution_on_what_is_shared(warper: Warper, draft: Backbone, target: Backbone) -> None:
    """Brute force: the draft's own forward over its own tokens, restricted, renormalised, warped."""
    drafter = make(Kept, draft, target, draft_length=3)
    generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=10, seed=4)
    shared = dict(drafter.pair.shared)
    back = {theirs: mine for mine, theirs in shared.items()}
    assert 200 < len(shared) < min(len(OWN), len(THEIRS))
    assert len(drafter.kept) >= 3
    for texts, made in drafter.kept:
        assert made.sampling is DraftSampling.IID
        for row, text in enumerate(texts):
            for k in range(3):
                drafted = [back[n] for n in made.tokens_BN[row, 1 : k + 1].tolist()]
                ids = torch.tensor([[*text, *drafted]])
                logits_D = draft.model(ids).logits[0, -1]
                expected_V = torch.zeros(target.vocabulary)
                if warper.top_k == 0 and warper.top_p == 1:
                    q_D = (logits_D / warper.temperature).softmax(-1)
                    mass = sum(float(q_D[mine]) for mine in shared)
                    for mine, theirs in shared.items():
                        expected_V[theirs] = q_D[mine] / mass
                else:
                    few = warper(torch.stack([logits_D[mine] for mine in shared]))
                    for place, theirs in enumerate(shared.values()):
                        expected_V[theirs] = few[place]
                torch.testing.assert_close(made.q_BNV[row, k], expected_V, atol=1e-5, rtol=1e-3)


@torch.inference_mode()
def test_the_draft_reads_what_was_committed_and_nothing_else(draft: Backbone, target: Backbone) -> None:
    """After every step the text read is the committed one, byte for byte, each token ending alike."""
    drafter = make(Kept, draft, target, draft_length=3)
    done = generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=24, seed=4)
    pair = drafter.pair
    for row, prompt in enumerate(PROMPTS):
        whole = [*prompt, *done.tokens[row]]
        for texts, _ in drafter.kept:
            read = texts[row][len(pair.text(tuple(prompt))) :]
            answer = whole[len(prompt) :]
            pieces = [[p for n in answer[:at] for p in pair.piece(n)] for at in range(len(answer) + 1)]
            # a row at its limit has heard of tokens that were cut off
            assert read in pieces[1:] or read[: len(pieces[-1])] == pieces[-1]


@KINDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_do_not_feel_each_other(
    kind: type[ForeignDraft], temperature: float, draft: Backbone, target: Backbone
) -> None:
    """Rows whose texts take very different numbers of own tokens, alone and together."""
    prompts = [*PROMPTS, PROMPTS[0] * 9, [THEIRS.eos_token_id, len(THEIRS) + 1]]
    drafter = make(kind, draft, target)
    how = {"warper": Warper(temperature), "max_new_tokens": 20, "seed": 3}
    together = generate(target, drafter, prompts, **how)
    for row, prompt in enumerate(prompts):
        alone = generate(target, make(kind, draft, target), [prompt], requests=[row], **how)
        assert (alone.tokens[0], alone.origin[0]) == (together.tokens[row], together.origin[row])
    if temperature == 0:
        base = autoregressive(target, prompts, warper=Warper(0.0), max_new_tokens=20)
        assert together.tokens == base.tokens


@KINDS
def test_an_arena_that_is_too_small_grows(
    kind: type[ForeignDraft], draft: Backbone, target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text may take more of the draft's tokens than was planned for."""
    how = {"warper": Warper(1.0), "max_new_tokens": 30, "seed": 3}
    first = generate(target, make(kind, draft, target), PROMPTS, **how)
    drafter, sizes = make(kind, draft, target), []
    plain = drafter.rows._read_all

    def tight(capacity: int) -> None:
        plain(max(map(len, drafter.rows._texts)) if not sizes else capacity)
        sizes.append(drafter.rows._kv_cache.capacity)

    monkeypatch.setattr(drafter.rows, "_read_all", tight)
    again = generate(target, drafter, PROMPTS, **how)
    assert len(sizes) > 1
    assert (again.tokens, again.origin) == (first.tokens, first.origin)


@KINDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_behind_the_draft_s_context_nothing_is_drafted(
    kind: type[ForeignDraft], temperature: float, target: Backbone, caplog: pytest.LogCaptureFixture
) -> None:
    """The draft counts its own tokens; its learnt positions end, and a step behind them would be an error."""
    torch.manual_seed(2)
    reads, how = 24, {"warper": Warper(temperature), "max_new_tokens": 60, "seed": 3}
    short = ready(
        random_model("gpt2", vocab_size=len(OWN), max_position_embeddings=reads, n_embd=32, n_head=2, n_layer=1)
    )
    short.tokenizer = OWN
    draft_model._SAID.clear()
    long = "def add(left, right):\n    return left + right\n" * 2
    prompts = [*PROMPTS, THEIRS(long)["input_ids"]]

    class Met(kind):  # type: ignore[misc, valid-type]
        def propose(self, *given: Any) -> Proposal:
            made = super().propose(*given)
            there = made.present_BN if made.present_BN is not None else torch.ones_like(made.tokens_BN, dtype=bool)
            met.extend(zip(map(len, self.rows._texts), there[:, 1:].any(1).tolist(), strict=True))
            return made

    met: list[tuple[int, bool]] = []
    with caplog.at_level(logging.WARNING):
        done = generate(target, make(Met, short, target, draft_length=3), prompts, **how)
    assert not any(drafted for length, drafted in met if length + 2 > reads)
    assert any(drafted for length, drafted in met if length + 2 <= reads)
    assert caplog.text.count("reads texts of up to 24 tokens, and a text with a draft takes") == 1
    for row, prompt in enumerate(prompts):
        alone = generate(target, make(kind, short, target, draft_length=3), [prompt], requests=[row], **how)
        assert alone.tokens[0] == done.tokens[row]
    if not temperature:
        assert done.tokens == autoregressive(target, prompts, warper=Warper(0.0), max_new_tokens=60).tokens


def test_a_draft_that_knows_the_answer_is_accepted() -> None:
    """Re-tokenised whole: the target's own weights behind another numbering of its tokens."""
    target = make_target("qwen3")
    words = [bytes([number + 32]) for number in range(61)]
    pair = VocabularyPair(Vocabulary(words), Vocabulary(words))
    for kind in (IntersectionDraft, RetokenisedDraft):
        drafter = kind(target, pair, 61, draft_length=3)
        done = generate(target, drafter, [[5, 9, 2], [7]], warper=Warper(0.0), max_new_tokens=21)
        assert done.target_calls == 5  # 20 tokens behind the first, four at a time


# spaces and letters of both, whatever their tokenizers call them
LETTERS = {" ": ("\u0120", "\u2581")} | {letter: (letter, letter) for letter in "abcdefghij(,1"}
SIMPLE = {
    "bytes": train_tokenizer([], 256),
    "pieces": sentence_piece([piece for _, piece in LETTERS.values()], [], begins=False),
}


def says_letters(name: str) -> Backbone:
    """The same weights for every tokenizer; what is no letter is not said."""
    tokenizer = SIMPLE[name]
    places = [each[name == "pieces"] for each in LETTERS.values()]
    made, g = model(len(tokenizer), seed=4), torch.Generator().manual_seed(4)
    rows_VH = made.model.get_input_embeddings().weight
    with torch.no_grad():
        rows_VH.zero_()
        for parameter in made.model.model.layers.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.6 * torch.randn(parameter.shape, generator=g))
        ids = tokenizer.convert_tokens_to_ids(places)
        rows_VH[ids] = torch.randn((len(ids), 32), generator=g)
    made.tokenizer = tokenizer
    return made


@KINDS
@pytest.mark.parametrize(("draft", "target"), [("pieces", "bytes"), ("bytes", "pieces"), ("pieces", "pieces")])
def test_letters_of_another_tokenizer_are_accepted_as_its_own(
    kind: type[ForeignDraft], draft: str, target: str
) -> None:
    """A perfect draft loses nothing to the other way of writing single characters."""
    says = says_letters(target)
    prompts = [says.tokenizer(text)["input_ids"] for text in ("abc def", "j(1, a")]
    how = {"warper": Warper(0.0), "max_new_tokens": 33}
    own = generate(says, DraftModel(says, says.vocabulary), prompts, **how)
    done = generate(says, make(kind, says_letters(draft), says), prompts, **how)
    letters = says.tokenizer.convert_ids_to_tokens({n for row in own.tokens for n in row})
    assert len(letters) > 5
    assert set(letters) <= {letter for each in LETTERS.values() for letter in each}
    assert (done.tokens, done.target_calls) == (own.tokens, own.target_calls)
    assert own.target_calls == 7  # 32 tokens behind the first, five at a time


# ---- losslessness ----------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("policy", ["sample", pytest.param("argmax", marks=pytest.mark.slow)])
def test_both_ways_are_lossless(kind: type[ForeignDraft], policy: str, draft: Backbone, target: Backbone) -> None:
    """Enumeration of the method over tables, sampled and greedy tokens of the pair in a batch."""
    if kind is RetokenisedDraft and policy == "argmax":
        pytest.skip("it has no other")
    drafter = make(kind, draft, target, policy=policy)
    config = AuditConfig(tokens=500, sequences=10_000, temperature=1.0, batch=4, prompts=4, max_new_tokens=40)
    report = audit(target, drafter, PROMPTS, config)
    assert report.verdict == "lossless", report.text()
    assert report.replay.argmax == report.replay.tokens > 0


class WholeDistribution(IntersectionDraft):
    """The planted bug: q itself is declared, whose mass outside what is shared was never drawn."""

    def declare(self, logits_BD: Tensor, probs_BV: Tensor) -> Tensor:
        whole_BD = (logits_BD / 0.7).softmax(-1)
        q_BV = torch.zeros_like(probs_BV)
        for mine, theirs in self.pair.shared:
            q_BV[:, theirs] = whole_BD[:, mine]
        return q_BV


def test_declaring_the_whole_distribution_is_seen() -> None:
    small = Toy.of("intersection", 1)

    def p_value(kind: type[ForeignDraft]) -> float:
        return enumerate_decoding(
            small.target,
            lambda: toys._foreign(kind, small.drafts),
            rule=None,
            sequences=20_000,
            warper=Warper(0.7),
            seed=1,
            level=1e-3,
        ).p_value

    assert p_value(IntersectionDraft) > 1e-3
    with pytest.raises(RequestError, match=r"WholeDistribution.propose returned q_BNV\[0, 0\] that sums to 0\.\d+"):
        p_value(WholeDistribution)


def test_the_toys_translate() -> None:
    """The third token of each side is a text of two tokens of the other, and is met."""
    pair = toys._LETTERS
    assert pair.shared == [(0, 0), (1, 1)]
    assert pair.piece(2) == [0, 1]
    assert pair.after((0,), (2,)) == [1, 0]
    for name in ("intersection", "intersection argmax", "retokenised"):
        drafter: Any = Toy.of(name, 1).proposer()
        target = Toy.of(name, 1).target.as_backbone()
        done = generate(target, drafter, [[0, 1, 2]] * 50, warper=Warper(0.7), max_new_tokens=6)
        assert any("draft" in row for row in done.origin)
        assert any(2 in row for row in done.tokens)


# ---- loading ---------------------------------------------------------------------------------


@pytest.fixture
def folders(draft: Backbone, target: Backbone, tmp_path: Path) -> dict[str, Path]:
    """A plain causal LM, a drafter of another target, one of this target, and heads."""
    draft.model.save_pretrained(tmp_path / "plain")
    OWN.save_pretrained(tmp_path / "plain")
    save_draft_model(draft.model, tmp_path / "foreign", draft)
    save_draft_model(target.model, tmp_path / "own", target)
    save_heads(torch.nn.Linear(2, 2), tmp_path / "heads", target, family="medusa", settings={})
    return {each.name: each for each in tmp_path.iterdir()}


def test_other_tokens_need_permission(folders: dict[str, Path], target: Backbone) -> None:
    how = r"by config=DrafterConfig\(vocabulary='auto'\) in Python, on the command line by --drafter.vocabulary auto$"
    with pytest.raises(RequestError, match=f"with tokenizer .* {how}"):
        load_drafter(folders["foreign"], target)
    with pytest.raises(RequestError, match=f"does not describe a drafter.* {how}"):
        load_drafter(folders["plain"], target)


@pytest.mark.parametrize("length", [0, -3, 2.5, "4"])
def test_a_draft_of_no_length_is_refused(folders: dict[str, Path], target: Backbone, length: Any) -> None:
    with pytest.raises(RequestError, match=rf"draft_length .* is {length!r}; expected a whole number of at least 1"):
        load_drafter(folders["own"], target, draft_length=length)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [("auto", IntersectionDraft), ("intersection", IntersectionDraft), ("retokenise", RetokenisedDraft)],
)
@pytest.mark.parametrize("folder", ["plain", "foreign"])
def test_with_permission_it_drafts_and_says_how(
    folder: str, asked: Any, kind: type, folders: dict[str, Path], target: Backbone, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        drafter = load_drafter(folders[folder], target, config=DrafterConfig(vocabulary=asked))
    assert type(drafter) is kind
    assert f"are the target's too; it drafts by {kind.family}" in caplog.text
    done = generate(target, drafter, PROMPTS, warper=Warper(0.0), max_new_tokens=16)
    base = autoregressive(target, PROMPTS, warper=Warper(0.0), max_new_tokens=16)
    assert done.tokens == base.tokens


def test_auto_takes_a_draft_of_the_same_tokens_as_it_is(folders: dict[str, Path], target: Backbone) -> None:
    drafter = load_drafter(folders["own"], target, config=DrafterConfig(vocabulary="auto"))
    assert type(drafter) is DraftModel


@pytest.mark.parametrize("folder", ["own", "plain", "foreign"])
def test_a_pard_draft_is_never_an_ordinary_one(
    folder: str, folders: dict[str, Path], draft: Backbone, target: Backbone, caplog: pytest.LogCaptureFixture
) -> None:
    """A published one, which is a model that names its mask, and one of ours; of other tokens it is refused."""
    path = folders[folder] / "config.json"
    config = json.loads(path.read_text()) | {"pard_token": 3}
    if folder == "own":
        del config["draftsmith"]  # as it was published
    path.write_text(json.dumps(config))
    reader = draft if folder == "plain" else target
    with caplog.at_level(logging.INFO):
        if folder == "foreign":
            with pytest.raises(RequestError, match="is a PARD draft .* for a target that has others"):
                load_drafter(folders[folder], target, config=DrafterConfig(vocabulary="auto"))
            return
        drafter = load_drafter(folders[folder], reader, config=DrafterConfig(vocabulary="auto"))
    assert type(drafter) is Pard
    assert (drafter.mask, drafter.draft_steps) == (3, 1)
    assert "trained to draft in one pass (pard_token 3), and does: PARD" in caplog.text
    with pytest.raises(RequestError, match="drafter.vocabulary is 'intersection' for a target that may have others"):
        load_drafter(folders[folder], reader, config=DrafterConfig(vocabulary="intersection"))


@pytest.mark.parametrize(
    ("folder", "asked", "kind"), [("own", "auto", DraftModel), ("foreign", "intersection", IntersectionDraft)]
)
def test_what_is_asked_of_a_draft_is_handed_on(
    folder: str, asked: Any, kind: type, folders: dict[str, Path], target: Backbone
) -> None:
    config = DrafterConfig(vocabulary=asked, policy="sample", temperature_factors=[0.8, 1.2])
    drafter = load_drafter(folders[folder], target, config=config, draft_length=3)
    assert type(drafter) is kind
    assert (drafter.draft_length, drafter.policy, tuple(drafter.factors)) == (3, "sample", (0.8, 1.2))
    likeliest = load_drafter(folders[folder], target, config=DrafterConfig(vocabulary=asked, policy="argmax"))
    assert likeliest.policy == "argmax"
    assert tuple(likeliest.factors) == ()


def test_auto_writes_anew_where_few_are_shared(target: Backbone) -> None:
    from draftsmith.drafters.vocabulary.across import _kind

    few = VocabularyPair(Vocabulary([b"ab", b"bc", b"c"]), Vocabulary([b"a", b"b", b"c"]))
    assert few.share == pytest.approx(1 / 3)
    assert _kind("auto", few) is RetokenisedDraft
    assert _kind("intersection", few) is IntersectionDraft
    none = VocabularyPair(Vocabulary([b"ab"]), Vocabulary([b"a"]))
    with pytest.raises(RequestError, match="no token in common"):
        IntersectionDraft(target, none, target.vocabulary)


def test_what_rides_on_a_target_is_refused(folders: dict[str, Path], target: Backbone) -> None:
    with pytest.raises(RequestError, match="family 'medusa', which drafts its target"):
        load_drafter(folders["heads"], target, config=DrafterConfig(vocabulary="intersection"))
    with pytest.raises(RequestError, match="drafts chains"):
        load_drafter(folders["plain"], target, config=DrafterConfig(vocabulary="auto", tree="tree.json"))
    assert json.loads((folders["plain"] / "config.json").read_text())["model_type"] == "qwen3"


def test_an_arena_is_the_draft_s_own(draft: Backbone, target: Backbone) -> None:
    drafter = make(IntersectionDraft, draft, target)
    generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=8)
    assert isinstance(drafter.rows._kv_cache, KVCache)
    assert not drafter.replayable


@KINDS
def test_a_recurrent_draft_is_refused(kind: type, draft: Backbone, target: Backbone) -> None:
    """It would have to read on from any token, and keeps states of the last few alone."""
    recurrent = ready(random_model("lfm2", **RECURRENT["lfm2"]))
    with pytest.raises(RequestError, match="the draft random has recurrent layers.*draft with the target's tokenizer"):
        kind(recurrent, pair_of(draft, target), target.vocabulary)
