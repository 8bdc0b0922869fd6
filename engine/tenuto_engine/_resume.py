"""From a checkpoint to the arguments that continue it."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import replace

from tenuto_engine._checkpoint import Checkpoint
from tenuto_engine._errors import InvalidOption, ResumeMismatch
from tenuto_engine._live import LiveCheckpoint
from tenuto_engine._options import GenerationOptions, PendingLogprobs
from tenuto_engine._token import Token


def resume_options(
    checkpoint: Checkpoint | LiveCheckpoint | None,
    options: GenerationOptions,
    published: Ids[Token] | None = None,
    *,
    prompt_tokens: Ids[int] | None = None,
) -> tuple[list[int], GenerationOptions]:
    """The prompt and options with which ``Engine.add`` or ``generate`` continues a run.

    The rest is that of a run that was never interrupted only if model, prompt, options and
    geometry are those that it began with. Only the prompt is compared here: a checkpoint knows
    neither its options (but for the seed) nor its geometry. Keep what may change, such as
    ``Engine.geometry.fingerprint``, in the store's ``meta``, and compare ``checkpoint.meta``.

    Args:
        checkpoint: where to continue. None: at the beginning, with ``options`` as they are.
        options: those that the run began with; seed and resume fields are replaced.
            ``max_tokens`` counts the whole run and may be another, above what is covered.
        published: all tokens that a reader has, from index 1. Those that the checkpoint does
            not cover are caught up; those that it covers and the reader lacks are handed
            out first. None: the reader has exactly those that the checkpoint covers.
        prompt_tokens: the whole original prompt. Needed for a checkpoint taken inside a
            prefill, which covers a part of it, and without one; otherwise only compared.

    Raises:
        InvalidOption: ``max_tokens`` is not above what the checkpoint covers, or there is
            neither a checkpoint nor ``prompt_tokens``.
        ResumeMismatch: the checkpoint is of another prompt, or its tokens are not the
            published ones.
    """
    if checkpoint is None:
        return _from_the_start(options, published, prompt_tokens)
    covered = checkpoint.generated_tokens
    _check_room(options, covered)
    published = checkpoint.generated if published is None else tuple(published)
    _check_agreement(checkpoint, published)
    tokens = _tokens(checkpoint, prompt_tokens)
    resumed = replace(
        options,
        seed=checkpoint.seed,
        cache=checkpoint.caches,
        cached_tokens=len(checkpoint.cache_tokens),
        cache_origin=checkpoint.origin,
        initial_pending_token=checkpoint.pending_token,
        initial_pending_logprobs=_pending_logprobs(checkpoint),
        initial_generated_tokens=covered,
        original_prompt_tokens=len(tokens) - covered,
        initial_tokens=checkpoint.generated,
        initial_divergences=checkpoint.divergences,
        initial_first_divergence=checkpoint.first_divergence,
        initial_published_tokens=min(len(published), covered),
        published_tokens=published[covered:],
    )
    return tokens, resumed


def _from_the_start(
    options: GenerationOptions, published: Ids[Token] | None, prompt_tokens: Ids[int] | None
) -> tuple[list[int], GenerationOptions]:
    if prompt_tokens is None:
        raise InvalidOption("prompt_tokens", "are needed where there is no checkpoint")
    if published:
        options = replace(options, published_tokens=tuple(published))
    return list(prompt_tokens), options


def _check_room(options: GenerationOptions, covered: int) -> None:
    if options.max_tokens <= covered:
        raise InvalidOption(
            "max_tokens",
            f"is {options.max_tokens}, but the checkpoint covers {covered} generated tokens",
            hint="it counts those of the whole run; resume with the one that it began with",
        )


def _check_agreement(checkpoint: Checkpoint | LiveCheckpoint, published: Ids[Token]) -> None:
    hint = "use an older checkpoint, or replay from the prompt"
    for own, other in zip(checkpoint.generated, published, strict=False):
        if (own.index, own.token) != (other.index, other.token):
            raise ResumeMismatch(
                f"token {own.index} is {own.token} in the checkpoint, but {other.token} "
                "was published",
                hint=hint,
            )
        if own.jumped != other.jumped:
            raise ResumeMismatch(
                f"token {own.index} was in another forward in the checkpoint than it was published",
                hint=hint,
            )
    after = published[checkpoint.generated_tokens :]
    if after and after[0].jumped and checkpoint.pending_token is not None:
        raise ResumeMismatch(
            f"the checkpoint ends before token {after[0].index}, which was in the forward of the "
            "token before it",
            hint=hint,
        )


def _tokens(checkpoint: Checkpoint | LiveCheckpoint, prompt_tokens: Ids[int] | None) -> list[int]:
    cached, original = checkpoint.cache_tokens, checkpoint.original_prompt_tokens
    if prompt_tokens is None:
        if checkpoint.pending_token is None:
            raise ResumeMismatch(
                f"the checkpoint covers {len(cached)} of {original} prompt tokens",
                hint="give the whole prompt as prompt_tokens",
            )
        return list(cached)
    prompt = tuple(prompt_tokens)
    if len(prompt) != original or prompt[: len(cached)] != cached[:original]:
        raise ResumeMismatch("the checkpoint is of another prompt")
    return [*prompt, *cached[original:]]


def _pending_logprobs(checkpoint: Checkpoint | LiveCheckpoint) -> PendingLogprobs | None:
    if checkpoint.pending_token is None or checkpoint.pending_logprob is None:
        return None
    return PendingLogprobs(checkpoint.pending_logprob, checkpoint.pending_top_logprobs)
