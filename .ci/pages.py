"""The pages of the repository as a site: what MkDocs is told beside `mkdocs.yml`, which names this file as its hook.

The README is the first page, its list of documentation the navigation: a page that it does not list fails the build.
GitHub's Markdown becomes that of MkDocs; links to files that are no part of the site become their text. `make docs`
builds. What is plain text in, plain text out needs no MkDocs, and `tests/test_pages.py` tries it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"README.md": "index.md", **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}}
"""Pages that do not stand in docs/ -> where the site has them."""
ASSETS = (".ci/site/iframe-worker.js", ".ci/site/site.css")
"""Material would fetch the first from elsewhere."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """MkDocs asks for the settings."""
    config.nav = navigation((ROOT / "README.md").read_text(encoding="utf-8"))
    return config


def on_files(files: Any, config: Any) -> Any:
    """MkDocs asks for the files."""
    from mkdocs.structure.files import File

    for path, place in [*OUTSIDE.items(), *((path, posixpath.basename(path)) for path in ASSETS)]:
        files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """MkDocs asks for the text of a page."""
    return for_site(markdown, source_of(page.file.src_uri))


def navigation(readme: str) -> list[dict[str, Any]]:
    """The list of documentation at the end of the README: sections, rows of a table, links."""
    nav: list[dict[str, Any]] = [{"Home": "index.md"}]
    for line in readme[readme.index("## Documentation") :].splitlines():
        cells = line.strip("|").split("|") if line.startswith("|") else [line]
        title = re.match(r"\*\*(.+?)\*\*:|\| (\w+) \| \|$", line)
        if title is not None:
            nav.append({capital(title[1] or title[2]): []})
        (pages,) = nav[-1].values()
        links = [{capital(text): place_of(path)} for _, text, path in LINK.findall(line)]
        if links:
            pages += [{capital(cells[0].strip()): links}] if len(cells) > 1 else links
    return nav


def listed(nav: list[Any]) -> Iterator[str]:
    """The pages that a navigation leads to."""
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else listed(value)


def capital(title: str) -> str:
    """The first letter large, as titles of pages have it."""
    return title[:1].upper() + title[1:]


def place_of(path: str) -> str | None:
    """Where the site has a file of the repository; None for a folder, and for what is no part of it."""
    inside = path.removeprefix("docs/")
    return OUTSIDE.get(path, inside if inside != path and posixpath.splitext(inside)[1] else None)


def source_of(place: str) -> str:
    """The file of the repository that a page of the site is."""
    return next((path for path, other in OUTSIDE.items() if other == place), f"docs/{place}")


def for_site(markdown: str, path: str) -> str:
    """A page's text as MkDocs reads it: links inside of the site, no comments, which would swallow what follows."""
    parts = FENCE.split(markdown)
    return "".join(each if each.startswith("```") else in_prose(each, path) for each in parts)


def in_prose(text: str, path: str) -> str:
    """What stands outside of code."""
    return LINK.sub(lambda found: link(found, path), COMMENT.sub("", text))


def link(found: re.Match[str], path: str) -> str:
    """A link as the site has it."""
    name, mark, anchor = found[3].partition("#")
    if not name or "://" in name:
        return found[0]
    place = place_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), name)))
    if place is None:
        return found[2]
    here = posixpath.dirname(place_of(path) or "")
    return f"{found[1]}[{found[2]}]({posixpath.relpath(place, here or '.')}{mark}{anchor})"
