"""Chat templates that never end, or grow without end, are refused by a count; others are left as they were."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from draftsmith.data.config import DataConfig
from draftsmith.data.rows.prepare import prepare
from draftsmith.data.rows.raw import BadRow
from draftsmith.data.rows.shapes import Chat
from draftsmith.data.rows.templates import ChatTemplate, named_template, render_chat
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.launch.cli import main
from helpers.models.chat_templates import KINDS
from helpers.reliability_tally import tally
from transformers import PreTrainedTokenizerFast

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def grown(step: str) -> str:
    """A value that a loop makes longer in each of 60 steps."""
    loop = "{% for at in range(60) %}" + step + "{% endfor %}{{ kept.it }}"
    return "{% set kept = namespace(it='ab') %}" + loop


# what a template does: its text, what is said of it
TEMPLATES = {
    "divides by zero": ("{{ 1/0 }}", "division by zero"),
    "overflows": ("{{ 10.0**400 }}", "out of range"),
    "a range of a thousand million": ("{{ range(10**9) }}", "Range too big"),
    "a recursion without end": ("{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(0) }}", "recursion"),
    "a recursion in two branches": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "more steps",
    ),
    "a loop in a loop": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "more steps",
    ),
    "a loop that passes over everything": (
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "more steps",
    ),
    "loops over a list that is written out": ("{% for a in '0123456789' %}" * 8 + "{% endfor %}" * 8, "more steps"),
    "filters over a range": (
        "{% for a in range(99999) %}{{ range(99999)|map('string')|list|length }}{% endfor %}",
        "more steps",
    ),
    "loops nested too deeply for Python": ("{% for a in 'a' %}" * 30 + "{% endfor %}" * 30, "nested"),
    "brackets nested too deeply": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
    "a text times 10^13": ("{{ 'a'*10**13 }}", "would make"),
    "a list times 10^13": ("{{ [1]*10**13 }}", "would make"),
    "a number of 10^9 digits": ("{{ 10**(10**9) }}", "a number or a width"),
    "a text doubled by ~": (grown("{% set kept.it = kept.it ~ kept.it %}"), "would make"),
    "a text doubled by +": (grown("{% set kept.it = kept.it + kept.it %}"), "would make"),
    "a text doubled by a method": (grown("{% set kept.it = kept.it.replace('a', 'aa') %}"), "would make"),
    "a text doubled by a filter": (grown("{% set kept.it = kept.it|replace('a', 'aa') %}"), "would make"),
    "a text joined by itself": (grown("{% set kept.it = kept.it.join(['a', 'b', 'c']) %}"), "would make"),
    "a text doubled by a block": (grown("{% set kept.it %}{{ kept.it }}{{ kept.it }}{% endset %}"), "characters"),
    "a list that holds itself twice": (grown("{% set kept.it = [kept.it, kept.it] %}"), "would make"),
    "an object that holds itself twice": (grown("{% set kept.it = namespace(a=kept.it, b=kept.it) %}"), "would make"),
    "a width of 10^10 in a filter": ("{{ 'a'|center(10**10) }}", "would make"),
    "a width of 10^10 in a method": ("{{ 'a'.ljust(10**10) }}", "would make"),
    "a width of 10^10 in a format": ("{{ '%10000000000d' % 1 }}", "a number or a width"),
    "a width that is given to a format": ("{{ '{:{}}'.format(1, 10**10) }}", "a number or a width"),
    "JSON indented by 10^9": ("{{ messages|tojson(indent=10**9) }}", "would make"),
    "text without end": ("{{ lipsum(n=10**9) }}", "lipsum"),
    "the same text again and again": ("{% for a in range(9999) %}" + "x" * 5000 + "{% endfor %}", "writes more"),
    "half of a UTF-16 pair": ("{{ '\\ud800' }}", "surrogates not allowed"),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["the quick brown fox\n"] * 20, 400, chat_template=named_template("chatml"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_refused_with_a_reason(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    template, reason = TEMPLATES[name]
    with pytest.raises(BadRow, match=reason) as refused:
        render_chat(tokenizer, CHAT, answer_next=False, template=template)
    assert "the chat template refuses the messages" in str(refused.value)
    tally("hostile folders", tried=1)


@pytest.mark.parametrize(
    "name", ["divides by zero", "a loop in a loop", "a text times 10^13", "half of a UTF-16 pair"]
)
def test_the_command_line_says_it_in_one_message(
    name: str, chat_tokenizer_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    template, rows = tmp_path / "bad.jinja", tmp_path / "rows.jsonl"
    template.write_text(TEMPLATES[name][0])
    rows.write_text((json.dumps({"messages": CHAT}) + "\n") * 3)
    values = ["--target.path", str(chat_tokenizer_folder), "--data.source", str(rows)]
    code = main(["inspect", "distill-tiny", *values, "--data.chat_template", str(template)])
    message = capfd.readouterr().err
    assert code == 3, message
    assert message.count("draftsmith: ") == 1
    assert re.search(TEMPLATES[name][1], message)
    assert "unexpected" not in message


def test_nothing_of_the_process_is_replaced(tokenizer: PreTrainedTokenizerFast) -> None:
    """A notebook that uses transformers, or Jinja, beside it finds the same functions, classes and filters."""
    from jinja2 import defaults, sandbox
    from transformers.utils import chat_template_utils

    def found() -> list[dict[str, object]]:
        classes = (sandbox.ImmutableSandboxedEnvironment, sandbox.SandboxedEnvironment, PreTrainedTokenizerFast)
        return [dict(vars(each)) for each in (chat_template_utils, sandbox, *classes)] + [
            dict(defaults.DEFAULT_FILTERS),
            dict(defaults.DEFAULT_NAMESPACE),
        ]

    before = found()
    assert isinstance(ChatTemplate(tokenizer, None).write(Chat(CHAT)), str)
    render_chat(tokenizer, CHAT, answer_next=True, template="{{ strftime_now('%Y') }}{{ messages|tojson }}")
    after = found()
    changed = [name for old, new in zip(before, after, strict=True) for name in new if old.get(name) is not new[name]]
    assert changed == []
    theirs = tokenizer.apply_chat_template(CHAT, tokenize=False, chat_template="{{ 'a' * 2000000 }}")
    assert len(theirs) == 2_000_000


# what a template might do with what it is given, or put in the place of what Python looks up
ESCAPES = {
    "changes a message by the method of its class": ("{{ dict.update(messages[0], {'role': 'x'}) }}", "update"),
    "a list that is changed": ("{{ messages.append(1) }}", "unsafe"),
    "a namespace with a name that Python reads": ("{% set kept = namespace(__class__=1) %}", "no such name|takes no"),
    "such a name, set later": ("{% set kept = namespace() %}{% set kept._it = 1 %}", "takes no name"),
    "a range joined by a long text": ("{{ range(99999)|join('x' * 900000) }}", "would make"),
    "an iteration joined by one": ("{{ range(99999)|map(attribute='a')|join('x' * 900000) }}", "would make"),
    "the same by a method": ("{{ ('x' * 900000).join(range(99999)|map(attribute='a')) }}", "would make"),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_templates_change_nothing_that_they_are_given(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    template, reason = ESCAPES[name]
    chat = [dict(each) for each in CHAT]
    with pytest.raises(BadRow, match=reason):
        render_chat(tokenizer, chat, answer_next=False, template=template)
    assert chat == CHAT


@pytest.mark.parametrize("name", KINDS)
def test_chats_are_those_of_transformers(name: str) -> None:
    """Of every kind of template; bounds and marks change no character."""
    kind = KINDS[name]
    tokenizer = kind.tokenizer()
    # newer releases hand thoughts on by every name that a template reads, as we do; older ones as they come
    both = [
        {"thinking": each["reasoning_content"], **each} if "reasoning_content" in each else each
        for each in kind.messages
    ]
    for answer_next, messages in ((False, kind.messages), (True, kind.messages[:1])):
        values = {"tools": kind.tools, "add_generation_prompt": answer_next, **(kind.values or {})}
        try:
            theirs = tokenizer.apply_chat_template(both[: len(messages)], tokenize=False, **values)
        except Exception:  # noqa: BLE001 - a template may take calls as texts alone
            theirs = None
        ours = (
            None
            if theirs is None
            else render_chat(tokenizer, messages, answer_next=answer_next, tools=kind.tools, values=kind.values)
        )
        assert ours == theirs
    assert len(render_chat(tokenizer, kind.messages[:1], answer_next=True, tools=kind.tools)) > 5


def test_marks_are_those_of_transformers(tokenizer: PreTrainedTokenizerFast) -> None:
    """In a loop, in a macro, empty, and beside text that spells something like a mark."""
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}."
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{% generation %}{% endgeneration %}"
    )
    chat = [*CHAT, {"role": "user", "content": "\ufdd0 generation"}, CHAT[1]]
    (text,), (spans,) = render_jinja_template([chat], chat_template=source, return_assistant_tokens_mask=True)
    template = ChatTemplate(tokenizer, None)
    template.override = source
    assert template.marks(Chat(chat), chat, text) == spans
    assert [text[start:end] for start, end in spans] == ["yes.", "yes.", ""]


def test_texts_need_no_template(tmp_path: Path) -> None:
    """A template that is broken, or has no end, is no matter where there is no chat."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": f"text {at}"}) for at in range(20)))
    for template in ("{% if messages", TEMPLATES["a loop in a loop"][0], TEMPLATES["divides by zero"][0]):
        tokenizer = train_tokenizer(["the quick brown fox\n"] * 20, 400, chat_template=template)
        prepared = prepare(DataConfig(source=str(rows), cache=str(tmp_path / "cache")), tokenizer, out=None)
        assert prepared.report.rows == 20


