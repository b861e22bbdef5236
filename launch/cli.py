"""The command line: words in, exit code out.

Read next: `verbs.py` for what there is, `recipe/load.py` for recipes and overrides, `train/run.py`.
"""

from __future__ import annotations

try:  # so that Ctrl-C is quiet before `main` is there to see to it
    import errno
    import re
    import sys
    import traceback
    from collections.abc import Sequence
    from functools import reduce
    from operator import or_
    from pathlib import Path
    from typing import Annotated, Any

    import tyro

    from ..errors import DraftsmithError, EnvironmentFailure, RequestError
    from ..storage import MACHINE_ERRNOS
    from .recipe.values import check_words, split_overrides
    from .screen import log_to_screen, nobody_reads, printable, say
    from .verbs import VERBS
except KeyboardInterrupt:
    raise SystemExit(130) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (see `errors.py`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    log_to_screen()
    try:
        check_names(words)
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
        if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return _fail(f"{str(error.filename):.80}: {error.strerror}; name another file or folder", 2, debug)
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
            return _fail(f"out of memory: {error}; take smaller sizes, or a machine with more of it", 4, debug)
        text = f"unexpected {type(error).__name__}: {error}"
        return _fail(f"{text}\nrun again with --debug for the traceback", 5, debug)


def check_names(words: Sequence[str]) -> None:
    """Raise EnvironmentFailure for names that only UTF-8 can say, in a Python whose file names are not in UTF-8.

    Tensors would be written under other names than everything else, or not at all.
    """
    if (encoding := sys.getfilesystemencoding()) == "utf-8":
        return
    odd = [word for word in (*words, str(Path.cwd())) if not word.isascii()]
    if odd:
        raise EnvironmentFailure(
            f"file names are in {encoding} here, and {ascii(odd[0])} is not in ASCII; set PYTHONUTF8=1, or a "
            "locale with UTF-8, and give the same command again"
        )


def _run(words: list[str]) -> int:
    check_words(words)
    overrides: list[tuple[str, str]] = []
    if words and words[0] in _WITH_VALUES:
        words, overrides = split_overrides(words, of=VERBS[words[0]].request)
    _check_no_empty(words)
    try:
        request = tyro.cli(_union(words), args=words, prog="draftsmith", description=_ABOUT)
    except SystemExit as stop:
        return int(stop.code or 0)
    verb = next(each for each in VERBS.values() if each.request is type(request))
    text = verb.run(request, overrides) if verb.takes_values else verb.run(request)
    if text is not None:
        say(text)
    return 0


def _check_no_empty(words: Sequence[str]) -> None:
    """Refuse an empty word, as a shell's unset variable leaves it: an empty path would be the folder one is in."""
    for before, word in zip(["the command", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if not word or (name.startswith("--") and equals and not value):
            raise RequestError(f"{name or before}: the value is empty; give one, or leave it out")


_NO_MEMORY = re.compile("not enough memory|can't allocate memory")
"""What torch says where the machine has no memory left; its own error is a plain RuntimeError."""
_ABOUT = "Train, prove and ship drafters for speculative decoding."
_WITH_VALUES = {name for name, verb in VERBS.items() if verb.takes_values}
_VALUES = "Values of the recipe are set with --section.field VALUE."


def _union(words: Sequence[str]) -> Any:
    # said by the verb's own help alone: in the list of all it would stand eight times
    more = {name: f"{VERBS[name].request.__doc__}\n\n{_VALUES}" for name in _WITH_VALUES & {*words[:1]}}
    parts = [
        Annotated[verb.request, tyro.conf.subcommand(name=name, prefix_name=False, description=more.get(name))]
        for name, verb in VERBS.items()
    ]
    return reduce(or_, parts)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"draftsmith: {printable(message)}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
