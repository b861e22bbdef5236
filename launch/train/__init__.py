"""Training from a recipe; `python -m draftsmith.launch.train` runs it."""

from .run import train

__all__ = ["train"]
