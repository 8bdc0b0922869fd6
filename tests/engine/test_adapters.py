"""LoRA adapters: mlx-lm's numbers, each row with its own, and nothing of them in the others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model, quantize_model

from adapter_shop import write_adapter
from cache_models import _CONFIGS, CacheModel, cache_model, get_classes
from engine_runs import (
    GREEDY,
    STYLES,
    Run,
    engine_in_memory,
    finish,
    rest,
    resume,
    run,
    run_with_checkpoints,
)
from tenuto_engine import (
    Engine,
    GenerationOptions,
    InvalidOption,
    PrefixCache,
    ResumeMismatch,
    UnsupportedAdapter,
    resume_options,
)
from tenuto_engine._adapter_layers import sites_of
from tiny_models import Kind

LoadEngine = Callable[..., Engine]

TOKENS = 30
IDS = [3 + (7 * place) % 89 for place in range(45)]
NAMES = ("poet", "clerk", "all")
pipelines = pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])


@pytest.fixture
def adapters(model_folders: dict[Kind, Path], kind: Kind, tmp_path: Path) -> Path:
    """Three adapters of a model of that kind."""
    folder = tmp_path / "adapters"
    model = model_folders[kind]
    write_adapter(folder, "poet", model)
    write_adapter(folder, "clerk", model, seed=2, rank=8, scale=5.0)
    write_adapter(folder, "all", model, seed=3, suffixes=None)
    return folder


@pytest.fixture
def lora(load_engine: LoadEngine, kind: Kind, adapters: Path) -> Engine:
    return load_engine(kind, adapters=adapters, slots=4)


def alone(engine: Engine, adapter: str | None, **options: Any) -> Run:
    return run(engine, IDS, **{**GREEDY, "max_tokens": TOKENS, **options}, adapter=adapter)


# -- the numbers -----------------------------------------------------------------------


def of_mlx_lm(model: Any, prompt: list[int], chunk: int = 16) -> tuple[list[int], list[float]]:
    made = list(generate_step(mx.array(prompt), model, max_tokens=TOKENS, prefill_step_size=chunk))
    return [int(token) for token, _ in made], [_number(row[token]) for token, row in made]


def _number(array: mx.array) -> float:
    value: Any = array.item()
    return float(value)


@pytest.mark.parametrize("how", ["lora", "dora"])
@pytest.mark.parametrize("bits", [None, 4])
def test_tokens_and_logprobs_are_those_of_mlx_lm(
    load_engine: LoadEngine,
    model_folders: dict[Kind, Path],
    kind: Kind,
    tmp_path: Path,
    how: str,
    bits: int | None,
) -> None:
    loaded = load_engine(kind)._loaded
    theirs, config = load_model(model_folders[kind])
    if bits:
        for model in (loaded.model, theirs):
            quantize_model(model, config, group_size=32, bits=bits)
            mx.eval(model.parameters())
    # mlx-lm has no DoRA of a quantized embedding.
    suffixes = ("_proj",) if how == "dora" else None
    own = write_adapter(tmp_path, "poet", theirs, kind=how, suffixes=suffixes)
    load_adapters(theirs, str(own))
    theirs.eval()
    ids, logprobs = of_mlx_lm(theirs, IDS)
    for pipelined in (False, True):
        engine = Engine(loaded, slots=1, chunk_size=16, pipelined=pipelined, adapters=tmp_path)
        made = alone(engine, "poet")
        assert made.ids == ids
        assert [token.logprob for token in made.tokens] == logprobs
        assert made.ids != alone(engine, None).ids


@pytest.mark.parametrize("model", get_args(CacheModel))
def test_every_layer_of_every_architecture_gives_what_mlx_lm_gives(
    llama: Engine, model: CacheModel, tmp_path: Path
) -> None:
    """Experts, embeddings that are the head too, latent attention, recurrent layers."""
    base = cache_model(model)
    own = write_adapter(tmp_path, "all", base, suffixes=None)
    engine = engine_in_memory(llama, model, adapters=tmp_path)
    model_class, args_class = get_classes(_CONFIGS[model]())
    theirs = model_class(args_class.from_dict(_CONFIGS[model]()))
    theirs.update(base.parameters())
    load_adapters(theirs, str(own))
    theirs.eval()
    ids, logprobs = of_mlx_lm(theirs, IDS)
    made = alone(engine, "all")
    assert made.ids == ids
    assert [token.logprob for token in made.tokens] == logprobs
    assert made.ids != alone(engine, None).ids


def test_a_layer_that_the_model_looks_into_cannot_be_changed(
    load_engine: LoadEngine, model_folders: dict[Kind, Path], tmp_path: Path
) -> None:
    write_adapter(tmp_path, "poet", model_folders["llama"])
    engine = load_engine("llama", adapters=tmp_path)
    kind: Any = type(engine._loaded.model)

    class Peeking(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **more: Any) -> Any:
            assert self.layers[1].self_attn.q_proj.weight is not None
            return super().__call__(*args, **more)

    before = alone(engine, None)
    object.__setattr__(engine._loaded.model, "__class__", Peeking)
    with pytest.raises(UnsupportedAdapter, match="poet: the model cannot run with it: Attribute"):
        engine.add(IDS, GenerationOptions(adapter="poet"))
    assert not engine._slots.rows
    assert alone(engine, None) == before


# -- side by side ----------------------------------------------------------------------


@pipelines
@pytest.mark.parametrize("style", STYLES)
def test_rows_of_different_adapters_give_side_by_side_what_each_gives_alone(
    load_engine: LoadEngine, kind: Kind, adapters: Path, style: str, pipelined: bool
) -> None:
    engine = load_engine(kind, adapters=adapters, slots=4, pipelined=pipelined)
    plain = load_engine(kind, pipelined=pipelined)
    options = {**STYLES[style], "max_tokens": 12}
    # Some still read their prompts when others decode.
    rows = {
        name: (IDS[: 20 + 23 * place], name) for place, name in enumerate((None, *NAMES, "poet"))
    }
    apart = {
        name: run(plain if name is None else engine, prompt, **options, adapter=name)
        for name, (prompt, _) in rows.items()
    }
    assert len({tuple(each.ids) for each in apart.values()}) == len(apart)
    sequences = {
        name: engine.add(prompt, GenerationOptions(**options, adapter=name))
        for name, (prompt, _) in rows.items()
    }
    made: dict[Any, list[Any]] = {sequence: [] for sequence in sequences.values()}
    while engine._slots.rows:
        for event in engine.step():
            made[event.sequence].append(event.token)
    for name, sequence in sequences.items():
        assert made[sequence] == apart[name].tokens, name


def test_a_row_without_an_adapter_runs_the_model_itself(lora: Engine) -> None:
    plain = {path: site.plain for path, site in sites_of(lora._loaded.model).items()}
    row = lora.add(IDS, GenerationOptions(max_tokens=2))
    model = lora._loaded.model
    assert lora._stepper._model_of(lora._slots.rows[0], model) is model
    with_one = lora.add(IDS, GenerationOptions(max_tokens=2, adapter="all"))
    while not (row.state.is_end and with_one.state.is_end):
        lora.step()
        assert {path: site.plain for path, site in sites_of(lora._loaded.model).items()} == plain
    # What rows without adapters have of the engine is what one without a folder gives.
    assert row.error is None
    assert with_one.error is None


def test_a_forward_that_raises_leaves_the_model_as_it_was(
    lora: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = alone(lora, None)
    adapter = lora.load_adapter("all")
    sequence = lora.add(IDS, GenerationOptions(adapter=adapter, max_tokens=4))
    _, layer = adapter.model._layers[len(adapter.model._layers) // 2]

    def breaks(*args: Any, **more: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(type(layer), "__call__", breaks)
    lora.step()
    assert str(sequence.error) == "out of luck"
    monkeypatch.undo()
    assert alone(lora, None) == before
    assert alone(lora, "poet").ids != before.ids


# -- resuming --------------------------------------------------------------------------


@pipelines
@pytest.mark.parametrize("style", STYLES)
def test_a_run_resumed_from_any_checkpoint_is_the_undisturbed_one(
    load_engine: LoadEngine, kind: Kind, adapters: Path, style: str, pipelined: bool
) -> None:
    engine = load_engine(kind, adapters=adapters, pipelined=pipelined)
    options = {**STYLES[style], "max_tokens": 12, "adapter": "all"}
    whole, taken = run_with_checkpoints(engine, IDS, options)
    fresh = load_engine(kind, adapters=adapters, pipelined=pipelined)
    assert len(taken) >= 11
    for checkpoint in taken:
        handed_out = checkpoint.generated_tokens
        assert resume(fresh, checkpoint, options) == rest(whole, handed_out)


@pipelines
def test_a_run_killed_at_any_step_of_its_prompt_or_answer_goes_on_beside_others(
    load_engine: LoadEngine, kind: Kind, adapters: Path, pipelined: bool
) -> None:
    engine = load_engine(kind, adapters=adapters, pipelined=pipelined, slots=3)
    options = {**STYLES["sampled"], "max_tokens": 6}
    whole = alone(engine, "all", **options)
    kills = []
    for steps in range(1, 30):
        killed = engine.add(IDS, GenerationOptions(**options, adapter="all"))
        published: list[Any] = []
        for _ in range(steps):
            published += [event.token for event in engine.step()]
        if killed.state.is_end:
            break
        checkpoint = engine.checkpoint(killed)
        engine.close(killed)
        assert checkpoint is not None
        kills.append(checkpoint.pending_token is None)
        others = [
            engine.add(IDS, GenerationOptions(**options, adapter=name)) for name in ("clerk", None)
        ]
        tokens, resumed = resume_options(
            checkpoint,
            GenerationOptions(**options, adapter="all"),
            published,
            prompt_tokens=IDS,
        )
        made = finish(engine, engine.add(tokens, resumed))
        for other in others:
            engine.close(other)
        assert made == rest(whole, len(published)), f"killed after step {steps}"
    # In its prompt and in its answer.
    assert set(kills) == {True, False}
    assert len(kills) >= 6


# -- prompts that begin alike ----------------------------------------------------------


def test_kv_is_shared_with_rows_of_the_same_adapter_alone(
    load_engine: LoadEngine, kind: Kind, adapters: Path
) -> None:
    cache = PrefixCache(2**28, block_tokens=16)
    engine = load_engine(kind, adapters=adapters, prefix_cache=cache)
    without = load_engine(kind, adapters=adapters)
    for first in (None, "poet", "clerk"):
        for found in (0, 32):
            sequence = engine.add(IDS, GenerationOptions(**GREEDY, max_tokens=8, adapter=first))
            assert sequence.stats.cached_tokens == found, first
            assert finish(engine, sequence) == alone(without, first, max_tokens=8)
            cache.flush()
    other = engine.find_prefix(IDS, GenerationOptions(adapter="poet"))
    assert other.tokens == 32
    with pytest.raises(ResumeMismatch, match="another geometry"):
        engine.add(IDS, GenerationOptions(prefix=other))
    with pytest.raises(ResumeMismatch, match="another geometry"):
        engine.add(IDS, GenerationOptions(prefix=other, adapter="clerk"))


# -- which one -------------------------------------------------------------------------


def test_the_geometry_is_that_of_the_bytes_of_both_files(llama: Engine, tmp_path: Path) -> None:
    own = write_adapter(tmp_path, "poet", llama._loaded.model)
    seen = set()
    for file in (None, "adapters.safetensors", "adapter_config.json"):
        if file is not None:
            content = bytearray((own / file).read_bytes())
            # The last bit of a weight; white space.
            content[-1] ^= 1 if file.endswith("safetensors") else 0
            (own / file).write_bytes(content + (b" " if file.endswith("json") else b""))
        engine = Engine(llama._loaded, slots=1, chunk_size=16, pipelined=False, adapters=tmp_path)
        here = engine.geometry_of("poet")
        assert here.adapter_hash
        seen |= {here.fingerprint, engine.geometry.fingerprint}
        assert engine.geometry_of(None) == engine.geometry == llama.geometry
        assert not here.compatible_kv(engine.geometry)
    assert len(seen) == 4
    # The same bytes under another name, or elsewhere, give the same bits.
    copied = tmp_path / "elsewhere" / "other"
    copied.parent.mkdir()
    own.rename(copied)
    engine = Engine(llama._loaded, slots=1, chunk_size=16, pipelined=False, adapters=copied.parent)
    assert engine.geometry_of("other") == here


def test_a_changed_file_makes_another_adapter_and_rows_keep_theirs(
    llama: Engine, tmp_path: Path
) -> None:
    base = llama._loaded.model
    write_adapter(tmp_path, "poet", base)
    engine = Engine(llama._loaded, slots=3, chunk_size=16, pipelined=False, adapters=tmp_path)
    before, geometry = alone(engine, "poet"), engine.geometry_of("poet")
    options = GenerationOptions(**GREEDY, max_tokens=TOKENS, adapter="poet")
    seated = engine.add(IDS, options)
    held = engine.load_adapter("poet")
    engine.step()
    write_adapter(tmp_path, "poet", base, seed=9)
    fresh = engine.add(IDS, options)
    made: dict[Any, list[Any]] = {seated: [], fresh: []}
    while engine._slots.rows:
        for event in engine.step():
            made[event.sequence].append(event.token)
    assert made[seated] == before.tokens
    assert made[fresh] == alone(engine, "poet").tokens != before.tokens
    assert engine.geometry_of("poet") != geometry == engine.geometry_of(held)
    # What was loaded stays what it is, and what is there again is what it was.
    assert run(engine, IDS, **GREEDY, max_tokens=TOKENS, adapter=held) == before
    write_adapter(tmp_path, "poet", base)
    assert engine.load_adapter("poet") is held
    (tmp_path / "poet").rename(tmp_path / "elsewhere")
    with pytest.raises(InvalidOption, match=r"adapter: there is no adapter poet \(there are: else"):
        engine.load_adapter("poet")


def test_one_that_another_engine_loaded_is_loaded_again(
    load_engine: LoadEngine, kind: Kind, adapters: Path
) -> None:
    first, second = (load_engine(kind, adapters=adapters) for _ in range(2))
    adapter = first.load_adapter("poet")
    assert second.load_adapter(adapter) is not adapter
    assert alone(second, None) != run(second, IDS, **GREEDY, max_tokens=TOKENS, adapter=adapter)


def test_those_used_last_are_kept_and_those_in_use_stay(
    llama: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenuto_engine import _adapters

    monkeypatch.setattr(_adapters, "_KEPT", 2)
    for number in range(4):
        write_adapter(tmp_path, f"n{number}", llama._loaded.model, seed=number)
    engine = Engine(llama._loaded, slots=1, chunk_size=16, pipelined=False, adapters=tmp_path)
    assert engine._adapters is not None
    each = engine.load_adapter("n0").nbytes
    sequence = engine.add(IDS, GenerationOptions(adapter="n0"))
    for number in range(1, 4):
        engine.load_adapter(f"n{number}")
    gc.collect()
    assert engine._adapters.nbytes == 3 * each
    assert engine.load_adapter("n0") is engine._slots.rows[0].adapter
    engine.close(sequence)
    engine.load_adapter("n2")
    engine.load_adapter("n3")
    gc.collect()
    assert engine._adapters.nbytes == 2 * each


def test_a_sequence_that_is_kept_keeps_neither_adapter_nor_model(
    load_engine: LoadEngine, adapters: Path, model_folders: dict[Kind, Path]
) -> None:
    write_adapter(adapters, "poet", model_folders["llama"])
    engine = load_engine("llama", adapters=adapters)
    sequence = engine.add(IDS, GenerationOptions(max_tokens=2, adapter=engine.load_adapter("poet")))
    finish(engine, sequence)
    model = weakref.ref(engine._loaded.model)
    del engine
    gc.collect()
    assert model() is None
    assert sequence.options.adapter == "poet"


def test_loading_draws_no_random_number(lora: Engine) -> None:
    mx.random.seed(5)
    wanted = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(5)
    alone(lora, "all", max_tokens=2)
    assert mx.random.uniform(shape=(3,)).tolist() == wanted


def test_adapters_are_loaded_on_any_thread_while_rows_decode(
    load_engine: LoadEngine, kind: Kind, adapters: Path
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    engine = load_engine(kind, adapters=adapters, slots=2)
    write_adapter(adapters, "half", engine._loaded.model, dtype="bfloat16")
    names = ("poet", "half")
    expected = {name: alone(load_engine(kind, adapters=adapters), name) for name in (None, *names)}
    with ThreadPoolExecutor(1) as pool:
        for name in names:
            plain = engine.add(IDS, GenerationOptions(**GREEDY, max_tokens=TOKENS))
            waiting = pool.submit(engine.load_adapter, name)
            assert finish(engine, plain) == expected[None]
            loaded = waiting.result(timeout=60)
            made = run(engine, IDS, **GREEDY, max_tokens=TOKENS, adapter=loaded)
            assert made == expected[name]


def test_without_a_folder_an_adapter_is_refused_by_name(llama: Engine, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="adapter: the engine was loaded without a folder"):
        llama.add(IDS, GenerationOptions(adapter="poet"))
    with pytest.raises(InvalidOption, match=r"adapters: .*: no such folder"):
        Engine.load(llama._loaded.path, adapters=tmp_path / "nowhere")
    wrong: Any = 7
    with pytest.raises(InvalidOption, match="adapter: must be a name, is 7"):
        GenerationOptions(adapter=wrong)
