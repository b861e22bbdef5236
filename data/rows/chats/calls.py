"""Tools and their calls in a chat's turns, as templates read them: objects, under today's names.

OpenAI's logs hold the arguments of a call as text, and older ones calls and tools under other names.
Templates write an object's JSON themselves; text would be written with quotes around it.
Read next: `rows/shapes.py`, which reads the rest of a turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..raw import BadRow, is_object, kind_of


def as_calls(message: dict[str, Any], what: str) -> list[Any] | None:
    """The calls of a turn, put under `tool_calls` with arguments that are objects where they can be.

    Raises:
        BadRow: they are no list of objects.
    """
    older = message.pop("function_call", None)
    if older is not None and "tool_calls" not in message:
        if not is_object(older):
            raise BadRow(f"function_call of {what} is {kind_of(older)}; expected an object")
        message["tool_calls"] = [{"type": "function", "function": older}]
    calls = message.get("tool_calls")
    if calls is None:
        return None
    if not (isinstance(calls, list) and all(map(is_object, calls))):
        raise BadRow(f"tool_calls of {what} is {kind_of(calls)}; expected a list of objects")
    message["tool_calls"] = [_with_objects(each) for each in calls]
    return calls


def calls_of_text(content: Any, what: str) -> list[dict[str, Any]]:
    """The calls of a turn whose role is `function_call`: one as JSON, or a list of them (LLaMA-Factory).

    Raises:
        BadRow: its text is neither.
    """
    found = _parsed(content)
    calls = [found] if is_object(found) else found
    if not (isinstance(calls, list) and calls and all(is_object(each) and "name" in each for each in calls)):
        raise BadRow(f"{what} (function_call) is {kind_of(content)}; expected a call in JSON, with name and arguments")
    return [{"type": "function", "function": each} for each in calls]


def as_tools(tools: Any, what: str) -> list[dict[str, Any]] | None:
    """The tools of a row, each with parameters that are an object where they can be.

    Raises:
        BadRow: they are no list of objects.
    """
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(map(is_object, tools)):
        raise BadRow(f"{what} is {kind_of(tools)}; expected a list of objects")
    if what == "functions":
        tools = [{"type": "function", "function": each} for each in tools]
    return [_with_parameters(each) for each in tools]


def has_older_calls(messages: list[dict[str, Any]]) -> bool:
    """Whether turns, as a row has them, call in a form that is read as another: arguments that are no objects."""
    calls = [call for each in messages for call in each.get("tool_calls") or ()]
    arguments = [_function_of(call).get("arguments", {}) for call in calls]
    anew = any(each is None or _object(each) is not each for each in arguments)
    return anew or any(each.get("function_call") for each in messages)


def loose_arguments(messages: Sequence[Mapping[str, Any]]) -> int:
    """Calls whose arguments are text that is no object."""
    calls = [call for each in messages for call in each.get("tool_calls") or ()]
    return sum(isinstance(_function_of(call).get("arguments"), str) for call in calls)


def with_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with every call's arguments as text, for templates that put texts together; None: as they are."""
    changed = False
    made = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [_as_text(each) for each in calls]}
            changed |= message["tool_calls"] != calls
        made.append(message)
    return made if changed else None


def _function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a call that has name and arguments: OpenAI puts it one level down, others do not."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _with_objects(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _with_objects(function)}
    if "arguments" not in call:
        return call
    return {**call, "arguments": {} if call["arguments"] is None else _object(call["arguments"])}


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    if is_object(call.get("function")):
        return {**call, "function": _as_text(call["function"])}
    if not is_object(call.get("arguments")):
        return call
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def _with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    if is_object(tool.get("function")):
        return {**tool, "function": _with_parameters(tool["function"])}
    return {**tool, "parameters": _object(tool["parameters"])} if "parameters" in tool else tool


def _object(value: Any) -> Any:
    """The object that a text is; anything else as it stands."""
    found = _parsed(value)
    return found if is_object(found) else value


def _parsed(value: Any) -> Any:
    """What JSON text holds; anything else as it stands."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
