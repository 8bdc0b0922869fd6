"""``WiredLimit``: keeps a large model's memory resident while it runs, which Metal alone needs.

Near the limit of what the device recommends, Metal evicts the weights between two steps. Smaller
models lose nothing by that, and what is wired is taken from everybody else, so the limit is raised
only while a row of a model runs that takes more than half of the recommended working set.
"""

from __future__ import annotations

from typing import Final, Protocol

import mlx.core as mx

_LARGE: Final = 0.5


class WiredDevice(Protocol):
    """What of a device is needed here."""

    @property
    def working_set(self) -> int:
        """Bytes that it recommends to use; 0 where there is nothing to wire."""

    def set_limit(self, limit: int) -> int:
        """Keep so many bytes resident; returns how many there were to be."""

    def synchronize(self) -> None:
        """Wait until nothing runs: the limit must not change under a step."""


class Metal:
    """The device of this process."""

    @property
    def working_set(self) -> int:
        """As ``WiredDevice`` has it."""
        if not mx.metal.is_available() or mx.default_device().type != mx.DeviceType.gpu:
            return 0
        return int(mx.device_info().get("max_recommended_working_set_size", 0))

    def set_limit(self, limit: int) -> int:
        """As ``WiredDevice`` has it."""
        return mx.set_wired_limit(limit)

    def synchronize(self) -> None:
        """As ``WiredDevice`` has it."""
        mx.synchronize()


class WiredLimit:
    """Counts the large models that run; the first one raises the limit, the last restores it.

    Called on the decode thread.
    """

    def __init__(self, device: WiredDevice) -> None:
        self._device = device
        self._running: set[int] = set()
        self._before = 0

    def begin(self, engine: object, nbytes: int) -> None:
        """Rows of ``engine``, whose model takes ``nbytes``, run from now on. Harmless twice."""
        working_set = self._device.working_set
        if id(engine) in self._running or not nbytes > _LARGE * working_set > 0:
            return
        if not self._running:
            self._before = self._device.set_limit(working_set)
        self._running.add(id(engine))

    def end(self, engine: object) -> None:
        """None of them runs any more. Harmless twice."""
        if id(engine) not in self._running:
            return
        self._running.remove(id(engine))
        if not self._running:
            self._device.synchronize()
            self._device.set_limit(self._before)


WIRED_LIMIT: Final = WiredLimit(Metal())
"""Of this process, which has one limit."""
