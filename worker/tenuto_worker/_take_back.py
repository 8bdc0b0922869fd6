"""Taking back what the previous incarnation of this worker, which is dead, was running.

The lock that the worker holds is the proof that it is dead, so nobody waits for its leases. This
comes before anything heavy is imported: a model may take minutes to load, and others may go on
meanwhile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import redis

from tenuto_client import Keys

from . import _metrics as metrics
from ._calls import take_back_call
from ._logging import get_log
from ._redis import Patience
from ._scripts import JobScripts


def take_back(
    client: redis.Redis, keys: Keys, holder: str, patience: Patience, *, crashed: bool = False
) -> list[str]:
    """Requeue the running jobs of `holder`; returns their ids.

    `crashed` says that its child died by itself. Any of its jobs may be the cause, so they run
    apart until they get on. Of a worker that died as a whole nobody knows: then those do that had
    got nowhere.
    """
    scripts = JobScripts(client, keys)

    def patiently(call: Any) -> Any:
        return patience(call, until=lambda: False, beat=lambda: None)

    running = map(id_of, patiently(partial(client.zrange, keys.running(), 0, -1)))
    taken = []
    for job in running:
        if job is None:
            continue
        try:
            if patiently(partial(take_back_job, scripts, job, holder, crashed=crashed)):
                taken.append(job)
        except redis.ResponseError as error:
            # One job's trouble, which the reaper will have as well; the others are taken back.
            get_log(job=job).error("job not taken back", error=str(error))
    return taken


def id_of(found: bytes) -> str | None:
    """An id or a name as text; None for what cannot be one, which the reaper puts aside."""
    try:
        return found.decode()
    except UnicodeDecodeError:
        return None


def take_back_job(scripts: JobScripts, job_id: str, holder: str, *, crashed: bool = False) -> bool:
    """Requeue a job if it is running and `holder`, which is dead, had it; whether it was so."""
    state = scripts.run(take_back_call(job_id, holder, crashed=crashed))
    if state == "foreign":
        return False
    metrics.taken_back.inc()
    get_log(job=job_id).warning("job taken back", state=state, lost_by=holder)
    return True
