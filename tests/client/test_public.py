"""What the package exports, and that what it exports explains itself."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import tenuto_client
from tenuto_client import TenutoError
from tenuto_client import _errors as errors

PUBLIC = [
    "Client", "DataDirError", "EndEvent", "Event", "FakeClient", "FakeReply", "Finding",
    "IdempotencyConflict", "IllegalTransition", "InvalidRequest", "Job", "JobCancelled",
    "JobFailed", "JobGone", "JobNotCompleted", "JobRecord", "JobSpec", "JobState", "JobStats",
    "Keys", "Level",
    "LimitExceeded", "Message", "ModelInfo", "ProgressEvent", "Prompt", "ProtocolError", "Result",
    "ResultTimeout", "ServerStartFailed", "ServerUnavailable", "Settings", "StateEvent",
    "SubmitOptions",
    "SyncClient", "SyncJob", "TenutoError", "Token", "UnknownModel", "Usage", "WorkerInfo",
    "pack_announcement", "pack_spec", "pack_tokens", "script_source", "ticket_payload",
    "unpack_entry", "unpack_model", "unpack_spec", "unpack_tokens", "unpack_worker",
]  # fmt: skip


def test_exactly_these_names_are_public() -> None:
    assert tenuto_client.__all__ == PUBLIC
    assert all(hasattr(tenuto_client, name) for name in PUBLIC)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ("Event", "Prompt")])
def test_every_public_name_and_method_is_documented(name: str) -> None:
    public = getattr(tenuto_client, name)
    assert inspect.getdoc(public)
    if inspect.isclass(public) and public.__module__.startswith("tenuto_client"):
        methods = inspect.getmembers(public, inspect.isfunction)
        silent = [m for m, function in methods if not m.startswith("_") and not function.__doc__]
        assert silent == []


def test_every_exception_has_the_one_root_and_is_public_and_in_the_tree() -> None:
    found = [
        member
        for _, member in inspect.getmembers(errors, inspect.isclass)
        if issubclass(member, Exception)
    ]
    assert all(issubclass(error, TenutoError) for error in found)
    assert {error.__name__ for error in found} <= set(PUBLIC)
    assert all(error.__name__ in (errors.__doc__ or "") for error in found)


def test_importing_the_client_imports_none_of_the_heavy_packages() -> None:
    code = (
        "import sys, tenuto_client, tenuto_client._command;"
        "print([m for m in ('arq', 'mlx', 'mlx_lm', 'numpy', 'transformers', 'tenuto_worker',"
        " 'tenuto_engine') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout.strip() == b"[]"
