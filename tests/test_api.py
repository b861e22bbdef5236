"""The Python door: own drafters decode, are audited and measured, and what comes back can be shown."""

from __future__ import annotations

import ast
import json
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import draftsmith
import jsonschema
import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.bars import bar
from draftsmith.decoding import engine
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.proposal import Committed, Trials, check_proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.eval.report.results import read_results, schema
from helpers.models.shallow_target import SHALLOW
from torch import Tensor

IDS = [[5, 9, 2, 33, 7, 9, 2], [11, 4]]
TEXTS = ["def add(a, b):\n    return", "class Point:\n"]
SMALL: dict[str, Any] = {"tokens": 600, "sequences": 20_000, "max_new_tokens": 40, "batch": 8, "draft_length": 3}
SHORT: dict[str, Any] = {"temperatures": [0.0, 1.0], "max_new_tokens": 12, "repeats": 1}


class Table(draftsmith.Drafter):
    """What follows a token by a table, drawn as the warper says: all that a drafter has to write."""

    def __init__(self, logits_VV: Tensor, draft_length: int = 2) -> None:
        self.logits_VV, self.draft_length = logits_VV, draft_length

    def propose(self, last_B: Tensor, warper: draftsmith.Warper, uniforms: Uniforms) -> draftsmith.Proposal:
        random_BK = uniforms.take(self.draft_length)
        tokens, q = [last_B], []
        for k in range(self.draft_length):
            q.append(warper(self.logits_VV[tokens[-1]]))
            tokens.append(draftsmith.draw(q[-1], random_BK[:, k]))
        q.append(torch.zeros_like(q[-1]))
        tree = draftsmith.chain(self.draft_length)
        return draftsmith.Proposal(
            torch.stack(tokens, 1), tree, draftsmith.DraftSampling.IID, self.said(torch.stack(q, 1))
        )

    def said(self, q_BNV: Tensor) -> Tensor:
        return q_BNV


class Lying(Table):
    """It draws from the table, and says that it drew evenly."""

    def said(self, q_BNV: Tensor) -> Tensor:
        return torch.full_like(q_BNV, 1 / q_BNV.shape[-1])


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


@pytest.fixture(scope="module")
def tiny() -> Backbone:
    return load_target(SHALLOW)


def table_of(target: Backbone, kind: type[Table] = Table) -> Table:
    """A table that resembles what the target says behind a token alone."""
    V = target.vocabulary
    with torch.no_grad():
        return kind(target.model(torch.arange(V)[:, None]).logits[:, 0].float())


def sharp(target: Backbone) -> Lying:
    """It draws little else than the likeliest token, and says otherwise."""
    return Lying(3 * table_of(target).logits_VV)


# ---- names ------------------------------------------------------------------------------------


