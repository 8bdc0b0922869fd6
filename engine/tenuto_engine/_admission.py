"""From a prompt and options to a row that may run: every check against the model is here."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from copy import copy
from typing import Any

from tenuto_engine._adapters import Adapter
from tenuto_engine._caches import CacheState, check_supported, rebuild
from tenuto_engine._decode import take_published
from tenuto_engine._errors import InvalidOption, PromptTooLong, ResumeMismatch
from tenuto_engine._grammars import Grammars
from tenuto_engine._kv_quantizer import check_quantized, is_quantized_at
from tenuto_engine._kv_scheme import KVScheme
from tenuto_engine._logits import LogitsProcessors
from tenuto_engine._model import LoadedModel
from tenuto_engine._options import GenerationOptions
from tenuto_engine._prefill import is_border
from tenuto_engine._prompt import check_ids
from tenuto_engine._sampler import Sampler
from tenuto_engine._sequence import Drawn, Sequence
from tenuto_engine._slots import Pending, Row


def admit(
    loaded: LoadedModel,
    ids: Ids[int],
    options: GenerationOptions,
    chunk: int,
    grammars: Grammars,
    scheme: KVScheme | None = None,
    adapter: Adapter | None = None,
) -> Row:
    """Check everything and build the row; nothing is computed but the caches' arrays.

    Args:
        adapter: that of the options, loaded.

    Raises:
        PromptError, PromptTooLong, InvalidOption, ResumeMismatch: by name what is wrong.
    """
    tokens = tuple(check_ids(ids, loaded.vocab_size))
    prompt, generated = _split(tokens, options)
    _check_length(loaded, len(prompt), options)
    _check_token_options(loaded, generated, options)
    caches, position = _caches(loaded, options)
    _check_cover(position, len(tokens), options, chunk)
    if scheme is not None:
        check_quantized(caches, scheme, position)
    ends = frozenset() if options.ignore_eos else loaded.eos_token_ids
    ends |= set(options.stop_token_ids)
    if options.min_tokens and ends.issuperset(range(loaded.vocab_size)):
        raise InvalidOption("min_tokens", "every token of the model is one that ends")
    grammar = None if options.grammar is None else grammars.compile(options.grammar).begin()
    sequence = Sequence(prompt, _lasting(options), ends, loaded.decode, grammar)
    sequence.stats.cached_tokens = min(position, len(prompt))
    sequence.prefill_done = min(position, len(prompt))
    sequence.prefill_total = len(prompt) if options.resumes else len(tokens)
    sequence.replay(generated)
    row = Row(
        sequence=sequence,
        caches=caches,
        position=position,
        bound=len(prompt) + options.max_tokens - 1,
        reading=tokens,
        processors=LogitsProcessors(options, tokens, sequence.end_tokens),
        sampler=Sampler(options, sequence.seed, _xtc_exempt(loaded, options)),
        pending=_pending(options),
        origin=options.cache_origin,
        unquantized=None if scheme is None or is_quantized_at(scheme, position) else scheme,
        adapter=adapter,
    )
    # In the synchronous loop a reader has the pending token of a checkpoint already.
    if row.pending and options.published_tokens:
        take_published(row)
    return row


def _split(
    tokens: tuple[int, ...], options: GenerationOptions
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    expected = len(tokens) - options.initial_generated_tokens
    original = (
        expected if options.original_prompt_tokens is None else options.original_prompt_tokens
    )
    if original != expected or original < 1:
        raise InvalidOption(
            "original_prompt_tokens",
            f"{original} and initial_generated_tokens={options.initial_generated_tokens} "
            f"do not add up to the {len(tokens)} tokens given",
        )
    return tokens[:original], tokens[original:]


def _check_length(loaded: LoadedModel, prompt_tokens: int, options: GenerationOptions) -> None:
    context = loaded.context_length
    if context is not None and prompt_tokens + options.max_tokens > context:
        raise PromptTooLong(
            f"{prompt_tokens} prompt tokens and max_tokens={options.max_tokens} do not fit into "
            f"the context of {context} tokens",
            hint=f"at most {max(context - prompt_tokens, 0)} tokens can follow this prompt",
        )


def _check_token_options(
    loaded: LoadedModel, generated: tuple[int, ...], options: GenerationOptions
) -> None:
    named = {
        "logit_bias": tuple(options.logit_bias),
        "stop_token_ids": options.stop_token_ids,
        "published_tokens": tuple(token.token for token in options.published_tokens),
        "initial_pending_token": (options.initial_pending_token or 0,),
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < loaded.vocab_size:
                raise InvalidOption(name, f"token {token} is not in 0..{loaded.vocab_size - 1}")
    if options.initial_generated_tokens + len(options.published_tokens) > options.max_tokens:
        raise InvalidOption("published_tokens", f"are more than max_tokens={options.max_tokens}")
    if options.published_tokens and options.temperature > 0 and options.seed is None:
        raise InvalidOption("seed", "published tokens were sampled with a seed; give that one")
    if options.initial_tokens and generated != tuple(t.token for t in options.initial_tokens):
        raise InvalidOption("initial_tokens", "are not the generated tokens of the prompt given")


def _xtc_exempt(loaded: LoadedModel, options: GenerationOptions) -> frozenset[int]:
    """What mlx-lm's server and command exempt: end tokens, and all that a line break encodes to."""
    if options.xtc_probability == 0:
        return frozenset()
    return loaded.eos_token_ids.union(loaded.tokenizer.encode("\n"))


