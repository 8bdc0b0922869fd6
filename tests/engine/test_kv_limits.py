"""What a KV scheme costs, where it stands in a geometry, and which models cannot have one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from cache_models import _CONFIGS, CacheModel, cache_model, fresh_caches, get_classes
from tenuto_engine import (
    Engine,
    InvalidOption,
    KVScheme,
    LayerQuantization,
    ModelLoadError,
    UnsupportedScheme,
    _engine,
    _facts,
    model_facts,
)
from tenuto_engine._kv_quantizer import is_quantized_at, quantize_caches
from tenuto_engine._row_cost import RowCost, row_cost
from tenuto_engine._sizes import Sizes
from tiny_models import KINDS, Kind, build_tiny_model, tiny_config

CHUNK = 32
EIGHT = KVScheme(bits=8, group_size=32)


# -- what a row takes ------------------------------------------------------------------


def most_held(model: Any, scheme: KVScheme, tokens: int) -> int:
    """Bytes of a row's caches at their largest, between two forwards."""
    caches = fresh_caches(model)
    most: int = 0
    position = 0
    while position < tokens:
        length = min(CHUNK, tokens - position)
        mx.eval(model(mx.zeros((1, length), mx.int32), cache=caches))
        most = max(most, sum(cache.nbytes for cache in caches))
        due = not is_quantized_at(scheme, position)
        position += length
        if due and is_quantized_at(scheme, position):
            quantize_caches(caches, scheme)
    held: int = sum(cache.nbytes for cache in caches)
    return max(most, held)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "lfm2", "falcon_h1"])
@pytest.mark.parametrize("start", [0, 40, 300, 5000])
@pytest.mark.parametrize("tokens", [1, 40, 300, 700])
def test_a_row_never_takes_more_than_its_cost_and_nearly_that(
    kind: CacheModel, start: int, tokens: int
) -> None:
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = wide_model(kind, **(heads if kind == "lfm2" else {"head_dim": 32}))
    scheme = KVScheme(bits=8, group_size=32, start=start)
    cost = row_cost(model, lambda: fresh_caches(model), CHUNK, scheme)
    most = most_held(model, scheme, tokens)
    assert most <= cost.of(tokens)
    assert most >= cost.fixed + cost.per_token * (tokens - 1)
    # Buffers grow by 256 positions at a time, so so much of each layer may be unused.
    assert cost.plain is not None
    assert cost.of(tokens) - most <= 256 * (cost.plain.per_token + layer_bytes(cost.plain))


def layer_bytes(cost: RowCost) -> int:
    return sum(each for _, each in cost.windows)


_wide: dict[str, Any] = {}


def wide_model(kind: CacheModel, **changes: int) -> Any:
    if kind not in _wide:
        config = _CONFIGS[kind]() | changes
        model_class, args_class = get_classes(config)
        mx.random.seed(7)
        _wide[kind] = model_class(args_class.from_dict(config))
        mx.eval(_wide[kind].parameters())
    return _wide[kind]


def test_a_long_row_takes_what_the_bits_say() -> None:
    model = cache_model("llama_wide")
    plain = row_cost(model, lambda: fresh_caches(model), CHUNK)
    for bits, group_size in ((4, 64), (8, 32)):
        scheme = KVScheme(bits=bits, group_size=group_size)
        cost = row_cost(model, lambda: fresh_caches(model), CHUNK, scheme)
        # A scale and a bias of the activations' four bytes for each group.
        assert cost.per_token / plain.per_token == (bits / 8 + 8 / group_size) / 4
    assert plain.plain is None


def test_before_the_start_a_row_takes_what_a_plain_one_does() -> None:
    model = cache_model("llama_wide")
    plain = row_cost(model, lambda: fresh_caches(model), CHUNK)
    scheme = KVScheme(bits=8, start=2000)
    cost = row_cost(model, lambda: fresh_caches(model), CHUNK, scheme)
    assert cost.of(1500) == plain.of(1500)
    assert cost.of(2500) == plain.of(2000 - 1 + CHUNK)
    assert cost.of(100_000) == cost.per_token * (100_000 + 255) < plain.of(100_000) / 3
    costs = [cost.of(tokens) for tokens in range(0, 10_000, 7)]
    assert costs == sorted(costs)
    for size in (0, 10**6, 10**7, 10**8):
        most = cost.tokens_in(size)
        assert most is not None
        assert cost.of(most) <= size < cost.of(most + 1)


def test_measuring_computes_nothing() -> None:
    model = cache_model("llama_wide")
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    row_cost(model, lambda: fresh_caches(model), CHUNK, KVScheme(bits=8))
    # Ids of tokens, and the counters of the caches.
    assert mx.get_peak_memory() - before < 1024


def test_sizes_are_remembered_with_what_comes_before_the_start() -> None:
    plain = RowCost(7, 40, ((24, 5),))
    for cost in (plain, RowCost(7, 11, ((24, 2),), plain, 63)):
        sizes = Sizes(1000, cost)
        assert Sizes.unpack(json.loads(json.dumps(sizes.pack()))) == sizes
    packed = Sizes(1000, RowCost(7, 11, ((24, 2),), plain, 63)).pack()
    for wrong in ([*packed, 1], [*packed[:-1], 5], packed[:-1], [*packed[:-1], [1]]):
        assert Sizes.unpack(wrong) is None