def test_every_name_is_typed_and_listed() -> None:
    """What type checkers and editors are told is what is handed out lazily, from the same modules."""
    tree = ast.parse(Path(draftsmith.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.body[0], ast.ImportFrom))
    told = {alias.name: node.module for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert told == draftsmith._HOMES
    assert set(draftsmith.__all__) <= set(dir(draftsmith))


def test_help_reads_and_importing_is_light() -> None:
    code = "import draftsmith, sys; dir(draftsmith); assert 'torch' not in sys.modules; help(draftsmith)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for said in ("measure(target", "class Drafter", "Prove that decoding with a drafter", "draft_steps"):
        assert said in done.stdout


ROOT = Path(draftsmith.__file__).parent
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/notebook.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_of_the_api_is_current() -> None:
    from draftsmith.benchmarks.api_page import GROUPS, PAGE, page

    assert PAGE.read_text() == page(), "python benchmarks/api_page.py writes it anew"
    assert {name for names in GROUPS.values() for name in names} == set(draftsmith._HOMES)


@pytest.mark.run
def test_the_notebook_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """All blocks in one namespace, as cells, on a target with fewer layers; a drafter in sixty lines of them."""
    assert sum(bool(line.strip()) for block in BLOCKS[:-1] for line in block.splitlines()) <= 60
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, block in enumerate(BLOCKS):
        code = block.replace('load_target("tiny")', f"load_target({SHALLOW!r})")
        code = code.replace('"eagle3-tiny",', f'"eagle3-tiny", target_path={SHALLOW!r},')
        exec(compile(code, f"cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "verdict: lossless" in printed
    assert "True" in printed.splitlines()[-1]


# ---- decoding ---------------------------------------------------------------------------------


def test_ids_in_are_what_the_engine_decodes(target: Backbone) -> None:
    drafter = table_of(target)
    done = draftsmith.generate(target, drafter, IDS, temperature=1.0, max_new_tokens=20, seed=3)
    same = engine.generate(target, drafter, IDS, warper=draftsmith.Warper(1.0), max_new_tokens=20, seed=3)
    assert (done.tokens, done.origin, done.target_calls) == (same.tokens, same.origin, same.target_calls)
    assert done.tau == draftsmith.tau([same.steps]) > 1
    warped = draftsmith.generate(target, drafter, IDS, warper=draftsmith.Warper(1.0), max_new_tokens=20, seed=3)
    assert warped.tokens == done.tokens


def test_texts_in_and_texts_out(tiny: Backbone) -> None:
    encoded = tiny.tokenizer(TEXTS).input_ids
    plain = draftsmith.autoregressive(tiny, TEXTS, max_new_tokens=10)
    assert (
        plain.tokens
        == engine.autoregressive(
            tiny, encoded, warper=draftsmith.Warper(), max_new_tokens=10, eos_ids=tiny.eos_ids
        ).tokens
    )
    done = draftsmith.generate(tiny, table_of(tiny), [TEXTS[0], encoded[1]], max_new_tokens=10)
    assert done.tokens == plain.tokens
    assert done.texts == [tiny.tokenizer.decode(ids, skip_special_tokens=True) for ids in plain.tokens]
    assert [row["tokens"] for row in done.table()] == [len(ids) for ids in done.tokens]
    assert f"{done.target_calls} target calls" in done._repr_html_()


def test_a_row_ends_where_the_target_ends(tiny: Backbone) -> None:
    first = draftsmith.autoregressive(tiny, TEXTS[:1], max_new_tokens=8).tokens[0]
    done = draftsmith.generate(tiny, table_of(tiny), TEXTS[:1], max_new_tokens=8, eos_ids=[first[2]])
    assert done.tokens[0] == first[: first.index(first[2]) + 1]


class Reader(draftsmith.Drafter):
    """Keeps the target's last state, of the prompt and then of what was kept."""

    layers = (-1,)

    def __init__(self, target: Backbone) -> None:
        self.draft_length, self._target = 1, target
        self.seen: list[Tensor] = []

    def begin(self, features: Any) -> None:
        self.last_BF = torch.stack([each[-1] for each in features])

    def propose(self, last_B: Tensor, warper: draftsmith.Warper, uniforms: Uniforms) -> draftsmith.Proposal:
        # the state in front of the last token foretells that token: it is drafted once more
        self.seen.append(self._target.project(self.last_BF).argmax(-1) == last_B)
        tokens_BN = torch.stack([last_B, last_B], 1)
        return draftsmith.Proposal(tokens_BN, draftsmith.chain(1), draftsmith.DraftSampling.POINT_MASS)

    def observe(self, committed: Committed) -> None:
        at_B = (committed.count_B - 1).clamp_min(0)
        self.last_BF = committed.kept_features_BEF[torch.arange(len(at_B)), at_B]


def test_a_drafter_of_ones_own_reads_states_of_the_target(target: Backbone) -> None:
    drafter = Reader(target)
    draftsmith.generate(target, drafter, IDS[:1], max_new_tokens=12)
    assert len(drafter.seen) > 3
    assert torch.stack(drafter.seen).all()
    assert drafter.nodes == 2
    drafter.nodes = 7
    assert drafter.nodes == 7


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: draftsmith.generate(t, table_of(t), "def f"), r"single str \('def f'\); expected a list"),
        (lambda t: draftsmith.generate(t, Table, IDS), "expected one that is made"),
        (lambda t: draftsmith.generate(t, table_of(t), torch.tensor(IDS[1:])), "prompts is a Tensor of shape"),
        (lambda t: draftsmith.generate(t, table_of(t), IDS, temperature=-1.0), "temperature is -1.0; expected 0"),
        (
            lambda t: draftsmith.generate(t, table_of(t), IDS, temperature=1.0, warper=draftsmith.Warper()),
            "warper is given beside temperature",
        ),
        (
            lambda t: draftsmith.audit(t, table_of(t), IDS, token=600),
            "token is no field of AuditConfig; did you mean 'tokens'",
        ),
        (lambda t: draftsmith.measure(t, table_of(t), IDS, repeats=0), "repeats: found 0; Input should be greater"),
        (lambda t: draftsmith.measure(t, table_of(t), IDS, max_new_tokens=2), "set --eval.max_new_tokens 4"),
        (lambda t: draftsmith.measure(t, {}, IDS), "there is no drafter to measure"),
        (lambda t: draftsmith.measure(t, [table_of(t)], IDS), "the drafter is .*; expected one that is made"),
        (lambda t: draftsmith.measure(t, table_of(t), []), "there is no prompt"),
        (lambda t: draftsmith.measure(t, table_of(t), [[]]), "prompt is empty, number 1 of 1; expected at least one"),
        (lambda t: draftsmith.load_drafter("nowhere", "tiny"), "target is a str; expected what draftsmith.load_targ"),
        (lambda t: draftsmith.load_drafter(3, t), "the drafter is 3; expected a run, a drafter's folder, or hub:NAME"),
        (lambda t: draftsmith.measure(t, table_of(t), [None]), "prompt number 1 of 1 is None; expected token ids"),
        (
            lambda t: draftsmith.measure(t, table_of(t), IDS, {"repeats": 1}),
            "config is {'repeats': 1}; expected a sec",
        ),
        (lambda t: draftsmith.measure(t, table_of(t), IDS, audit="yes"), "audit is 'yes'; expected a report"),
        (lambda t: draftsmith.audit(t, table_of(t), []), "there is no prompt"),
        (lambda t: draftsmith.audit(t, table_of(t), IDS, decoder="vllm"), "decoder is 'vllm'; expected 'draftsmith'"),
        (lambda t: draftsmith.audit(t.model, table_of(t), IDS), "target is a Qwen3ForCausalLM; expected what draftsm"),
        (
            lambda t: draftsmith.generate("tiny", table_of(t), IDS),
            "target is a str; expected what draftsmith.load_targ",
        ),
        (
            lambda t: draftsmith.generate(t, table_of(t), {"input_ids": IDS}),
            "prompts is a dict .*of what a tokenizer returns take",
        ),
        (lambda t: draftsmith.generate(t, table_of(t), None), "prompts is a NoneType .*; expected a list of texts"),
        (lambda t: draftsmith.generate(t, table_of(t), IDS, temperature="1"), "temperature is '1'; expected a number"),
        (lambda t: draftsmith.generate(t, table_of(t), IDS, warper="greedy"), "warper is 'greedy'; expected draftsm"),
    ],
)
def test_wrong_arguments_are_named(call: Any, said: str, target: Backbone) -> None:
    with pytest.raises(RequestError, match=said):
        call(target)


class Returning(draftsmith.Drafter):
    """It returns what a test wants it to."""

    def __init__(self, made: Any) -> None:
        self.made, self.draft_length = made, 1

    def propose(self, last_B: Tensor, warper: draftsmith.Warper, uniforms: Uniforms) -> draftsmith.Proposal:
        tokens_BN, q_BNV = torch.stack([last_B, last_B], 1), torch.full((len(last_B), 2, 61), 1 / 61)
        return self.made(tokens_BN, draftsmith.chain(1), draftsmith.DraftSampling.IID, q_BNV)


class Bare:
    """A class that derives from nothing."""

    def propose(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda *_: None, r"Returning.propose returned None; expected a draftsmith.Proposal"),
        (
            lambda t, tree, how, q: draftsmith.Proposal(t, [-1, 0], how, q),
            r"\[-1, 0\] as tree; expected draftsmith.ch",
        ),
        (lambda t, tree, how, q: draftsmith.Proposal(t, tree, "iid", q), "'iid' as sampling; expected one of"),
        (lambda t, tree, how, q: draftsmith.Proposal(t[:, 1:], tree, how, q), r"int64 of shape \[2, 1\] as tokens_BN"),
        (
            lambda t, tree, how, q: draftsmith.Proposal(t * 1.0, tree, how, q),
            r"float32 of shape \[2, 2\] as tokens_BN",
        ),
        (
            lambda t, tree, how, q: draftsmith.Proposal(t, tree, how),
            r"None as q_BNV; expected fp32 of shape \[2, 2, 61",
        ),
        (lambda t, tree, how, q: draftsmith.Proposal(t, tree, how, q[:, :1]), r"\[2, 1, 61\] as q_BNV; expected fp32"),
        (
            lambda t, tree, how, q: draftsmith.Proposal(t + 99, tree, how, q),
            r"the token id \d+; expected ids of the tar",
        ),
        (
            lambda t, tree, how, q: draftsmith.Proposal(t - 99, tree, how, q),
            r"the token id -\d+; expected ids of the ta",
        ),
        (lambda t, tree, how, q: draftsmith.Proposal((t + 1) % 61, tree, how, q), "as the roots, tokens_BN"),
    ],
)
def test_a_proposal_that_is_none_is_named(made: Any, said: str, target: Backbone) -> None:
    with pytest.raises(RequestError, match=said):
        draftsmith.generate(target, Returning(made), IDS, temperature=1.0)


