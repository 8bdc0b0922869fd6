"""From what a caller gives as a prompt to token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from typing import Any, cast

from tenuto_engine._errors import PromptError, described
from tenuto_engine._model import LoadedModel
from tenuto_engine._template import render

Prompt = str | Ids[Mapping[str, Any]] | Ids[int]
"""A text, chat messages (``role`` and ``content``), or token ids."""


def encode(loaded: LoadedModel, prompt: Prompt, *, raw: bool = False) -> list[int]:
    """Token ids of a prompt.

    A text becomes one user message of the chat template, unless `raw` or there is none.
    Token ids are taken as they are.

    Raises:
        PromptError: it is empty or malformed, or the chat template refuses it.
    """
    if isinstance(prompt, str):
        ids = _encode_text(loaded, prompt, raw=raw)
    elif _are_messages(prompt):
        ids = _encode_messages(loaded, cast(Ids[Mapping[str, Any]], prompt))
    else:
        ids = list(cast(Ids[int], prompt))
    return check_ids(ids, loaded.vocab_size)


def text_of(loaded: LoadedModel, prompt: Prompt, *, raw: bool = False) -> str | None:
    """The text that a text or messages become before it is tokenized; None of token ids.

    Raises:
        PromptError: as `encode`.
    """
    if isinstance(prompt, str):
        if raw or not loaded.tokenizer.has_chat_template:
            return prompt
        return _render(loaded, [{"role": "user", "content": prompt}])
    if _are_messages(prompt):
        return _render(loaded, _checked(loaded, cast(Ids[Mapping[str, Any]], prompt)))
    return None


def check_ids(ids: Ids[int], vocab_size: int) -> list[int]:
    """Return `ids` as a list, if there are any and all are ids of the model.

    Raises:
        PromptError: which one is not.
    """
    if not ids:
        raise PromptError("the prompt is empty", hint="give at least one token")
    for position, token in enumerate(ids):
        if not _is_integer(token):
            raise PromptError(f"prompt[{position}] is {described(token)}, not a token id")
        if not 0 <= token < vocab_size:
            raise PromptError(f"prompt[{position}]: token id {token} is not in 0..{vocab_size - 1}")
    return list(ids)


# Callers without a type checker pass anything.
def _is_integer(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool)


def _is_message(entry: object) -> bool:
    return isinstance(entry, Mapping) and {"role", "content"} <= entry.keys()


def _encode_text(loaded: LoadedModel, text: str, *, raw: bool) -> list[int]:
    if not text:
        raise PromptError("the prompt is empty", hint="give at least one character")
    if raw or not loaded.tokenizer.has_chat_template:
        return list(loaded.tokenizer.encode(text))
    return _encode_messages(loaded, [{"role": "user", "content": text}])


def _are_messages(prompt: Ids[Any]) -> bool:
    return any(isinstance(entry, Mapping) for entry in prompt)


def _checked(loaded: LoadedModel, messages: Ids[Mapping[str, Any]]) -> list[dict[str, Any]]:
    for number, message in enumerate(messages):
        if not _is_message(message):
            raise PromptError(f"messages[{number}] is not a message with role and content")
    if not loaded.tokenizer.has_chat_template:
        raise PromptError(
            "the model has no chat template", hint="send a text or token ids instead of messages"
        )
    return [dict(entry) for entry in messages]


def _encode_messages(loaded: LoadedModel, messages: Ids[Mapping[str, Any]]) -> list[int]:
    checked = _checked(loaded, messages)
    template = cast(Callable[..., list[int]], loaded.tokenizer.apply_chat_template)
    try:
        return list(template(checked, add_generation_prompt=True))
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        raise _refused(checked, error) from None


def _render(loaded: LoadedModel, messages: list[dict[str, Any]]) -> str:
    try:
        return render(loaded.tokenizer, messages)
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        raise _refused(messages, error) from None


def _refused(messages: Ids[Mapping[str, Any]], error: Exception) -> PromptError:
    """The template may quote what it refuses, and users' texts are in no error."""
    quotes = any(part in str(error) for part in _texts(messages))
    why = type(error).__name__ if quotes else str(error)
    return PromptError(f"the chat template refused the messages: {why}")


def _texts(messages: Ids[Mapping[str, Any]]) -> list[str]:
    """What users wrote in messages, but for words so short that they stand anywhere."""
    parts = [str(part) for message in messages for part in message.values()]
    return [part for part in parts if len(part) >= 8 and part != "assistant"]
