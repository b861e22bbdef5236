"""The JSON Schema of recipes, for editors: `python -m draftsmith.launch.recipe.schema` writes it anew.

Read next: `recipe/load.py`, whose model it is made from.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from .model import Recipe


def recipe_schema() -> dict[str, Any]:
    """Schema (draft 2020-12) of a recipe file: every section with its descriptions, and `base`."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "draftsmith recipe"
    schema["properties"] = {
        "base": {"type": "string", "description": "A recipe whose values are the defaults here."},
        **schema["properties"],
    }
    # a recipe with a base may leave even the method to it
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["base"]}]
    return schema


def schema_file() -> Path:
    """The file that ships beside the recipes."""
    return Path(str(files("draftsmith.recipes"))) / "schema.json"


def schema_text() -> str:
    """The file's content."""
    return json.dumps(recipe_schema(), indent=1) + "\n"


if __name__ == "__main__":
    schema_file().write_text(schema_text(), encoding="utf-8")