def spoilt(q_BNV: Tensor, entry: float) -> Tensor:
    """A distribution of every row but the leaf's, with another entry."""
    return q_BNV.index_fill(2, torch.tensor([3]), entry)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda q: spoilt(q, float("nan")),
            r"q_BNV\[0, 0\] that sums to nan, its least entry nan; expected a distrib",
        ),
        (lambda q: spoilt(q, float("inf")), r"q_BNV\[0, 0\] that sums to inf"),
        (
            lambda q: spoilt(q, -0.1),
            ".* its least entry -0.1; expected a distribution, the one that the children were",
        ),
        (lambda q: 2 * q, r"q_BNV\[0, 0\] that sums to 2"),
        (lambda q: q * torch.tensor([1.0, 0.9, 1.0])[:, None], r"q_BNV\[0, 1\] that sums to 0.9"),
    ],
)
def test_a_distribution_that_is_none_is_refused_before_it_is_judged(change: Any, said: str, target: Backbone) -> None:
    drafter = table_of(target)
    drafter.said = change  # type: ignore[method-assign]
    for call in (
        lambda: draftsmith.generate(target, drafter, IDS, temperature=1.0),
        lambda: draftsmith.audit(target, drafter, IDS, **SMALL),
    ):
        with pytest.raises(RequestError, match=f"Table.propose returned {said}"):
            call()


