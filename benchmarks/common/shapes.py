"""What `benchmarks/families.py` compares: a recipe of each family, and the shapes that it drafts in.

Read next: `../families.py`, which trains and measures them; `../curves.py`, by length of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.proposal import Proposer
from draftsmith.drafters.config import BlockOptions, DrafterConfig
from draftsmith.drafters.eagle.family import load_eagle
from draftsmith.drafters.heads.hydra import load_hydra
from draftsmith.drafters.heads.medusa import default_paths, load_medusa
from draftsmith.drafters.registry import load_drafter

DEPTH = 4  # drafted tokens of a chain, depth of every tree
CHAIN = [[0] * depth for depth in range(1, DEPTH + 1)]
NODES = (DEPTH + 1, 20)  # of the trees; the first verifies as many tokens as the chain
SHAPES = ("chain", *(f"tree {nodes}" for nodes in NODES))

CHILDREN = 10  # of a node at most, in trees by confidence

Load = Callable[[Path, Backbone], Proposer]


def paths(nodes: int) -> list[list[int]]:
    """The default static tree of so many nodes."""
    return [list(path) for path in default_paths(DEPTH, nodes)]


def on_paths(load: Callable[..., Proposer], **settings: Any) -> dict[str, Load]:
    """A chain and static trees for what fills any static tree."""
    shapes = {"chain": CHAIN, **{f"tree {nodes}": paths(nodes) for nodes in NODES}}
    return {name: partial(load, paths=shape, **settings) for name, shape in shapes.items()}


def dynamic() -> dict[str, Load]:
    """A chain, and trees by confidence."""
    load = partial(load_eagle, draft_length=DEPTH)
    trees = {
        f"tree {nodes}": partial(load, tree="dynamic", nodes=nodes, top_k=min(CHILDREN, nodes)) for nodes in NODES
    }
    return {"chain": partial(load, tree="chain"), **trees}


def eagle_1() -> dict[str, Load]:
    """A chain, and static trees with siblings drawn without replacement."""
    trees = on_paths(load_eagle, tree="static")
    return {**trees, "chain": dynamic()["chain"]}


def chain_alone() -> dict[str, Load]:
    """What drafts a chain and nothing else."""
    return {"chain": partial(load_drafter, draft_length=DEPTH)}


def blocks() -> dict[str, Load]:
    """A chain, and trees of a block's likeliest tokens: side leaves (DFlash), or children behind their parent."""
    trees = {
        f"tree {nodes}": DrafterConfig(block=BlockOptions(tree="tree", nodes=nodes, children=min(CHILDREN, nodes)))
        for nodes in NODES
    }
    load = partial(load_drafter, draft_length=DEPTH)
    return chain_alone() | {name: partial(load, config=config) for name, config in trees.items()}


@dataclass(frozen=True, eq=False)
class Family:
    """A row of the table: what is trained, and how it drafts."""

    name: str
    recipe: str
    shapes: dict[str, Load]
    behind: str = ""
    """A recipe that takes the first half of the steps, whose drafter this one is initialised from."""
    block: bool = False
    """Whether its first draft has the inputs of EAGLE-3's, and should be accepted about as often."""


FAMILIES = [
    Family("distilled draft", "distill-tiny", chain_alone()),
    Family("BPD (frozen)", "bpd-tiny", chain_alone()),
    Family("BPD (fine-tuned)", "bpd-tuned-tiny", chain_alone()),
    Family("Medusa-1", "medusa-tiny", on_paths(load_medusa)),
    Family("Medusa-2", "medusa2-tiny", on_paths(load_medusa)),
    Family("Hydra", "hydra-tiny", on_paths(load_hydra)),
    Family("Hydra++", "hydra-plus-tiny", on_paths(load_hydra)),
    Family("EAGLE-1", "eagle-tiny", eagle_1()),
    Family("EAGLE-2", "eagle-tiny", dynamic()),
    Family("HASS", "hass-tiny", dynamic()),
    Family("HASS behind EAGLE-1", "hass-tiny", dynamic(), behind="eagle-tiny"),
    Family("EAGLE-3", "eagle3-tiny", dynamic()),
    Family("MTP", "mtp-tiny", chain_alone()),
    Family("PARD", "pard-tiny", chain_alone()),
    Family("P-EAGLE", "peagle-tiny", chain_alone()),
    Family("DFlash", "dflash-tiny", blocks(), block=True),
    Family("DFlash 2", "dflash2-tiny", blocks(), block=True),
    Family("DSpark", "dspark-tiny", blocks(), block=True),
]


def with_shapes(family: Family, shapes: Sequence[str]) -> Family:
    """A family with the shapes that were asked for; its chain always."""
    return replace(family, shapes={name: load for name, load in family.shapes.items() if name in ("chain", *shapes)})
