"""Submit, stream, cancel and resume long LLM generations that survive everything."""

from ._errors import TenutoError
from ._records import JobState, Token
from ._scripts import source as script_source
from ._scripts import ticket_payload
from ._wire import pack_tokens, unpack_tokens
from .keys import Keys

__all__ = [
    "JobState",
    "Keys",
    "TenutoError",
    "Token",
    "pack_tokens",
    "script_source",
    "ticket_payload",
    "unpack_tokens",
]
