"""Every line names the worker, and no secret gets into one."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest
import structlog

from tenuto_worker._logging import get_log, redacted, set_up_logging, take_over_loggers


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    set_up_logging("json", "host-dir-0", stream)
    yield stream
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()


def _parsed(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_worker_job_and_epoch(lines: io.StringIO) -> None:
    get_log(job="j", epoch=3).info("job claimed", tokens=4)

    (line,) = _parsed(lines)
    expected = {"event": "job claimed", "worker": "host-dir-0", "job": "j", "epoch": 3, "tokens": 4}
    assert expected.items() <= line.items()
    assert {"level", "at"} <= line.keys()


def test_other_libraries_are_heard_from_warning_on(lines: io.StringIO) -> None:
    other = logging.getLogger("arq.worker")
    other.info("chatter")
    other.warning("job %s expired", "x:1")
    other.warning("something is wrong with %s", "y")

    (line,) = _parsed(lines)
    assert line["event"] == "something is wrong with y"
    assert line["worker"] == "host-dir-0"


def test_a_library_with_a_handler_of_its_own_speaks_json_too(lines: io.StringIO) -> None:
    other = logging.getLogger("a_library_that_prints")
    own = io.StringIO()
    other.addHandler(logging.StreamHandler(own))
    other.propagate = False
    take_over_loggers()
    other.warning("this is long")

    (line,) = _parsed(lines)
    assert line["event"] == "this is long"
    assert own.getvalue() == ""


def test_a_python_warning_is_a_line_as_well(lines: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # What `catch_warnings` put in its place, put back as the worker has it.
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old hat", DeprecationWarning, stacklevel=1)

    (line,) = _parsed(lines)
    assert "old hat" in str(line["event"])
    assert line["level"] == "warning"


def test_a_traceback_stays_on_its_line_and_shows_no_local_variables(lines: io.StringIO) -> None:
    prompt = "the secret prompt"
    try:
        len(prompt) / 0
    except ZeroDivisionError:
        get_log().exception("attempt failed")

    (line,) = _parsed(lines)
    assert "ZeroDivisionError" in str(line["exception"])
    assert prompt not in lines.getvalue()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("redis://:secret@h:1/2", "redis://:***@h:1/2"),
        ("rediss://me:secret@h", "rediss://me:***@h"),
        ("redis://h?password=secret", "redis://h"),
        (
            "redis+sentinel://me:secret@a:1,[::1]:2/jobs?sentinel_password=secret",
            "redis+sentinel://me:***@a:1,[::1]:2/jobs",
        ),
        ("unix:///a/b?db=1", "unix:///a/b"),
    ],
)
def test_a_url_is_logged_without_its_password(url: str, shown: str) -> None:
    assert redacted(url) == shown
