"""`Moves`: the worker's scripts one by one, for tests that make each move by hand."""

from __future__ import annotations

from collections.abc import Sequence

from tenuto_client import Token
from tenuto_worker._answers import Fence, Published, Renewed
from tenuto_worker._calls import (
    Bound,
    bind_call,
    expire_call,
    finish_call,
    mend_tickets_call,
    publish_call,
    reap_call,
    release_call,
    renew_call,
    sweep_call,
    take_back_call,
)
from tenuto_worker._scripts import JobScripts


class Moves(JobScripts):
    """Each move of an attempt as a method."""

    def bind(
        self,
        fence: Fence,
        *,
        prompt_ids: bytes,
        prompt_tokens: int,
        fingerprint: str,
        geometry: bytes,
        reach: str,
        exactness: str,
        exactness_reason: str | None,
    ) -> bool:
        bound = Bound(prompt_ids, prompt_tokens, fingerprint, geometry, reach)
        return self.run(bind_call(fence, bound, exactness, exactness_reason)) == "ok"

    def publish(self, fence: Fence, tokens: Sequence[Token], *, durable: int = 0) -> Published:
        return self.run(publish_call(fence, tokens, durable=durable))

    def renew(
        self,
        fence: Fence,
        *,
        durable: int = 0,
        holder: str,
        lease_ms: int,
        phase: str,
        done: int,
        total: int,
        checkpoint_error: str = "",
    ) -> Renewed:
        call = renew_call(
            fence,
            durable=durable,
            holder=holder,
            lease_ms=lease_ms,
            phase=phase,
            done=done,
            total=total,
            checkpoint_error=checkpoint_error,
        )
        return self.run(call)

    def finish(
        self,
        fence: Fence,
        *,
        durable: int = 0,
        state: str,
        finish_reason: str | None = None,
        text: str = "",
        error: str = "",
        exactness: str = "exact",
        exactness_reason: str | None = None,
        tokens: int = 0,
    ) -> str:
        call = finish_call(
            fence,
            durable=durable,
            state=state,
            finish_reason=finish_reason,
            text=text,
            error=error,
            exactness=exactness,
            exactness_reason=exactness_reason,
            tokens=tokens,
        )
        return self.run(call).status

    def release(self, fence: Fence, reason: str, error: str = "", *, durable: int = 0) -> str:
        return self.run(release_call(fence, reason, error, durable=durable))

    def reap(self, job_id: str) -> str:
        return self.run(reap_call(job_id)).state

    def take_back(self, job_id: str, holder: str, *, crashed: bool = False) -> str:
        return self.run(take_back_call(job_id, holder, crashed=crashed))

    def expire(self, limit: int = 100) -> list[str]:
        return self.run(expire_call(limit))

    def sweep(self, limit: int = 100) -> list[str]:
        return [each.job_id for each in self.run(sweep_call(limit))]

    def mend_tickets(self, model: str) -> int:
        return self.run(mend_tickets_call(model))
