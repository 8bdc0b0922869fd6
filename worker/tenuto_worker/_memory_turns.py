"""`MemoryTurns`: whose turn it is when models wait for memory that others hold."""

from __future__ import annotations


class MemoryTurns:
    """Notes which models have jobs that wait for memory, and since when.

    A model whose jobs follow each other without a pause is never idle, so its memory would never
    go to another. Therefore the one that has waited longest, and longer than `patience` seconds,
    gets its turn: nothing is claimed for any other until it got what it waits for.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._since: dict[str, float] = {}

    def waits(self, model: str, now: float) -> None:
        """A job of the model waits for memory."""
        self._since.setdefault(model, now)

    def settled(self, model: str) -> None:
        """None does."""
        self._since.pop(model, None)

    def whose(self, now: float) -> str | None:
        """The model for which the others have to wait, if there is one."""
        late = {model: at for model, at in self._since.items() if now - at >= self._patience}
        return min(late, key=late.__getitem__, default=None)
