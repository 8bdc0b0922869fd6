"""`JobScripts`: runs the worker's Lua scripts, one by one or many in a round trip.

They block: the worker's own threads make the calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import redis
from redis.exceptions import NoScriptError

from tenuto_client import Keys, script_source, ticket_payload

from ._calls import Call, T
from ._redis import is_outage

_NAMES = (
    "claim",
    "preempt",
    "head",
    "suspect",
    "provide",
    "bind",
    "publish",
    "renew",
    "finish",
    "release",
    "reap",
    "depth",
    "take_back",
    "expire",
    "sweep",
    "mend_tickets",
    "recover",
)


class JobScripts:
    """The scripts over one blocking client and one namespace."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._scripts = {
            name: client.register_script(script_source("tenuto_worker", name)) for name in _NAMES
        }

    def run(self, call: Call[T]) -> T:
        """Run one script."""
        return self.run_all([call])[0]

    def run_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Run scripts in order, in one round trip, and return their answers.

        Raises the first error among the answers, after all were run: each of these scripts may be
        run again when its answer was lost.
        """
        answers = self.run_each(calls)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return cast(list[T], answers)

    def run_each(self, calls: Sequence[Call[T]]) -> list[T | Exception]:
        """As `run_all`, with an error that only one call has in the place of its answer."""
        replies: list[Any] = self._send(calls)
        # A server that was restarted, or replaced by another, knows no scripts.
        missing = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:
            self._load({calls[n].script for n in missing})
            for n, reply in zip(missing, self._send([calls[n] for n in missing]), strict=True):
                replies[n] = reply
        for reply in replies:
            if isinstance(reply, Exception) and is_outage(reply):
                raise reply
        answers: list[T | Exception] = []
        for call, reply in zip(calls, replies, strict=True):
            answer = _read(call, reply)
            answers.append(answer)
        return answers

    def _send(self, calls: Sequence[Call[T]]) -> list[Any]:
        payload = ticket_payload(int(time.time() * 1000))
        with self._client.pipeline(transaction=False) as pipe:
            for call in calls:
                sha = self._scripts[call.script].sha
                arguments = (self._keys.namespace, payload, *call.arguments)
                pipe.evalsha(sha, 0, *cast(tuple[str, ...], arguments))
            return pipe.execute(raise_on_error=False)

    def _load(self, names: set[str]) -> None:
        for name in names:
            self._client.script_load(self._scripts[name].script)


def _read(call: Call[T], reply: Any) -> T | Exception:
    if isinstance(reply, Exception):
        return reply
    try:
        return call.read(reply)
    except (TypeError, ValueError, KeyError) as error:
        return error
