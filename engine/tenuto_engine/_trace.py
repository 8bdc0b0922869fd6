"""``Span``: what a generation did, from when to when; ``Trace``: tells it to whoever wants to know.

Nothing here is known to OpenTelemetry but ``opentelemetry_spans``, which imports it when called.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

_log = logging.getLogger("tenuto_engine")


class Span(NamedTuple):
    """A part of a generation's time.

    Attributes:
        name: the phases are ``prefill``, ``catch_up`` and ``decode``. Within them are
            ``prefill_chunk`` and ``first_token`` (the last prompt token, up to the first token
            known), and ``checkpoint`` (what of one keeps the row waiting). ``checkpoint_write``
            is on the writer's thread: hashing, disk and sync.
        began, ended: nanoseconds since 1970.
        facts: numbers by name. Positions of a prompt are ``start`` and ``stop``, tokens are
            ``first`` and ``last`` by their index; no text and no token is among them.
    """

    name: str
    began: int
    ended: int
    facts: Mapping[str, int]


OnSpan = Callable[[Span], object]


class Trace:
    """The spans of one generation. Without `on_span` nothing is done."""

    def __init__(self, on_span: OnSpan | None) -> None:
        self._on_span = on_span
        self._phase: _Open | None = None

    @contextmanager
    def span(self, name: str, **facts: int) -> Iterator[dict[str, int]]:
        """What the body does is a span, also if it raises; it may add to the facts."""
        if self._on_span is None:
            yield facts
            return
        opened = _Open(name)
        try:
            yield facts
        finally:
            self._tell(opened, facts)

    def enter(self, phase: str, **facts: int) -> None:
        """A phase begins, and the one before ends, of which `facts` are told; harmless when called
        again."""
        if self._on_span is not None and (self._phase is None or self._phase.name != phase):
            self.leave(**facts)
            self._phase = _Open(phase)

    def leave(self, **facts: int) -> None:
        """The phase is over; harmless where there is none."""
        opened, self._phase = self._phase, None
        if opened is not None:
            self._tell(opened, facts)

    def _tell(self, opened: _Open, facts: Mapping[str, int]) -> None:
        if self._on_span is None:
            return
        try:
            self._on_span(opened.closed(facts))
        except Exception:  # noqa: BLE001 - it is the caller's code, and nothing depends on it
            _log.exception("on_span raised; nothing more is traced")
            self._on_span = None


class _Open:
    """A span that is not over. How long it takes does not follow the clock on the wall."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._began = time.time_ns()
        self._counted = time.perf_counter_ns()

    def closed(self, facts: Mapping[str, int]) -> Span:
        lasted = time.perf_counter_ns() - self._counted
        return Span(self.name, self._began, self._began + lasted, facts)


def opentelemetry_spans(context: Any = None, provider: Any = None) -> OnSpan:
    """For ``GenerationOptions.on_span``: each span becomes one of OpenTelemetry.

    Its name is that of the span after ``tenuto.``, and so are its attributes.

    Args:
        context: the OpenTelemetry context that they belong to; None is that of the caller.
        provider: the tracer provider that they go to; None is the global one.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """
    trace = importlib.import_module("opentelemetry.trace")
    tracer = trace.get_tracer("tenuto_engine", tracer_provider=provider)
    parent = importlib.import_module("opentelemetry.context").get_current()
    parent = parent if context is None else context

    def send(span: Span) -> None:
        attributes = {f"tenuto.{name}": value for name, value in span.facts.items()}
        made = tracer.start_span(
            f"tenuto.{span.name}", context=parent, start_time=span.began, attributes=attributes
        )
        made.end(end_time=span.ended)

    return send
