"""``GenerationOptions``: what a caller may ask of one generation, checked by field name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from tenuto_engine._errors import InvalidOption, described
from tenuto_engine._token import Token

if TYPE_CHECKING:
    from tenuto_engine._adapters import Adapter
    from tenuto_engine._checkpoint import Origin
    from tenuto_engine._grammar import Grammar
    from tenuto_engine._live import LiveCheckpoint
    from tenuto_engine._prefix import Prefix
    from tenuto_engine._trace import OnSpan

MAX_SEED: Final = 2**64 - 1
MAX_TOP_LOGPROBS: Final = 20
GRAMMAR_KINDS: Final = ("json_schema", "regex", "lark")


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """The logprobs of a pending token, as a checkpoint keeps them.

    Attributes:
        logprob: natural log of its probability.
        top_logprobs: the likeliest ids at its place with their logprobs.
    """

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class GenerationOptions:
    """One generation's parameters; a bad one raises ``InvalidOption``, which names the field.

    What is asked for:
        max_tokens: tokens of the whole generation, resumed part included; at least 1.
        min_tokens: the generation does not end by itself before it has so many tokens, none of
            which is an end token; at most ``max_tokens``. Till then end tokens and
            ``stop_token_ids`` cannot be drawn, and a stop string that is complete by then is
            ordinary text.
        temperature: 0 is greedy, else the logprobs are divided by it before the draw.
        top_p: keep the likeliest tokens that together hold this probability; 1 is off.
        top_k: keep this many likeliest tokens; 0 is off.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 is off.
        xtc_probability: how often the top choices are excluded (XTC), 0 to 1; 0 is off. Then of
            the tokens above ``xtc_threshold`` only the least likely may be drawn. The model's
            end tokens and those of a line break are never excluded.
        xtc_threshold: the probability above which a token is a top choice, 0 to 0.5.
        seed: 0 to 2**64-1. None draws one, unless the generation is a resumed one.
        stop: strings that end the generation and are not part of its text.
        stop_token_ids: token ids that end it, besides the model's own.
        ignore_eos: let the model's own end tokens pass as ordinary ones.
        logprobs: how many likeliest tokens to report with each token, 0 to 20.
        logit_bias: token id -> what is added to its logit.
        repetition_penalty: divides the logit of a token seen lately; at least 0.01, 1 is off.
        presence_penalty, frequency_penalty: subtracted once, or per time seen; 0 is off.
        *_context_size: how many last tokens, prompt included, count as lately.
        grammar: what the text must match: a mapping with one of ``json_schema`` (a JSON object or
            a bool), ``regex`` and ``lark`` (strings), or what ``Engine.compile_grammar`` made of
            one. The model's own end tokens are drawn only where it is complete, so that all of the
            text matches it unless ``max_tokens`` or a stop comes first.
        jump_forward: let the tokens that the grammar forces go through the model together with
            the token before them, in one forward. They are marked ``jumped``. Needs a grammar,
            and goes with no ``logprobs``.
        adapter: the name of a LoRA adapter in the engine's folder, or what ``Engine.load_adapter``
            made of one, which stays as it is whatever becomes of its files. The geometry is another
            with it (``Engine.geometry_of``).

    Checkpoints:
        checkpoint_every_tokens, checkpoint_every_seconds: whichever comes first; None is off.
        on_decode_checkpoint: takes each one, on the decode thread. What it raises is logged
            and counted in ``stats.checkpoint_errors``; the generation goes on.

    Tracing:
        on_span: takes each ``Span`` when it is over, most of them on the decode thread, those of
            checkpoints that are written on the writer's. After it raised it is not called again.

    To resume (``resume_options`` fills these in from a checkpoint):
        cache: what covers ``prompt_tokens`` exactly or, with no pending token, a strict
            prefix that ends at a chunk border. Either the host states of a checkpoint,
            or live mlx-lm caches, which then belong to the engine.
        cached_tokens: how many tokens ``cache`` covers; None reads it from the cache.
        cache_origin: the place in a log that ``cache`` was loaded from; a store in whose folder
            that is goes on from there, and writes only what is new.
        prefix: what ``Engine.find_prefix`` found, where there is no ``cache``; None has ``add``
            look for it.
        initial_pending_token: the token that was sampled and is not in the cache.
        initial_pending_logprobs: its logprobs.
        initial_generated_tokens: how many of ``prompt_tokens`` were generated. With neither
            cache nor pending token they are prefilled with the prompt: quicker than feeding
            them as ``published_tokens``, but the bits are others.
        original_prompt_tokens: how many were the prompt; None is all the others.
        initial_tokens: the records of the generated ones; without them later checkpoints
            know their text, but have NaN for their logprobs.
        initial_published_tokens: how many of them a reader has; the others are handed out
            first. None is all.
        initial_divergences, initial_first_divergence: what the stats of the run begin with.
        published_tokens: the tokens after them that a reader has. They are fed again, never
            handed out again, and stand even where this engine would choose others.
    """

    max_tokens: int = 512
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    grammar: Mapping[str, Any] | Grammar | None = None
    jump_forward: bool = False
    adapter: str | Adapter | None = None
    checkpoint_every_tokens: int | None = 256
    checkpoint_every_seconds: float | None = 2.0
    on_decode_checkpoint: Callable[[LiveCheckpoint], object] | None = None
    on_span: OnSpan | None = None
    cache: Sequence[Any] | None = None
    cached_tokens: int | None = None
    cache_origin: Origin | None = None
    prefix: Prefix | None = None
    initial_pending_token: int | None = None
    initial_pending_logprobs: PendingLogprobs | None = None
    initial_generated_tokens: int = 0
    original_prompt_tokens: int | None = None
    initial_tokens: tuple[Token, ...] = ()
    initial_published_tokens: int | None = None
    initial_divergences: int = 0
    initial_first_divergence: int | None = None
    published_tokens: tuple[Token, ...] = ()

    def __post_init__(self) -> None:
        _freeze(self)
        _check_sampling(self)
        _check_ends(self)
        _check_penalties(self)
        _check_grammar(self)
        _check_jump_forward(self)
        _check_adapter(self)
        _check_checkpoints(self)
        _check_resume(self)

    @property
    def resumes(self) -> bool:
        """Whether decoding goes on from a pending token, with no forward pass before it."""
        return self.initial_pending_token is not None


def _freeze(options: GenerationOptions) -> None:
    if _is_text(options.stop):
        raise InvalidOption("stop", "is one string", hint="give a tuple of strings")
    for name in ("stop", "stop_token_ids", "initial_tokens", "published_tokens"):
        object.__setattr__(options, name, tuple(getattr(options, name)))
    if not isinstance(options.logit_bias, Mapping):
        raise InvalidOption("logit_bias", "must map token ids to numbers")
    object.__setattr__(options, "logit_bias", MappingProxyType(dict(options.logit_bias)))


def _check_sampling(options: GenerationOptions) -> None:
    _integer(options, "max_tokens", 1, None)
    _integer(options, "min_tokens", 0, None)
    if options.min_tokens > options.max_tokens:
        raise InvalidOption(
            "min_tokens", f"is {options.min_tokens}, above max_tokens={options.max_tokens}"
        )
    _number(options, "temperature", 0.0, None)
    _number(options, "top_p", 0.0, 1.0)
    if options.top_p == 0:
        raise InvalidOption("top_p", "must be above 0", hint="temperature=0 is greedy")
    _integer(options, "top_k", 0, None)
    _number(options, "min_p", 0.0, 1.0)
    _number(options, "xtc_probability", 0.0, 1.0)
    _number(options, "xtc_threshold", 0.0, 0.5)
    _integer(options, "logprobs", 0, MAX_TOP_LOGPROBS)
    if options.seed is not None:
        _integer(options, "seed", 0, MAX_SEED)


def _check_ends(options: GenerationOptions) -> None:
    for stop in options.stop:
        if not _is_text(stop) or not stop:
            raise InvalidOption("stop", f"{described(stop)} is not a non-empty string")
    for token in options.stop_token_ids:
        if not _is_integer(token) or token < 0:
            raise InvalidOption("stop_token_ids", f"{described(token)} is not a token id")
    if not isinstance(options.ignore_eos, bool):
        raise InvalidOption("ignore_eos", "must be true or false")


def _check_penalties(options: GenerationOptions) -> None:
    for token, bias in options.logit_bias.items():
        if not _is_integer(token) or token < 0:
            raise InvalidOption("logit_bias", f"{described(token)} is not a token id")
        if not _is_finite(bias):
            raise InvalidOption("logit_bias", f"the bias of token {token} is {described(bias)}")
    _number(options, "repetition_penalty", 0.0, None)
    if options.repetition_penalty == 0:
        raise InvalidOption("repetition_penalty", "must be above 0", hint="1 is off")
    # What is divided by less overflows.
    _number(options, "repetition_penalty", 0.01, None)
    _number(options, "presence_penalty", None, None)
    _number(options, "frequency_penalty", None, None)
    for name in ("repetition", "presence", "frequency"):
        _integer(options, f"{name}_context_size", 1, None)


def _check_grammar(options: GenerationOptions) -> None:
    grammar = options.grammar
    if grammar is None:
        return
    if options.ignore_eos:
        raise InvalidOption("ignore_eos", "cannot be with a grammar, which the model has to end")
    if options.min_tokens:
        raise InvalidOption("min_tokens", "cannot be with a grammar, which says where to end")
    if isinstance(grammar, Mapping):
        object.__setattr__(options, "grammar", checked_grammar(grammar))
        return
    from tenuto_engine._grammar import Grammar

    # Callers without a type checker pass anything.
    if not isinstance(grammar, Grammar):
        raise InvalidOption("grammar", f"must be a mapping, is {described(grammar)}")


def _check_jump_forward(options: GenerationOptions) -> None:
    if not isinstance(options.jump_forward, bool):
        raise InvalidOption("jump_forward", "must be true or false")
    if not options.jump_forward:
        return
    if options.grammar is None:
        raise InvalidOption("jump_forward", "needs a grammar, which forces the tokens")
    if options.logprobs:
        raise InvalidOption(
            "jump_forward", "cannot be with logprobs: nothing is drawn where a token is forced"
        )


def _check_adapter(options: GenerationOptions) -> None:
    adapter = options.adapter
    if adapter is None or _is_text(adapter):
        return
    from tenuto_engine._adapters import Adapter

    # Callers without a type checker pass anything.
    if not isinstance(adapter, Adapter):
        raise InvalidOption("adapter", f"must be a name, is {described(adapter)}")


def checked_grammar(grammar: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a grammar's source.

    Raises:
        InvalidOption: it has not exactly one kind, or a value that cannot be one.
    """
    if len(grammar) != 1 or not set(grammar) <= set(GRAMMAR_KINDS):
        raise InvalidOption("grammar", f"must have exactly one of {', '.join(GRAMMAR_KINDS)}")
    ((kind, value),) = grammar.items()
    if kind == "json_schema":
        return {kind: _copied_schema(value)}
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidOption("grammar", f"{kind} is {described(value)}, not a text") from None
    return {kind: value}


