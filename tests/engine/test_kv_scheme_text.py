"""How a KV scheme is written, and the `kv_config.json` of a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto_engine import InvalidOption, KVScheme, LayerQuantization, ModelLoadError
from tenuto_engine._kv_scheme import check_width, scheme_of, text_of

hows = st.builds(LayerQuantization, st.sampled_from([4, 8]), st.sampled_from([32, 64, 128]))
start_positions = st.integers(0, 2**31 - 1)
schemes = st.one_of(
    st.builds(
        lambda how, start: KVScheme(bits=how.bits, group_size=how.group_size, start=start),
        hows,
        start_positions,
    ),
    st.builds(
        lambda layers, start: KVScheme(layers=layers, start=start),
        st.dictionaries(st.integers(0, 90), hows, min_size=1, max_size=40),
        start_positions,
    ),
)


@given(schemes)
def test_a_scheme_comes_back_from_its_text(scheme: KVScheme) -> None:
    assert KVScheme.parse(str(scheme)) == scheme
    assert KVScheme.canonical_text(str(scheme)) == str(scheme)


@given(schemes, schemes)
def test_equal_schemes_and_no_others_have_equal_texts(one: KVScheme, other: KVScheme) -> None:
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("8", "8:64:0"),
        ("4:32", "4:32:0"),
        ("8:128:5000", "8:128:5000"),
        ("08:064:00", "8:64:0"),
        ("none", "none"),
        ("config", "config:0"),
        ("config:12", "config:12"),
        ("2=4:64,0=4:64,1=4:64,5=8:32@7", "0-2=4:64,5=8:32@7"),
    ],
)
def test_what_an_operator_types_has_a_canonical_text(given: str, canonical: str) -> None:
    assert KVScheme.canonical_text(given) == canonical


def test_the_order_of_layers_is_no_part_of_a_scheme() -> None:
    eight, four = LayerQuantization(8), LayerQuantization(4)
    assert str(KVScheme(layers={3: eight, 1: four})) == str(KVScheme(layers={1: four, 3: eight}))


def test_a_layer_that_is_not_named_keeps_its_precision() -> None:
    scheme = KVScheme.parse("0-1=8:32,3=4:64@0")
    assert [scheme.of_layer(layer) for layer in range(5)] == [
        (8, 32),
        (8, 32),
        None,
        (4, 64),
        None,
    ]
    assert KVScheme(bits=8).of_layer(70) == (8, 64)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not BITS"),
        ("q8", "'q8' is not BITS"),
        ("8:", "'8:' is not BITS"),
        ("8:64:0:0", "is not BITS"),
        ("-8", "is not BITS"),
        ("٨", "is not BITS"),
        ("5", "bits must be 4 or 8, is 5"),
        ("8:48", "group_size must be 32 or 64 or 128, is 48"),
        ("8:64:2147483648", "start must be from 0 to 2147483647, is 2147483648"),
        ("config:2147483648", "start must be from 0"),
        ("config:x", "is not BITS"),
        ("0=3:64@0", "layer 0: bits must be 4 or 8, is 3"),
        ("3-1=4:64@0", "'3-1=4:64' ends before it begins"),
        ("0-4=4:64,2=8:64@0", "layer 2 is named twice"),
        ("0-9999=4:64@0", "layer must be from 0 to 4095"),
        ("0=4:64", "is not BITS"),
        ("0=4@0", "'0=4' is not FIRST-LAST=BITS:GROUP_SIZE"),
    ],
)
def test_a_text_that_is_no_scheme_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(said)) as caught:
        KVScheme.canonical_text(text)
    assert caught.value.field == "kv_scheme"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "needs either bits"),
        ({"bits": 8, "layers": {0: LayerQuantization(4)}}, "needs either bits"),
        ({"layers": {0: LayerQuantization(4)}, "group_size": 32}, "beside the bits of each layer"),
        ({"bits": True}, "bits must be 4 or 8, is True"),
        ({"bits": 8.0}, "bits must be 4 or 8, is 8.0"),
        ({"bits": 8, "start": -1}, "start must be from 0"),
        ({"bits": 8, "start": 0.0}, "start must be from 0"),
    ],
)
def test_a_scheme_of_wrong_values_cannot_be_made(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        KVScheme(**values)


def test_a_start_needs_rows_that_decode_alone() -> None:
    late = KVScheme(bits=8, start=1)
    check_width(late, 1)
    check_width(KVScheme(bits=8), 8)
    check_width(None, 8)
    with pytest.raises(InvalidOption, match=r"start position of 1 needs a decode width of 1, .* 8"):
        check_width(late, 8)


def test_a_scheme_is_read_without_a_device() -> None:
    code = (
        "import sys; from tenuto_engine import KVScheme; KVScheme.parse('8:64:0');"
        "sys.exit('mlx' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- kv_config.json --------------------------------------------------------------------


def write(folder: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "kv_config.json").write_text(text)


def test_a_config_names_layers_and_defaults_to_groups_of_64(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            {"layer_idx": 2, "bits": 8, "group_size": 32, "why": "sensitive"},
            {"layer_idx": 0, "bits": 4},
        ],
    )
    for asked, start in (("config", 0), ("config:0", 0), ("config:300", 300)):
        scheme = scheme_of(asked, tmp_path)
        assert scheme == KVScheme(
            layers={0: LayerQuantization(4, 64), 2: LayerQuantization(8, 32)}, start=start
        )
        assert text_of(scheme) == f"0=4:64,2=8:32@{start}"


def test_a_config_is_read_only_where_it_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "no JSON")
    assert scheme_of(None, tmp_path) is None
    assert scheme_of("none", tmp_path) is None
    assert scheme_of("8", tmp_path) == KVScheme(bits=8)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "is no JSON"),
        ({"layer_idx": 0, "bits": 8}, "holds no list of layers"),
        ([], "holds no list of layers"),
        ([8], "entry 0 is no object"),
        ([{"bits": 8}], "entry 0: layer_idx is no whole number"),
        ([{"layer_idx": 0, "bits": 8}, {"layer_idx": 1}], "entry 1: bits is no whole number"),
        ([{"layer_idx": True, "bits": 8}], "entry 0: layer_idx is no whole number"),
        ([{"layer_idx": 0, "bits": "8"}], "entry 0: bits is no whole number"),
        ([{"layer_idx": 0, "bits": 8, "group_size": None}], "entry 0: group_size is no whole"),
        ([{"layer_idx": 0, "bits": 8}, {"layer_idx": 0, "bits": 4}], "layer_idx 0 is there twice"),
        ([{"layer_idx": 0, "bits": 6}], "layer 0: bits must be 4 or 8, is 6"),
        ([{"layer_idx": -1, "bits": 8}], "layer must be from 0 to 4095, is -1"),
    ],
)
def test_a_broken_config_is_refused_by_path_and_entry(
    tmp_path: Path, content: Any, said: str
) -> None:
    write(tmp_path, content)
    with pytest.raises(ModelLoadError, match=re.escape(said)) as caught:
        scheme_of("config", tmp_path)
    assert str(tmp_path / "kv_config.json") in str(caught.value)


def test_a_config_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"kv_config\.json: no such file"):
        scheme_of("config", tmp_path)
