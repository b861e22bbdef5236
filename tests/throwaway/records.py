"""The records of the throw-away family, and the command line with them: `python records.py VERB ...`."""

from __future__ import annotations

import sys

from draftsmith.config import Section
from draftsmith.drafters.families import FAMILIES, Family, Form
from draftsmith.trainers.methods import METHODS, Method
from pydantic import Field


class BigramConfig(Section):
    """The bigram network."""

    inner: int = Field(8, ge=2)
    """Numbers between a token and the next one."""


FAMILIES["bigram"] = Family(
    name="bigram",
    title="bigram",
    kind="on target",
    summary="what follows depends on the last token alone",
    page="extending.md",
    build="bigram:BigramNet.from_settings",
    load="bigram:load",
    proposer="bigram:draft_by",
    toy=lambda _drafter: "bigram",
    toys={"bigram": "bigram:toy"},
    exports={"vllm": Form("bigram", "bigram:export")},
)
METHODS["bigram"] = Method(
    name="bigram",
    summary="a bigram network",
    family="bigram",
    module="bigram_trainer",
    sections={"bigram": BigramConfig},
    reads=("target", "features", "probe", "model.start_from"),
    sizes={"inner": "bigram.inner"},
)

if __name__ == "__main__":
    from draftsmith.launch.cli import main  # behind the records, from which the recipe is made

    sys.exit(main(sys.argv[1:]))
