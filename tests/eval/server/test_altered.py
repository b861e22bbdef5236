"""Texts that came otherwise than the target writes them: what explains that, and what does not."""

from __future__ import annotations

import pytest
from draftsmith.eval.server.texts import alteration, footer_of

OWN = "  <think>the fox asks</think> The caf\u00e9 is \u4e16\u754c & 5 < 7, says the lazy dog.\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OWN.strip(), "white space at their ends"),
        (OWN.lstrip()[:30], "white space at their ends"),
        (OWN.replace("&", "&amp;").replace("<", "&lt;"), "characters are written otherwise"),
        (OWN.replace("\u00e9", "e\u0301"), "characters are written otherwise"),
        (OWN.replace(" The", "\n\nThe"), "characters are written otherwise"),
        (OWN.replace("\u00e9", "\ufffd\ufffd"), "characters are spoilt"),
        (OWN.replace("\u4e16", "\ufffd"), "characters are spoilt"),
        (OWN.partition("</think>")[2], "their beginning is missing"),
        ("dog.", "their beginning is missing"),
        (f"Answer: {OWN}", "something stands in front of them"),
        (f"Answer: {OWN[:40]}", "something stands in front of them"),
        (f"Answer: {OWN} and on", "something stands in front of them"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_what_happens_to_a_text_on_its_way(text: str, words: str, *, ended: bool) -> None:
    assert alteration(text, OWN, ended=ended) == words


def test_a_text_that_ends_early() -> None:
    assert alteration(OWN[:20], OWN, ended=True) == "they end where the target goes on"


@pytest.mark.parametrize(
    "text",
    [
        "  <think>the fox asks</think> The dog is \u4e16\u754c & 5 < 7, says the lazy dog.\n",
        "  <think>the fox says</think> The caf\u00e9 is \u4e16\u754c & 5 < 7, says the lazy dog.\n",
        OWN.replace("fox", "dog"),
        "  <think>the foxes ask<think>the fox asks</think> The caf\u00e9 is",
        OWN.replace("\u00e9", "\ufffd").replace("lazy", "quick"),
        OWN.replace("lazy", "\ufffd\ufffd"),
        OWN.replace("fox", "fox\ufffd\ufffd"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_another_text_is_another_text(text: str, *, ended: bool) -> None:
    assert alteration(text, OWN, ended=ended) is None


@pytest.mark.parametrize("text", ["something else", OWN.upper(), "no", "  <th is"])
def test_a_text_that_begins_otherwise_tells_nothing(text: str) -> None:
    assert alteration(text, OWN, ended=True) == "they begin otherwise than the target's, altered on their way or wrong"


def test_a_text_that_loops_explains_nothing() -> None:
    """A wrong token in a text that repeats itself is found again in its own beginning."""
    own = " fox" * 12
    assert alteration(" fox" * 3 + " dog" + " fox" * 8, own, ended=False) is None


def test_what_all_texts_end_with_was_put_there() -> None:
    footer = "\n-- a gateway"
    texts = [OWN[:30] + footer, "the fox" + footer, "the dog asks" + footer]
    assert footer_of(texts) == footer
    for rest, wanted in (
        (OWN[:30], True),
        (OWN.strip(), True),
        ("Answer: " + OWN, True),
        (OWN.replace("fox", "dog"), False),
    ):
        found = alteration(rest + footer, OWN, ended=True, footer=footer)
        assert (found == "something stands behind them") == wanted, rest
    assert footer_of(texts[:1]) == footer_of(texts[:1] * 3) == ""
    # a few characters are no footer
    assert alteration(OWN[:30] + "x.", OWN, ended=True, footer="x.") is None
