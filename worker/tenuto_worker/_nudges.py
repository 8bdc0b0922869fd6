"""`NudgeListener`: pub/sub wake-ups. Losing one costs a second, so nothing depends on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import redis

from tenuto_client import Keys

from ._redis import Backoff, is_outage

_LISTEN_S = 5.0


class NudgeListener:
    """Listens on a thread and a connection of its own.

    Args:
        on_queued: called when a job of some model was queued.
        on_cancel: called with the id of a job that somebody wants to stop.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        on_queued: Callable[[], object],
        on_cancel: Callable[[str], object],
    ) -> None:
        self._client = client
        self._keys = keys
        self._on_queued = on_queued
        self._on_cancel = on_cancel

    def run(self) -> None:
        """The body of the thread."""
        backoff = Backoff()
        while True:
            try:
                self._listen(backoff)
            except (redis.RedisError, OSError) as error:
                if not is_outage(error):
                    raise
                time.sleep(backoff.pause())

    def _listen(self, backoff: Backoff) -> None:
        pubsub: Any = self._client.pubsub  # untyped in redis-py
        with pubsub(ignore_subscribe_messages=True) as channel:
            channel.subscribe(self._keys.wake())
            # What was said while nobody listened is lost.
            self._on_queued()
            while True:
                message: Any = channel.get_message(timeout=_LISTEN_S)
                backoff.reset()
                if message is not None:
                    self._take(message["data"].decode(errors="replace"))

    def _take(self, nudge: str) -> None:
        word, _, what = nudge.partition(" ")
        if word == "queued":
            self._on_queued()
        elif word == "cancel":
            self._on_cancel(what)