def test_what_is_never_read_of_a_distribution_may_be_anything(target: Backbone) -> None:
    """A leaf's, that of a candidate which is not there, and of a chain that drew nothing."""
    ids_BN, q_BNV = torch.zeros(1, 3, dtype=torch.long), torch.full((1, 3, 61), 1 / 61)
    nan_BNV = q_BNV.index_fill(1, torch.tensor([1]), torch.nan)
    tree, drawn = draftsmith.Tree((-1, 0, 0)), draftsmith.DraftSampling.IID
    absent_BN = torch.tensor([[True, True, False]])
    for proposal in (
        draftsmith.Proposal(ids_BN, tree, drawn, nan_BNV),
        draftsmith.Proposal(ids_BN, draftsmith.chain(2), drawn, nan_BNV, absent_BN),
        draftsmith.Proposal(ids_BN[:, :1], draftsmith.chain(0), drawn, nan_BNV[:, 1:2]),
    ):
        check_proposal(proposal, ids_BN[:, 0], 61, object(), draws=True, reads=True)
    wrong = draftsmith.Proposal(ids_BN, draftsmith.chain(2), drawn, nan_BNV)
    with pytest.raises(RequestError, match=r"q_BNV\[0, 1\] that sums to nan"):
        check_proposal(wrong, ids_BN[:, 0], 61, object(), draws=True, reads=True)


def test_distributions_of_several_drafts_are_held_to_the_same(target: Backbone) -> None:
    ids_BN, q_BXV = torch.zeros(1, 2, dtype=torch.long), torch.full((1, 2, 61), 1 / 61)
    drawn, child_BNC = draftsmith.DraftSampling.SEVERAL, torch.tensor([[[1], [-1]]])
    for wrong, at, refused in ((0, 0, True), (1, 0, False), (1, 1, True)):
        spoilt_BXV = q_BXV.index_fill(1, torch.tensor([wrong]), -1.0)
        trials = Trials(spoilt_BXV, child_BNC, torch.full_like(child_BNC, at))
        proposal = draftsmith.Proposal(ids_BN, draftsmith.chain(1), drawn, trials=trials)
        said = rf"trials.q_BXV\[0, {wrong}\] that sums to -61"
        with pytest.raises(RequestError, match=said) if refused else nullcontext():
            check_proposal(proposal, ids_BN[:, 0], 61, object(), draws=True, reads=True)


