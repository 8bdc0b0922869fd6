"""Submit, stream, cancel and resume long LLM generations that survive everything."""

from ._announce import ModelInfo, WorkerInfo, pack_announcement, unpack_model, unpack_worker
from ._asked import Message, Prompt, SubmitOptions
from ._backend import Event
from ._client import Client
from ._config import Settings
from ._errors import (
    DataDirError,
    IdempotencyConflict,
    IllegalTransition,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobGone,
    JobNotCompleted,
    LimitExceeded,
    ProtocolError,
    ResultTimeout,
    ServerStartFailed,
    ServerUnavailable,
    TenutoError,
    UnknownModel,
)
from ._fake import FakeClient, FakeReply
from ._findings import Finding, Level
from ._job import Job
from ._records import (
    EndEvent,
    JobRecord,
    JobState,
    JobStats,
    ProgressEvent,
    Result,
    StateEvent,
    Token,
    Usage,
)
from ._scripts import source as script_source
from ._scripts import ticket_payload
from ._spec import JobSpec, pack_spec, unpack_spec
from ._sync import SyncClient, SyncJob
from ._wire import pack_tokens, unpack_entry, unpack_tokens
from .keys import Keys

__all__ = [
    "Client",
    "DataDirError",
    "EndEvent",
    "Event",
    "FakeClient",
    "FakeReply",
    "Finding",
    "IdempotencyConflict",
    "IllegalTransition",
    "InvalidRequest",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobGone",
    "JobNotCompleted",
    "JobRecord",
    "JobSpec",
    "JobState",
    "JobStats",
    "Keys",
    "Level",
    "LimitExceeded",
    "Message",
    "ModelInfo",
    "ProgressEvent",
    "Prompt",
    "ProtocolError",
    "Result",
    "ResultTimeout",
    "ServerStartFailed",
    "ServerUnavailable",
    "Settings",
    "StateEvent",
    "SubmitOptions",
    "SyncClient",
    "SyncJob",
    "TenutoError",
    "Token",
    "UnknownModel",
    "Usage",
    "WorkerInfo",
    "pack_announcement",
    "pack_spec",
    "pack_tokens",
    "script_source",
    "ticket_payload",
    "unpack_entry",
    "unpack_model",
    "unpack_spec",
    "unpack_tokens",
    "unpack_worker",
]
