"""The exceptions of the engine.

EngineError
├── ModelLoadError             the model folder cannot be loaded
│   ├── UnsupportedCache       a cache class that cannot be saved exactly
│   └── UnsupportedScheme      a KV scheme that the model cannot have
├── InvalidOption              an option of a generation is unknown or out of range
│   └── UnsupportedAdapter     an adapter that is damaged, or not of this model
├── PromptError                the prompt cannot be used
│   └── PromptTooLong          it does not fit into the context
├── NoFreeSlot                 every row of the engine is taken
├── GenerationFailed           a row raised while it ran; its cause is ``__cause__``
├── CheckpointError            anything wrong with a checkpoint
│   ├── CheckpointCorrupt      a file that is damaged or foreign; an older one may be good
│   └── CheckpointWriteError   a checkpoint did not become durable; the run goes on
└── ResumeMismatch             a state that does not belong to this model or run
"""

from __future__ import annotations

from pathlib import Path


class EngineError(Exception):
    """Root of everything the engine raises on purpose.

    Attributes:
        hint: what the reader may do about it, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class ModelLoadError(EngineError):
    """The model folder is missing, incomplete or of a kind that cannot be run.

    The message names the folder or hub name that was asked for.
    """


class UnsupportedCache(ModelLoadError):
    """A cache class that the checkpoint format does not know."""


class UnsupportedScheme(ModelLoadError):
    """A KV scheme that the model's caches or its attention cannot have."""


class InvalidOption(EngineError):
    """An option is unknown or out of range.

    Attributes:
        field: the name of the option.
        problem: what is wrong with it, without the name.
    """

    def __init__(self, field: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{field}: {message}", hint=hint)
        self.field = field
        self.problem = message


class UnsupportedAdapter(InvalidOption):
    """An adapter cannot be read, or its tensors have no place in the model.

    Attributes:
        adapter: its name.
        reason: what is wrong with it, without the name.
    """

    def __init__(self, adapter: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__("adapter", f"{adapter}: {reason}", hint=hint)
        self.adapter = adapter
        self.reason = reason


class PromptError(EngineError):
    """The prompt is empty or holds token ids that the model does not have."""


class PromptTooLong(PromptError):
    """Prompt and answer together do not fit into the context of the model."""


class NoFreeSlot(EngineError):
    """Every row of the engine is taken."""


class GenerationFailed(EngineError):
    """A generation ended with an exception of its own; other rows went on."""


class CheckpointError(EngineError):
    """Root of what can be wrong with a checkpoint."""


class _CheckpointFileError(CheckpointError):
    def __init__(self, path: Path, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = path
        self.reason = reason


class CheckpointCorrupt(_CheckpointFileError):
    """A checkpoint file is damaged, truncated or not one of ours.

    Attributes:
        path: the file.
        reason: what check it failed.
        offset: where in the file its first bad record begins; None if all of it is bad.
    """

    def __init__(
        self, path: Path, reason: str, *, offset: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(path, reason, hint=hint)
        self.offset = offset


class CheckpointWriteError(_CheckpointFileError):
    """A checkpoint could not be made durable; earlier ones are untouched.

    Attributes:
        path: the file or folder concerned.
        reason: what the disk said.
    """


class ResumeMismatch(EngineError):
    """A saved state does not belong to this model, prompt or seed."""


def described(value: object) -> str:
    """A value for a message: numbers as they are, of anything else only its type. It may be part of
    a prompt, and messages are logged."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else "a very large number"
    return f"a {type(value).__name__}"
