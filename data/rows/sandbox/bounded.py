"""A bound on the work of chat templates, which are programs that strangers wrote.

transformers renders them in jinja2's sandbox: nothing gets out of it, but a loop in a loop, a recursion,
a power or a text doubled again and again need not come to an end. Here templates count their work and
what they make, and stop before it is too much: counted, never timed, so the bound is the same on every
machine. What they render is unchanged. How long a value an operation would make is told by arithmetic, before it is
made: zero where the result is no longer than what goes in.

Read next: `rows/templates.py`, which renders inside `bounded`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cache, lru_cache, wraps
from math import inf
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ....errors import RequestError
from .meter import WorkMeter

_RANGE, _KNOWN = "transformers>=5.17", "5.23.0"
CLOCK = "strftime_now"
"""The function by which a template asks for the time."""
_METER: ContextVar[WorkMeter | None] = ContextVar("meter", default=None)
_DAY: ContextVar[str | None] = ContextVar("day", default=None)


@contextmanager
def bounded(*given: Any, day: str | None = None) -> Iterator[None]:
    """Inside, one template may be rendered for the messages and tools `given`.

    Args:
        day: what its clock shows, as 2026-07-01, at midnight; None: the time it is.

    Raises:
        TooMuchWork: from the rendering, where the template does too much for what it is given.
        RequestError: with this version of transformers, templates cannot be bounded.
    """
    _bound_templates()
    token, day_token = _METER.set(WorkMeter.of(given)), _DAY.set(day)
    try:
        yield
    finally:
        _METER.reset(token)
        _DAY.reset(day_token)


@cache
def _bound_templates() -> None:
    """From now on, templates that transformers compiles in this process count their work."""
    import transformers
    from transformers.utils import chat_template_utils as theirs

    # the one place where transformers makes a template of a source, for every rendering
    compile_template = getattr(theirs, "_compile_jinja_template", None)
    if compile_template is None:
        raise RequestError(
            f"transformers {transformers.__version__} compiles chat templates in another place than draftsmith knows: "
            "their work could not be bounded, so none is rendered; install another version of the range in "
            f"pyproject.toml ({_RANGE}), such as {_KNOWN}"
        )
    environment = compile_template("").environment  # its filters, its tags, its globals
    environment.__class__ = type("Bounded", (_Bounded, type(environment)), {})
    environment.filters = {name: _counted(name, each) for name, each in environment.filters.items()}
    environment.filters |= {"_loop": _loop, "_made": _made}
    environment.globals.pop("lipsum", None)  # endless text, of which no chat has need
    environment.globals[CLOCK] = _strftime_now
    theirs._compile_jinja_template = lru_cache(environment.from_string)


class _Bounded(ImmutableSandboxedEnvironment):
    """transformers' environment, with every call, operator and loop of a template counted."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = _meter()
        meter.work()
        if operator != "+":  # which makes no more than goes in
            meter.check(of_operator(operator, left, right, meter.size))
        return meter.made(self.binop_table[operator](left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        meter = _meter()
        meter.work()
        given = [*args, *kwargs.values()]
        meter.check(of_method(__obj, given, meter.size))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, Namespace):
            meter.holds(result, given)
        return meter.made(result)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What a template, a macro or a block has written."""
        meter, kept = _meter(), []
        for part in parts:
            meter.write(len(part))
            kept.append(part)
        return "".join(kept)


class _Counting(NodeTransformer):
    """Puts the counting filters around what is looped over, and around texts and lists that are put together."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - jinja2's names
        self.generic_visit(node)
        node.iter = _through("_loop", node.iter)
        return node

    def _put_together(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        is_fixed = next(node.find_all((nodes.Name, nodes.Call, nodes.Filter)), None) is None
        is_target = getattr(node, "ctx", "load") != "load"
        return node if is_fixed or is_target else _through("_made", node)

    visit_Concat = visit_List = visit_Tuple = visit_Dict = _put_together  # noqa: N815


def _through(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


@pass_context  # so that it is never worked out while the template is compiled
def _made(context: Any, value: Any) -> Any:
    """A text or a list that a template has put together."""
    meter = _meter()
    meter.work()
    return meter.made(value)


@pass_context
def _loop(context: Any, values: Any) -> Any:
    """What a loop goes over: paid for before the first step where its length is known."""
    meter = _meter()
    if hasattr(values, "__len__"):
        meter.work(len(values))
        return values
    return _steps(values, meter) if hasattr(values, "__next__") else values


def _steps(values: Iterator[Any], meter: WorkMeter) -> Iterator[Any]:
    for value in values:
        meter.work()
        yield value


def _counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def counted(*args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        given = [*args[hasattr(run, "jinja_pass_arg") :], *kwargs.values()]
        meter.work(elements=max((len(each) for each in given if isinstance(each, list | tuple | range)), default=0))
        meter.check(of_filter(name, given, meter.size))
        return meter.made(run(*args, **kwargs))

    return counted


def _strftime_now(form: str) -> str:
    """What transformers gives templates as their clock, at the day that is pinned."""
    day = _DAY.get()
    return (datetime.now() if day is None else datetime.fromisoformat(day)).strftime(form)


def _meter() -> WorkMeter:
    # a template that somebody renders outside `bounded` has a bound for each of its steps
    return _METER.get() or WorkMeter.of(())


Size = Callable[[Any], int]

# no number in a chat has more, and products of longer ones take their time
_DIGITS = 4300
# a width written into a format, or taken from an argument
_WIDTH = re.compile(r"%[^a-zA-Z%]*?(\*|\d{5})|\{[^{}]*:[^{}]*(\d{5}|\{)")
_PADDING = ("center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice", "wordwrap")


def of_operator(operator: str, left: Any, right: Any, size: Size) -> float:
    """Of `left OPERATOR right`."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        return inf if bits > 3 * _DIGITS else 0
    if operator == "*":
        times = next((each for each in (left, right) if isinstance(each, int)), 0)
        repeated = left if times is right else right
        return max(times, 0) * (size(repeated) + 1)
    if operator == "%" and isinstance(left, str | bytes):
        return _of_format(str(left), right, size)
    return size(left) + size(right)


def of_method(call: Any, given: Sequence[Any], size: Size) -> float:
    """Of a call with the arguments `given`; methods of texts and numbers can make much of little."""
    method = getattr(call, "__wrapped__", call)  # the sandbox wraps `format`
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    return _of(name, [owner, *given], size) if isinstance(owner, str | bytes | int) else 0


def of_filter(name: str, given: Sequence[Any], size: Size) -> float:
    """Of a filter; the first of `given` is what stands before its bar."""
    if name == "join" and len(given) > 1:  # the other way round than the method
        return _of("join", [given[1], given[0]], size)
    if name in ("indent", "tojson"):
        widths = [each if isinstance(each, int) else size(each) for each in given[1:]]
        lines = str(given[0]).count("\n") + 1 if name == "indent" else size(given[0])
        return max(widths, default=0) * lines
    if name == "round":
        return inf if any(isinstance(each, int) and abs(each) > _DIGITS for each in given[1:]) else 0
    if name == "sum":  # of lists: each sum is a new list
        starts = any(isinstance(each, list | tuple) for each in given[1:])
        return len(given[0]) * size(given[0]) if starts and isinstance(given[0], list | tuple) else 0
    return _of(name, given, size)


def _of(name: str, given: Sequence[Any], size: Size) -> float:
    """Of what methods and filters of one name do alike; `given` begins with the text."""
    if name in _PADDING:
        return max((each for each in given[1:] if isinstance(each, int)), default=0)
    if name in ("format", "format_map"):
        return _of_format(str(given[0]), list(given[1:]), size)
    if name == "expandtabs":
        return size(given[0]) * max((each for each in given[1:] if isinstance(each, int)), default=8)
    if name == "translate":
        return size(given[0]) * max(map(size, given[1:]), default=0)
    if name == "replace" and len(given) > 2:
        text, old, new = given[:3]
        found = text.count(old) + (len(text) if not old else 0) if isinstance(old, type(text)) else 0
        return size(text) + found * size(new)
    if name == "join" and len(given) > 1 and isinstance(given[1], list | tuple):
        return size(given[0]) * len(given[1]) + size(given[1])
    return 0


def _of_format(text: str, given: Any, size: Size) -> float:
    """Every field may hold all that is given; a width that nobody could read is refused."""
    if _WIDTH.search(text):
        return inf
    return len(text) + (text.count("%") + text.count("{")) * size(given)
