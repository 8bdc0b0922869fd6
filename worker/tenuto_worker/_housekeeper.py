"""`Housekeeper`: what somebody has to do for all jobs, not only for those that run here.

It hands on running jobs without a lease, mends tickets, ends queued jobs that waited too long,
removes ended jobs whose time is over, and has the collector remove checkpoints. Any number of
workers may do it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import redis

from tenuto_client import Keys

from . import _metrics as metrics
from ._calls import expire_call, mend_tickets_call, reap_call, sweep_call
from ._collector import Collector
from ._errors import RedisAway
from ._logging import get_log
from ._redis import Outage, is_outage, uptime
from ._scripts import JobScripts
from ._settings import WorkerSettings
from ._take_back import id_of, take_back_job

_EXPIRE_S = 1.0


@dataclass(slots=True)
class Contact:
    """How long Redis has answered without a break.

    After a break, owners need time to renew their leases before anybody may take their jobs away.

    Attributes:
        needed: seconds of unbroken contact, and of the server's own life, before reaping.
        longest_gap: silence between two answers that does not count as a break.
    """

    needed: float
    longest_gap: float
    since: float | None = None
    last: float = field(default=0.0)

    def answered(self, now: float) -> None:
        if self.since is None or now - self.last > self.longest_gap:
            self.since = now
        self.last = now

    def broke(self) -> None:
        self.since = None

    def is_long_enough(self, now: float) -> bool:
        return self.since is not None and now - self.since >= self.needed


class Housekeeper:
    """Does the chores on a thread and a connection of its own.

    Args:
        collector: removes checkpoints.
        announce: writes what this worker is into Redis; called with each round of chores.
        is_dead: whether a worker, by its name, is known to be dead as long as the context lasts.
    """

    def __init__(
        self,
        scripts: JobScripts,
        client: redis.Redis,
        keys: Keys,
        settings: WorkerSettings,
        outage: Outage,
        *,
        collector: Collector,
        announce: Callable[[], object],
        is_dead: Callable[[str], AbstractContextManager[bool]],
    ) -> None:
        self._scripts = scripts
        self._client = client
        self._keys = keys
        self._settings = settings
        self._outage = outage
        self._announce = announce
        self._is_dead = is_dead
        self._log = get_log()
        self._told: set[str] = set()
        self._contact = Contact(settings.lease_seconds, max(3.0, settings.lease_seconds))
        self._due = {self.chores: 0.0, collector.collect: time.monotonic() + settings.gc_seconds}
        self._every = {self.chores: settings.chores_seconds, collector.collect: settings.gc_seconds}

    def run(self) -> None:
        """The body of the thread."""
        while True:
            self.round()
            time.sleep(self._settings.reap_seconds)

    def round(self) -> None:
        """Do what is due. An outage only delays it."""
        try:
            self._outage.attempt(self._do_what_is_due)
        except RedisAway:
            self._contact.broke()

    def _do_what_is_due(self) -> None:
        self.reap()
        for chore, due in self._due.items():
            if time.monotonic() >= due:
                chore()
                self._due[chore] = time.monotonic() + self._every[chore]

    # -- jobs without a lease ----------------------------------------------------------

    def reap(self) -> None:
        """Hand on running jobs whose lease has run out, if contact was long enough."""
        asked = time.monotonic()
        running = self._client.zrange(self._keys.running(), 0, -1)
        answered = time.monotonic()
        if answered - asked > self._settings.renew_every:
            # It stood still, so owners could not renew either.
            self._contact.broke()
        if self._outage.failed_at > self._contact.last:
            # Nor could ours, in an outage so short that it fell between two of our rounds.
            self._contact.broke()
        self._contact.answered(answered)
        ids = _list(running)
        jobs = [job for each in ids if (job := id_of(each)) is not None]
        self._take_back(jobs)
        if not ids or not self._may_reap():
            return
        calls = [reap_call(each) for each in ids]
        answers = self._scripts.run_each(calls)
        for each, found in zip(ids, answers, strict=True):
            job = each.decode(errors="backslashreplace")
            if isinstance(found, Exception):
                self._tell_once(job, found)
            elif found.why:
                self._log.warning("job put aside", job=job, state=found.state, why=found.why)
            # A completed one has only ended since it was listed.
            elif found.state not in ("alive", "completed", "gone"):
                metrics.reaped.inc()
                self._log.warning("job reaped", job=job, state=found.state, lost_by=found.worker)

    def _tell_once(self, job: str, error: Exception) -> None:
        if job not in self._told:
            self._told.add(job)
            self._log.error("job not reaped", job=job, error=str(error))

    def _take_back(self, jobs: list[str]) -> None:
        """Hand on at once what workers had that are known to be dead."""
        with self._client.pipeline(transaction=False) as pipe:
            for job in jobs:
                pipe.hget(self._keys.job(job), "worker")
            answers: list[Any] = pipe.execute(raise_on_error=False)
            holders = [(id_of(each) if isinstance(each, bytes) else None) or "" for each in answers]
        for name in {*holders} - {""}:
            with self._is_dead(name) as dead:
                for job in jobs if dead else ():
                    try:
                        take_back_job(self._scripts, job, name)
                    except redis.ResponseError as error:
                        if is_outage(error):
                            raise
                        self._tell_once(job, error)

    def _may_reap(self) -> bool:
        if not self._contact.is_long_enough(time.monotonic()):
            return False
        return uptime(self._client) >= self._settings.lease_seconds

    # -- chores ------------------------------------------------------------------------

    def chores(self) -> None:
        """Expire ended jobs, end those that waited too long, announce this worker, mend tickets."""
        # A server without memory refuses all that comes after these two.
        self._expire()
        self._sweep()
        self._announce()
        for model in self._settings.models:
            if mended := self._scripts.run(mend_tickets_call(model)):
                # Nothing went wrong: the ticket of a job that nobody may claim yet is used up.
                self._log.debug("tickets mended", model=model, count=mended)

    def _sweep(self) -> None:
        end = time.monotonic() + _EXPIRE_S
        while ended := self._scripts.run(sweep_call()):
            for each in ended:
                if each.why:
                    log = get_log(job=each.job_id)
                    log.warning("job put aside", why=each.why)
                else:
                    self._log.info("job waited too long", job=each.job_id)
            if time.monotonic() >= end:
                break

    def _expire(self) -> None:
        """What is due, in pieces that do not hold Redis up, while reaping can wait."""
        end = time.monotonic() + _EXPIRE_S
        count = 0
        while gone := self._scripts.run(expire_call()):
            count += len(gone)
            if time.monotonic() >= end:
                break
        if count:
            self._log.info("jobs expired", count=count)


def _list(reply: Any) -> list[bytes]:
    return list(reply)
