"""`LateEnds`: notes on disk the ends that no worker noted.

A job that ended in the queue (a cancel, a deadline), or by a reaper, has no writer; and a worker
may die between the end that Redis accepted and its note. Without the note, `recover` would put
the job back as queued, and the caches of a completed job would stay.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import redis

from tenuto_client import EndEvent, Keys, ProtocolError, Token, unpack_entry
from tenuto_engine import CheckpointError, CheckpointStore, StoredJob, read_job

from ._checkpoints import engine_tokens
from ._judge import Folder, Judge, Worth
from ._logging import get_log
from ._meta import JobMeta, UnknownMeta
from ._redis import is_outage
from ._remains import files_of

_QUIET_S = 60.0
_PAGE = 1000
_OVER = (b"completed", b"failed", b"cancelled")
_FIELDS = ["state", "epoch", "finished_at"]

_Seen = tuple[float, bytes | None]
"""When a folder changed, and the epoch of its job."""


class LateEnds:
    """Looks through the folders of ended jobs.

    Args:
        quiet_s: how long nothing must have changed in a folder, so that no writer is about to.
    """

    def __init__(
        self, client: redis.Redis, keys: Keys, judge: Judge, *, quiet_s: float = _QUIET_S
    ) -> None:
        self._client = client
        self._keys = keys
        self._judge = judge
        self._quiet_s = quiet_s
        self._done: dict[str, _Seen] = {}

    def note(self, found: Iterable[Folder]) -> None:
        """Note of each folder's job how it ended, if it has and nobody noted it."""
        looks = {folder.job_id: self._look(folder) for folder in found}
        self._done = {job_id: seen for job_id, seen in looks.items() if seen is not None}

    def _look(self, folder: Folder) -> _Seen | None:
        """What was seen, if the folder needs no further look until that changes. A job may be
        resumed and end elsewhere, which changes nothing here."""
        if time.time() - folder.changed_at < self._quiet_s:
            return None
        values: Any = self._client.hmget(self._keys.job(folder.job_id), _FIELDS)
        seen = (folder.changed_at, values[1])
        if values[0] not in _OVER:
            return None
        if self._done.get(folder.job_id) == seen:
            return seen
        if self._judge.worth(folder) is Worth.EVERYTHING:
            return None
        if None in values or not values[1].isdigit():
            get_log(job=folder.job_id).warning("end not noted", error="the job's hash is damaged")
            return seen
        try:
            self._note(read_job(folder.path), *values)
        except redis.ResponseError as error:
            if is_outage(error):
                raise
            get_log(job=folder.job_id).warning("end not noted", error=str(error))
        except (CheckpointError, ProtocolError, UnknownMeta) as error:
            get_log(job=folder.job_id).warning("end not noted", error=str(error))
        return seen

    def _note(self, job: StoredJob, state: bytes, epoch: bytes, finished_at: bytes) -> None:
        # An end of an earlier epoch is of before a resume: the job went on elsewhere.
        newest = max(int(epoch), *(each.epoch for each in files_of(job)))
        begun = next((each for each in job.attempts if each.meta is not None), None)
        if begun is None or any(end.epoch == newest and not end.damage for end in job.ends):
            return
        tokens, end = self._read(job.job_id)
        if end is None or end.index != len(tokens):
            return
        meta = replace(JobMeta.read(begun.meta or {}), epoch=newest)
        store = CheckpointStore(job.folder, epoch=newest, meta=meta.pack())
        store.open(begun.prompt, begun.seed)
        words = {
            "state": str(end.state),
            "finish_reason": end.finish_reason or "",
            "text": end.text,
            "error": end.error or "",
            "exactness": end.exactness,
            "exactness_reason": end.exactness_reason,
            "finished_at": finished_at.decode("utf-8", "replace"),
            **_stats(end),
        }
        store.finish(words, engine_tokens(tokens), keep_caches=state != b"completed")
        get_log(job=job.job_id).info("end noted", state=str(end.state), tokens=len(tokens))

    def _read(self, job_id: str) -> tuple[list[Token], EndEvent | None]:
        """All that the job's stream has, and its end if that comes last."""
        tokens: list[Token] = []
        last = None
        start = "-"
        while True:
            page: Any = self._client.xrange(self._keys.stream(job_id), start, "+", count=_PAGE)
            if not page:
                return tokens, last if isinstance(last, EndEvent) else None
            for entry_id, fields in page:
                last = unpack_entry(entry_id.decode(), fields)
                if isinstance(last, list):
                    tokens += [token for token in last if token.index > len(tokens)]
            start = f"({page[-1][0].decode()}"


def _stats(end: EndEvent) -> dict[str, str]:
    """As `end_words` has them."""
    if end.stats is None:
        return {}
    told = asdict(end.stats)
    del told["attempts"]
    ran = told.pop("seconds")
    return {"stats": json.dumps(told), "ran": f"{ran:.3f}"}