def test_a_drafter_that_lacks_something_is_named(target: Backbone) -> None:
    for change, said in (
        (None, "Bare drafts, and has no draft_length, nodes, draft_steps, reset, observe; derive the class from"),
        ({"draft_length": "2"}, "draft_length of Table is '2'; expected a whole number"),
        ({"layers": -1}, "layers of Table is -1; expected a list of the numbers of hidden states"),
    ):
        drafter: Any = Bare() if change is None else table_of(target)
        vars(drafter).update(change or {})
        with pytest.raises(RequestError, match=said):
            draftsmith.generate(target, drafter, IDS)


def test_a_run_is_named_by_its_folder(tmp_path: Path, target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe says how it drafts, and arguments may say otherwise."""
    from draftsmith.drafters import registry

    asked: list[Any] = []
    monkeypatch.setattr(registry, "load_drafter", lambda path, _target, **how: asked.append((path, how)))
    drafted = "drafter: {policy: argmax}\neval: {draft_length: 6}\n"
    (tmp_path / "run.yaml").write_text(f"method: eagle\n{drafted}")
    draftsmith.load_drafter(tmp_path, target)
    draftsmith.load_drafter(str(tmp_path), target, draft_length=2, policy="sample")
    draftsmith.load_drafter("hub:some/drafter", target)
    assert [(str(path), how["draft_length"], how["config"].policy) for path, how in asked] == [
        (str(tmp_path / "drafter"), 6, "argmax"),
        (str(tmp_path / "drafter"), 2, "sample"),
        ("hub:some/drafter", 4, "sample"),
    ]


# ---- the audit --------------------------------------------------------------------------------


def test_a_drafter_of_ones_own_is_audited(target: Backbone) -> None:
    report = draftsmith.audit(target, table_of(target), IDS, **SMALL)
    assert report.verdict == "lossless", report.text()
    assert report.enumeration is None
    assert "enumeration: left out, as no toy model stands for this proposer" in report.text()
    assert "no toy model stands for this proposer" in report._repr_html_()
    assert "drafter" not in json.loads(json.dumps(report.to_dict()))


def test_a_toy_of_ones_own_is_enumerated(target: Backbone) -> None:
    for kind, verdict in ((Table, "lossless"), (Lying, "NOT lossless")):
        made = lambda _target, drafts, kind=kind: kind(drafts[0].logits_VV)  # noqa: E731
        report = draftsmith.audit(target, table_of(target, kind), IDS, toy=made, **SMALL)
        assert report.verdict == verdict, report.text()
        assert report.enumeration is not None
        assert (report.enumeration.p_value < 1e-6) == (kind is Lying)


def test_a_wrong_drafter_of_ones_own_fails_without_a_toy(target: Backbone) -> None:
    report = draftsmith.audit(target, sharp(target), IDS, **SMALL)
    assert report.verdict == "NOT lossless", report.text()
    assert "NOT lossless" in report.note


class Other(DraftModel):
    """A class of the caller's that says it is of a family of the package."""


def test_a_class_is_not_proven_by_the_one_that_it_derives_from(target: Backbone) -> None:
    drafter = make_drafter(target, draft_length=2)
    assert draftsmith.audit(target, drafter, IDS, **SMALL).enumeration is not None
    mine = Other(drafter.backbone, target.vocabulary, draft_length=2)
    assert mine.family == "draft_model"
    assert draftsmith.audit(target, mine, IDS, **SMALL).enumeration is None


# ---- measuring --------------------------------------------------------------------------------


def test_acceptance_stands_beside_the_verdict_of_an_audit(tiny: Backbone, tmp_path: Path) -> None:
    mine, lying = table_of(tiny), table_of(tiny, Lying)
    report = draftsmith.audit(tiny, mine, TEXTS, **SMALL)
    chat = draftsmith.load_prompts("stdlib", limit=1)
    found = draftsmith.measure(tiny, mine, [*TEXTS, tiny.tokenizer(TEXTS[0]).input_ids, *chat], audit=report, **SHORT)
    assert found.verdict == report.verdict == "lossless"
    assert found.reports == {"Table": report}
    assert [row["temperature"] for row in found.rows] == [0.0, 1.0]
    assert found.rows[0]["requests"] == 4
    assert found.tau.low <= found.tau.value <= found.tau.high
    assert found.tau.to_list() == found.row("Table")["tau"]
    assert len(found.by_depth) == 2
    assert found.speedup.value > 0
    frame = found.to_pandas()
    assert list(frame["verdict"]) == ["lossless", "lossless"]
    assert frame["tau"][0] == found.tau.value
    jsonschema.validate(read_results(found.save(tmp_path / "out") / "results.json"), schema())
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["verdict"] == "lossless"
    with pytest.raises(RequestError, match="no report of the drafter 'Lying' itself"):
        draftsmith.measure(tiny, lying, TEXTS, audit=report, **SHORT)
    with pytest.raises(RequestError, match="is measured with 'lossy-typical'"):
        draftsmith.measure(tiny, mine, TEXTS, audit=report, rule="lossy-typical", **SHORT)
    with pytest.raises(RequestError, match="no drafter 'Lying' was measured at temperature 0; there are 'Table' at 0"):
        found.row("Lying")


def test_several_drafters_are_measured_in_turn_each_with_its_own_verdict(tiny: Backbone) -> None:
    drafters = {"mine": table_of(tiny), "wrong": sharp(tiny)}
    how = {**SHORT, "temperatures": [1.0]}
    found = draftsmith.measure(tiny, drafters, TEXTS, audit=draftsmith.AuditConfig(**SMALL), **how)
    assert {row["method"]: row["verdict"] for row in found.rows} == {"mine": "lossless", "wrong": "NOT lossless"}
    assert [report.verdict for report in found.reports.values()] == ["lossless", "NOT lossless"]
    assert draftsmith.measure(tiny, drafters["mine"], TEXTS, audit=False, **how).verdict == "not audited"


@pytest.mark.parametrize(("prompts", "which"), [([""], "prompt 1 of 1"), (["x", ""], "prompt 2 of 2")])
def test_an_empty_text_is_named(prompts: list[str], which: str, tiny: Backbone) -> None:
    with pytest.raises(RequestError, match=f"{which} is empty; expected a text of at least one token"):
        draftsmith.measure(tiny, table_of(tiny), prompts, audit=False, **SHORT)


def test_answers_that_end_at_once_have_no_measure_and_it_is_said(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backbone, "eos_ids", tuple(range(tiny.vocabulary)))
    found = draftsmith.measure(tiny, table_of(tiny), TEXTS, audit=False, **SHORT)
    assert math.isnan(found.tau.value)
    for shown in (str(found), found._repr_html_()):
        assert "no step counts of Table: the answers end with their first token, or are too short" in shown


# ---- shown ------------------------------------------------------------------------------------


def test_results_print_as_short_tables(tiny: Backbone) -> None:
    drafter = table_of(tiny)
    done = draftsmith.generate(tiny, drafter, TEXTS, max_new_tokens=8)
    report = draftsmith.audit(tiny, drafter, TEXTS, **SMALL)
    found = draftsmith.measure(tiny, drafter, TEXTS, audit=report, **SHORT)
    for shown, head, last in (
        (done, "text", "target calls, tau"),
        (report, "proof", "verdict: lossless"),
        (found, "drafter", "Table"),
    ):
        lines = str(shown).splitlines()
        assert lines[0].split()[0] == head
        assert last in lines[-1]
        assert len(lines) == 1 + len(shown.table()) + bool(shown.note)
        assert max(map(len, lines)) <= 200
        assert repr(shown) == str(shown)
    assert [line.split()[0] for line in str(found).splitlines()[1:]] == ["Table", "Table"]
    assert str(drafter) == "<Table: draft_length=2, nodes=3, draft_steps=0>"
    hostile = replace(done, tokens=tiny.tokenizer(["a\x1b[31m" + 90 * "b"] * 2).input_ids)
    assert "a\\x1b[31mbbb" in str(hostile)
    assert "bbb... " in str(hostile)


def test_tables_are_escaped_and_pandas_is_asked_for_when_it_is_needed(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters = {"<script>": table_of(tiny)}
    found = draftsmith.measure(tiny, drafters, TEXTS, audit=False, **SHORT)
    assert "&lt;script&gt;" in found._repr_html_()
    assert "<script>" not in found._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(EnvironmentFailure, match="pip install pandas; table"):
        found.to_pandas()


@pytest.mark.parametrize("notebook", [False, True])
def test_a_bar_is_shown_in_a_notebook(notebook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with bar(total=2) as line:
        assert line.disable is not notebook
