"""The attempts of a worker as OpenTelemetry spans, where OpenTelemetry is installed.

A job that was submitted within a span carries its W3C `traceparent`; each attempt then has a span
`tenuto.attempt` below that one, from the claim to the end, with an event for each phase that it
enters, and below that the spans of the engine. Where OpenTelemetry is not installed nothing
happens. A worker that is killed reports no span for what it was running; the next attempt does.

Spans leave the process if a tracer provider was set up by whoever started it
(`opentelemetry-instrument`), or if `OTEL_TRACES_EXPORTER` names exporters, as the SDK has them.
The service is then `tenuto-worker`, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` give
another name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from ._answers import Claim
from ._errors import ConfigError

if TYPE_CHECKING:
    from tenuto_engine import Span

_NAME = "tenuto.attempt"
_FLUSH_MS = 2000


class AttemptSpan(Protocol):
    """The span of one attempt. Its methods may be called from any thread."""

    @property
    def on_span(self) -> Callable[[Span], object] | None:
        """Takes the engine's spans, which are below this one; None if nobody wants them."""

    def event(self, name: str) -> None:
        """Something happened now."""

    def end(self, outcome: str, *, failed: bool, **facts: str | int) -> None:
        """The attempt is over."""


class _NoSpan:
    on_span = None

    def event(self, name: str) -> None:
        return

    def end(self, outcome: str, *, failed: bool, **facts: str | int) -> None:
        return


class _OpenSpan:
    def __init__(self, span: Any, error_status: Any) -> None:
        self._span = span
        self._error_status = error_status

    @property
    def on_span(self) -> Callable[[Span], object] | None:
        from tenuto_engine import opentelemetry_spans

        # Without a provider, or where the trace is sampled out, nobody gets them.
        return opentelemetry_spans(_below(self._span)) if self._span.is_recording() else None

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, outcome: str, *, failed: bool, **facts: str | int) -> None:
        self._span.set_attribute("tenuto.outcome", outcome)
        for name, value in facts.items():
            self._span.set_attribute(f"tenuto.{name}", value)
        if failed:
            self._span.set_status(self._error_status)
        self._span.end()


def trace_id(traceparent: str | None) -> str | None:
    """The 32 hex digits that a trace is found by; None where there is none."""
    parts = (traceparent or "").split("-")
    return parts[1] if len(parts) >= 4 else None


def begin_span(claim: Claim) -> AttemptSpan:
    """The span of an attempt that begins now."""
    trace = _api()
    if trace is None:
        return _NoSpan()
    attributes = {
        "tenuto.job": claim.fence.job_id,
        "tenuto.model": claim.model,
        "tenuto.epoch": claim.fence.epoch,
        "tenuto.attempt": claim.attempts,
    }
    span = trace.get_tracer("tenuto_worker").start_span(
        _NAME, context=_parent(claim.traceparent), attributes=attributes
    )
    return _OpenSpan(span, trace.StatusCode.ERROR)


def export_spans() -> None:
    """Have spans sent where `OTEL_TRACES_EXPORTER` says, unless somebody has seen to it.

    Raises:
        ConfigError: it names an exporter that is not installed, or the SDK is not.
    """
    names = [each.strip() for each in os.environ.get("OTEL_TRACES_EXPORTER", "").split(",")]
    names = [each for each in names if each not in ("", "none")]
    trace = _api()
    if not names or (trace is not None and _is_set_up(trace)):
        return
    try:
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        batches = importlib.import_module("opentelemetry.sdk.trace.export")
    except ImportError as error:
        raise ConfigError(
            "OTEL_TRACES_EXPORTER",
            "is set, but the OpenTelemetry SDK is not installed",
            hint="pip install opentelemetry-sdk, or unset it",
        ) from error
    provider = sdk.TracerProvider(resource=resources.Resource.create(_service()))
    for name in names:
        provider.add_span_processor(batches.BatchSpanProcessor(_exporter(name)))
    assert trace is not None, "the SDK needs the API"
    trace.set_tracer_provider(provider)


def _service() -> dict[str, str]:
    """The service's name, unless the environment has one, over which it would win."""
    listed = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    is_given = any(each.partition("=")[0].strip() == "service.name" for each in listed)
    if is_given or os.environ.get("OTEL_SERVICE_NAME"):
        return {}
    return {"service.name": "tenuto-worker"}


def flush_spans() -> None:
    """Send what is ended and not sent. The process is about to leave without further ado."""
    trace = _api()
    if trace is None:
        return
    flush = getattr(trace.get_tracer_provider(), "force_flush", None)
    if flush is not None:
        # Whoever collects spans may be away; nothing waits for that.
        with contextlib.suppress(Exception):
            flush(_FLUSH_MS)


def _api() -> Any:
    try:
        return importlib.import_module("opentelemetry.trace")
    except ImportError:
        return None


def _below(span: Any) -> Any:
    """The context in which a span begins that is to be below this one."""
    return _api().set_span_in_context(
        span, importlib.import_module("opentelemetry.context").Context()
    )


def _is_set_up(trace: Any) -> bool:
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _parent(traceparent: str | None) -> Any:
    propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    carrier = {} if traceparent is None else {"traceparent": traceparent}
    context = importlib.import_module("opentelemetry.context").Context()
    # An empty context, not the current one: the claimer's thread has nothing to do with the job.
    return propagation.TraceContextTextMapPropagator().extract(carrier, context)


def _exporter(name: str) -> Any:
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        return found.load()()
    raise ConfigError(
        "OTEL_TRACES_EXPORTER",
        f"{name!r} is not installed",
        hint="pip install opentelemetry-exporter-otlp" if name == "otlp" else None,
    )
