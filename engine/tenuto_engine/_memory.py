"""How much memory the device has for models, and how much of it is in use."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mlx.core as mx

# The driver, other programs and what MLX needs besides its arrays have the rest.
_CUDA_SHARE: Final = 0.9
_HOST_SHARE: Final = 0.7

_CGROUPS: Final = Path("/sys/fs/cgroup")
_MY_CGROUPS: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What MLX has of the device's memory. All in bytes.

    Attributes:
        active: in arrays.
        cache: free, kept for the next arrays.
        peak: most that was active at once since the process began.
        budget: what may be used; infinite where there is no limit.
    """

    active: int
    cache: int
    peak: int
    budget: float


def memory_use(budget: float) -> MemoryUse:
    """What this process uses now, of ``budget`` bytes."""
    return MemoryUse(
        active=mx.get_active_memory(),
        cache=mx.get_cache_memory(),
        peak=max(_highest, mx.get_peak_memory()),
        budget=budget,
    )


class PeakMeter:
    """The most memory that MLX had in arrays at once since the meter was made, in bytes.

    MLX counts one peak for the whole process, which is begun anew for each meter; so the others
    and ``memory_use`` note it before.
    """

    def __init__(self) -> None:
        self._bytes = mx.get_active_memory()
        with _lock:
            _note_peak()
            mx.reset_peak_memory()
            _meters.add(self)

    def note(self, peak: int) -> None:
        """So much was in use since it was last told."""
        self._bytes = max(self._bytes, peak)

    def read(self) -> int:
        """The peak up to now."""
        self.note(mx.get_peak_memory())
        return self._bytes


_lock = threading.Lock()
_meters: weakref.WeakSet[PeakMeter] = weakref.WeakSet()
_highest = 0


def _note_peak() -> None:
    global _highest
    peak = mx.get_peak_memory()
    _highest = max(_highest, peak)
    for meter in _meters:
        meter.note(peak)


def default_budget() -> int:
    """Bytes that models and their caches may take where nobody says so.

    On Metal the working set that the device recommends, on CUDA nine tenths of its memory,
    on a CPU seven tenths of the memory that this process may have.
    """
    about = mx.device_info()
    if mx.default_device().type == mx.DeviceType.gpu:
        if "max_recommended_working_set_size" in about:
            return int(about["max_recommended_working_set_size"])
        if "total_memory" in about:
            return int(_CUDA_SHARE * int(about["total_memory"]))
    return int(_HOST_SHARE * host_memory())


def release_memory() -> None:
    """Give back what MLX keeps for the next arrays."""
    mx.clear_cache()


def limit_memory(budget: float) -> None:
    """Have the device give back what is free before MLX takes more than ``budget`` bytes."""
    if math.isfinite(budget) and mx.default_device().type == mx.DeviceType.gpu:
        mx.set_memory_limit(int(budget))


def host_memory(cgroups: Path = _CGROUPS, mine: Path = _MY_CGROUPS) -> int:
    """Bytes of memory that this process may have: the machine's, or its control group's.

    Args:
        cgroups: where the control groups are mounted.
        mine: says which of them this process is in.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_group_limits(cgroups, mine)])


def _group_limits(cgroups: Path, mine: Path) -> Iterator[int]:
    for file in _limit_files(cgroups, mine):
        try:
            yield int(file.read_text())
        except (OSError, ValueError):
            # Not there, or the word for no limit.
            continue


def _limit_files(cgroups: Path, mine: Path) -> Iterator[Path]:
    try:
        lines = mine.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / controllers, "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # A limit of any group above counts, too. In a container the path may be the host's.
        for each in (group, *group.parents):
            if each.is_relative_to(root):
                yield each / name
