"""`OtherWorkers`: what they say they take, and what those took that have just gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis

from tenuto_client import Keys, ProtocolError, WorkerInfo, unpack_model, unpack_worker
from tenuto_client._announce import ALIVE_S


class OtherWorkers:
    """Reads the hashes `workers` and `models`.

    Args:
        me: name of this worker, whose own limits are asked of `mine`, since what it announced may
            be some seconds old: by a limit's name and a model.
    """

    def __init__(
        self, client: redis.Redis, keys: Keys, me: str, mine: Callable[[str, str], int | None]
    ) -> None:
        self._client = client
        self._keys = keys
        self._me = me
        self._mine = mine

    def widest(self, limit: str, model: str) -> int | None:
        """The most that any worker of a model takes that is alive, this one included, or was some
        minutes ago and may be back soon; None is no limit.

        Raises:
            RedisError: Redis is away.
        """
        others = [each for each in self._living() if model in each.models]
        limits = [each.limits.get(model, {}).get(limit) for each in others]
        limits.append(self._mine(limit, model))
        said: Any = self._client.hget(self._keys.models(), model)
        if said is not None:
            limits.append(getattr(unpack_model(model, said), limit))
        known = [each for each in limits if each is not None]
        return max(known) if len(known) == len(limits) else None

    def _living(self) -> list[WorkerInfo]:
        found: Any = self._client.hgetall(self._keys.workers())
        reply: Any = self._client.time()
        now = float(reply[0])
        living = []
        for name, packed in found.items():
            try:
                info = unpack_worker(name.decode(errors="backslashreplace"), packed)
            except ProtocolError:
                continue
            if info.name != self._me and now - info.seen_at <= ALIVE_S:
                living.append(info)
        return living
