"""Engines whose KV is quantized: the numbers of mlx-lm, and every resume the same to the bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from cache_models import fresh_caches, mlx_caches
from engine_runs import PROMPT, STYLES, Run, engine_in_memory, finish, run, run_with_checkpoints
from tenuto_engine import (
    Checkpoint,
    CheckpointStore,
    Engine,
    GenerationOptions,
    KVScheme,
    LayerQuantization,
    ResumeMismatch,
    SequenceState,
    Token,
    _slots,
    resume_options,
)
from tenuto_engine._cache_tree import leaf_caches
from tenuto_engine._kv_quantizer import quantize_caches
from tenuto_engine._log import LogFile
from tenuto_engine._quantized_ring import QuantizedRotatingKVCache
from tiny_models import KINDS, Kind, build_tiny_model

TOKENS: Final = 40
CHUNK: Final = 16
START_IN_PROMPT: Final = 20
"""Not at a border: the chunk that ends at 32 comes to it."""

Load = Callable[..., Engine]
maybe_quantize_kv_cache: Any = sys.modules[generate_step.__module__].maybe_quantize_kv_cache
# Each kind with each start, and each of both with either loop, without all that there could be.
scenes = pytest.mark.parametrize(
    ("kind", "where", "pipelined"),
    [
        ("llama", "from the start", False),
        ("llama", "in the prompt", True),
        ("llama", "in the answer", False),
        ("gemma3_text", "from the start", True),
        ("gemma3_text", "in the prompt", False),
        ("gemma3_text", "in the answer", True),
        ("lfm2", "from the start", False),
        ("lfm2", "in the prompt", True),
        ("lfm2", "in the answer", False),
    ],
)
starts = pytest.mark.parametrize("where", ["from the start", "in the prompt", "in the answer"])


@pytest.fixture(scope="session")
def wide_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """Models whose heads can be quantized."""
    root = tmp_path_factory.mktemp("wide")
    return {kind: build_tiny_model(root / kind, kind, wide=True) for kind in KINDS}


@pytest.fixture
def load(wide_folders: dict[Kind, Path]) -> Load:
    """`load(kind, scheme, **how)`, with chunks of 16, not pipelined."""

    def load(kind: Kind, scheme: KVScheme | str | None, **how: Any) -> Engine:
        values = {"chunk_size": CHUNK, "pipelined": False} | how
        return Engine.load(wide_folders[kind], kv_scheme=scheme, **values)

    return load


def encode(engine: Engine) -> list[int]:
    return engine.encode_prompt(PROMPT, raw=True)


def start_at(where: str, load: Load, kind: Kind) -> int:
    """The start position that is meant."""
    prompt = len(encode(load(kind, None)))
    assert prompt > START_IN_PROMPT
    return {"from the start": 0, "in the prompt": START_IN_PROMPT}.get(where, prompt + 7)


def uniform(start: int, bits: int = 4) -> KVScheme:
    return KVScheme(bits=bits, group_size=32, start=start)


# -- the numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
@starts
def test_tokens_and_logprobs_are_those_of_generate_step(
    load: Load, kind: Kind, where: str, bits: int
) -> None:
    start = start_at(where, load, kind)
    engine = load(kind, uniform(start, bits))
    made = run(engine, encode(engine), max_tokens=TOKENS, ignore_eos=True)
    theirs = list(
        generate_step(
            mx.array(encode(engine)),
            engine._loaded.model,
            max_tokens=TOKENS,
            prefill_step_size=CHUNK,
            kv_bits=bits,
            kv_group_size=32,
            quantized_kv_start=start,
        )
    )
    assert made.ids == [int(token) for token, _ in theirs]
    assert [token.logprob for token in made.tokens] == [row[i].item() for i, row in theirs]


def test_caches_are_those_of_maybe_quantize_kv_cache(load: Load) -> None:
    engine = load("llama", uniform(0))
    prompt = encode(engine)
    caches = fresh_caches(engine._loaded.model)
    sequence = engine.add(prompt, GenerationOptions(max_tokens=2, ignore_eos=True))
    for begin in range(0, len(prompt) - 1, CHUNK):
        chunk = prompt[begin : min(begin + CHUNK, len(prompt) - 1)]
        mx.eval(engine._loaded.model(mx.array([chunk]), cache=caches))
        maybe_quantize_kv_cache(caches, 0, 32, 4)
        engine.step()
        # The step that reads the last chunk reads the last token, too.
        [row] = engine._slots.rows
        if row.position == begin + len(chunk):
            for ours, theirs in zip(row.caches, caches, strict=True):
                assert same_arrays(ours, theirs)
    engine.close(sequence)


def same_arrays(one: Any, other: Any) -> bool:
    pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return all(mx.array_equal(ours, theirs).item() for ours, theirs in pairs)


class Rounding(mlx_caches.KVCache):  # type: ignore[misc]  # mlx-lm is not annotated
    """Keeps full precision of what is left of each position when it is quantized once."""

    how: LayerQuantization

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(rounded(keys, self.how), rounded(values, self.how))


class RoundingRing(mlx_caches.RotatingKVCache):  # type: ignore[misc]
    """The same of a window."""

    how: LayerQuantization

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(rounded(keys, self.how), rounded(values, self.how))


def rounded(array: mx.array, how: LayerQuantization) -> mx.array:
    values, scales, biases = mx.quantize(array, group_size=how.group_size, bits=how.bits)
    return mx.dequantize(values, scales, biases, group_size=how.group_size, bits=how.bits)


def rounding(cache: Any, how: LayerQuantization) -> Any:
    """An empty plain cache that rounds."""
    ring = isinstance(cache, mlx_caches.RotatingKVCache)
    made = RoundingRing(cache.max_size, keep=cache.keep) if ring else Rounding()
    made.how = how
    return made


@pytest.mark.parametrize("bits", [4, 8])
def test_logits_of_windows_are_those_of_plain_attention_over_rounded_positions(
    load: Load, bits: int
) -> None:
    model = load("gemma3_text", None)._loaded.model
    scheme = uniform(0, bits)
    caches = fresh_caches(model)
    how = LayerQuantization(bits, 32)
    plain = [rounding(cache, how) for cache in caches]
    quantize_caches(caches, scheme)
    assert {type(cache) for cache in caches} == {
        QuantizedRotatingKVCache,
        mlx_caches.QuantizedKVCache,
    }
    for number, length in enumerate([CHUNK, CHUNK, 5, *[1] * 60, 3, CHUNK, *[1] * 30]):
        tokens = mx.random.randint(0, 300, (1, length), key=mx.random.key(number))
        ours, theirs = model(tokens, cache=caches), model(tokens, cache=plain)
        assert mx.allclose(ours, theirs, atol=2e-3), number
        assert mx.array_equal(mx.argmax(ours, -1), mx.argmax(theirs, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_bits_give_other_logprobs_and_another_start_too(load: Load, kind: Kind) -> None:
    schemes = [None, uniform(0), uniform(0, 8), uniform(START_IN_PROMPT)]
    runs = []
    for scheme in schemes:
        engine = load(kind, scheme)
        runs.append(run(engine, encode(engine), max_tokens=5, ignore_eos=True))
    logprobs = {tuple(token.logprob for token in each.tokens) for each in runs}
    assert len(logprobs) == len(schemes)


def test_layers_are_quantized_each_as_the_scheme_says(tmp_path: Path) -> None:
    layers = {0: LayerQuantization(8, 32), 3: LayerQuantization(4, 32)}
    folder = build_tiny_model(tmp_path, "gemma3_text", wide=True, layers=4)
    engine = Engine.load(folder, chunk_size=CHUNK, kv_scheme=KVScheme(layers=layers))
    sequence = engine.add(encode(engine), GenerationOptions(max_tokens=4, ignore_eos=True))
    engine.step()
    [row] = engine._slots.rows
    assert [type(cache).__name__ for cache in row.caches] == [
        "QuantizedRotatingKVCache",
        "KVCache",
        "RotatingKVCache",
        "QuantizedKVCache",
    ]
    assert (row.caches[0].bits, row.caches[3].bits) == (8, 4)
    engine.close(sequence)


def test_a_row_is_quantized_once_and_not_again_after_a_resume(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load("llama", uniform(START_IN_PROMPT))
    rows: list[int] = []
    layers: list[int] = []
    quantize = mlx_caches.KVCache.to_quantized

    def counted(self: Any, **how: int) -> Any:
        layers.append(self.offset)
        return quantize(self, **how)

    def counted_row(caches: list[Any], scheme: KVScheme) -> None:
        rows.append(caches[0].offset)
        quantize_caches(caches, scheme)

    monkeypatch.setattr(mlx_caches.KVCache, "to_quantized", counted)
    monkeypatch.setattr(_slots, "quantize_caches", counted_row)
    options = STYLES["greedy"] | {"max_tokens": 20}
    whole, taken = run_with_checkpoints(engine, encode(engine), options)
    assert resume(engine, taken[5], options) == rest(whole, 5)
    assert rows == [2 * CHUNK]
    assert layers == [2 * CHUNK] * 2


def test_only_one_layer_at_a_time_is_held_in_both_forms() -> None:
    caches: list[Any] = [mlx_caches.KVCache() for _ in range(8)]
    for cache in caches:
        cache.update_and_fetch(*(mx.ones((1, 4, 4096, 64)) for _ in range(2)))
        mx.eval(cache.keys, cache.values)
    layer = cache.nbytes
    del cache
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    quantize_caches(caches, KVScheme(bits=8))
    assert mx.get_peak_memory() - before < layer / 2
    assert before - mx.get_active_memory() > 5 * layer


# -- resumes ---------------------------------------------------------------------------


def resume(engine: Engine, checkpoint: Checkpoint, options: dict[str, Any], **how: Any) -> Run:
    tokens, resumed = resume_options(checkpoint, GenerationOptions(**options), **how)
    return finish(engine, engine.add(tokens, resumed))


def rest(whole: Run, handed_out: int) -> Run:
    return whole._replace(tokens=whole.tokens[handed_out:])


def kinds_in(checkpoint: Checkpoint) -> set[str]:
    return {state.kind for state in checkpoint.caches}


@scenes
def test_a_resume_at_any_step_gives_the_rest_to_the_bit(
    load: Load, kind: Kind, where: str, pipelined: bool
) -> None:
    start = start_at(where, load, kind)
    engine = load(kind, uniform(start), pipelined=pipelined)
    options = STYLES["sampled"] | {"max_tokens": TOKENS}
    whole, taken = run_with_checkpoints(engine, encode(engine), options)
    assert whole == run(load(kind, uniform(start)), encode(engine), **options)
    for checkpoint in taken:
        done = checkpoint.generated_tokens
        is_quantized = len(checkpoint.cache_tokens) >= start
        assert bool({"QuantizedKVCache", "QuantizedRotatingKVCache"} & kinds_in(checkpoint)) == (
            is_quantized
        )
        assert bool({"KVCache", "RotatingKVCache"} & kinds_in(checkpoint)) != is_quantized
        if done % 15 == 0:
            assert resume(engine, checkpoint, options) == rest(whole, done)
        else:
            tokens, resumed = resume_options(checkpoint, GenerationOptions(**options))
            with engine.generate(tokens, resumed) as generation:
                few = [token for token, _ in zip(generation, range(4), strict=False)]
            assert few == whole.tokens[done : done + 4]


@starts
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_resumes_at_every_step_through_files_gives_the_same_run(
    load: Load, tmp_path: Path, kind: Kind, where: str
) -> None:
    engine = load(kind, uniform(start_at(where, load, kind)))
    options = STYLES["sampled"] | {"max_tokens": 40}
    prompt = encode(engine)
    whole = run(engine, prompt, **options)
    tokens: list[Token] = []
    for epoch in range(1, 100):
        store = CheckpointStore(tmp_path / "j1", epoch=epoch)
        ids, resumed = resume_options(
            store.newest_valid(), GenerationOptions(**options), tokens, prompt_tokens=prompt
        )
        sequence = engine.add(ids, resumed)
        tokens += [event.token for event in engine.step()]
        if sequence.state.is_end:
            break
        assert engine.checkpoint_to(sequence, store.save)
        assert sequence.stats.checkpoint_errors == 0
        engine.close(sequence)
        store.close()
    assert Run(tokens, sequence.end_text, sequence.finish_reason) == whole
    assert sequence.stats.divergences == 0


@scenes
def test_a_resume_at_any_prefill_border_gives_the_same_run(
    load: Load, kind: Kind, where: str, pipelined: bool
) -> None:
    engine = load(kind, uniform(start_at(where, load, kind)), pipelined=pipelined)
    options = STYLES["sampled"] | {"max_tokens": 20}
    prompt = encode(engine)
    sequence = engine.add(prompt, GenerationOptions(**options))
    borders = []
    while sequence.state in (SequenceState.WAITING, SequenceState.PREFILL):
        checkpoint = engine.checkpoint(sequence)
        borders += [checkpoint] if checkpoint else []
        engine.step()
    engine.close(sequence)
    whole = run(engine, prompt, **options)
    assert [len(border.cache_tokens) for border in borders] == list(range(CHUNK, len(prompt), 16))
    for border in borders:
        assert resume(engine, border, options, prompt_tokens=prompt) == whole


@scenes
def test_a_catch_up_from_any_checkpoint_computes_every_published_token_again(
    load: Load, kind: Kind, where: str, pipelined: bool
) -> None:
    engine = load(kind, uniform(start_at(where, load, kind)), pipelined=pipelined)
    options = STYLES["sampled"] | {"max_tokens": 40}
    prompt = encode(engine)
    whole, taken = run_with_checkpoints(engine, prompt, options)
    for checkpoint in [None, taken[0], taken[3], taken[20]]:
        ids, resumed = resume_options(
            checkpoint, GenerationOptions(**options), whole.tokens[:30], prompt_tokens=prompt
        )
        sequence = engine.add(ids, resumed)
        assert finish(engine, sequence) == rest(whole, 30)
        assert sequence.stats.divergences == 0


@pytest.mark.parametrize("model", ["falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("start", [0, START_IN_PROMPT, 110])
def test_recurrent_layers_beside_quantized_ones_resume_to_the_bit(
    load: Load, model: Any, start: int
) -> None:
    engine = engine_in_memory(load("llama", None), model, head_dim=32, kv_scheme=uniform(start))
    prompt = [byte % engine.vocab_size for byte in PROMPT.encode()]
    options = STYLES["greedy"] | {"max_tokens": 40}
    whole, taken = run_with_checkpoints(engine, prompt, options)
    kept = engine.add(prompt, GenerationOptions(max_tokens=40, ignore_eos=True))
    while len(kept.tokens) < 30:
        engine.step()
    [row] = engine._slots.rows
    leaves = {type(leaf).__name__ for leaf in leaf_caches(row.caches)}
    assert leaves == {"ArraysCache", "QuantizedKVCache"}
    engine.close(kept)
    for checkpoint in taken[::7]:
        done = checkpoint.generated_tokens
        assert resume(engine, checkpoint, options) == rest(whole, done)


def test_a_neighbour_that_comes_to_the_start_changes_nobody_elses_bits(load: Load) -> None:
    options: dict[str, Any] = STYLES["sampled"] | {"max_tokens": 40}
    engine = load("gemma3_text", uniform(50), slots=2)
    alone = run(engine, encode(engine)[:20], **options)
    other = engine.add(encode(engine), GenerationOptions(**options))
    assert run(engine, encode(engine)[:20], **options) == alone
    engine.close(other)


# -- checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_cost_follows_the_new_positions_but_for_the_checkpoint_after_the_start(
    load: Load, tmp_path: Path, kind: Kind
) -> None:
    start = start_at("in the answer", load, kind)
    engine = load(kind, uniform(start))
    store = CheckpointStore(tmp_path / "j1", epoch=1)
    options = STYLES["greedy"] | {"max_tokens": 20, "checkpoint_every_tokens": 1}
    run(engine, encode(engine), **options, on_decode_checkpoint=store.save)
    [path] = (tmp_path / "j1").glob("*.log")
    spans = [(e.span.generation, e.span.start, e.span.stop) for e in LogFile.scan(path).spans]
    first = spans[0][2]
    before = [(0, position - 1, position) for position in range(first + 1, start)]
    assert spans[1:] == [
        *before,
        (1, 0, start),
        *((1, position - 1, position) for position in range(start + 1, spans[-1][2] + 1)),
    ]
    assert spans[-1][2] > start + 5


def test_a_scheme_from_the_start_has_one_generation(load: Load, tmp_path: Path) -> None:
    engine = load("gemma3_text", uniform(0))
    store = CheckpointStore(tmp_path / "j1", epoch=1)
    how: dict[str, Any] = {"checkpoint_every_tokens": 1, "checkpoint_every_seconds": 0.0}
    options = STYLES["greedy"] | how | {"max_tokens": 20}
    run(engine, encode(engine), **options, on_decode_checkpoint=store.save)
    [path] = (tmp_path / "j1").glob("*.log")
    spans = [(e.span.generation, e.span.start) for e in LogFile.scan(path).spans]
    assert spans[:3] == [(0, 0), (0, CHUNK), (0, 2 * CHUNK)]
    assert {generation for generation, _ in spans} == {0}


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (uniform(0, 8), uniform(0, 4), "layer 0 of the cache is of 8 bits in groups of 32 at"),
        (None, uniform(0, 4), "layer 0 of the cache is not quantized at"),
        (uniform(0, 4), uniform(500, 4), "kv_scheme 4:32:500 it is not quantized"),
        (uniform(0, 4), "1=4:32@0", "layer 0 of the cache is of 4 bits"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_checkpoint_of_another_scheme_is_refused(
    load: Load, kind: Kind, theirs: KVScheme | None, ours: KVScheme | str, said: str
) -> None:
    options = STYLES["greedy"] | {"max_tokens": 10}
    engine = load(kind, theirs)
    _, taken = run_with_checkpoints(engine, encode(engine), options)
    with pytest.raises(ResumeMismatch, match=said):
        resume(load(kind, ours), taken[4], options)
