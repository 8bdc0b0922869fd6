"""``Sequence``: the host's side of one generation. No MLX in here.

It knows the tokens, their text, what ends it and what was handed out. What is on the
device (caches, the pending token) belongs to the row that runs it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

from tenuto_engine._errors import ResumeMismatch
from tenuto_engine._options import GenerationOptions
from tenuto_engine._text import TextStream
from tenuto_engine._token import Token
from tenuto_engine._trace import Trace

if TYPE_CHECKING:
    from tenuto_engine._grammar import GrammarState

FinishReason = Literal["stop", "length"]


class SequenceState(Enum):
    """Where a generation stands. Only the engine that runs it moves it on."""

    WAITING = "waiting"
    """Entered by ``Engine.add``; left for PREFILL, CATCH_UP or DECODE at its first step."""
    PREFILL = "prefill"
    """Its prompt is being read; left for CATCH_UP or DECODE after the last prompt token."""
    CATCH_UP = "catch_up"
    """Tokens that a reader has are fed again; left for DECODE after the last of them."""
    DECODE = "decode"
    """It gives tokens; left for FINISHED."""
    FINISHED = "finished"
    """Entered at a stop or at the length limit. An end."""
    FAILED = "failed"
    """Entered from any state when its row raises; ``error`` says why. An end."""
    CLOSED = "closed"
    """Entered by ``Engine.close`` before any other end. An end."""

    @property
    def is_end(self) -> bool:
        return self in _ENDS


_ENDS = frozenset({SequenceState.FINISHED, SequenceState.FAILED, SequenceState.CLOSED})


@dataclass(slots=True)
class GenerationStats:
    """What a generation did; live while it runs. Seconds are wall-clock.

    Attributes:
        prompt_tokens: tokens of the original prompt.
        cached_tokens: those that a warm cache spared.
        generated_tokens: tokens of the whole generation so far, resumed ones included.
        finish_reason: ``stop``, ``length``, or None while or if it did not finish.
        prefill_seconds: from the first chunk to the first token known; set at the end of that.
            Pauses in which other rows decode are part of it, waiting for another row's prompt
            is not.
        decode_seconds: from then on; set at the end. Checkpoints are part of it.
        cache_tokens: at the end, the exact tokens whose KV was in the cache.
        divergences: published tokens that differ, by id or logprob, from the computed ones.
        first_divergence: index of the first of those, or None.
        checkpoints: checkpoints handed to the callback.
        checkpoint_errors: those on which the callback raised.
        prefilled_tokens: prompt tokens that this run read.
        decoded_tokens: tokens that this run decoded, those of a catch-up included. The first
            one of a prefill, and one that a checkpoint knew already, are not.
        jumped_tokens: those among them that a grammar forced into the forward of another.
        peak_memory: bytes that MLX had in arrays at most while the generation had its slot.
            They are the whole process's: weights and other rows included.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    finish_reason: FinishReason | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cache_tokens: tuple[int, ...] = ()
    divergences: int = 0
    first_divergence: int | None = None
    checkpoints: int = 0
    checkpoint_errors: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    jumped_tokens: int = 0
    peak_memory: int = 0

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens a second that this run read."""
        return self.prefilled_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens a second that this run decoded, caught-up ones included."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Drawn(NamedTuple):
    """A sampled token as the host reads it: id, logprob, likeliest ids with logprobs.

    One that a grammar forced into the forward of the token before it is ``jumped``.
    """

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    jumped: bool = False

    @classmethod
    def forced(cls, token: int) -> Drawn:
        """One that nothing was drawn for, as it was certain."""
        return cls(token, 0.0, (), jumped=True)


@dataclass(eq=False, repr=False)
class Sequence:
    """One generation, as its caller sees it. Made by ``Engine.add``.

    Attributes:
        prompt: ids of the original prompt.
        options: what was asked for.
        grammar: where it stands in the grammar that it has to match, if any.
        seed: what its draws derive from; drawn here if the options gave none.
        state: where it stands.
        tokens: the tokens whose text is settled, handed out or not.
        emitted: how many of them a reader has.
        prefill_done, prefill_total: tokens read, and to read, before the first new one.
        catch_up_done, catch_up_total: published tokens fed again, and to feed.
        finish_reason: ``stop``, ``length`` or None.
        end_text: the text held back until a natural end.
        error: why it failed, or None.
        stats: what it did.
        trace: its spans.
    """

    prompt: tuple[int, ...]
    options: GenerationOptions
    end_tokens: frozenset[int]
    decode: Callable[[list[int]], str]
    grammar: GrammarState | None = None
    state: SequenceState = SequenceState.WAITING
    tokens: list[Token] = field(default_factory=list)
    emitted: int = 0
    prefill_done: int = 0
    prefill_total: int = 0
    catch_up_done: int = 0
    finish_reason: FinishReason | None = None
    end_text: str = ""
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(64) if self.options.seed is None else self.options.seed
        self.stats = GenerationStats(
            prompt_tokens=len(self.prompt),
            divergences=self.options.initial_divergences,
            first_divergence=self.options.initial_first_divergence,
        )
        self.trace = Trace(self.options.on_span)
        self._text = TextStream(self.decode, self.options.stop)
        self._began: float | None = None
        self._prefilled: float | None = None
        self._decodes = False

    @property
    def catch_up_total(self) -> int:
        return len(self.options.published_tokens)

    @property
    def next_published(self) -> Token | None:
        """The published token that is to be fed next, or None."""
        if self.catch_up_done == self.catch_up_total:
            return None
        return self.options.published_tokens[self.catch_up_done]

    def published_span(self) -> Iterator[Token]:
        """The published tokens that were in one forward with the token settled last, as each comes
        to be the next one."""
        while (token := self.next_published) is not None and token.jumped:
            yield token

    def replay(self, ids: tuple[int, ...]) -> None:
        """Rebuild text state from the generated tokens of a checkpoint, which a reader has."""
        records = self.options.initial_tokens
        for index, token in enumerate(ids, 1):
            settled = self._settle(Drawn(token, float("nan"), ()), index)
            self.tokens.append(records[index - 1] if records else settled)
            if self.finish_reason:
                raise ResumeMismatch(f"the generation had ended at token {index}")
        published = self.options.initial_published_tokens
        self.emitted = len(ids) if published is None else published

    def take(self, drawn: Drawn) -> Token:
        """Settle the next token and note what it ends; it is not handed out yet."""
        token = self._settle(drawn, len(self.tokens) + 1)
        self._append(token)
        return token

    def take_published(self, published: Token, drawn: Drawn | None) -> bool:
        """Settle a token that a reader has, and compare it with the one `drawn` here, if any was.

        Returns:
            Whether they are the same.
        """
        is_same = drawn is not None and (drawn.token, drawn.logprob, drawn.jumped) == (
            published.token,
            published.logprob,
            published.jumped,
        )
        if not is_same:
            self.stats.divergences += 1
            self.stats.first_divergence = self.stats.first_divergence or published.index
        self._settle(Drawn(published.token, published.logprob, ()), published.index)
        self._append(published)
        self.catch_up_done += 1
        self.emitted = len(self.tokens)
        if self.finish_reason and self.next_published:
            raise ResumeMismatch(f"published tokens go on after the end at {published.index}")
        return is_same

    def hand_out(self) -> list[Token]:
        """Return the settled tokens that no reader has, and count them as handed out."""
        fresh = self.tokens[self.emitted :]
        self.emitted = len(self.tokens)
        return fresh

    def start_prefill(self) -> None:
        """The first chunk begins now; harmless when called again."""
        self._began = self._began or time.perf_counter()
        self.trace.enter("prefill")

    def start_decode(self) -> None:
        """The first token is known now, or was from the beginning; harmless when called again."""
        self._prefilled = self._prefilled or time.perf_counter()
        self.stats.prefill_seconds = self._prefilled - (self._began or self._prefilled)
        self.go_on()

    def go_on(self) -> None:
        """It is past its prompt: published tokens come next, or new ones."""
        state = SequenceState.CATCH_UP if self.next_published else SequenceState.DECODE
        if state is not self.state:
            self.state = state
            self.trace.enter(state.value, **self._reached())

    def stop_clock(self) -> None:
        """Set the times of the stats; called at an end, and harmless when called again."""
        now = time.perf_counter()
        if self._prefilled is not None:
            self.stats.decode_seconds = now - self._prefilled
        elif self._began is not None:
            self.stats.prefill_seconds = now - self._began
        self.trace.leave(**self._reached())

    def _reached(self) -> dict[str, int]:
        """How far it is, at the end of a phase."""
        return {"prompt": self.prefill_done, "tokens": len(self.tokens)}

    def _append(self, token: Token) -> None:
        # Whatever comes first was known before this run decoded anything.
        self.stats.decoded_tokens += self._decodes
        self.stats.jumped_tokens += token.jumped
        self._decodes = True
        self.tokens.append(token)
        self.stats.generated_tokens = len(self.tokens)

    def _settle(self, drawn: Drawn, index: int) -> Token:
        text = ""
        may_stop = index > self.options.min_tokens
        if drawn.token in self.end_tokens:
            self._finish("stop", self._text.flush(may_stop=may_stop).text)
        else:
            text, stopped = self._text.push(drawn.token, may_stop=may_stop)
            if stopped:
                self._finish("stop")
            elif index == self.options.max_tokens:
                # What was half a character may complete a stop string, and that wins.
                last = self._text.flush(may_stop=may_stop)
                is_whole = last.stopped or self._is_whole_with(drawn.token)
                self._finish("stop" if is_whole else "length", last.text)
        return Token(drawn.token, index, text, drawn.logprob, drawn.top_logprobs, drawn.jumped)

    def _is_whole_with(self, last: int) -> bool:
        """Whether a grammar ends with the last token, so that nothing was cut short."""
        return self.grammar is not None and self.grammar.is_whole_with(self.tokens, last)

    def _finish(self, reason: FinishReason, end_text: str = "") -> None:
        self.finish_reason = self.stats.finish_reason = reason
        self.end_text = end_text


class TokenEvent(NamedTuple):
    """A token that a step handed out, and whose it is."""

    sequence: Sequence
    token: Token
