"""`JobLimits`: whether a claimed job is within the limits, now that its prompt is counted."""

from __future__ import annotations

from typing import Any

import redis

from tenuto_client import Keys
from tenuto_client._limits import field_of

from ._errors import BadJob, LeftToOthers
from ._other_workers import OtherWorkers
from ._run import Run
from ._settings import WorkerSettings


class JobLimits:
    """Checks what submit could not: how long a text is only a tokenizer knows.

    Every call asks Redis, and raises `RedisError` while it is away.
    """

    def __init__(
        self, client: redis.Redis, keys: Keys, settings: WorkerSettings, others: OtherWorkers
    ) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._others = others

    def check(self, run: Run, prompt: int, max_tokens: int) -> None:
        """Refuse a job that is over a limit; `prompt` is how many tokens its prompt has.

        Raises:
            LeftToOthers: it is over this worker's own; another worker takes it, or took it before.
            BadJob: it is over the queue's, or no worker takes it.
        """
        if run.claim.prompt_ids is None:
            self._check_queue(run.model, prompt)
        self._check_own(run, "max_prompt", prompt, self._settings.max_prompt)
        self._check_own(run, "max_tokens", max_tokens, self._settings.max_tokens)

    def _check_queue(self, model: str, prompt: int) -> None:
        """At the first claim only: what was once accepted is not refused by a later limit."""
        names = [field_of(each, "max_prompt") for each in (model, None)]
        found: Any = self._client.hmget(self._keys.limits(), names)
        most = min((int(each) for each in found if each is not None), default=prompt)
        if prompt > most:
            raise BadJob(
                f"max_prompt: {prompt} tokens of prompt are over the {most} that {model} allows",
                hint="tenuto limits",
            )

    def _check_own(self, run: Run, name: str, value: int, most: int | None) -> None:
        if most is None or value <= most:
            return
        widest = self._others.widest(name, run.model)
        if widest is None or widest >= value or run.claim.tokens:
            raise LeftToOthers(f"{name}: {value} is over the {most} of this worker")
        what = "tokens of prompt are" if name == "max_prompt" else "tokens are"
        raise BadJob(
            f"{name}: {value} {what} over the {widest} that the workers of {run.model} take",
            hint="their flag is --" + name.replace("_", "-"),
        )
