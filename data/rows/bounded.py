"""Renders chat templates, which are programs that strangers wrote, with a bound on their work.

They run in jinja2's sandbox, with the tags, filters and functions that transformers gives them: nothing gets out of
it, but a loop in a loop, a recursion, a power or a text doubled again and again need not come to an end. Here they
count their work and what they make, and stop before it is too much: counted, never timed, so the bound is the same on
every machine. What an operation would make is told by arithmetic, before it is made.

Read next: `templates.py`, which renders by `render`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cache, lru_cache, wraps
from math import inf
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

CLOCK = "strftime_now"
"""The function by which a template asks for the time."""
GIVEN = ("messages", "tools", "add_generation_prompt", CLOCK)
"""What every template is given beside its own variables."""
# for messages of no length; templates of released models do hundreds of steps for a turn
_STEPS = 200_000
_STEPS_PER_CHARACTER = 200
# a step may compare or copy the longest text, which costs one step more for each so many characters
_PER_STEP = 256
_CHARACTERS = 2**20
_TIMES_GIVEN = 64
# no number in a chat has more, and products of longer ones take their time
_BITS = 12_900
# a width written into a format, or taken from an argument
_WIDTH = re.compile(r"%[^a-zA-Z%]*?(\*|\d{5})|\{[^{}]*:[^{}]*(\d{5}|\{)")
# around what a template marks as generated
_OPENED, _CLOSED = "\ufdd0generation\ufdd1", "\ufdd0endgeneration\ufdd1"


class TooMuchWork(Exception):  # noqa: N818 - a verdict on a template, not a failure of the program
    """A template asks for more steps, or for longer texts, than its bound."""


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    answer_next: bool = False,
    tools: list[dict[str, Any]] | None = None,
    values: Mapping[str, Any],
    day: str | None = None,
    mark: bool = False,
) -> str:
    """A chat as a template writes it.

    Args:
        answer_next: end where an assistant's answer begins (`add_generation_prompt`).
        values: the template's own variables.
        day: what its clock shows, as 2026-07-01, at midnight; None: the time it is.
        mark: put marks around what is generated, for `unmarked`.

    Raises:
        TooMuchWork: the template does too much for what it is given.
        Exception: whatever else it raises.
    """

    def clock(form: str) -> str:
        return (datetime.now() if day is None else datetime.fromisoformat(day)).strftime(form)

    token = _METER.set(_Meter([messages, tools, [*values.values()]], mark=mark))
    try:
        given = {"messages": messages, "tools": tools, "add_generation_prompt": answer_next, CLOCK: clock}
        return _compiled(source).render({"documents": None, **values, **given})
    finally:
        _METER.reset(token)


def unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """A rendered chat without its marks, and the characters that stood between two of them."""
    plain, opened, spans = "", [], []
    for piece in re.split(f"({_OPENED}|{_CLOSED})", text):
        if piece == _OPENED:
            opened.append(len(plain))
        elif piece == _CLOSED:
            spans.append((opened.pop(), len(plain)))
        else:
            plain += piece
    return plain, spans


class _Meter:
    """One rendering: what it may do, and what it has done."""

    def __init__(self, given: Sequence[Any], *, mark: bool) -> None:
        self.mark, self.steps, self.written = mark, 0, 0
        self._sizes: dict[int, tuple[Any, int]] = {}
        size = self.size(given)
        self.longest = max((self.size(each) for part in given for each in part or ()), default=0)
        self.allowed_steps = _STEPS + _STEPS_PER_CHARACTER * size
        self.allowed_size = _CHARACTERS + _TIMES_GIVEN * size

    def work(self, times: int = 1, *, elements: int = 0) -> None:
        """Count steps; `elements` that one of them goes through cost one more each."""
        self.steps += times * (1 + self.longest // _PER_STEP) + elements
        if self.steps > self.allowed_steps:
            raise TooMuchWork("it does more steps than its messages can need: a loop or a recursion has no end")

    def check(self, size: float) -> None:
        """Raise TooMuchWork before something of that many characters is made."""
        if size == inf:
            raise TooMuchWork("it asks for a number or a width that no chat has")
        if size > self.allowed_size:
            raise TooMuchWork(f"it would make a value of {size:,.0f} characters; the limit is {self.allowed_size:,}")

    def made(self, value: Any) -> Any:
        """The same value, whose size counts from now on."""
        size = self.size(value)
        if size > self.longest:
            self.check(size)
            self.longest = size
        return value

    def write(self, text: str) -> str:
        """The same text, which the template has written."""
        self.written += len(text)
        if self.written > 16 * self.allowed_size:
            raise TooMuchWork(f"it writes more than {16 * self.allowed_size:,} characters")
        return text

    def size(self, value: Any) -> int:
        """Characters of a text, a number, or of all that is in a list or an object."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 3
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        if not isinstance(value, list | tuple | dict):
            return 0
        return self.holds(value, [*value, *value.values()] if isinstance(value, dict) else value)

    def holds(self, value: Any, parts: Collection[Any]) -> int:
        """The size of a value that these are in; what is in it many times counts as often."""
        size = len(parts) + sum(map(self.size, parts))
        self._sizes[id(value)] = value, size  # with the value, or another one might get its id
        return size

    def expected(self, name: str, given: Sequence[Any]) -> float:
        """Characters of what a filter or a method of `given[0]` makes, where that can be more than goes in."""
        text, arguments, sizes = given[0], given[1:], [*map(self.size, given)]
        if name in ("format", "format_map", "%"):
            # every field may hold all that is given; a width that nobody could read is refused
            fields = str(text).count("%") + str(text).count("{")
            return inf if _WIDTH.search(str(text)) else sizes[0] + fields * sum(sizes[1:])
        if name == "replace" and len(arguments) > 1 and isinstance(text, type(arguments[0])):
            return sizes[0] + text.count(arguments[0]) * sizes[2]
        if name == "join" and arguments and hasattr(arguments[0], "__len__"):
            return sizes[0] * len(arguments[0]) + sizes[1]
        if name == "sum" and isinstance(text, list | tuple) and any(isinstance(each, list | tuple) for each in text):
            return len(text) * sizes[0]  # each sum is a new list
        most = max((abs(each) for each in arguments if isinstance(each, int)), default=0)
        if name in ("indent", "tojson", "expandtabs", "translate"):
            return sizes[0] * max(most, *sizes[1:], 8 if name == "expandtabs" else 0)
        return most


