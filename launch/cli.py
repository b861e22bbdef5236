"""The command line: words in, exit code out.

Read next: `verbs.py` for what there is, `recipe/load.py` for recipes and overrides, `train.py`.
"""

from __future__ import annotations

try:  # so that Ctrl-C is quiet before `main` is there to see to it
    import sys
    import traceback
    from collections.abc import Callable, Sequence
    from functools import reduce
    from operator import or_
    from typing import Annotated, Any

    import tyro

    from ..errors import DraftsmithError, RequestError
    from ..storage import MACHINE_ERRNOS
    from .screen import log_to_screen, nobody_reads
    from .verbs import VERBS, WITH_OVERRIDES
except KeyboardInterrupt:
    raise SystemExit(130) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (see `errors.py`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    log_to_screen()
    try:
        code = _run(words)
        print(end="", flush=True)  # noqa: T201 - here, where it can still be told that nobody reads
        return code
    except DraftsmithError as error:
        return _fail(str(error), error.exit_code, debug)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, debug)
    except Exception as error:  # noqa: BLE001 - the last resort of a command line
        if isinstance(error, BrokenPipeError) and nobody_reads():
            return 141
        if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
            path = error.filename or "a file"
            text = f"{path}: {error.strerror}; make room or get the right, or name another place"
            return _fail(text, 4, debug)
        text = f"unexpected {type(error).__name__}: {error}"
        return _fail(f"{text}\nrun again with --debug for the traceback", 5, debug)


def _run(words: list[str]) -> int:
    takes_values = bool(words) and words[0] in WITH_OVERRIDES
    words, overrides = split_overrides(words) if takes_values else (words, [])
    try:
        verb = tyro.cli(_union(words), args=words, prog="draftsmith", description=_ABOUT)
    except SystemExit as stop:
        return int(stop.code or 0)
    run: Callable[..., None] = verb.run
    run(overrides) if takes_values else run()
    return 0


_ABOUT = "Train, prove and ship drafters for speculative decoding."
_VALUES = "Values of the recipe are set with --section.field VALUE."


def _union(words: Sequence[str]) -> Any:
    # said by the verb's own help alone: in the list of all it would stand eight times
    more = {name: f"{VERBS[name].__doc__}\n\n{_VALUES}" for name in WITH_OVERRIDES & {*words[:1]}}
    parts = [
        Annotated[verb, tyro.conf.subcommand(name=name, prefix_name=False, description=more.get(name))]
        for name, verb in VERBS.items()
    ]
    return reduce(or_, parts)


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take `--section.field value` and `--section.field=value` out of the words."""
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            rest.append(word)
            continue
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise RequestError(f"{word}: no value given; expected {word} VALUE")
            value = waiting.pop(0)
        overrides.append((name.replace("-", "_"), value))
    return rest, overrides


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"draftsmith: {message}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
