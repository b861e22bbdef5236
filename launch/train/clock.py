"""The day that a run's chat template is told, if it has a clock: that of the run's beginning, on every later one too.

Without it rows of today and prompts of tomorrow would differ, and a resumed run would find other rows.
Read next: `run.py`, which asks; `data/rows/templates.py`, the clock.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from ...errors import DraftsmithError
from ..recipe.load import Resolved, load_recipe
from ..recipe.model import Recipe

_log = logging.getLogger(__name__)


def on_a_day(resolved: Resolved, folder: Path, resume: str) -> Resolved:
    """The recipe with the day of its run, where its template has a clock and it names no day itself."""
    recipe = resolved.recipe
    if recipe.data.template_date is not None or not _has_clock(recipe):
        return resolved
    from ...data.rows.templates import today

    day = _begun_on(folder, resume) or today()
    _log.info("the chat template has a clock, which shows %s for the whole run (data.template_date)", day)
    data = recipe.data.model_copy(update={"template_date": day})
    return replace(resolved, recipe=recipe.model_copy(update={"data": data}))


def _begun_on(folder: Path, resume: str) -> str | None:
    """The day of the run that is gone on with."""
    if resume == "never":
        return None
    runs = [] if resume == "auto" else [Path(resume).resolve().parents[1]]
    for run in [*runs, folder]:
        try:
            if (run / "run.yaml").is_file():
                return load_recipe(str(run / "run.yaml")).recipe.data.template_date
        except DraftsmithError:
            continue  # a record of another version, which the comparison of recipes speaks of
    return None


def _has_clock(recipe: Recipe) -> bool:
    """Whether the run's template reads the clock; of a target that is not there, the run itself will say so."""
    from ...data.rows.sandbox.bounded import CLOCK
    from ...data.rows.templates import ChatTemplate, named_template

    data, config = recipe.data, recipe.tokenizer
    try:
        if not recipe.record.has_target and config.path is None:
            return config.chat_template is not None and CLOCK in named_template(config.chat_template)
        from ..inspect import tokenizer_of

        return ChatTemplate(tokenizer_of(recipe), data.chat_template, data.template_values).reads_clock
    except DraftsmithError:
        return False
