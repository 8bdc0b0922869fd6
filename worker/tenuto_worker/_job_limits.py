"""`JobLimits`: whether a claimed job is within the limits, now that its prompt is counted."""

from __future__ import annotations

from ._errors import BadJob, LeftToOthers
from ._other_workers import OtherWorkers
from ._run import Run
from ._settings import WorkerSettings


class JobLimits:
    """Checks what submit could not: how long a text is only a tokenizer knows.

    What is over this worker's own limits is asked about in Redis: `RedisError` while it is away.
    """

    def __init__(self, settings: WorkerSettings, others: OtherWorkers) -> None:
        self._settings = settings
        self._others = others

    def check(self, run: Run, prompt: int, max_tokens: int) -> None:
        """Refuse a job that is over a limit; `prompt` is how many tokens its prompt has.

        Raises:
            LeftToOthers: it is over this worker's own; another worker takes it, or took it before.
            BadJob: it is over the queue's of when it was submitted, or no worker takes it.
        """
        _check_queue(run, prompt)
        self._check_own(run, "max_prompt", prompt, self._settings.max_prompt)
        self._check_own(run, "max_tokens", max_tokens, self._settings.max_tokens)

    @staticmethod
    def check_text(run: Run, least: int) -> None:
        """Refuse a text that is over the queue's limit whatever it is tokenized to; `least` is how
        many tokens it has at least.

        Raises:
            BadJob: it is.
        """
        _check_queue(run, least, "at least ")

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


def _check_queue(run: Run, prompt: int, at_least: str = "") -> None:
    """By what submit noted in the job: limits that were set or cleared since are not its own."""
    noted = run.claim.record.get("max_prompt")
    if noted is not None and prompt > int(noted):
        raise BadJob(
            f"max_prompt: {at_least}{prompt} tokens of prompt are over the {int(noted)} that "
            f"{run.model} allowed when it was submitted",
            hint="submit a shorter one",
        )
