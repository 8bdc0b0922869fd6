"""A clock for the jobs in Redis that goes on only when a test says so.

The clock of Redis cannot be moved, so what is moved are the times that stand in Redis: back by the
seconds that are to pass, and forward by those that really passed since the last call. So a slow
machine changes nothing, as long as no single step takes a second: times in a test are multiples of
`STEP`, and all limits that decide anything are a second off those.
"""

from __future__ import annotations

from typing import Any

from tenuto_client import Keys

STEP = 3
"""Seconds. No multiple of it comes nearer than a second to 2, 4, 5, 8, 10, 16, 20, 32, ..."""
MARGIN = 1
"""Seconds by which a time in Redis may be off."""

_STAMPS = (
    *("queued_at", "claimed_at", "finished_at", "deadline", "queue_until"),
    *("yield_at", "room_at", "apart_at"),
)
_MOVE = """
local t = redis.call('TIME')
local at = tonumber(t[1]) + tonumber(t[2]) / 1e6
local by = at - tonumber(ARGV[2]) - tonumber(ARGV[3])
for _, id in ipairs(redis.call('ZRANGE', key_jobs(), 0, -1)) do
  for i = 4, #ARGV do
    local time = redis.call('HGET', key_job(id), ARGV[i])
    if time then redis.call('HSET', key_job(id), ARGV[i], string.format('%.6f', time + by)) end
  end
end
for _, index in ipairs({ key_due(), key_expiry(), key_running() }) do
  local found = redis.call('ZRANGE', index, 0, -1, 'WITHSCORES')
  for i = 1, #found, 2 do redis.call('ZADD', index, found[i + 1] + by, found[i]) end
end
return string.format('%.6f', at)
"""


class StillClock:
    """The time of the jobs of one namespace, 0 at first."""

    def __init__(self, client: Any, keys: Keys) -> None:
        self._script = client.register_script(f"local P = ARGV[1]\n{Keys.lua()}\n{_MOVE}")
        self._keys = keys
        seconds, micros = client.time()
        self._real: float = seconds + micros / 1e6
        self.at = 0

    def go_on(self, seconds: int = 0) -> None:
        """Let so much time pass, and not what has passed by itself."""
        arguments = (self._keys.namespace, f"{self._real:.6f}", seconds, *_STAMPS)
        self._real = float(self._script(args=arguments))
        self.at += seconds

    def in_redis(self, at: float) -> float:
        """What stands in Redis for a time of this clock."""
        return self._real + at - self.at

    def is_at(self, stamp: bytes | float | None, at: float | None) -> bool:
        """Whether this is what stands in Redis for a time; None is absent."""
        if stamp is None or at is None:
            return stamp is None and at is None
        return abs(float(stamp) - self.in_redis(at)) < MARGIN

    def remember(self) -> tuple[float, int]:
        """What `put_back` needs when all of Redis is put back to what it is now."""
        return self._real, self.at

    def put_back(self, then: tuple[float, int]) -> None:
        """Redis is what it was at `then`, and time has gone on."""
        now = self.at
        self._real, self.at = then
        self.go_on(now - self.at)
