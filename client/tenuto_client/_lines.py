"""The lines of `--json`: one object each, whose shapes are fixed.

Floats are printed as Python prints them, which is enough digits for the same double and so for the
same single precision; what JSON cannot hold (minus infinity) is null. Only ASCII is written: some
readers take a line separator in a text for the end of a line.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from ._backend import Event
from ._findings import Finding
from ._records import (
    EndEvent,
    JobRecord,
    JobStats,
    ProgressEvent,
    Result,
    StateEvent,
    Token,
    Usage,
)


def dump(value: dict[str, Any]) -> str:
    """One line, with its end."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n"


def event_line(event: Event) -> str:
    """A line of `watch --json`."""
    if isinstance(event, Token):
        return dump({"type": "token", **_token(event)})
    if isinstance(event, StateEvent):
        return dump({"type": "state", **_state(event)})
    if isinstance(event, ProgressEvent):
        return dump(
            {"type": "progress", "phase": event.phase, "done": event.done, "total": event.total}
        )
    return dump({"type": "end", **_end(event)})


def record_line(record: JobRecord) -> str:
    """A job as `status --json` and `list --json` show it."""
    return dump(
        {
            "id": record.id,
            "model": record.model,
            "state": record.state,
            "epoch": record.epoch,
            "prompt_tokens": record.prompt_tokens,
            "tokens": record.tokens,
            "created_at": record.created_at,
            "started_at": record.started_at,
            "finished_at": record.finished_at,
            "finish_reason": record.finish_reason,
            "exactness": record.exactness,
            "error": record.error,
            "priority": record.priority,
            "metadata": record.metadata,
            "tenant": record.tenant,
            "attempts": record.attempts,
            **_present(
                exactness_reason=record.exactness_reason,
                worker=record.worker,
                cancelling=record.cancelling or None,
                phase=record.phase,
                phase_done=record.phase_done,
                phase_total=record.phase_total,
                tokens_at_risk=record.tokens_at_risk,
                checkpoint_error=record.checkpoint_error,
                adapter=record.adapter,
                deadline=record.deadline,
                queue_ttl=record.queue_ttl,
                max_runtime=record.max_runtime,
                suspect=record.suspect or None,
                preemptions=record.preemptions or None,
                stats=_stats(record.stats),
            ),
        }
    )


def result_line(result: Result) -> str:
    """What `result --json` prints."""
    return dump(
        {
            "id": result.job_id,
            "state": result.state,
            "finish_reason": result.finish_reason,
            "text": result.text,
            "usage": _usage(result.usage),
            "exactness": result.exactness,
            **_present(
                exactness_reason=result.exactness_reason,
                error=result.error,
                stats=_stats(result.stats),
            ),
            "tokens": [_token(token) for token in result.tokens],
        }
    )


def finding_line(finding: Finding) -> str:
    """A line of `doctor --json`."""
    return dump(
        {
            "level": finding.level,
            "subject": finding.subject,
            "says": finding.says,
            "fix": finding.fix,
            "note": finding.note,
        }
    )


def _token(token: Token) -> dict[str, Any]:
    return {
        "index": token.index,
        "token": token.token,
        "text": token.text,
        "logprob": _number(token.logprob),
        "top_logprobs": [[each, _number(logprob)] for each, logprob in token.top_logprobs],
        **_present(jumped=token.jumped or None),
    }


def _state(event: StateEvent) -> dict[str, Any]:
    return {
        "state": event.state,
        "epoch": event.epoch,
        "index": event.index,
        "worker": event.worker,
        **_present(reason=event.reason),
    }


def _end(event: EndEvent) -> dict[str, Any]:
    return {
        "index": event.index,
        "state": event.state,
        "finish_reason": event.finish_reason,
        "text": event.text,
        "usage": _usage(event.usage),
        "exactness": event.exactness,
        **_present(
            exactness_reason=event.exactness_reason, error=event.error, stats=_stats(event.stats)
        ),
    }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        **_present(cached_tokens=usage.cached_tokens),
    }


def _stats(stats: JobStats | None) -> dict[str, float] | None:
    if stats is None:
        return None
    return {**asdict(stats), "prefill_tps": stats.prefill_tps, "decode_tps": stats.decode_tps}


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
