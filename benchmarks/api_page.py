"""Writes docs/api.md: every public name with its signature and docstring, as Python itself has them.

python benchmarks/api_page.py             # write the page anew
python benchmarks/api_page.py --check     # say whether it differs, exit 1
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import draftsmith
from draftsmith.storage import write_text

PAGE = Path(draftsmith.__file__).parent / "docs" / "api.md"
HEAD = """\
# The Python API

What `import draftsmith` hands out, from the docstrings ([in a notebook](notebook.md) uses most of it).
`python benchmarks/api_page.py` writes this page.
"""
GROUPS = {
    "From idea to verdict": (
        *("load_target", "load_drafter", "load_prompts", "generate", "autoregressive", "audit", "measure"),
        *("fit", "train", "register"),
    ),
    "Drafters of your own": (
        *("Drafter", "Proposal", "DraftSampling", "Committed", "Uniforms"),
        *("Tree", "chain", "draw", "Warper", "Proposer"),
    ),
    "Results": ("Decoded", "Measurement", "AuditReport", "DecodeRequest", "Interval", "tau", "Generation"),
    "Settings": ("DataConfig", "EvalConfig", "AuditConfig", "DrafterConfig", "load_recipe"),
    "Records": ("Family", "Form", "Method", "PassMemory"),
    "The rest": ("Backbone", "Arm", "evaluate", "DraftsmithError", "RequestError"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    made = page()
    if not parser.parse_args().check:
        write_text(PAGE, made)
    elif made != PAGE.read_text(encoding="utf-8"):
        raise SystemExit("docs/api.md differs from the docstrings: python benchmarks/api_page.py writes it anew")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n", *(_entry(name, getattr(draftsmith, name)) for name in names)]
    return "\n".join(parts)


def _entry(name: str, value: Any) -> str:
    kind = "class " if inspect.isclass(value) else ""
    lines = [f"### {name}\n", "```text", f"{kind}{name}{_signature(value)}", "```\n", _prose(inspect.getdoc(value))]
    if inspect.isclass(value):
        for member, given, said in _members(value):
            lines += textwrap.wrap(f"- `{member}{given}`: {said}", 118, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines).rstrip("\n") + "\n"


def _signature(value: Any) -> str:
    """Arguments one a line where there are many; of settings, whose fields are listed, none."""
    if inspect.isclass(value) and (hasattr(value, "model_fields") or issubclass(value, (enum.Enum, Exception))):
        return ""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    if inspect.isclass(value):
        found = found.replace(return_annotation=inspect.Signature.empty)
    text = _plain(str(found))
    if len(text) < 100:
        return text
    given = found.parameters.values()
    shown = [_plain(str(each)) for each in given]
    named = [at for at, each in enumerate(given) if each.kind is each.KEYWORD_ONLY]
    if named:
        shown.insert(named[0], "*")
    ends = "" if found.return_annotation is inspect.Signature.empty else f" -> {found.return_annotation}"
    return "(\n" + "".join(f"    {each},\n" for each in shown) + f"){ends}"


def _plain(text: str) -> str:
    """A signature without the quotes of annotations that are kept as text, and without addresses."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r"<function .*? at 0x[0-9a-f]+>|<factory>", "...", text))


def _members(kind: type) -> list[tuple[str, str, str]]:
    """Fields, properties and methods that the class itself defines: name, arguments, first paragraph."""
    said = {**_field_docs(kind), **_model_docs(kind)}
    for name, value in vars(kind).items():
        if name.startswith("_") or name in said:
            continue
        plain = value.fget if isinstance(value, property) else getattr(value, "func", value)
        plain = getattr(plain, "__func__", plain)
        if inspect.isfunction(plain) and plain.__doc__:
            is_called = inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod))
            said[name] = ("()" if is_called else "", inspect.cleandoc(plain.__doc__).split("\n\n")[0])
    return [(name, given, " ".join(text.split())) for name, (given, text) in said.items()]


def _model_docs(kind: Any) -> dict[str, tuple[str, str]]:
    """The fields of a recipe section, which keep their docstrings; those of a section within it by their path."""
    found: dict[str, tuple[str, str]] = {}
    for name, field in getattr(kind, "model_fields", {}).items():
        if hasattr(field.annotation, "model_fields"):
            inner = _model_docs(field.annotation)
            found |= {f"{name}.{each}": said for each, said in inner.items()}
            continue
        default = "" if field.is_required() else f" = {field.get_default(call_default_factory=True)!r}"
        found[name] = (default, field.description or "")
    return found


def _field_docs(kind: type) -> dict[str, tuple[str, str]]:
    """The docstrings below fields, which Python leaves in the source alone."""
    import ast

    if hasattr(kind, "model_fields"):
        return {}
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    found, body = {}, getattr(node, "body", [])
    for field, text in zip(body, body[1:]):
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            target = field.targets[0] if isinstance(field, ast.Assign) else getattr(field, "target", None)
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                value = f" = {ast.unparse(field.value)}" if getattr(field, "value", None) is not None else ""
                found[target.id] = (value, str(text.value.value))
    return found


def _prose(doc: str | None) -> str:
    """A docstring as Markdown: its sections of arguments as lists."""
    lines: list[str] = []
    for line in (doc or "").splitlines():
        indent = len(line) - len(line.lstrip())
        if indent == 0 and re.fullmatch(r"(Args|Returns|Raises|Attributes):", line):
            lines += [f"{line}\n"]
        elif indent == 4:
            lines.append(re.sub(r"^([\w, ]+): ", r"- `\1`: ", line.strip()))
        else:
            lines.append(line[4:] if indent > 4 else line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
