"""`ModelPool`: the models of a worker, within its memory."""

from __future__ import annotations


class ModelPool:
    """Says what the claimer may take."""

    def may_claim(self, model: str) -> bool:
        """Whether the model is loaded, or could be loaded now."""
        return True

    def room(self, model: str) -> int | None:
        """Most tokens of prompt and answer for which a new row has memory; None is no limit."""
        return None

    def max_context(self, model: str) -> int | None:
        """As `room`, in a worker that runs nothing else; None where memory sets no limit."""
        return None

    def broken(self) -> dict[str, str]:
        """The models that could not be loaded, and why."""
        return {}

    def note_left(self, model: str, *, for_memory: bool) -> None:
        """A claim was answered; `for_memory` says that a job was left, for want of memory."""
