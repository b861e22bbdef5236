"""Draws docs/diagrams/*.svg: a draft step, a tree with the mask that its nodes attend by, what each family reads.

python benchmarks/diagrams.py             # draw them anew

The mask is that of `decoding/tree/tree.py`; what a family reads is the table of docs/families.md. Colours follow the
reader's light or dark.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import draftsmith
from draftsmith.decoding.tree.tree import Tree
from draftsmith.storage import write_text

DOCS = Path(draftsmith.__file__).parent / "docs"
STYLE = """\
text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; dominant-baseline: central; }
.left { text-anchor: start; } .small { font-size: 12px; } .faint { fill: #59636e; }
rect, circle { fill: #f6f8fa; stroke: #818b98; stroke-width: 1.2; }
line, path { stroke: #818b98; stroke-width: 1.4; fill: none; }
.draft { fill: #ddf4ff; stroke: #0969da; } .kept { fill: #dafbe1; stroke: #1a7f37; }
.lost { fill: #ffebe9; stroke: #cf222e; stroke-dasharray: 4 3; } .seen { fill: #54aeff; stroke: #0969da; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .faint { fill: #9198a1; } rect, circle { fill: #21262d; stroke: #656c76; }
line, path { stroke: #656c76; } .draft { fill: #121d2f; stroke: #4493f8; } .kept { fill: #12261e; stroke: #3fb950; }
.lost { fill: #25171c; stroke: #f85149; } .seen { fill: #1f6feb; stroke: #4493f8; }
}
"""
TEXT = ("The", "cat", "sat")
DRAFT = ("on", "the", "mat", "and")
KEPT = 2
CORRECTION = "sofa"
TREE = Tree((-1, 0, 0, 1, 1, 2, 3))
TOKENS = ("sat", "on", "by", "the", "a", "the", "mat")
LAYER, PITCH = 54, 36
LAYERS = 8
TAPPED = (2, LAYERS // 2, LAYERS - 3)
READS = (
    (
        "states of several layers, of all tokens",
        "seen",
        r".*(three|several)",
        [LAYER + (LAYERS - at) * PITCH for at in TAPPED],
    ),
    ("the last layer's states of all tokens", "kept", r"(?!.*(three|several)).*states? of all tokens", [LAYER]),
    ("the last layer's state of one token", "kept", r"last hidden state(?! of all)", [LAYER]),
    ("tokens alone", "", r"(?!.*state)", [LAYER + LAYERS * PITCH]),
)
"""What is read, its colour, how the table's cell says it, and how far down in the drawing it comes from."""
ROW = re.compile(r"^\| (?P<family>[^|]+) \| [^|]+ \| (?P<reads>[^|]+) \| [^|]+ \|$", re.MULTILINE)


def main() -> None:
    for name, drawing in drawings().items():
        write_text(DOCS / "diagrams" / f"{name}.svg", drawing)


def drawings() -> dict[str, str]:
    """Each by its name."""
    return {"draft-step": draft_step(), "tree": tree(), "reads": reads((DOCS / "families.md").read_text("utf-8"))}


def draft_step() -> str:
    """From a text to a longer one, by one call of the target."""
    lines = ("the text so far", "the drafter proposes", "one call of the target checks", "the text goes on")
    verdicts = [*["kept"] * KEPT, *["lost"] * (len(DRAFT) - KEPT)]
    rows = [
        tokens(TEXT, [""] * len(TEXT), 0, 0),
        tokens(DRAFT, ["draft"] * len(DRAFT), len(TEXT), 1),
        tokens(DRAFT, verdicts, len(TEXT), 2),
        tokens([*TEXT, *DRAFT[:KEPT], CORRECTION], [*[""] * len(TEXT), *["kept"] * KEPT, "seen"], 0, 3),
    ]
    captions = (label(12, 30 + 56 * at, line, "left small faint") for at, line in enumerate(lines))
    note = f"{KEPT} drafts kept, the rest dropped, and one token of the target's own: {KEPT + 1} tokens for one call"
    return svg(640, 266, note, [*captions, *(part for row in rows for part in row), label(320, 246, note, "small")])


def tokens(words: Sequence[str], kinds: Sequence[str], start: int, line: int) -> Iterator[str]:
    """Boxes with words, from a column on."""
    for at, (word, kind) in enumerate(zip(words, kinds, strict=True), start):
        yield box(212 + 60 * at, 14 + 56 * line, 54, 32, kind)
        yield label(239 + 60 * at, 30 + 56 * line, word)


def tree() -> str:
    """The candidates of a step, and which of them each one sees."""
    spots = places(TREE)
    parts = [edge(spots[parent], spots[node]) for node, parent in enumerate(TREE.parents) if parent >= 0]
    for node, (x, y) in enumerate(spots):
        parts += [
            disc(x, y, "" if node == 0 else "draft"),
            label(x, y - 7, TOKENS[node]),
            label(x, y + 10, node, "small faint"),
        ]
    left, top, size = 400, 60, 32
    for node, row in enumerate(TREE.ancestors_NN.tolist()):
        y, x = top + size * node, left + size * node
        parts += [label(left - 14, y + 14, node, "small faint"), label(x + 14, top - 14, node, "small faint")]
        parts += [box(left + size * at, y, 28, 28, "seen" if seen else "") for at, seen in enumerate(row)]
    parts += [label(160, 20, "candidates behind the last token", "small")]
    parts += [label(left + size * len(TREE) / 2, 20, "what each of them attends to", "small")]
    return svg(640, 300, "A tree of candidates, and the mask of ancestors that its nodes attend by", parts)


def places(of: Tree) -> list[tuple[float, float]]:
    """Where its nodes stand: a column per depth, a line per leaf, parents between their children."""
    across = [0.0] * len(of)
    leaves = (70 + 76 * at for at in range(len(of)))

    def put(node: int) -> float:
        below = [put(child) for child in of.children[node]]
        across[node] = sum(below) / len(below) if below else next(leaves)
        return across[node]

    put(0)
    return [(50 + 100 * depth, y) for depth, y in zip(of.depths, across, strict=True)]


def reads(page: str) -> str:
    """The target's layers, and which of their states each family takes."""
    table = page[page.index("## How they differ") :].split("\n\n")[2]
    rows = [found.groupdict() for found in ROW.finditer(table)][1:]
    parts = [label(72, 20, "the target", "small"), label(72, LAYER + LAYERS * PITCH, "tokens", "small")]
    for at in range(1, LAYERS + 1):
        y = LAYER + (LAYERS - at) * PITCH
        kind = "kept" if at == LAYERS else "seen" if at in TAPPED else ""
        parts += [box(12, y - 14, 120, 28, kind), label(72, y, "last layer" if at == LAYERS else f"layer {at}")]
    for at, (what, kind, said, sources) in enumerate(READS):
        y = LAYER + 84 * at
        families = ", ".join(row["family"] for row in rows if re.match(said, row["reads"]))
        parts += [f'<path d="M 132 {source} C 180 {source} 180 {y} 228 {y}"/>' for source in sources]
        parts += [box(228, y - 30, 400, 60, kind)]
        parts += [label(242, y - 13, what, "left small"), label(242, y + 12, families, "left")]
    return svg(640, 360, "What each family reads from the target", parts)


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A drawing that says what it shows."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", f"<style>\n{STYLE}</style>", *parts, "</svg>\n"])


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" class="{kind}"/>'


def disc(x: float, y: float, kind: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="24" class="{kind}"/>'


def edge(one: tuple[float, float], other: tuple[float, float]) -> str:
    return f'<line x1="{one[0] + 24:g}" y1="{one[1]:g}" x2="{other[0] - 24:g}" y2="{other[1]:g}"/>'


def label(x: float, y: float, words: object, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(str(words))}</text>'


if __name__ == "__main__":
    main()
