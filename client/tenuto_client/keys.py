"""Every Redis key name of Tenuto, for Python and for Lua.

The names are stated once, in `_TEMPLATES`. `Keys` builds them for Python, and `Keys.lua()`
generates the functions of the same names (`key_job(id)`, `key_queue(model)`, ...) that the scripts
use. Scripts reach keys that depend on data (the lane of a job, the stream of the job just claimed),
so they are not declared one by one; Redis Cluster is not supported.

arq's own keys (`arq:job:<ticket>`) are the one exception to the prefix: arq fixes them.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

DEFAULT_NAMESPACE = "tenuto:"
DEFAULT_TENANT = "default"
MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
MODEL_NAME_HINT: Final = "1 to 128 letters, digits and . _ / -, beginning with a letter or digit"

_TEMPLATES: dict[str, tuple[str, ...]] = {
    # name: literal and argument parts in turn, "literal", "arg", "literal", ...
    "job": ("job:", "id"),
    "stream": ("stream:", "id"),
    "lease": ("lease:", "id"),
    "half": ("half:", "id", ":", "built"),
    "queue": ("queue:", "model"),
    "lane": ("queue:", "model", ":", "lane"),
    "looked": ("looked:", "model", ":", "holder"),
    "tickets": ("tickets:", "model"),
    "jobs": ("jobs",),
    "running": ("running",),
    "expiry": ("expiry",),
    "removed": ("removed",),
    "idem": ("idem:", "name"),
    "queued": ("queued:", "model"),
    "due": ("due",),
    "suspects": ("suspects:", "model"),
    "usage": ("usage",),
    "limits": ("limits",),
    "models": ("models",),
    "workers": ("workers",),
    "sequence": ("sequence",),
    "namespace": ("namespace",),
    "heirs": ("heirs",),
    "collectable": ("collectable",),
    "wake": ("wake",),
    "progress": ("progress:", "id"),
}


class Keys:
    """The key names under one namespace, a prefix that ends with a colon."""

    def __init__(self, namespace: str = DEFAULT_NAMESPACE) -> None:
        self.namespace = namespace if namespace.endswith(":") else namespace + ":"

    def _make(self, name: str, *args: str) -> str:
        values = iter(args)
        parts = _TEMPLATES[name]
        return self.namespace + "".join(
            part if i % 2 == 0 else next(values) for i, part in enumerate(parts)
        )

    def job(self, job_id: str) -> str:
        """Hash: spec, state, epoch, tokens, timestamps, worker, finish_reason, exactness, error."""
        return self._make("job", job_id)

    def stream(self, job_id: str) -> str:
        """Stream: tokens under `<index>-0`, events under `<index>-<n>`."""
        return self._make("stream", job_id)

    def lease(self, job_id: str) -> str:
        """String with a time to live: holder, epoch and nonce of the running attempt."""
        return self._make("lease", job_id)

    def half(self, job_id: str, built: str) -> str:
        """Stream of a job that is being put back, until it is whole."""
        return self._make("half", job_id, built)

    def queue(self, model: str) -> str:
        """Sorted set of lanes (`<priority>:<tenant>`), in the order in which they are served."""
        return self._make("queue", model)

    def lane(self, model: str, lane: str) -> str:
        """Sorted set of the queued jobs of one priority and tenant, oldest first."""
        return self._make("lane", model, lane)

    def looked(self, model: str, holder: str) -> str:
        """String with a time to live: how far down the queue of a model a worker has looked (its
        lane and jobs), where it had to leave all jobs before to others. Under
        `<holder>:ways`, where it looked for what something may make way for."""
        return self._make("looked", model, holder)

    def tickets(self, model: str) -> str:
        """arq's sorted set: wake-ups for the workers of a model."""
        return self._make("tickets", model)

    def jobs(self) -> str:
        """Sorted set of all jobs by creation time in milliseconds."""
        return self._make("jobs")

    def running(self) -> str:
        """Sorted set of the running jobs by time of claim; what the reaper looks through."""
        return self._make("running")

    def expiry(self) -> str:
        """Sorted set of ended jobs by the time at which they are removed."""
        return self._make("expiry")

    def removed(self) -> str:
        """Sorted set of the jobs that were deleted or expired, by when; each for a day.

        A job that is neither there nor in it was lost, and its checkpoints may bring it back.
        """
        return self._make("removed")

    def idem(self, tenant: str, key: str) -> str:
        """String: `<job id>|<hash of the body>` of an idempotency key of a tenant."""
        quoted = quote(key, safe="")
        return self._make("idem", quoted if tenant == DEFAULT_TENANT else f"{tenant}:{quoted}")

    def queued(self, model: str) -> str:
        """Hash: how many jobs of a model are queued; `*` all, and one field a tenant."""
        return self._make("queued", model)

    def due(self) -> str:
        """Sorted set of the queued jobs whose time in the queue ends, by when."""
        return self._make("due")

    def suspects(self, model: str) -> str:
        """Sorted set of the queued jobs of a model on which a worker may have died, by age."""
        return self._make("suspects", model)

    def usage(self) -> str:
        """Hash: `bytes` is what all jobs may come to in Redis's memory; see `held` of a job."""
        return self._make("usage")

    def limits(self) -> str:
        """Hash: `<model or *>|<name of a limit>` to a number."""
        return self._make("limits")

    def models(self) -> str:
        """Hash: what workers have announced about each model; outlives them."""
        return self._make("models")

    def workers(self) -> str:
        """Hash: what each worker last said of itself, with the time it said so."""
        return self._make("workers")

    def sequence(self) -> str:
        """Counter that orders jobs by age and tenants by turn."""
        return self._make("sequence")

    def namespace_id(self) -> str:
        """String: random id of this data set, also written into every checkpoint."""
        return self._make("namespace")

    def heirs(self) -> str:
        """Set: ids of earlier data sets whose jobs were put back here; their checkpoints may be
        used."""
        return self._make("heirs")

    def collectable(self) -> str:
        """Set: `<id>@<data dir>` of those of `heirs` whose jobs in that data dir were all put back;
        what is not here of them is gone."""
        return self._make("collectable")

    def wake(self) -> str:
        """Pub/sub channel: `queued <model>` and `cancel <job>` nudges for workers."""
        return self._make("wake")

    def progress(self, job_id: str) -> str:
        """Pub/sub channel: progress of one job."""
        return self._make("progress", job_id)

    @staticmethod
    def ticket_payload(ticket: str) -> str:
        """arq's key for the content of a ticket."""
        return f"arq:job:{ticket}"

    @staticmethod
    def lua() -> str:
        """Lua functions that build the same names under the prefix `P`."""
        return "\n".join(_lua_function(name, parts) for name, parts in _TEMPLATES.items())


def _lua_function(name: str, parts: tuple[str, ...]) -> str:
    args = parts[1::2]
    terms = [f"'{part}'" if i % 2 == 0 else part for i, part in enumerate(parts)]
    body = " .. ".join(["P", *terms])
    return f"local function key_{name}({', '.join(args)}) return {body} end"
