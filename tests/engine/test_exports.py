"""The public names, and that describing tokens starts no device."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tenuto_engine


def test_every_public_name_is_there() -> None:
    for name in tenuto_engine.__all__:
        value = getattr(tenuto_engine, name)
        assert value.__name__ == name
        assert value.__module__.startswith("tenuto_engine._")
        assert value.__doc__
    assert set(tenuto_engine.__all__) <= set(dir(tenuto_engine))


def test_a_type_checker_sees_the_same_names() -> None:
    tree = ast.parse(Path(str(tenuto_engine.__file__)).read_text())
    guarded = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    imported = [
        alias.asname for node in guarded if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert sorted(map(str, imported)) == tenuto_engine.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Metronome"):
        _ = tenuto_engine.Metronome


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_tokens_options_and_errors_need_no_mlx() -> None:
    code = (
        "import sys; from tenuto_engine import GenerationOptions, Sequence, Token, EngineError;"
        "print('mlx' in sys.modules or 'mlx.core' in sys.modules)"
    )
    assert run_python(code) == "False"


def test_cudnn_attention_is_off_before_mlx_is_imported_unless_the_user_chose() -> None:
    code = "import tenuto_engine, os; print(os.environ['MLX_CUDA_USE_CUDNN_SDPA'])"
    assert run_python(code) == "0"
    assert run_python(f"import os; os.environ['MLX_CUDA_USE_CUDNN_SDPA'] = '1'; {code}") == "1"
