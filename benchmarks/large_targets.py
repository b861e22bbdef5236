"""What the pre-flight says of targets that no device holds: each way of holding them, on a described machine.

Nothing is measured and no weights are read: sizes come from `recipes/assets/sizes`, and every figure is what
`draftsmith check eagle3-8b` adds up for the same values.

    python benchmarks/large_targets.py --json docs/results/large-targets.json
    python benchmarks/large_targets.py --sizes llama3-70b
"""

from __future__ import annotations

import argparse
from pathlib import Path

from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.errors import DraftsmithError
from draftsmith.launch.check.devices import Devices, devices_of, in_units
from draftsmith.launch.check.memory import by_host, exchanged, fits, needs, parameters
from draftsmith.launch.check.models import Models
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.recipe.model import Recipe
from transformers import PreTrainedModel

RECIPE = "eagle3-8b"
CUT, TEAM = "--target.sharding fully_shard", "--target.tensor_parallel"
WAYS = (
    "",
    CUT,
    f"{CUT} --machine.processes 16",
    f"{CUT} --target.offload true",
    f"{TEAM} 4",
    f"{TEAM} 8",
    "--features.source engine --features.server http://host:8000 --features.shared states --probe.every_steps ''",
)
REFUSED = "refused"


def main() -> None:
    args = arguments()
    record = assembled([row(name, way) for name in args.sizes.split(",") for way in WAYS], args)
    print(printed(record))
    finish(record, args.json)


def row(name: str, way: str) -> dict[str, Cell]:
    """One target held in one way: what a device and its host hold, and what a pass sends a process."""
    recipe = load_recipe(RECIPE, [("target.path", f"path/to/{name}"), ("target.sizes", name), *values_of(way)]).recipe
    models, devices = Models(recipe), devices_of(recipe)
    held = way.partition(" --features.server")[0]
    cells: dict[str, Cell] = {"target": name, "way": f"`{held}`" if held else "whole on each"}
    cells |= {"processes": float(devices.processes)}
    try:
        target = models.target()
    except DraftsmithError as error:
        reason = str(error).partition("; ")[0]
        return cells | {"device": "-", "host": "-", "moved": "-", "verdict": f"{REFUSED}: {reason}"}
    return cells | {"parameters": parameters(target) / 1e9, **sums_of(recipe, models, target, devices)}


def sums_of(recipe: Recipe, models: Models, target: PreTrainedModel, devices: Devices) -> dict[str, Cell]:
    """Bytes, with their units."""
    need, host = needs(recipe, models.student(), target), by_host(recipe, target, devices)
    return {
        "device": in_units(sum(need.values())),
        "host": in_units(host) if host else "-",
        "moved": in_units(exchanged(recipe, target, devices)) if recipe.target.is_shared else "-",
        "verdict": "fits" if fits(need, devices) else REFUSED,
    }


def values_of(way: str) -> list[tuple[str, str]]:
    """Flags of the command line as values of a recipe."""
    words = way.replace("''", "\0").split()
    return [
        (name.removeprefix("--"), value.replace("\0", "")) for name, value in zip(words[::2], words[1::2], strict=True)
    ]


def assembled(rows: list[dict[str, Cell]], args: argparse.Namespace) -> Record:
    """All figures as a record."""
    heads = {
        "target": "{target}",
        "held": "{way}",
        "processes": "{processes}",
        "each device": "{device}",
        "its host, for each process": "{host}",
        "a pass sends a process": "{moved}",
        "pre-flight": "{verdict}",
    }
    sizes = {str(row["target"]): row["parameters"] for row in rows if "parameters" in row}
    named = " and ".join(f"{count:.1f} B parameters ({name})" for name, count in sizes.items())
    return record_of(
        args,
        title="Targets that no device holds, in the pre-flight",
        target=None,
        setup=(
            f"EAGLE-3 (`{RECIPE}`) on devices of 80 GB under ZeRO-2, of which the pre-flight takes nine tenths; "
            f"targets of {named} in bf16. Counted, not measured."
        ),
        formats={"processes": ".0f", "parameters": ".1f"},
        rows=rows,
        tables={"large-targets": table_of(heads)},
        not_measured=["a GPU's own count"],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="llama3-70b,qwen3-235b-a22b", help="names in recipes/assets/sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
