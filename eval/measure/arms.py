"""An arm: a drafter as one row of the tables, and what is known of it before it is measured.

Read next: `rounds.py`, which decodes arms in turn; `evaluate.py`, which makes rows of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...decoding.backbone.backbone import Backbone
from ...decoding.proposal import Proposer
from ...drafters.model.draft_model import DraftModel
from ...drafters.model.ensemble import Ensemble
from ...errors import RequestError
from ..config import EvalConfig
from .speed import bytes_of

NOT_AUDITED = "not audited"


@dataclass(frozen=True)
class Arm:
    """A method as one row of the tables: a drafter, and its verdict of the audit."""

    name: str
    drafter: Proposer
    verdict: str = NOT_AUDITED
    audited_as: str | None = None
    """Whose audit the verdict is of, where it is another arm's: same code and rule, other weights."""
    distance: float | None = None
    """Of a lossy rule: its measured total variation."""
    path: str | None = None
    """Of the drafter's folder, as it was asked for; None where there is none."""
    sha256: str | None = None
    """Of that folder's config and weights."""

    @property
    def audited(self) -> str | None:
        """Name of the arm that was audited; None where none was."""
        return None if self.verdict == NOT_AUDITED else self.audited_as or self.name

    def at(self, length: int | None) -> Arm:
        """The same with another draft length, where it has one to set."""
        if length is not None and isinstance(self.drafter, (DraftModel, Ensemble)):
            self.drafter.draft_length = length
        return self

    @property
    def backbone(self) -> Backbone | None:
        """The model whose call of one token is a draft step; None where a step is something else."""
        return self.drafter.backbone if isinstance(self.drafter, DraftModel) and self.drafter.steps_of_one else None

    @property
    def draft_bytes(self) -> int:
        """Bytes of the weights that drafting reads; 0 where there is no model of its own.

        An early exit's are the target's, and they count. Members of an ensemble run one after
        another, so what two of them share counts for both.
        """
        if isinstance(self.drafter, Ensemble):
            return sum(bytes_of(each.module, each.adapters_read) for each in self.drafter.members)
        module = getattr(self.drafter, "module", None)
        return 0 if module is None else bytes_of(module)

    @property
    def proposal_bytes(self) -> int:
        """Bytes of the weights that a proposal reads, as often as it reads them.

        A draft model reads all of its own in every step. Heads and feature drafters say what they
        read (`weights_read`), the target's projection included where they have none.
        """
        read = getattr(self.drafter, "weights_read", None)
        if read is None:
            return self.drafter.draft_steps * self.draft_bytes
        return sum(bytes_of(module) for module in read)

    @property
    def sweeps(self) -> bool:
        """Whether its draft length can be chosen."""
        if isinstance(self.drafter, Ensemble):
            return True
        return isinstance(self.drafter, DraftModel) and self.drafter.keeps_length


def check_answer_length(arms: Sequence[Arm], config: EvalConfig) -> None:
    """Raise RequestError where answers are so short that the length limit may cut every step.

    A step counts if it begins at least draft length + 1 tokens before the limit, and the first one
    begins behind the prefill's token.
    """
    check_longest(*_deepest(arms, config), config.max_new_tokens)


def check_context(
    target: Backbone, arms: Sequence[Arm], config: EvalConfig, longest: int, *, answer: tuple[str, int]
) -> None:
    """Raise RequestError, before anything is decoded, where a prompt has no room with its answer and a draft.

    Args:
        longest: tokens of the longest prompt.
        answer: the most that are written behind one, and the setting that says so.
    """
    name, depth = _deepest(arms, config)
    setting, most = answer
    room = target.context - most - depth
    if longest > room:
        shorter = f"set --eval.prompt_tokens {room} or less, or " if room > 0 else ""
        raise RequestError(
            f"the longest prompt has {longest} tokens; with an answer of {most} ({setting}) and a draft of {depth} "
            f"({name}) it does not fit the target's context of {target.context}{target.context_reason}; {shorter}"
            f"lower --{setting}"
        )


def _deepest(arms: Sequence[Arm], config: EvalConfig) -> tuple[str, int]:
    """Which arm drafts the longest, and how many tokens."""
    lengths = {arm.name: config.draft_length if arm.sweeps else arm.drafter.draft_length for arm in arms}
    if arms[0].sweeps and config.sweep:
        lengths["eval.sweep"] = max(config.sweep)
    deepest = max(lengths, key=lambda name: lengths[name])
    return deepest, lengths[deepest]


def check_longest(name: str, length: int, max_new_tokens: int) -> None:
    """The same for drafts of one length, which `name` makes."""
    least = length + 2
    if max_new_tokens < least:
        raise RequestError(
            f"eval.max_new_tokens is {max_new_tokens}, and {name} drafts up to {length} tokens "
            f"per target call: the length limit may cut every step, so none can be counted; set "
            f"--eval.max_new_tokens {least} or more"
        )