def test_long_chats_are_no_endless_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    """Hundreds of turns, a turn of a megabyte, and a template that looks at every turn from every turn."""
    turns = [{"role": ("user", "assistant")[at % 2], "content": f"turn {at} " * 20} for at in range(300)]
    squared = (
        "{% for m in messages %}{% for other in messages %}{% if other.role == 'system' %}{{ 1 }}{% endif %}"
        "{% endfor %}{{ m.content }}{% endfor %}"
    )
    whole = render_chat(tokenizer, turns, answer_next=False)
    assert all(turn["content"] in whole for turn in turns)
    assert render_chat(tokenizer, turns, answer_next=False, template=squared) == "".join(t["content"] for t in turns)
    long = [{"role": "user", "content": "long text\n" * 100_000}, CHAT[1]]
    assert long[0]["content"] in render_chat(tokenizer, long, answer_next=False)


def test_what_templates_render_is_unchanged(tokenizer: PreTrainedTokenizerFast) -> None:
    """Loops with their variables, filters, macros, blocks, formats and marks, against Jinja without a bound."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = (
        "{% macro tag(name, body='') -%}<{{ name }}>{{ body }}{{ caller() if caller else '' }}{%- endmacro %}"
        "{% for m in messages if m.content %}{{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.last }} "
        "{{ loop.previtem.role if loop.previtem is defined }} {{ tag(m.role, m.content|trim|upper) }}"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
        "{% set kept = namespace(n=0, it=[]) %}{% for a, b in [('x', 1), ('y', 2)] %}{% set kept.n = kept.n + b * 2 %}"
        "{% set kept.it = kept.it + [a ~ b] %}{% endfor %}{{ kept.n }}{{ kept.it|join('-') }}"
        "{% for x in messages|map(attribute='role')|unique %}{{ loop.index }}{{ x }}{{ loop.last }}{% endfor %}"
        "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% else %}none{% endfor %}"
        "{{ '%s and %05.1f' % ('a', 2.5) }}{{ '{:>4}|{}'.format(1, 'b') }}{{ messages[1:]|length }}{{ 7 % 4 }}"
        "{% call tag('c') %}inside{% endcall %}{% filter upper %}{{ messages[0].content }}{% endfilter %}"
        "{{ messages|tojson|length }}{{ {'k': messages[0].role}['k'] }}{{ 2**10 }}{{ nothing is defined }}{{ nothing }}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    plain.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    chat = [*CHAT, {"role": "user", "content": " ü\n"}, {"role": "assistant", "content": ""}, *CHAT]
    expected = plain.from_string(template).render(messages=chat)
    assert render_chat(tokenizer, chat, answer_next=False, template=template) == expected
    assert len(expected) > 100
