"""`tenuto doctor` in this process, for tests of either package."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tenuto_client._command import main

Found = dict[str, dict[str, Any]]
Doctor = Callable[..., Found]


def consult(capsys: pytest.CaptureFixture[str], *words: str) -> Found:
    """What it finds, by subject."""
    capsys.readouterr()
    main(["doctor", "--json", *words])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["subject"]: line for line in found}
