"""``LoadedModel``: weights, tokenizer and what the engine must know of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model
from mlx_lm.utils import load_tokenizer as load_any_tokenizer

from tenuto_engine._caches import check_supported
from tenuto_engine._errors import ModelLoadError, UnsupportedCache
from tenuto_engine._fs import StrPath

_CONTEXT_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.tiktoken", "*.model")

# Metal evicts the weights of a model near the working set's limit at every step, unless they
# are wired; wiring smaller ones only takes memory from others.
_WIRED_SHARE: Final = 0.5
_MOST_TOKENS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on the device.

    Attributes:
        path: the folder it came from.
        model: the mlx-lm module; called as ``model(tokens[1, L], cache=caches)``, it gives
            logits ``[1, L, V]``.
        tokenizer: mlx-lm's wrapper.
        config: ``config.json``, with what ``generation_config.json`` adds.
        vocab_size: V; token ids are below it.
        context_length: most tokens of prompt and answer together, None if not known.
        eos_token_ids: the ids that end a generation.
    """

    path: Path
    model: Any
    tokenizer: TokenizerWrapper
    config: Mapping[str, Any]
    vocab_size: int
    context_length: int | None
    eos_token_ids: frozenset[int]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all arrays that the model holds."""
        return bytes_of(self.model)

    def make_caches(self) -> list[Any]:
        """Fresh, empty caches, one a layer."""
        return make_prompt_cache(self.model)

    @property
    def decode(self) -> Callable[[list[int]], str]:
        """Gives the text of tokens, special ones included."""
        # Not a method: a sequence may be kept for long after its model was unloaded.
        return cast(Callable[[list[int]], str], self.tokenizer.decode)


def load(path_or_repo: StrPath) -> LoadedModel:
    """Load a model folder, or a Hugging Face repository by its name.

    Raises:
        ModelLoadError: nothing usable is there; the message names the path and the reason.
        UnsupportedCache: the model keeps its state in a cache that cannot be saved exactly.
    """
    folder = find_folder(path_or_repo)
    model, config = _load_weights(folder)
    tokenizer = load_tokenizer(folder, config)
    loaded = LoadedModel(
        path=folder,
        model=model,
        tokenizer=tokenizer,
        config=config,
        vocab_size=vocab_size_of(folder, config),
        context_length=context_length_of(config),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
    )
    try:
        check_supported(loaded.make_caches())
    except UnsupportedCache as error:
        raise UnsupportedCache(f"{folder}: {error}") from error
    _wire(loaded.weight_bytes)
    return loaded


def find_folder(path_or_repo: StrPath) -> Path:
    """The folder of a model; a Hugging Face repository is fetched.

    Raises:
        ModelLoadError: there is none, or it lacks the files of a model.
    """
    folder = Path(path_or_repo).expanduser()
    if not folder.exists():
        if isinstance(path_or_repo, str) and _HUB_NAME.fullmatch(path_or_repo):
            return _download(path_or_repo)
        raise ModelLoadError(f"{folder}: no such folder", hint=_FOLDER_HINT)
    if not folder.is_dir():
        raise ModelLoadError(f"{folder}: is a file, not a model folder", hint=_FOLDER_HINT)
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder}: has no config.json", hint=_FOLDER_HINT)
    if not any(folder.glob("model*.safetensors")):
        raise ModelLoadError(f"{folder}: has no model*.safetensors", hint=_FOLDER_HINT)
    return folder


_FOLDER_HINT: Final = (
    "give a folder with config.json, model*.safetensors and a tokenizer, as mlx_lm.convert "
    "writes it, or the name of a Hugging Face repository"
)


def _download(repo: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=list(_HUB_FILES)))
    except Exception as error:
        raise ModelLoadError(
            f"{repo}: no folder here, and not fetched from the hub: {_reason(error)}",
            hint="check the name and the network, or give a local folder",
        ) from error


def _load_weights(folder: Path) -> tuple[Any, dict[str, Any]]:
    try:
        model, config = load_model(folder)
        # Arrays that are no parameters (rotary frequencies) are lazy still, and a lazy
        # array cannot be used on another thread than the one that made it.
        mx.eval(_arrays(dict(model)))
    except Exception as error:
        mx.clear_cache()
        raise cannot_run(folder, error) from error
    return model, config


def load_tokenizer(folder: Path, config: Mapping[str, Any]) -> TokenizerWrapper:
    """The tokenizer of a model folder, in mlx-lm's wrapper.

    Raises:
        ModelLoadError: it cannot be loaded.
    """
    try:
        load_any = cast(Callable[..., TokenizerWrapper], load_any_tokenizer)
        tokenizer = load_any(folder, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:
        raise ModelLoadError(
            f"{folder}: the tokenizer cannot be loaded: {_reason(error)}",
            hint="tokenizer.json and tokenizer_config.json must be in the folder",
        ) from error
    _silence_length_warning(tokenizer)
    return tokenizer


def _silence_length_warning(tokenizer: TokenizerWrapper) -> None:
    """Who uses a library wants no line on stderr; a prompt too long is an error of ours."""
    # transformers says it once a tokenizer, and notes here that it has.
    said = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(said, dict):
        said["sequence-length-is-longer-than-the-specified-maximum"] = True


def bytes_of(model: Any) -> int:
    """Bytes of all arrays of an mlx-lm module, evaluated or not."""
    return sum(array.nbytes for array in _arrays(dict(model)))


def cannot_run(folder: Path, error: Exception) -> ModelLoadError:
    """What is raised where a model's own code fails."""
    return ModelLoadError(f"{folder}: {_reason(error)}", hint=_hint(error))


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    # The hub's client puts it before the error that it met.
    return lines[0].removeprefix("Got: ") if lines else type(error).__name__


def _hint(error: Exception) -> str:
    if "not supported" in str(error):
        return "mlx-lm does not know this model_type; a newer one may"
    return "config.json and the weights must be of one model, and complete"


def context_length_of(config: Mapping[str, Any]) -> int | None:
    """Most tokens of prompt and answer together; None if the model does not say."""
    return _first_integer(config, _CONTEXT_KEYS)


def vocab_size_of(folder: Path, config: Mapping[str, Any]) -> int:
    """Token ids are below it.

    Raises:
        ModelLoadError: the model does not say.
    """
    size = _first_integer(config, ("vocab_size",))
    if size is None:
        raise ModelLoadError(f"{folder}: config.json has no vocab_size", hint=_FOLDER_HINT)
    return size


def _first_integer(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for part in (config, config.get("text_config") or {}):
        for key in keys:
            value = part.get(key)
            # What is beyond is no number of tokens, and breaks whoever passes it on.
            if type(value) is int and 0 < value <= _MOST_TOKENS:
                return value
    return None


def _wire(weights: int) -> None:
    if not mx.metal.is_available():
        return
    limit = int(mx.device_info()["max_recommended_working_set_size"])
    if weights > _WIRED_SHARE * limit:
        mx.set_wired_limit(limit)


def _arrays(tree: dict[str, Any]) -> list[mx.array]:
    leaves = cast(list[tuple[str, Any]], tree_flatten(tree))
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
