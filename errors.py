"""The errors that a user can cause, each with the exit code that scripts branch on.

Raise these with one clear message: what was found, what was expected, where it came from, what to
do. The command line prints the message without a traceback (`--debug` brings it back).
"""

from __future__ import annotations


class DraftsmithError(Exception):
    """A failure with a message for the user and an exit code."""

    exit_code = 5


class RequestError(DraftsmithError):
    """A bad request: recipe, flag, model or pairing that cannot work."""

    exit_code = 2


class FieldError(RequestError):
    """A value of one of a recipe's fields that cannot work; the pre-flight adds the line that has it.

    Args:
        field: its path in the recipe, such as `model.head_size`.
        reason: how a sentence goes on that begins with it.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field} {reason}")
        self.field, self.reason = field, reason


class DataError(DraftsmithError):
    """The data cannot be trained or evaluated on."""

    exit_code = 3


class EnvironmentFailure(DraftsmithError):
    """The machine lacks something: space, a device, a package, a permission."""

    exit_code = 4


class TrainingFailed(DraftsmithError):
    """Training cannot go on, for example after too many non-finite steps."""

    exit_code = 5


class Stopped(DraftsmithError):
    """A signal ended the run after a checkpoint was saved; `--resume auto` goes on from it."""

    exit_code = 75
