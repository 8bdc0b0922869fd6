"""``Engine``: a model and its slots. One thread, the decode thread, makes every call into it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from tenuto_engine import _model, _prompt
from tenuto_engine._adapters import Adapter, Adapters, no_adapters
from tenuto_engine._admission import admit
from tenuto_engine._checkpoint import Checkpoint
from tenuto_engine._compiled import check_compiles, check_plain
from tenuto_engine._errors import (
    InvalidOption,
    ModelLoadError,
    ResumeMismatch,
    UnsupportedScheme,
)
from tenuto_engine._fs import StrPath
from tenuto_engine._generation import Generation
from tenuto_engine._geometry import DECODE_WIDTH, Geometry, default_chunk, geometry_of
from tenuto_engine._grammar import Grammar
from tenuto_engine._grammars import Grammars
from tenuto_engine._kv_scheme import KVScheme, check_width, scheme_of, text_of
from tenuto_engine._live import LiveCheckpoint
from tenuto_engine._longest import longest_token
from tenuto_engine._model import LoadedModel
from tenuto_engine._options import GenerationOptions
from tenuto_engine._prefill import PrefillTurn
from tenuto_engine._prefix import Prefix, PrefixCache, PrefixOffers
from tenuto_engine._row_cost import RowCost, row_cost
from tenuto_engine._sequence import Sequence, SequenceState, TokenEvent
from tenuto_engine._slots import Row, Slots
from tenuto_engine._stepper import Stepper


class Engine:
    """Runs up to ``slots`` generations of one model, a step at a time.

    A row's tokens depend on nothing but its own prompt and options. Made by ``load``.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        slots: int,
        chunk_size: int,
        pipelined: bool | None,
        hash_cache: Path | None = None,
        prefix_cache: PrefixCache | None = None,
        kv_scheme: KVScheme | None = None,
        prefill_turn: PrefillTurn | None = None,
        compiled: bool = False,
        adapters: Path | None = None,
    ) -> None:
        self._loaded = loaded
        self._prefix_cache = prefix_cache
        self._slots = Slots(slots)
        self._chunk = chunk_size
        self._backlog: list[TokenEvent] = []
        self._generations: weakref.WeakKeyDictionary[Sequence, weakref.ref[Generation]]
        self._generations = weakref.WeakKeyDictionary()
        self._geometry: Geometry | None = None
        self._kv_scheme = kv_scheme
        self._compiled = compiled
        self._row_cost = _cost(loaded, chunk_size, kv_scheme)
        self._hash_cache = hash_cache
        self._grammars = Grammars(loaded)
        self._adapters = (
            None if adapters is None else Adapters(loaded.model, loaded.make_caches, adapters)
        )
        self._weight_bytes = loaded.weight_bytes
        self._stepper = Stepper(
            loaded.model,
            self._slots,
            chunk=chunk_size,
            pipelined=pipelined,
            turn=prefill_turn or PrefillTurn(),
            compiled=compiled,
            weight_bytes=self._weight_bytes,
        )
        self._longest_token: int | None = None
        self._is_longest_known = False

    @classmethod
    def load(
        cls,
        path_or_repo: StrPath,
        *,
        slots: int = 1,
        chunk_size: int | None = None,
        pipelined: bool | None = None,
        hash_cache: StrPath | None = None,
        prefix_cache: PrefixCache | None = None,
        kv_scheme: KVScheme | str | None = None,
        prefill_turn: PrefillTurn | None = None,
        compiled: bool = False,
        adapters: StrPath | None = None,
    ) -> Engine:
        """Load a model folder, or a Hugging Face repository by name.

        Args:
            path_or_repo: the folder, or ``owner/name``.
            slots: how many generations may run at once.
            chunk_size: tokens of a prefill chunk; None is 512 on a GPU, 32 on a CPU. Part of
                the geometry: another size gives other bits.
            pipelined: dispatch step n+1 before token n is read; None is on a GPU always, on a
                CPU while a row's caches are small enough to gain by it. It
                changes the speed, never a bit.
            hash_cache: a file that remembers the hashes of model files, so that ``geometry``
                reads unchanged weights only once.
            prefix_cache: where prompts that begin alike share what their prefill computes. It may
                be shared with other engines, and changes no bit.
            kv_scheme: how the KV of all rows is quantized: a ``KVScheme``, or its text, such as
                ``8:64:0``; ``config`` or ``config:START`` is the ``kv_config.json`` of the model;
                None or ``none`` is full precision. Part of the geometry.
            prefill_turn: shared by engines that one thread steps in turns, so that the rows of all
                decode at least as long as a chunk of a prompt took, whichever engine read it.
            compiled: run decode steps through ``mx.compile``; for models whose caches are all plain
                ones, without a ``kv_scheme``. Part of the geometry.
            adapters: a folder of LoRA adapters, a subfolder each as mlx_lm.lora writes them, for
                ``GenerationOptions.adapter``. They are loaded when they are asked for.

        Raises:
            ModelLoadError: nothing usable is there, or it cannot be compiled. UnsupportedCache and
                UnsupportedScheme are of those.
            InvalidOption: ``slots`` or ``chunk_size`` is below 1, ``kv_scheme`` is no scheme, or is
                there with ``compiled``, or ``adapters`` is no folder.
        """
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        chunk = default_chunk() if chunk_size is None else chunk_size
        for name, value in (("slots", slots), ("chunk_size", chunk)):
            if value < 1:
                raise InvalidOption(name, f"must be at least 1, is {value}")
        scheme = None
        if kv_scheme is not None:
            path_or_repo = _model.find_folder(path_or_repo)
            scheme = scheme_of(kv_scheme, path_or_repo)
            check_width(scheme, DECODE_WIDTH)
        check_plain(scheme, compiled=compiled)
        loaded = _model.load(path_or_repo)
        if compiled:
            _check_compiles(loaded)
        return cls(
            loaded,
            slots=slots,
            chunk_size=chunk,
            pipelined=True if pipelined is None and on_gpu else pipelined,
            hash_cache=None if hash_cache is None else Path(hash_cache),
            prefix_cache=prefix_cache,
            kv_scheme=scheme,
            prefill_turn=prefill_turn,
            compiled=compiled,
            adapters=None if adapters is None else Path(adapters).expanduser(),
        )

    @property
    def tokenizer(self) -> TokenizerWrapper:
        """mlx-lm's tokenizer of the model."""
        return self._loaded.tokenizer

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and answer together; None if the model does not say."""
        return self._loaded.context_length

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids with which the model ends."""
        return self._loaded.eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._loaded.vocab_size

    @property
    def slots(self) -> int:
        """How many generations may run at once."""
        return self._slots.count

    @property
    def free_slots(self) -> int:
        """How many more may be added now."""
        self._close_abandoned()
        return self._slots.free

    @property
    def geometry(self) -> Geometry:
        """All that decides the bits of a logit here, without an adapter; computed at the first
        use."""
        if self._geometry is None:
            self._geometry = geometry_of(
                self._loaded.path,
                width=DECODE_WIDTH,
                chunk=self._chunk,
                compiled=self._compiled,
                kv_scheme=text_of(self._kv_scheme),
                cache_file=self._hash_cache,
            )
        return self._geometry

    def geometry_of(self, adapter: str | Adapter | None) -> Geometry:
        """The same of rows with an adapter; None is ``geometry``. Raises as ``load_adapter``."""
        if adapter is None:
            return self.geometry
        return self.geometry.with_adapter(self.load_adapter(adapter).hash)

    @property
    def kv_scheme(self) -> KVScheme | None:
        """How the KV of all rows is quantized; None is full precision."""
        return self._kv_scheme

    @property
    def weight_bytes(self) -> int:
        """Bytes that the model takes, without rows."""
        return self._weight_bytes

    @property
    def row_cost(self) -> RowCost:
        """How many bytes a row may need, by its length."""
        return self._row_cost

    def encode_prompt(self, prompt: _prompt.Prompt, raw: bool = False) -> list[int]:
        """Token ids of a text, of chat messages or of ids.

        A text becomes one user message of the chat template, unless `raw` or there is none.

        Raises:
            PromptError: it is empty or malformed.
        """
        return _prompt.encode(self._loaded, prompt, raw=raw)

    def prompt_text(self, prompt: _prompt.Prompt, raw: bool = False) -> str | None:
        """What `encode_prompt` tokenizes, as text; None of token ids.

        Raises:
            PromptError: as there.
        """
        return _prompt.text_of(self._loaded, prompt, raw=raw)

    @property
    def longest_token(self) -> int | None:
        """A text has at least one token for so many of its characters without control characters,
        as `ModelFacts` has it, but of the text as it is tokenized, with the chat template's.
        Computed at the first use."""
        if not self._is_longest_known:
            self._longest_token = longest_token(self._loaded.tokenizer)
            self._is_longest_known = True
        return self._longest_token

    def compile_grammar(self, grammar: Mapping[str, Any] | Grammar) -> Grammar:
        """A grammar compiled for this model, for ``GenerationOptions.grammar``.

        `add` compiles too, but on the thread that steps the engine. This one may be called on any
        thread. What was compiled lately is kept.

        Args:
            grammar: as ``GenerationOptions.grammar``; one compiled by another engine is
                compiled again.

        Raises:
            InvalidOption: it is not valid, or the model cannot be used with one.
        """
        return self._grammars.compile(grammar)

    def load_adapter(self, adapter: str | Adapter) -> Adapter:
        """An adapter of the folder, for ``GenerationOptions.adapter``, as its files are now.

        `add` loads too, but on the thread that steps the engine. This one may be called on any
        thread. What was used lately is kept.

        Args:
            adapter: its name; what another engine loaded is loaded again.

        Raises:
            InvalidOption: there is none of that name.
            UnsupportedAdapter: it cannot be read, or is of another model.
        """
        if self._adapters is None:
            raise no_adapters()
        return self._adapters.load(adapter)

    def add(self, prompt_tokens: Ids[int], options: GenerationOptions | None = None) -> Sequence:
        """Give a generation a slot. It runs with the next ``step``.

        Args:
            prompt_tokens: the prompt; for a resumed run, with the generated tokens whose KV
                is in the cache after it.
            options: what is asked for.

        Raises:
            NoFreeSlot: all slots are taken.
            PromptError: no tokens, or ids that the model does not have.
            PromptTooLong: prompt and ``max_tokens`` are over the context length.
            InvalidOption: an option does not fit the model or the prompt. UnsupportedAdapter is
                one.
            ResumeMismatch: the cache does not fit the model or the prompt.
        """
        self._close_abandoned()
        self._slots.require_free()
        options = options or GenerationOptions()
        adapter = self._adapter_of(options)
        if adapter is not None:
            # By now it is settled which one, whatever becomes of its files.
            options = replace(options, adapter=adapter)
        if options.cache is None and options.prefix is None:
            options = replace(options, prefix=self.find_prefix(prompt_tokens, options))
        elif options.prefix is not None:
            self._check_prefix(options.prefix, adapter)
        row = admit(
            self._loaded,
            prompt_tokens,
            options,
            self._chunk,
            self._grammars,
            self._kv_scheme,
            adapter,
        )
        self._share_prefix(row, options)
        self._stepper.seat(row)
        return row.sequence

    def _adapter_of(self, options: GenerationOptions) -> Adapter | None:
        if options.adapter is None:
            return None
        adapter = self.load_adapter(options.adapter)
        assert self._adapters is not None, "it has loaded one"
        self._adapters.check(adapter)
        return adapter

    def _check_prefix(self, prefix: Prefix, adapter: Adapter | None) -> None:
        if prefix.tokens and prefix.fingerprint != self.geometry_of(adapter).fingerprint:
            raise ResumeMismatch("the prefix is of another geometry", hint="or another adapter")

    def find_prefix(
        self, prompt_tokens: Ids[int], options: GenerationOptions | None = None
    ) -> Prefix:
        """What of a prompt the prefix cache has, for ``GenerationOptions.prefix``.

        It may read the disk; on any thread, so that the decode thread need not wait.

        Args:
            prompt_tokens: as ``add`` gets them.
            options: the same; generated tokens at the end of ``prompt_tokens`` are left out, and
                what is found is of their adapter.
        """
        if self._prefix_cache is None:
            return Prefix()
        generated = options.initial_generated_tokens if options else 0
        prompt = prompt_tokens[: len(prompt_tokens) - generated]
        geometry = self.geometry_of(options.adapter if options else None)
        return self._prefix_cache.find(geometry.fingerprint, prompt, self._chunk)

    def _share_prefix(self, row: Row, options: GenerationOptions) -> None:
        # Caches that somebody else filled may hold what decode wrote, whose bits are others.
        if self._prefix_cache is not None and options.cache is None:
            row.offers = PrefixOffers(
                self._prefix_cache,
                self.geometry_of(row.adapter).fingerprint,
                row.sequence.prompt,
                self._chunk,
                caches=row.caches,
                position=row.position,
            )

    def generate(
        self, prompt_tokens: Ids[int], options: GenerationOptions | None = None
    ) -> Generation:
        """Run a generation as an iterator of its tokens. Raises as ``add`` does."""
        sequence = self.add(prompt_tokens, options)
        generation = Generation(sequence, pump=self._pump, close=self.close)
        self._generations[sequence] = weakref.ref(generation)
        return generation

    def step(self) -> list[TokenEvent]:
        """Move every row on by one step and return the tokens handed out, oldest first.

        At most one row reads a chunk of its prompt. A row that raises is FAILED, with the
        exception as its ``error``; the others go on. The tokens of a ``Generation`` go to
        it instead.
        """
        self._pump()
        events, self._backlog = self._backlog, []
        return events

    def checkpoint(self, sequence: Sequence) -> Checkpoint | None:
        """All that `sequence` needs to go on elsewhere, between any two steps.

        None if nothing is computed yet, or if it has ended.
        """
        row = self._slots.find(sequence)
        live = row.checkpoint() if row else None
        return live.whole() if live else None

    def checkpoint_to(
        self, sequence: Sequence, callback: Callable[[LiveCheckpoint], object]
    ) -> bool:
        """Call `callback` with a checkpoint of now, between any two steps.

        Whatever it raises is logged and counted, as of ``on_decode_checkpoint``.

        Returns:
            False if it was not called, as nothing is computed yet, or `sequence` has ended.
        """
        row = self._slots.find(sequence)
        live = row.checkpoint() if row else None
        if row is None or live is None:
            return False
        row.hand_over(live, callback)
        return True

    def close(self, sequence: Sequence) -> None:
        """End `sequence` and free its slot; nothing more is handed out. Harmless after an end."""
        if self._slots.find(sequence):
            self._stepper.end(sequence, SequenceState.CLOSED)

    def _pump(self) -> None:
        self._close_abandoned()
        for event in self._stepper.step():
            reference = self._generations.get(event.sequence)
            generation = reference() if reference else None
            if generation is None:
                self._backlog.append(event)
            else:
                generation.receive(event.token)

    def _close_abandoned(self) -> None:
        for sequence, reference in list(self._generations.items()):
            if reference() is None:
                self.close(sequence)


def _cost(loaded: LoadedModel, chunk: int, scheme: KVScheme | None) -> RowCost:
    try:
        return row_cost(loaded.model, loaded.make_caches, chunk, scheme)
    except UnsupportedScheme as error:
        raise UnsupportedScheme(f"{loaded.path}: {error}") from error
    except Exception as error:
        raise _model.cannot_run(loaded.path, error) from error


def _check_compiles(loaded: LoadedModel) -> None:
    try:
        check_compiles(loaded.model, loaded.make_caches)
    except ModelLoadError as error:
        raise ModelLoadError(f"{loaded.path}: {error}") from error
