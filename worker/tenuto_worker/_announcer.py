"""`Announcer`: what this worker says of itself and its models in Redis."""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import redis

from tenuto_client import (
    Keys,
    ModelInfo,
    ProtocolError,
    WorkerInfo,
    pack_announcement,
    unpack_model,
    unpack_worker,
)
from tenuto_client._announce import ALIVE_S, MODEL_LIMITS

from ._identity import Identity
from ._logging import get_log
from ._redis import namespace_id
from ._run import Runs
from ._served import ServedNote, data_set_ids
from ._settings import VERSION, WorkerSettings

if TYPE_CHECKING:
    from tenuto_engine import DiskBudget, ModelFacts

_FORGET_S = 24 * 3600.0


class Namespace:
    """The id of the data set in Redis, as this worker last saw it.

    It is drawn by whoever comes first. When Redis was emptied it gets a new one, so that
    checkpoints of the old data are not mistaken for leftovers.
    """

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self.id = ""

    def refresh(self) -> str:
        """Read the id, or draw one where there is none."""
        # A new one each time: with the one from before, an emptied Redis would pass for the
        # data set that it lost, and gc would take every job on disk for a deleted one.
        found = namespace_id(self._client, self._keys, secrets.token_hex(8))
        if self.id and found != self.id:
            get_log().error(
                "redis has another data set now",
                was=self.id,
                now=found,
                hint="tenuto checkpoints recover puts jobs back that are on disk",
            )
        self.id = found
        return found


class Announcer:
    """Writes the hashes `models` and `workers`.

    Args:
        adapters: of a model, the fingerprint with each that this worker has.
        own_limits: `max_prompt`, `max_tokens` and `max_context` of a model on this worker, where
            there are.
        broken: the models that could not be loaded, and why.
        loaded: the models that are in memory.
        note: beside this worker's lock, which data set it serves.
        last_death: how the child before this one died; "" if none did.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        settings: WorkerSettings,
        identity: Identity,
        runs: Runs,
        namespace: Namespace,
        budget: DiskBudget,
        *,
        adapters: Callable[[str], Mapping[str, str]],
        own_limits: Callable[[str], Mapping[str, int]],
        broken: Callable[[], Mapping[str, str]],
        loaded: Callable[[], Iterable[str]],
        last_death: str,
        note: ServedNote,
    ) -> None:
        self._client = client
        self._keys = keys
        self._budget = budget
        self._settings = settings
        self._identity = identity
        self._runs = runs
        self._namespace = namespace
        self._adapters = adapters
        self._own_limits = own_limits
        self._broken = broken
        self._loaded = loaded
        self._last_death = last_death
        self._note = note
        self._models: dict[str, ModelInfo] = {}
        self._device = ""
        self._started_at = 0.0

    def describe(self, models: Mapping[str, ModelFacts]) -> None:
        """Learn what is to be said of the models."""
        for name, facts in models.items():
            geometry = facts.geometry
            self._device = geometry.device_name or geometry.device_kind
            self._models[name] = ModelInfo(
                name=name,
                context_length=facts.context_length,
                vocab_size=facts.vocab_size,
                fingerprint=geometry.fingerprint,
                announced_at=0.0,
                longest_token=facts.longest_token,
            )

    def announce(self) -> None:
        """Say it, and forget workers that have been silent for a day."""
        self._namespace.refresh()
        self._note.write(data_set_ids(self._client, self._keys))
        now = self._now()
        self._started_at = self._started_at or now
        me = self._me(now)
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hset(self._keys.workers(), mapping={me.name: pack_announcement(me)})
            pipe.hgetall(self._keys.workers())
            pipe.hgetall(self._keys.models())
            _, packed, said = pipe.execute()
        workers = _known(packed)
        living = [each for each in workers if now - each.seen_at <= ALIVE_S]
        models = {
            name: pack_announcement(
                _limited(
                    replace(info, announced_at=now),
                    _widest(name, living),
                    _said(name, said.get(name.encode())),
                    self._settings.widest_seconds,
                )
            )
            for name, info in self._models.items()
        }
        if models:
            self._client.hset(self._keys.models(), mapping=models)
        for worker in workers:
            if now - worker.seen_at > _FORGET_S:
                self._client.hdel(self._keys.workers(), worker.name)

    def retract(self) -> None:
        """This worker is going; its models stay known."""
        self._client.hdel(self._keys.workers(), self._identity.name)

    def _me(self, now: float) -> WorkerInfo:
        runs = self._runs.all()
        return WorkerInfo(
            name=self._identity.name,
            models=tuple(self._models),
            slots=self._settings.slots * len(self._models),
            running=len(runs),
            started_at=self._started_at,
            seen_at=now,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=self._device,
            data_dir=self._identity.reach,
            version=VERSION,
            tokens_at_risk=sum(run.at_risk for run in runs),
            checkpoint_bytes=self._budget.used(),
            checkpoint_budget=self._budget.limit,
            broken=self._broken(),
            last_death=self._last_death or None,
            loaded=tuple(self._loaded()),
            busy=Counter(run.model for run in runs),
            limits={name: limits for name in self._models if (limits := self._own_limits(name))},
            adapters={name: dict(has) for name in self._models if (has := self._adapters(name))},
        )

    def _now(self) -> float:
        reply: Any = self._client.time()
        seconds, micros = reply
        return float(seconds) + float(micros) / 1e6


def _known(packed: Mapping[bytes, bytes]) -> list[WorkerInfo]:
    """The workers whose words this version can read."""
    workers = []
    for name, value in packed.items():
        try:
            workers.append(unpack_worker(name.decode(errors="backslashreplace"), value))
        except ProtocolError:
            continue
    return workers


def _widest(model: str, living: Iterable[WorkerInfo]) -> dict[str, Any]:
    """Of each limit the most that any worker of a model takes; only those that all have. And all
    the adapters that any of them has."""
    living = list(living)
    adapters: dict[str, str] = {}
    for each in living:
        adapters |= each.adapters.get(model, {})
    serving = [each.limits.get(model, {}) for each in living if model in each.models]
    most = {
        name: max(limits[name] for limits in serving)
        for name in MODEL_LIMITS
        if serving and all(name in limits for limits in serving)
    }
    return {**most, "adapters": adapters}


def _said(model: str, packed: bytes | None) -> ModelInfo | None:
    """What was said of a model before, if this version can read it."""
    if packed is None:
        return None
    try:
        return unpack_model(model, packed)
    except ProtocolError:
        return None


def _limited(
    info: ModelInfo, widest: Mapping[str, Any], before: ModelInfo | None, patience: float
) -> ModelInfo:
    """With limits and adapters of the living workers, which become narrower and fewer than before
    only after `patience` seconds: who took more may just be starting again."""
    now = info.announced_at
    living: dict[str, Any] = {name: widest.get(name) for name in (*MODEL_LIMITS, "adapters")}
    if before is not None and before.wide_at is not None:
        kept: dict[str, Any] = {
            name: _wider(living[name], getattr(before, name)) for name in MODEL_LIMITS
        }
        kept["adapters"] = {**(before.adapters or {}), **living["adapters"]}
        # As long as nobody said anything, nobody could be missed.
        is_news = now - before.announced_at > ALIVE_S
        wide_at = now if is_news else before.wide_at
        if kept != living and now - wide_at < patience:
            return replace(info, wide_at=wide_at, **kept)
    return replace(info, wide_at=now, **living)


def _wider(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)