# -- the geometry ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_facts_have_scheme_and_bytes_of_the_loaded_model(tmp_path: Path, kind: Kind) -> None:
    folder = build_tiny_model(tmp_path / "model", kind, wide=True)
    file = tmp_path / "hashes.json"
    fingerprints = set()
    for scheme in (None, "none", "8:32", "4:32:0", "8:32:100"):
        for _ in range(2):
            facts = model_facts(folder, chunk_size=16, kv_scheme=scheme, hash_cache=file)
            engine = Engine.load(folder, chunk_size=16, kv_scheme=scheme)
            assert facts.geometry == engine.geometry
            assert facts.row_cost == engine.row_cost
            assert facts.weight_bytes == engine.weight_bytes
            fingerprints.add(facts.geometry.fingerprint)
    assert len(fingerprints) == 4
    assert facts.geometry.kv_scheme == "8:32:100" == str(engine.kv_scheme)
    assert Engine.load(folder).geometry.kv_scheme == "none"


def test_a_scheme_of_the_models_config_stands_in_the_geometry_by_layers(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, wide=True)
    layers = [{"layer_idx": layer, "bits": 8, "group_size": 32} for layer in (0, 1)]
    (folder / "kv_config.json").write_text(json.dumps(layers))
    engine = Engine.load(folder, kv_scheme="config:9")
    assert engine.geometry.kv_scheme == "0-1=8:32@9"
    assert model_facts(folder, kv_scheme="config:9").geometry == engine.geometry
    assert Engine.load(folder).geometry.kv_scheme == "none"


def test_the_scheme_is_no_option_of_a_job() -> None:
    from tenuto_engine import GenerationOptions

    assert not [name for name in GenerationOptions.__dataclass_fields__ if "kv" in name]


# -- who cannot have one ---------------------------------------------------------------


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A folder of a random model of that config, with the tokenizer of a tiny one."""
    build_tiny_model(folder)
    model_class, args_class = get_classes(config)
    model = model_class(args_class.from_dict(config))
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def gpt_oss() -> dict[str, Any]:
    return tiny_config("llama", 97, 4096, 0) | {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "head_dim": 32,
        "sliding_window": 24,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-5,
    }


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "attention sinks": (gpt_oss, r"its attention has sinks \(model.layers.0.self_attn.sinks\)"),
    "MLA": (_CONFIGS["deepseek_v3"], r"its attention is MLA \(kv_lora_rank\)"),
    "MLA in a CacheList": (_CONFIGS["deepseek_v32"], r"its attention is MLA"),
    "chunked": (_CONFIGS["llama4"], "layer 0 keeps its KV in a ChunkedKVCache"),
    "recurrent only": (_CONFIGS["mamba2"], "the model has no KV, only recurrent state"),
    "narrow heads": (
        _CONFIGS["falcon_h1"],
        "keys of layer 0 have a head dimension of 8, no multiple of the group size 32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_have_a_scheme_is_refused_with_the_reason(
    tmp_path: Path, name: str
) -> None:
    config, reason = REFUSED[name]
    folder = write_model(tmp_path / "m", config())
    for load in (Engine.load, model_facts):
        with pytest.raises(UnsupportedScheme, match=reason) as caught:
            load(folder, kv_scheme=EIGHT)
        assert str(folder) in str(caught.value)
        assert "kv_scheme 8:32:0" in str(caught.value)
        assert isinstance(caught.value, ModelLoadError)
    # And is none the worse for it.
    assert model_facts(folder).row_cost is not None


def test_attention_that_does_something_of_its_own_with_keys_is_refused() -> None:
    model = cache_model("llama_wide")

    class Own:
        """Looks at the keys themselves."""

        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            logits: mx.array = model(tokens, cache=cache)
            assert cache[0].keys.shape[-1] == 64
            return logits

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    with pytest.raises(UnsupportedScheme, match="cannot read a quantized cache: AttributeError"):
        row_cost(Own(), lambda: fresh_caches(model), CHUNK, KVScheme(bits=8))


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((3, 4), "there is no layer 4, the model has 4 caches"),
        ((0, 1), "layer 0 has no KV, only recurrent state"),
    ],
)
def test_a_config_for_layers_that_have_no_kv_is_refused(
    tmp_path: Path, layers: tuple[int, ...], reason: str
) -> None:
    folder = build_tiny_model(tmp_path, "lfm2", wide=True)
    scheme = KVScheme(layers={layer: LayerQuantization(8, 32) for layer in layers})
    with pytest.raises(UnsupportedScheme, match=reason):
        Engine.load(folder, kv_scheme=scheme)


def test_a_start_is_refused_at_load_where_rows_decode_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_tiny_model(tmp_path, wide=True)
    for module in (_engine, _facts):
        monkeypatch.setattr(module, "DECODE_WIDTH", 8)
    for load in (Engine.load, model_facts):
        with pytest.raises(InvalidOption, match=r"kv_scheme: .* needs a decode width of 1"):
            load(folder, kv_scheme="8:32:100")
        load(folder, kv_scheme="8:32:0")


def test_a_text_that_is_no_scheme_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InvalidOption, match="kv_scheme: '8bit' is not BITS"):
        Engine.load(folder, kv_scheme="8bit")
