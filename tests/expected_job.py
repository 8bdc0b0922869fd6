"""What a job must look like after any moves: a model of its life, by a clock of whole seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto_worker._answers import Fence

TRUST = ((32, 2, 2), (128, 8, 10), (256, 256, 0))
"""After a first, second and further crash: the new tokens after which a job is trusted again; or
those, and the seconds since the first of them, that do as well."""
CALM = 256
OVER = ("completed", "failed", "cancelled")


@dataclass
class Expected:
    """A job; `at` is always the time now."""

    deadline: int | None = None
    queue_until: int | None = None
    max_runtime: int | None = None
    state: str = "queued"
    epoch: int = 1
    owner: Fence | None = None
    holder: str | None = None
    lease: bool = False
    cancel: bool = False
    moved: bool = False
    prefilled: int = 0
    stalls: int = 0
    crashes: int = 0
    crashed_at: int | None = None
    """Tokens at the last crash, while the job has to run apart."""
    calm_at: int | None = None
    apart_at: int | None = None
    preemptions: int = 0
    claimed_at: int = 0
    ran: int = 0
    finished_at: int | None = None
    error: str = ""
    """How the reason begins."""
    tokens: list[int] = field(default_factory=list)
    events: list[tuple[int, str, int]] = field(default_factory=list)

    @property
    def suspect(self) -> bool:
        return self.crashed_at is not None

    @property
    def due(self) -> int | None:
        """When it ends, if it still waits then."""
        times = [time for time in (self.deadline, self.queue_until) if time is not None]
        return min(times, default=None)

    def event(self) -> None:
        self.events.append((len(self.tokens), self.state, self.epoch))

    def claim(self, fence: Fence, worker: str, at: int) -> None:
        self.state, self.owner, self.holder, self.claimed_at = "running", fence, worker, at
        self.lease, self.moved = True, False
        # Once begun, it may wait as long as it must.
        self.queue_until = None
        self.event()

    def late(self, at: int) -> str:
        """Why it may not begin any more; "" while it may."""
        if self.deadline is not None and self.deadline <= at:
            return "deadline"
        if self.queue_until is not None and self.queue_until <= at:
            return "queue_ttl"
        if self.max_runtime is not None and self.ran >= self.max_runtime:
            return "max_runtime"
        return ""

    def end_if_late(self, at: int) -> bool:
        """A queued job whose time is over is found."""
        late = self.state == "queued" and self.late(at)
        if late:
            self.end("failed", at, late)
        return bool(late)

    def is_over_time(self, at: int) -> bool:
        """Whether this attempt, with all before, has run for as long as the job may."""
        spent = self.ran + at - self.claimed_at
        return self.max_runtime is not None and spent >= self.max_runtime

    def _leave(self, at: int) -> None:
        if self.state == "running":
            self.ran += at - self.claimed_at
        self.owner, self.lease = None, False

    def queue(self, at: int) -> None:
        self._leave(at)
        self.state = "queued"
        if late := self.late(at):
            self.end("failed", at, late)
            return
        self.epoch += 1
        self.apart_at = None
        self.event()

    def end(self, state: str, at: int, error: str = "") -> None:
        self._leave(at)
        self.state, self.cancel, self.finished_at = state, False, at
        self.error = error
        if state == "completed":
            self.crashed_at = self.calm_at = self.apart_at = None
            self.crashes = 0
        self.event()

    def crash(self) -> None:
        self.crashed_at = len(self.tokens)
        self.calm_at, self.apart_at = self.crashed_at + CALM, None
        self.crashes += 1

    def die(self, at: int) -> None:
        if self.cancel:
            self.end("cancelled", at)
        elif self.moved:
            self.queue(at)
        else:
            self.stalls += 1
            if self.stalls >= 3:
                self.end("failed", at, "no progress")
            else:
                self.queue(at)

    def progress(self) -> None:
        self.moved, self.stalls = True, 0

    def trust(self, at: int) -> bool:
        """After a publish: whether it is to run apart still."""
        if self.calm_at is not None and len(self.tokens) >= self.calm_at:
            self.crashes, self.calm_at = 0, None
        if self.crashed_at is None:
            return False
        new = len(self.tokens) - self.crashed_at
        if new == 0:
            return True
        if self.apart_at is None:
            self.apart_at = at
        many, few, seconds = TRUST[min(max(1, self.crashes), 3) - 1]
        if new < many and (new < few or at - self.apart_at < seconds):
            return True
        self.crashed_at = self.apart_at = None
        return False

    def resume(self, at: int) -> None:
        if self.state == "completed":
            return
        if self.state not in OVER:
            self.cancel = False
            return
        self.stalls, self.finished_at, self.error = 0, None, ""
        if self.deadline is not None and self.deadline <= at:
            self.deadline = None
        if self.queue_until is not None and self.queue_until <= at:
            self.queue_until = None
        if self.late(at):
            self.ran = 0
        self.queue(at)
