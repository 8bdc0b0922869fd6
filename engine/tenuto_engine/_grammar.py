"""``Grammar``: a compiled constraint on the text of a generation, and ``GrammarState``, where one
generation stands in it. No MLX in here.

llguidance does the matching. A state is a function of the grammar and the tokens matched, so a
resume rebuilds it by matching the generated tokens again, about 2 us each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tenuto_engine._deep_stack import on_deep_stack
from tenuto_engine._errors import GenerationFailed, InvalidOption, ResumeMismatch
from tenuto_engine._token import Token

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LONGEST_REASON: Final = 400
_LIMITS: Final = ("ParserTooComplex", "LexerTooComplex")
_RULE_HEAD: Final = re.compile(r"(?m)(?:^|\{)[ \t]*[?!]?(?P<name>[a-z_]\w*)(?:\.-?\d+)?[ \t]*\[")
_CAPTURE: Final = re.compile(r'\[[ \t]*capture[ \t]*(?:=[ \t]*"[^"\n]*"[ \t]*)?\]')
_LONG_QUOTE: Final = re.compile(r'"[^"]{12,}"')


class Grammar:
    """What the text of a generation must match, compiled for one tokenizer.

    Made by ``Engine.compile_grammar``. It never changes, and any thread may use it.

    Attributes:
        source: what it was compiled from, one of ``json_schema``, ``regex`` and ``lark``.
        vocabulary: the tokenizer that it was compiled for.
        vocab_size: ids from here on are none of the model's.
        textual_ends: the ids with which the model ends, and which its tokenizer has as ordinary
            text. They end a text only where it is complete.
        is_spoiled: llguidance failed in one of its states. All of them share a lexer, which is of
            no use to others then: it is compiled anew for the next one.
    """

    def __init__(
        self,
        source: Mapping[str, Any],
        vocabulary: LLTokenizer,
        vocab_size: int,
        ends: Collection[int],
    ) -> None:
        """Compile; raises ``InvalidOption`` with the parser's reason."""
        from llguidance import LLMatcher, LLParserLimits

        self.source = source
        self.vocabulary = vocabulary
        self.vocab_size = vocab_size
        # Ordinary text fits into any string; a special token comes where the grammar has it.
        self.textual_ends = [each for each in sorted(ends) if not vocabulary.is_special_token(each)]
        # Its verbose errors repeat the grammar and the text so far, and errors are logged.
        limits = LLParserLimits(verbose_errors=False)
        (kind,) = source
        if problem := attributes_of(source):
            raise InvalidOption("grammar", f"{kind}: {problem}")
        form = _llguidance_form(source)
        # Long chains of rules recurse.
        self._start = on_deep_stack(lambda: LLMatcher(vocabulary, form, log_level=0, limits=limits))
        if self._start.is_error():
            raise InvalidOption("grammar", f"{kind}: {_reason(self._start.get_error())}")
        self.is_spoiled = False
        try:
            self.begin().allowed([], 0, vocab_size)
        except GenerationFailed as error:
            problem = str(error).removeprefix("grammar: ")
            raise InvalidOption("grammar", f"{kind}: nothing can begin: {problem}") from error

    def begin(self) -> GrammarState:
        """Where a generation stands before its first token."""
        return GrammarState(self, self._start.deep_copy())


class GrammarState:
    """Where one generation stands in its grammar: which tokens may come next.

    Invariant: it has matched exactly the generated tokens before the one that was drawn last,
    those whose KV is in the row's caches when the draw is made; the pending one only just before
    its forward, where that takes forced tokens along.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._matched = 0

    def allowed(self, tokens: Ids[Token], count: int, width: int) -> NDArray[np.bool_]:
        """Which ids may be token ``count + 1``: bool ``[width]``.

        Args:
            tokens: the generated ones; the first `count` are matched.
            width: how many logits the model gives; those beyond the tokenizer's may not.

        Raises:
            ResumeMismatch: the grammar refuses one of them, so another one let it through.
            GenerationFailed: the grammar is too complex here, or names no token of the model.
        """
        self._match(tokens, count)
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._require_sound()
        allowed = np.zeros(width, np.bool_)
        known = np.unpackbits(packed, bitorder="little")[:width]
        allowed[: known.size] = known
        if not self._matcher.is_accepting():
            allowed[[token for token in self._grammar.textual_ends if token < width]] = False
        if not allowed.any():
            raise GenerationFailed(f"grammar: no token of the model may follow token {count}")
        return allowed

    def forced(self, tokens: Ids[Token], count: int) -> list[int]:
        """The ids that have to follow the first `count` of `tokens`, as the tokenizer would cut
        the text; it may be none. They are not matched yet.

        Raises:
            ResumeMismatch, GenerationFailed: as ``allowed``.
        """
        self._match(tokens, count)
        found: list[int] = self._matcher.compute_ff_tokens()
        self._require_sound()
        if not found:
            return found
        # Some tokenizers have ids that their models lack.
        beyond = (place for place, each in enumerate(found) if each >= self._grammar.vocab_size)
        found = found[: next(beyond, len(found))]
        # What it says has to follow, it may not accept: an end, in some grammars.
        return found[: self._matcher.deep_copy().try_consume_tokens(found)]

    def is_whole_with(self, tokens: Ids[Token], last: int) -> bool:
        """Whether nothing but an end may follow all `tokens` and `last`."""
        matcher = self._matcher.deep_copy()
        rest = [*(token.token for token in tokens[self._matched :]), last]
        matched = matcher.try_consume_tokens(rest) == len(rest)
        return matched and matcher.is_stopped() and not matcher.is_error()

    def _match(self, tokens: Ids[Token], count: int) -> None:
        assert self._matched <= count <= len(tokens), "a state never goes back"
        new = [token.token for token in tokens[self._matched : count]]
        done = self._matcher.try_consume_tokens(new)
        self._matched += done
        if done < len(new):
            self._require_sound()
            raise ResumeMismatch(f"the grammar does not allow token {self._matched + 1}")

    def _require_sound(self) -> None:
        """Raise if a limit was hit: what it gives from then on is an end, wherever it stands."""
        stop = self._matcher.stop_reason()
        if self._matcher.is_error() or stop in _LIMITS:
            self._grammar.is_spoiled = True
            reason = _reason(self._matcher.get_error() or stop)
            raise GenerationFailed(f"grammar: {reason}, after token {self._matched}")


def attributes_of(source: Mapping[str, Any]) -> str:
    """Which attributes of rules a Lark grammar has that cannot be kept over a resume; "" for none.

    With them llguidance's state depends on more than the tokens matched, or it gives up midway.
    """
    text = source.get("lark", "")
    for head in _RULE_HEAD.finditer(text):
        if not _CAPTURE.match(text, head.end() - 1):
            return f"the rule {head['name']} has attributes in brackets, which are not supported"
    return ""


def _llguidance_form(source: Mapping[str, Any]) -> str:
    """The grammar in the JSON that llguidance reads, in which each kind is named."""
    ((kind, value),) = source.items()
    if kind == "json_schema":
        part = {"json_schema": value}
    elif kind == "regex":
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_regex(value)
    else:
        part = {"lark_grammar": value}
    return json.dumps({"grammars": [part]})


def _reason(error: str) -> str:
    """The parser's message without the parts of the grammar that it shows: users' texts are in no
    error, since errors are logged. ``submit`` shows them to who wrote the grammar."""
    lines = [line for line in error.splitlines() if line and line[0] not in " \t<"]
    said = _LONG_QUOTE.sub('"..."', "; ".join(lines)) or "is not valid"
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}..."