def _caches(loaded: LoadedModel, options: GenerationOptions) -> tuple[list[Any], int]:
    given = options.cache
    if given is None and options.prefix is not None and options.prefix.tokens:
        return rebuild(options.prefix.caches, loaded.make_caches), options.prefix.tokens
    if given is None:
        return loaded.make_caches(), 0
    states = [cache for cache in given if isinstance(cache, CacheState)]
    if states and len(states) == len(given):
        caches = rebuild(states, loaded.make_caches)
    else:
        check_supported(given)
        caches = list(given)
    return caches, _covered(caches, options)


def _covered(caches: list[Any], options: GenerationOptions) -> int:
    """How many tokens the caches hold. Recurrent ones cannot tell, so they must be told."""
    known = {cache.offset for cache in caches if hasattr(cache, "offset")}
    if options.cached_tokens is not None:
        known.add(options.cached_tokens)
    if not known:
        raise InvalidOption("cached_tokens", "is needed: these caches do not count tokens")
    if len(known) > 1:
        raise ResumeMismatch(f"the caches cover different numbers of tokens: {sorted(known)}")
    return int(known.pop())


def _lasting(options: GenerationOptions) -> GenerationOptions:
    """The same options without saved caches, which may take gigabytes, and of an adapter, which
    holds the model, only its name: a sequence may be kept for long."""
    kept = copy(options)
    object.__setattr__(kept, "cache", None)
    object.__setattr__(kept, "prefix", None)
    if options.adapter is not None and not isinstance(options.adapter, str):
        object.__setattr__(kept, "adapter", options.adapter.name)
    return kept


def _check_cover(position: int, tokens: int, options: GenerationOptions, chunk: int) -> None:
    if options.resumes:
        if position != tokens:
            raise ResumeMismatch(
                f"the cache covers {position} tokens, but the tokens to resume from are {tokens}",
                hint="a resumed cache covers its prefix exactly",
            )
    elif position >= tokens:
        raise ResumeMismatch(
            f"the warm cache covers {position} tokens, not a strict prefix of the {tokens} given"
        )
    elif not is_border(position, tokens, chunk):
        raise ResumeMismatch(
            f"the warm cache ends at token {position}, between chunk borders",
            hint=f"only a multiple of {chunk} gives the same bits as a cold prefill",
        )


def _pending(options: GenerationOptions) -> Pending | None:
    token, logprobs = options.initial_pending_token, options.initial_pending_logprobs
    if token is None or logprobs is None:
        return None
    return Pending.known(Drawn(token, logprobs.logprob, logprobs.top_logprobs))
