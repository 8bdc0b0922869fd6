"""`ModelAdapters`: the LoRA adapters that this worker has for one of its models."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ._logging import get_log

if TYPE_CHECKING:
    from tenuto_engine import AdapterFacts, AdapterFolder, ModelFacts

_LOOK_S: Final = 5.0
# They are told with every claim and announcement.
_MOST: Final = 1000


class ModelAdapters:
    """Looks at their folder now and then: what is new there needs no restart. Safe to use from any
    thread.

    Args:
        model: the name under which the model is served.
        folder: has one subfolder for each adapter; None is no folder.
        hash_cache: remembers hashes of weights.

    Attributes:
        folder: the same.
        fingerprints: of the geometry with each adapter that fits, by name.
        largest: bytes of the largest of them, which count with each row.
    """

    def __init__(
        self, model: str = "", folder: str | None = None, hash_cache: Path | None = None
    ) -> None:
        self.folder = folder
        self.fingerprints: Mapping[str, str] = {}
        self.largest = 0
        self._model = model
        self._hash_cache = hash_cache
        self._lock = threading.Lock()
        self._folder: AdapterFolder | None = None
        self._model_hash = ""
        self._left_out = 0
        self._told: dict[str, str] = {}
        self._due_at = 0.0

    def look(self, facts: ModelFacts) -> bool:
        """Learn what fits the model now; whether that has changed.

        Raises:
            InvalidOption: there never was such a folder.
        """
        from tenuto_engine import AdapterFolder

        if self.folder is None:
            return False
        with self._lock:
            if self._folder is None or facts.geometry.model_hash != self._model_hash:
                self._model_hash = facts.geometry.model_hash
                self._folder = AdapterFolder(self.folder, facts.folder, hash_cache=self._hash_cache)
            looked = self._folder.look()
            found = {name: looked[name] for name in sorted(looked)[:_MOST]}
            left_out = len(looked) - len(found)
            if left_out and not self._left_out:
                get_log().warning("adapters left out", model=self._model, most=_MOST)
            self._left_out = left_out
            self._due_at = time.monotonic() + _LOOK_S
            before = self.fingerprints
            good = [each for each in found.values() if not each.problem]
            self.largest = max((each.nbytes for each in good), default=0)
            self.fingerprints = {
                each.name: facts.geometry.with_adapter(each.hash).fingerprint for each in good
            }
            self._tell(found, is_changed=self.fingerprints != before)
            return self.fingerprints != before

    def look_if_due(self, facts: ModelFacts) -> bool:
        """The same, if the last look was a while ago."""
        return self.folder is not None and time.monotonic() >= self._due_at and self.look(facts)

    def _tell(self, found: Mapping[str, AdapterFacts], *, is_changed: bool) -> None:
        log = get_log()
        if is_changed:
            log.info("adapters found", model=self._model, adapters=sorted(self.fingerprints))
        problems = {name: each.problem for name, each in found.items() if each.problem}
        for name, problem in problems.items():
            if self._told.get(name) != problem:
                log.warning("adapter not usable", model=self._model, adapter=name, error=problem)
        self._told = problems
