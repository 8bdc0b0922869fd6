"""``AdapterFolder``: the adapters of a folder, as they fit a model that need not be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tenuto_engine._adapter_files import (
    NAME_HINT,
    AdapterFiles,
    Stamp,
    adapter_names,
    adapter_stamp,
    check_folder,
    ill_named,
    look_at_adapter,
)
from tenuto_engine._adapter_layers import (
    LEAVES,
    AdaptedModel,
    Sites,
    check_runs,
    fitting,
    sites_of,
    stand_in,
)
from tenuto_engine._errors import InvalidOption, UnsupportedAdapter
from tenuto_engine._fs import StrPath
from tenuto_engine._model import find_folder
from tenuto_engine._remembered import Remembered, read_remembered, write_remembered
from tenuto_engine._sizes import hollow


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """An adapter that is not loaded.

    Attributes:
        name: of its subfolder.
        hash: over the bytes of its files, for ``Geometry.with_adapter``; empty if it does not fit.
        nbytes: what it takes in memory.
        problem: why it cannot be used with the model, by tensor or field; empty if it can.
    """

    name: str
    hash: str = ""
    nbytes: int = 0
    problem: str = ""


class AdapterFolder:
    """Looks at a folder of adapters, as often as its owner likes: only what is new or has changed
    is read.

    Args:
        folder: has one subfolder for each adapter.
        model: the folder of the model, or its hub name.
        hash_cache: a file that remembers hashes of weights.

    Raises:
        InvalidOption: there is no such folder.
        ModelLoadError: there is no model.
    """

    def __init__(
        self, folder: StrPath, model: StrPath, *, hash_cache: StrPath | None = None
    ) -> None:
        self.folder = check_folder(Path(folder).expanduser())
        self._model = find_folder(model)
        self._hash_cache = None if hash_cache is None else Path(hash_cache)
        self._seen: dict[str, tuple[Stamp, AdapterFacts]] = {}

    def look(self) -> dict[str, AdapterFacts]:
        """What is there now, by name."""
        stamps = {name: adapter_stamp(self.folder, name) for name in adapter_names(self.folder)}
        news = [name for name, stamp in stamps.items() if self._is_news(name, stamp)]
        remembered = read_remembered(self._hash_cache) if news else {}
        before = dict(remembered)
        model = _HollowModel(self._model)
        for name in news:
            self._seen[name] = (stamps[name] or (), self._look_at(name, model, remembered))
        if self._hash_cache is not None and remembered != before:
            changed = {key: found for key, found in remembered.items() if before.get(key) != found}
            write_remembered(self._hash_cache, read_remembered(self._hash_cache) | changed)
        self._seen = {name: self._seen[name] for name in stamps}
        found = {name: facts for name, (_, facts) in self._seen.items()}
        return found | {
            name: AdapterFacts(name, problem=f"its name must be {NAME_HINT}")
            for name in ill_named(self.folder)
        }

    def _is_news(self, name: str, stamp: Stamp | None) -> bool:
        return not stamp or name not in self._seen or self._seen[name][0] != stamp

    def _look_at(self, name: str, model: _HollowModel, remembered: Remembered) -> AdapterFacts:
        try:
            files = look_at_adapter(self.folder, name, remembered)
            model.try_with(files)
        except UnsupportedAdapter as error:
            return AdapterFacts(name, problem=error.reason)
        except InvalidOption as error:
            # It has gone since it was listed.
            return AdapterFacts(name, problem=error.problem)
        except Exception as error:  # noqa: BLE001 - any code of mlx-lm's models may run here
            return AdapterFacts(name, problem=f"the model cannot be built: {error}")
        return AdapterFacts(name, files.hash, files.nbytes)


class _HollowModel:
    """The model without its weights, made at the first need."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: tuple[Any, Sites] | None = None

    def try_with(self, files: AdapterFiles) -> None:
        model, sites = self._made = self._made or self._make()
        layers = tuple(
            (site, site.layer(files.kind, files.scale, _stand_ins(files, path)))
            for path, site in fitting(files, sites).items()
        )
        check_runs(files.name, AdaptedModel(model, layers), make_prompt_cache(model))

    def _make(self) -> tuple[Any, Sites]:
        model, _ = load_model(self._folder, lazy=True)
        hollow(model)
        return model, sites_of(model)


def _stand_ins(files: AdapterFiles, path: str) -> Mapping[str, Any]:
    return {leaf: stand_in(files.tensors[f"{path}.{leaf}"]) for leaf in LEAVES[files.kind]}
