"""The W3C `traceparent` of a job: the span that it was submitted in."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

from ._errors import InvalidRequest

_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


def check_traceparent(name: str, value: object) -> str:
    """`value`, if it is one.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, str) or not _TRACEPARENT.fullmatch(value):
        raise InvalidRequest(
            name,
            "is not a W3C traceparent",
            hint="such as 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )
    return value


def current_traceparent() -> str | None:
    """That of the OpenTelemetry span that the caller is in; None where there is none.

    Nothing is imported: where nobody has imported OpenTelemetry, there is no span.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags) & 0xFF:02x}"
