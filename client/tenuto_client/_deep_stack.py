"""``on_deep_stack``: calls something that may recurse as deeply as its input is long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

# Reserved, not used: llguidance takes about 8 KiB for each rule that leads to the next one, and a
# grammar of 256 KiB has up to 6,000.
_BYTES: Final = 128 * 2**20
_lock = threading.Lock()


def on_deep_stack(call: Callable[[], T]) -> T:
    """What `call` returns or raises, from a thread of its own with a stack of 128 MiB."""
    made: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            made.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            raised.append(error)

    with _lock:
        before = threading.stack_size(_BYTES)
        try:
            thread = threading.Thread(target=run, name="deep-stack")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
    return made[0]
