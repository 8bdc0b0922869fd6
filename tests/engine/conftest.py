"""Tiny models on disk, one of each cache kind, and engines that loaded them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tenuto_engine import Engine
from tiny_models import KINDS, Kind, build_tiny_model

LoadEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """A model folder of each kind; nobody changes them."""
    root = tmp_path_factory.mktemp("models")
    return {kind: build_tiny_model(root / kind, kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each cache kind in turn."""
    chosen: Kind = request.param
    return chosen


@pytest.fixture
def load_engine(model_folders: dict[Kind, Path]) -> LoadEngine:
    """`load_engine(kind, **how)`: the tiny model of a kind, with chunks of 16, not pipelined."""

    def load(
        kind: Kind, *, chunk_size: int = 16, pipelined: bool | None = False, **how: Any
    ) -> Engine:
        folder = model_folders[kind]
        return Engine.load(folder, chunk_size=chunk_size, pipelined=pipelined, **how)

    return load


@pytest.fixture
def llama(load_engine: LoadEngine) -> Engine:
    """The tiny llama, with one slot."""
    return load_engine("llama")
