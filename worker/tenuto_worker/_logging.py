"""Logs: JSON lines, or coloured text on a terminal; every line names the worker.

Prompts, texts and passwords are never logged. What other libraries say through `logging` comes out
the same way, from WARNING on.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from tenuto_client._endpoint import address_of

Log = FilteringBoundLogger

_OURS = "tenuto_worker"


def get_log(**context: Any) -> Log:
    """A logger whose lines carry `context`."""
    return cast(Log, structlog.get_logger(_OURS, **context))


def set_up_logging(log_format: str, worker: str, stream: TextIO | None = None) -> None:
    """Send every log line of the process to `stream` (stderr), each with the worker's name."""
    out = stream or sys.stderr
    pretty = log_format == "pretty" or (log_format == "auto" and out.isatty())
    shared = _shared_processors()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _name_worker(worker),
                *_renderers(pretty, colors=out.isatty()),
            ],
        )
    )
    handler.addFilter(_wanted)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def take_over_loggers() -> None:
    """Make libraries that brought handlers of their own (transformers, the hub's client) speak
    through ours, or their lines would be no JSON. Call it once they are imported."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True


def redacted(url: str) -> str:
    """A Redis URL without its password."""
    authority = url.partition("://")[2].partition("?")[0].partition("/")[0]
    user, colon, _ = authority.rpartition("@")[0].partition(":")
    shown = f"{user}:***@" if colon else f"{user}@" if user else ""
    return address_of(url).replace("://", f"://{shown}", 1)


def _shared_processors() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]


def _name_worker(worker: str) -> Processor:
    def add(_logger: Any, _method: str, event: structlog.typing.EventDict) -> Any:
        event.setdefault("worker", worker)
        return event

    return add


def _renderers(pretty: bool, *, colors: bool) -> list[Processor]:
    if pretty:
        # Not the fancy tracebacks: they print local variables, among them users' texts.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _wanted(record: logging.LogRecord) -> bool:
    """Our own lines, and others' from WARNING on.

    arq warns of each ticket whose job was claimed in the meantime, which is how it should be.
    """
    if record.name == _OURS:
        return True
    if record.name == "arq.worker" and "expired" in str(record.msg):
        return False
    return record.levelno >= logging.WARNING