def _copied_schema(value: object) -> object:
    if not isinstance(value, Mapping | bool):
        raise InvalidOption("grammar", f"json_schema is {described(value)}, not an object or bool")
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise InvalidOption("grammar", "json_schema is not JSON") from None


def _check_checkpoints(options: GenerationOptions) -> None:
    if options.checkpoint_every_tokens is not None:
        _integer(options, "checkpoint_every_tokens", 1, None)
    if options.checkpoint_every_seconds is not None:
        _number(options, "checkpoint_every_seconds", 0.0, None)
    for name in ("on_decode_checkpoint", "on_span"):
        callback = getattr(options, name)
        if callback is not None and not callable(callback):
            raise InvalidOption(name, "must be callable")


def _check_resume(options: GenerationOptions) -> None:
    _integer(options, "initial_generated_tokens", 0, options.max_tokens - 1)
    for name in ("cached_tokens", "original_prompt_tokens"):
        if getattr(options, name) is not None:
            _integer(options, name, 1, None)
    if options.initial_pending_token is not None:
        _check_pending(options)
    elif options.initial_generated_tokens and options.cache is not None:
        raise InvalidOption("initial_generated_tokens", "with a cache need initial_pending_token")
    given = options.initial_generated_tokens
    if options.initial_published_tokens is not None:
        _integer(options, "initial_published_tokens", 0, given)
        if options.initial_published_tokens < given and options.published_tokens:
            raise InvalidOption("published_tokens", "do not follow the ones published before")
    if options.initial_tokens and len(options.initial_tokens) != given:
        raise InvalidOption("initial_tokens", f"are {len(options.initial_tokens)}, not {given}")
    _check_numbering(options.initial_tokens, "initial_tokens", 1)
    _check_numbering(options.published_tokens, "published_tokens", given + 1)


