"""`Outlook`: what a job that nobody works on waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ._announce import ALIVE_S, ModelInfo, WorkerInfo, unpack_model, unpack_worker
from ._findings import count
from ._records import JobState
from ._redis import Connection
from .keys import Keys

EXACT_WAIT_S: Final = 30.0
"""What workers wait by default (`--exact-wait`) before they take a job that began elsewhere."""

_FIELDS: Final = (
    *("state", "model", "worker", "tokens", "queued_at", "fingerprint", "reach"),
    *("max_tokens", "prompt_tokens", "suspect", "adapter"),
)


@dataclass(frozen=True, slots=True)
class Outlook:
    """A job that is queued, or that runs without a lease.

    Attributes:
        state: what is the case, in a few words.
        why: what it waits for.
        waited: for how many seconds, by Redis's clock; None is not known.
    """

    state: str
    why: str
    waited: float | None

    def __str__(self) -> str:
        waiting = "" if self.waited is None else f", waiting {self.waited:.0f} s"
        return f"{self.state}{waiting}; {self.why}"


async def look(connection: Connection, keys: Keys, job_id: str) -> Outlook | None:
    """What the job waits for; None where it has ended, is gone, or a worker holds it.

    Raises:
        ServerUnavailable: the server does not answer.
    """
    values, has_lease, (seconds, _), workers = await connection.pipeline(
        [
            ("HMGET", keys.job(job_id), *_FIELDS),
            ("EXISTS", keys.lease(job_id)),
            ("TIME",),
            ("HGETALL", keys.workers()),
        ]
    )
    job = {k: v.decode() for k, v in zip(_FIELDS, values, strict=True) if v is not None}
    known = [unpack_worker(name.decode(), value) for name, value in workers.items()]
    if job.get("state") == JobState.QUEUED:
        model = await connection.call("HGET", keys.models(), job["model"])
        announced = None if model is None else unpack_model(job["model"], model)
        return _queued(job, int(seconds), known, announced)
    if job.get("state") == JobState.RUNNING and not has_lease:
        return _lost(job, int(seconds), known)
    return None


async def without_lease(connection: Connection, keys: Keys, job_ids: Sequence[str]) -> list[str]:
    """Which of these running jobs no worker holds."""
    leases = await connection.pipeline([("EXISTS", keys.lease(each)) for each in job_ids])
    return [each for each, has_lease in zip(job_ids, leases, strict=True) if not has_lease]


def waits_for_its_own(
    job: Mapping[str, str], now: float, workers: Sequence[WorkerInfo], model: ModelInfo | None
) -> bool:
    """Whether a queued job has begun, and is left to workers of its geometry and checkpoints.

    Args:
        job: `fingerprint`, `reach`, `queued_at`, `tokens` and `adapter` of its hash, where there
            are.
        now: Redis's time, Unix seconds.
        workers: those alive that serve its model.
    """
    if "fingerprint" not in job or now - float(job["queued_at"]) >= EXACT_WAIT_S:
        return False
    same = model is not None and _fingerprint(job, model) == job["fingerprint"]
    near = job.get("tokens") == "0" or any(each.data_dir == job.get("reach") for each in workers)
    return not (same and near)


def _fingerprint(job: Mapping[str, str], model: ModelInfo) -> str | None:
    """Of the geometry that the job would have."""
    if "adapter" not in job:
        return model.fingerprint
    return (model.adapters or {}).get(job["adapter"])


def _queued(
    job: Mapping[str, str], now: int, known: Sequence[WorkerInfo], model: ModelInfo | None
) -> Outlook:
    workers = _serving(job["model"], now, known)
    if not workers:
        why = f"no worker serves {job['model']} (tenuto doctor)"
    elif (name := job.get("adapter")) and not any(
        name in each.adapters.get(job["model"], {}) for each in workers
    ):
        why = f"no worker of {job['model']} that is alive has the adapter {name}; tenuto models"
    elif (limit := _too_long(job, workers, model)) is not None:
        why = f"no worker of {job['model']} that is alive takes so much ({limit})"
    elif waits_for_its_own(job, now, workers, model):
        why = (
            "it has begun, and waits for a worker of its own geometry and checkpoints, for as long "
            f"as --exact-wait of the workers says ({EXACT_WAIT_S:.0f} s by default)"
        )
    else:
        why = _what_holds_it_up(job, workers)
    return Outlook("queued", why, max(now - float(job["queued_at"]), 0.0))


def _what_holds_it_up(job: Mapping[str, str], workers: Sequence[WorkerInfo]) -> str:
    """Says what is known, and promises nothing: a worker with a slot may have no memory."""
    model = job["model"]
    if all(model in each.broken for each in workers):
        return f"no worker can load {model} (tenuto doctor)"
    if "suspect" in job and all(each.running for each in workers):
        return (
            "a worker died while it ran, so that it waits for one that runs nothing else "
            f"({_running(sum(each.running for each in workers))} there)"
        )
    free = [each for each in workers if each.free_slots(model) > 0]
    if not free:
        return f"every slot for {model} is taken"
    if any(each.running == 0 for each in free):
        return f"a worker of {model} is free to take it"
    if all(each.loaded is not None and model not in each.loaded for each in free):
        others = sorted({name for each in free for name in each.busy})
        return (
            f"{model} is not in memory, and has to wait for room beside {', '.join(others)} "
            f"({_running(sum(each.running for each in free))} there)"
        )
    return (
        f"a worker of {model} has a free slot, but perhaps no memory "
        f"({_running(min(each.running for each in free))} there)"
    )


def _running(jobs: int) -> str:
    return f"{count(jobs, 'job')} {'runs' if jobs == 1 else 'run'}"


def _too_long(
    job: Mapping[str, str], workers: Sequence[WorkerInfo], model: ModelInfo | None
) -> str | None:
    """The limit of the living workers that a job is over, with its value, and what follows."""
    if model is None:
        return None
    prompt, tokens = int(job.get("prompt_tokens", 0)), int(job.get("max_tokens", 0))
    asked = {"max_prompt": prompt, "max_tokens": tokens, "max_context": prompt + tokens}
    for name, value in asked.items():
        announced = getattr(model, name)
        if announced is not None and value > announced:
            return f"{name} {announced}, it needs {value}; tenuto models"
        limits = [each.limits.get(model.name, {}).get(name, value) for each in workers]
        if value > (most := max(limits)):
            # What is announced holds for some minutes after the widest worker has gone.
            return f"{name} {most}, it needs {value}; it waits for one that did minutes ago"
    return None


def _lost(job: Mapping[str, str], now: int, known: Sequence[WorkerInfo]) -> Outlook:
    holder = next((each for each in known if each.name == job.get("worker")), None)
    heard = ""
    if holder is not None and now - holder.seen_at > ALIVE_S:
        heard = f" (worker {holder.name} was last heard of {now - holder.seen_at:.0f} s ago)"
    if _serving(job["model"], now, known):
        why = "another one takes it over when it has a slot"
    else:
        why = f"the next worker that serves {job['model']} takes it over (tenuto doctor)"
    return Outlook(f"no worker holds it{heard}", why, None)


def _serving(model: str, now: int, known: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    return [each for each in known if model in each.models and now - each.seen_at <= ALIVE_S]
