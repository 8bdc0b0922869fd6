"""``Adapters``: the LoRA adapters of a loaded model, and ``Adapter``: one that is in memory."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from tenuto_engine._adapter_files import (
    Stamp,
    adapter_names,
    adapter_stamp,
    check_folder,
    read_adapter,
    unknown_adapter,
)
from tenuto_engine._adapter_layers import (
    LEAVES,
    AdaptedModel,
    array_of,
    check_runs,
    fitting,
    sites_of,
)
from tenuto_engine._errors import InvalidOption

_KEPT: Final = 16
_KEPT_BYTES: Final = 256 * 2**20


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A LoRA adapter in memory, for ``GenerationOptions.adapter``. Who holds it holds the model.

    Attributes:
        name: of its folder.
        hash: 32 hex digits over its files' bytes, from which it was made.
        nbytes: of its arrays.
        changes: paths of the layers that it changes.
        model: the model with it; for the thread that steps the engine.
    """

    name: str
    hash: str
    nbytes: int
    changes: tuple[str, ...]
    model: AdaptedModel


class Adapters:
    """Those of one loaded model, from a folder that has one subfolder each.

    An adapter is loaded at its first use. As many as were used last, and no row has, are kept. The
    methods may be called on any thread, but for ``check``.

    Raises:
        InvalidOption: there is no such folder.
    """

    def __init__(self, model: Any, make_caches: Callable[[], list[Any]], folder: Path) -> None:
        self.folder = check_folder(folder)
        self._model = model
        self._make_caches = make_caches
        self._sites = sites_of(model)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Stamp, Adapter]] = OrderedDict()
        # What rows hold stays what it is, however much was used since, or changed on disk.
        self._alive: weakref.WeakValueDictionary[tuple[str, str], Adapter]
        self._alive = weakref.WeakValueDictionary()
        self._checked: weakref.WeakSet[Adapter] = weakref.WeakSet()

    @property
    def names(self) -> list[str]:
        """What the folder has, whether it fits or not."""
        return adapter_names(self.folder)

    @property
    def nbytes(self) -> int:
        """Bytes of all that are in memory."""
        with self._lock:
            return sum(each.nbytes for each in self._alive.values())

    def load(self, given: str | Adapter) -> Adapter:
        """The adapter of that name as its files are now. One of ours is taken as it is.

        Raises:
            InvalidOption: there is none of that name.
            UnsupportedAdapter: it cannot be read, or does not fit the model.
        """
        if isinstance(given, Adapter):
            if self._alive.get((given.name, given.hash)) is given:
                return given
            given = given.name
        with self._lock:
            stamp = adapter_stamp(self.folder, given)
            if stamp is None:
                self._kept.pop(given, None)
                raise unknown_adapter(self.folder, given)
            known = self._kept.get(given)
            if known is None or not stamp or known[0] != stamp:
                known = self._kept[given] = self._read(given)
            self._kept.move_to_end(given)
            self._forget()
            return known[1]

    def check(self, adapter: Adapter) -> None:
        """Have the model try it, once; on the thread that steps the engine.

        Raises:
            UnsupportedAdapter: the model's own code cannot do with it.
        """
        if adapter not in self._checked:
            check_runs(adapter.name, adapter.model, self._make_caches())
            self._checked.add(adapter)

    def _read(self, name: str) -> tuple[Stamp, Adapter]:
        files = read_adapter(self.folder, name)
        adapter = self._alive.get((name, files.hash))
        if adapter is None:
            changed = fitting(files, self._sites)
            arrays = {key: array_of(files.payload, each) for key, each in files.tensors.items()}
            # A lazy array cannot be used on another thread than the one that made it.
            mx.eval(arrays)
            layers = tuple(
                (
                    site,
                    site.layer(
                        files.kind,
                        files.scale,
                        {leaf: arrays[f"{path}.{leaf}"] for leaf in LEAVES[files.kind]},
                    ),
                )
                for path, site in changed.items()
            )
            model = AdaptedModel(self._model, layers)
            adapter = Adapter(name, files.hash, files.nbytes, tuple(changed), model)
            self._alive[name, files.hash] = adapter
        return files.stamp, adapter

    def _forget(self) -> None:
        while len(self._kept) > _KEPT or (len(self._kept) > 1 and self._kept_bytes > _KEPT_BYTES):
            self._kept.popitem(last=False)

    @property
    def _kept_bytes(self) -> int:
        return sum(adapter.nbytes for _, adapter in self._kept.values())


def no_adapters() -> InvalidOption:
    """What is raised where an engine has no folder of adapters."""
    return InvalidOption("adapter", "the engine was loaded without a folder of adapters")