_METER: ContextVar[_Meter] = ContextVar("meter")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every call, operator and loop of a template counted."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = _METER.get()
        meter.work()
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            meter.check(inf if bits > _BITS else 0)
        elif operator == "*":
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            meter.check(max(times, 0) * (meter.size(repeated) + 1) if isinstance(times, int) else 0)
        elif operator == "%" and isinstance(left, str | bytes):
            meter.check(meter.expected("%", [left, right]))
        return meter.made(self.binop_table[operator](left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        meter = _METER.get()
        meter.work()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        args = _listed(name, args)
        if isinstance(owner, str | bytes | int):  # others make no more than goes in
            meter.check(meter.expected(name, [owner, *args, *kwargs.values()]))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, Namespace):
            meter.holds(result, [*args, *kwargs.values()])
        return meter.made(result)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What a template, a macro or a block has written."""
        return "".join(list(map(_METER.get().write, parts)))


class _Counting(NodeTransformer):
    """Puts the counting filters around what is looped over, and around texts and lists that are put together."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - jinja2's names
        self.generic_visit(node)
        node.iter = _through("_loop", node.iter)
        return node

    def _put_together(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return _through("_made", node) if getattr(node, "ctx", "load") == "load" else node

    visit_Concat = visit_List = visit_Tuple = visit_Dict = _put_together  # noqa: N815


def _through(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


def _made(value: Any) -> Any:
    """A text or a list that a template has put together."""
    _METER.get().work()
    return _METER.get().made(value)


def _loop(values: Any) -> Any:
    """What a loop goes over: paid for before the first step where its length is known."""
    if hasattr(values, "__len__"):
        _METER.get().work(len(values))
        return values
    return _steps(values) if hasattr(values, "__next__") else values


def _steps(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        _METER.get().work()
        yield value


def _listed(name: str, given: Sequence[Any]) -> tuple[Any, ...]:
    """What is joined as lists, whose length can be told."""
    return tuple([*_steps(each)] if name == "join" and hasattr(each, "__next__") else each for each in given)


def _counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def counted(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        args = _listed(name, args)
        given = [*args[hasattr(run, "jinja_pass_arg") :], *kwargs.values()]
        meter.work(elements=max((len(each) for each in given if isinstance(each, list | tuple | range)), default=0))
        # the text to join by stands behind the list, the other way round than the method has it
        meter.check(meter.expected(name, given[1::-1] if name == "join" and len(given) > 1 else given))
        return meter.made(run(*args, **kwargs))

    return counted


class _Generation(Extension):
    """The tag that marks what is generated."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """A block that passes what stands in it through `_marked`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_OPENED}{caller()}{_CLOSED}" if _METER.get().mark else caller()


class _Names(Namespace):
    """A namespace that cannot pass for something else by a name that Python reads."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805 - so that `self` may be a name, as jinja2 has it
        given = dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` without the methods of its class, which would change what they are given."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace takes no name such as {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **kwargs: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **kwargs)


@cache
def _environment() -> _Environment:
    # nothing is worked out while a template is compiled, where nothing is counted
    made = _Environment(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.filters = {name: _counted(name, each) for name, each in made.filters.items()}
    made.filters |= {"_loop": _loop, "_made": _made}
    made.globals |= {"raise_exception": _raise_exception, "namespace": _Names, "dict": _Dict()}
    del made.globals["lipsum"]  # endless text, of which no chat has need
    return made


@lru_cache
def _compiled(source: str) -> Template:
    return _environment().from_string(source)
