"""`draftsmith chat`: what is shown is the target's own answer, token by token, with where each comes from."""

from __future__ import annotations

import io
import re
import sys

import pytest
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.eval.report.pieces import TokenTexts, pieces_of
from draftsmith.launch.cli import main

PROMPT = "import os\n\ndef walk(path):\n    for name in os.listdir(path):\n"
FEW = ["--target", "tiny", "--method", "prompt-lookup", "--max-new-tokens", "24"]


def answer(text: str) -> str:
    """The target's greedy answer, by plain decoding."""
    target = load_target("tiny")
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    done = autoregressive(target, [ids], warper=Warper(0.0), max_new_tokens=24, eos_ids=target.eos_ids)
    return str(target.tokenizer.decode(done.tokens[0], skip_special_tokens=True))


def test_one_prompt_is_answered_as_the_target_does(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *FEW, "--prompt", PROMPT]) == 0
    text, _, took = capfd.readouterr().out.rpartition("\n[")
    assert text == answer(PROMPT)
    assert re.fullmatch(r"\d+ tokens, [\d.]+ tokens/s with the drafter, [\d.]+ without, .*\(not audited\)\]\n", took)


def test_lines_are_turns_until_the_end(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The second turn stands behind the first one and its answer."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n\nimport sys\n"))
    assert main(["chat", *FEW, "--no-plain"]) == 0
    shown = [text.strip("\n") for text in re.split(r"\n\[.*\]\n", capfd.readouterr().out)]
    first = answer("import os")
    assert shown[0] == first.strip("\n")
    assert shown[1] == answer(f"import os{first}import sys").strip("\n")
    assert "without" not in shown[0]


def test_the_watcher_sees_every_token_once_and_in_order(target: Backbone, drafter: DraftModel) -> None:
    seen: list[tuple[list[int], list[str]]] = []
    done = generate(
        target,
        drafter,
        [[1, 2, 3]],
        warper=Warper(0.0),
        max_new_tokens=20,
        watch=lambda tokens, origins: seen.append((tokens[0], origins[0])),
    )
    assert seen[0] == (done.tokens[0][:1], ["prefill"])
    assert seen[-1] == (done.tokens[0], done.origin[0])
    assert [len(tokens) for tokens, _ in seen] == sorted({len(tokens) for tokens, _ in seen})
    assert all(done.tokens[0][: len(tokens)] == tokens for tokens, _ in seen)
    assert len(seen) == done.target_calls + 1


def test_pieces_add_up_and_never_show_half_a_character() -> None:
    tokenizer = load_target("tiny").tokenizer
    text = "naïve 🐍 = 'é'\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = TokenTexts(tokenizer)
    assert "\ufffd" not in "".join(cut.add(token) for token in ids[:-3])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "prompt-lookup,lookahead"], "chat shows one method"),
        (["--method", "skeleton-of-thought"], "chat shows one method"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--prompt", "  "], "--prompt is empty"),
    ],
)
def test_what_cannot_be_shown(flags: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *FEW, *flags]) == 2
    assert message in capfd.readouterr().err
