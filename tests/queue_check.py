"""Whether what stands in Redis of a queue is what a `Book` says, to the last index and count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from still_clock import StillClock
from tenuto_client import Keys
from turn_rules import Book

BODY_BYTES, TOKEN_BYTES = 8192, 64
"""What a job takes in Redis at least, and what each token to come is counted as."""


class QueueCheck:
    """Looks at all in one round trip. Every job is in exactly one of queue, running, and over."""

    def __init__(self, client: Any, keys: Keys, clock: StillClock, models: Iterable[str]) -> None:
        self._client = client
        self._keys = keys
        self._clock = clock
        self._models = tuple(models)

    def check(self, book: Book) -> None:
        book_lanes = {model: book.lanes(model) for model in self._models}
        keys, pipe = self._keys, self._client.pipeline(transaction=False)
        pipe.hget(keys.usage(), "bytes").zrange(keys.jobs(), 0, -1).zrange(keys.running(), 0, -1)
        pipe.zrange(keys.due(), 0, -1).keys(keys.lease("*")).keys(keys.queue("*"))
        for job in book.jobs.values():
            pipe.hgetall(keys.job(job.id))
        for model, lanes in book_lanes.items():
            pipe.zrange(keys.queue(model), 0, -1).hgetall(keys.queued(model))
            pipe.zrange(keys.suspects(model), 0, -1).zrange(keys.tickets(model), 0, -1)
            for priority, tenant in lanes:
                pipe.zrange(keys.lane(model, f"{priority}:{tenant}"), 0, -1)
        found = iter(pipe.execute())
        usage = int(next(found) or 0)
        self._check_indexes(book, *(_names(next(found)) for _ in range(5)))
        hashes = [next(found) for _ in book.jobs]
        self._check_jobs(book, hashes)
        assert usage == sum(int(fields[b"held"]) for fields in hashes)
        for model, lanes in book_lanes.items():
            self._check_model(book, model, [next(found) for _ in range(4 + len(lanes))])

    def _check_indexes(
        self, book: Book, jobs: set[str], running: set[str], due: set[str], leases: set[str],
        queues: set[str],
    ) -> None:  # fmt: skip
        keys, runs, queued = self._keys, book.running(), book.queued()
        assert jobs == set(book.jobs)
        assert running == {run.id for run in runs}
        assert leases == {keys.lease(run.id) for run in runs if run.lease}
        assert due == {job.id for job in queued if job.due is not None}
        lanes = {(job.model, f"{job.priority}:{job.tenant}") for job in queued}
        of_models = {keys.queue(model) for model, _ in lanes}
        assert queues == {keys.lane(*lane) for lane in lanes} | of_models

    def _check_jobs(self, book: Book, hashes: list[dict[bytes, bytes]]) -> None:
        for job, fields in zip(book.jobs.values(), hashes, strict=True):
            assert fields[b"state"].decode() == job.state
            assert int(fields[b"epoch"]) == job.epoch
            assert (b"suspect" in fields) == job.suspect
            assert int(fields.get(b"preemptions", 0)) == job.preemptions
            assert self._clock.is_at(fields.get(b"yield_at"), job.yield_at)
            assert self._clock.is_at(fields.get(b"room_at"), job.room_at)
            if job.state in ("queued", "running"):
                assert int(fields[b"held"]) >= BODY_BYTES + TOKEN_BYTES * job.max_tokens

    def _check_model(self, book: Book, model: str, found: list[Any]) -> None:
        order, counts, suspects, tickets, *in_lanes = found
        lanes, queued = book.lanes(model), book.queued(model)
        assert order == [f"{priority}:{tenant}".encode() for priority, tenant in lanes]
        for lane, ids in zip(lanes, in_lanes, strict=True):
            assert ids == [job.id.encode() for job in book.lane(model, *lane)]
        expected = Counter(job.tenant for job in queued)
        expected.update({"*": len(queued)} if queued else {})
        assert {name.decode(): int(count) for name, count in counts.items()} == expected
        assert suspects == [job.id.encode() for job in book.suspects(model)]
        assert _names(tickets) == {f"{job.id}:{job.epoch}" for job in queued}


def _names(found: list[bytes]) -> set[str]:
    return {each.decode() for each in found}