def _check_pending(options: GenerationOptions) -> None:
    _integer(options, "initial_pending_token", 0, None)
    if options.cache is None:
        raise InvalidOption("cache", "a pending token needs the cache before it")
    if options.seed is None:
        raise InvalidOption("seed", "a resumed generation needs the seed that it began with")
    if options.initial_pending_logprobs is None:
        raise InvalidOption("initial_pending_logprobs", "are missing for the pending token")


def _check_numbering(tokens: tuple[Token, ...], name: str, first: int) -> None:
    for index, token in enumerate(tokens, first):
        if token.index != index:
            raise InvalidOption(name, f"token {token.index} stands where {index} should")


# These take any object: callers without a type checker pass anything.
def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return type(value) is not bool and isinstance(value, Real) and math.isfinite(value)


def _integer(options: GenerationOptions, name: str, low: int | None, high: int | None) -> None:
    value = getattr(options, name)
    if not _is_integer(value):
        raise InvalidOption(name, f"must be a whole number, is {described(value)}")
    _within(name, value, low, high)


def _number(options: GenerationOptions, name: str, low: float | None, high: float | None) -> None:
    value = getattr(options, name)
    if not _is_finite(value):
        raise InvalidOption(name, f"must be a finite number, is {described(value)}")
    _within(name, value, low, high)


def _within(name: str, value: float, low: float | None, high: float | None) -> None:
    if low is not None and value < low:
        raise InvalidOption(name, f"must be at least {low}, is {value}")
    if high is not None and value > high:
        raise InvalidOption(name, f"must be at most {high}, is {value}")
