"""``Grammars``: those compiled for a model, and its tokenizer as llguidance has it."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tenuto_engine._errors import InvalidOption
from tenuto_engine._grammar import Grammar
from tenuto_engine._model import LoadedModel
from tenuto_engine._options import checked_grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_KEPT: Final = 32


class Grammars:
    """Compiles grammars for one model and keeps those used last. Any thread may use it.

    The first one wraps the tokenizer, which takes a second or so for a large vocabulary.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, source: Mapping[str, Any] | Grammar) -> Grammar:
        """The grammar of `source` for this model.

        Raises:
            InvalidOption: it cannot be compiled, or the model's tokenizer cannot be used with one.
        """
        if isinstance(source, Grammar):
            if source.vocabulary is self._vocabulary and not source.is_spoiled:
                return source
            source = source.source
        source = checked_grammar(source)
        # The order of a schema's properties is that of the output.
        key = json.dumps(source)
        with self._lock:
            found = self._kept.get(key)
            if found is None or found.is_spoiled:
                found = self._kept[key] = self._compiled(source)
            self._kept.move_to_end(key)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def _compiled(self, source: Mapping[str, Any]) -> Grammar:
        loaded = self._loaded
        return Grammar(source, self._wrapped(), loaded.vocab_size, loaded.eos_token_ids)

    def _wrapped(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = _wrap(self._loaded)
        return self._vocabulary


def _wrap(loaded: LoadedModel) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    if not loaded.eos_token_ids:
        raise InvalidOption("grammar", "the model has no end token, by which a grammar ends")
    tokenizer = loaded.tokenizer
    # Some models have ids beyond the tokenizer's, some the other way round.
    size = max(loaded.vocab_size, len(tokenizer.vocab), max(loaded.eos_token_ids) + 1)
    try:
        return from_tokenizer(
            tokenizer._tokenizer, n_vocab=size, eos_token=sorted(loaded.eos_token_ids)
        )
    except Exception as error:
        raise InvalidOption(
            "grammar", f"the tokenizer of the model cannot be used with one: {error}"
        ) from error
