"""Submit, stream, cancel and resume long LLM generations that survive everything."""

from ._announce import ModelInfo, WorkerInfo, pack_announcement, unpack_model, unpack_worker
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
    ProtocolError,
    ServerStartFailed,
    ServerUnavailable,
    TenutoError,
    UnknownModel,
)
from ._findings import Finding, Level
from ._records import (
    EndEvent,
    JobRecord,
    JobState,
    ProgressEvent,
    Result,
    StateEvent,
    Token,
    Usage,
)
from ._scripts import source as script_source
from ._scripts import ticket_payload
from ._spec import JobSpec, Message, Prompt, SubmitOptions, pack_spec, unpack_spec
from ._wire import pack_tokens, unpack_entry, unpack_tokens
from .keys import Keys

__all__ = [
    "DataDirError",
    "EndEvent",
    "Finding",
    "IdempotencyConflict",
    "IllegalTransition",
    "InvalidRequest",
    "JobCancelled",
    "JobFailed",
    "JobGone",
    "JobNotCompleted",
    "JobRecord",
    "JobSpec",
    "JobState",
    "Keys",
    "Level",
    "Message",
    "ModelInfo",
    "ProgressEvent",
    "Prompt",
    "ProtocolError",
    "Result",
    "ServerStartFailed",
    "ServerUnavailable",
    "Settings",
    "StateEvent",
    "SubmitOptions",
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
