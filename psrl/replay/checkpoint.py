"""The weights of a model folder against its configuration: headers only, before a worker loads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.errors import InputError, UnsupportedError
from psrl.models.stacked_experts import one_by_one

INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NOT_WEIGHTS = ".rotary_emb.inv_freq"
"""End of the names of tables that older checkpoints carry and nobody reads."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class _Stored:
    file: Path
    shape: tuple[int, ...]
    dtype: str


def check_weights(folder: Path) -> None:
    """Check that the safetensors files hold every tensor of the model that ``config.json`` describes, and no other.

    Imports torch and transformers; loads no weights, but for a head on disk that the configuration ties.

    Raises:
        InputError: a file is missing or broken, or a tensor is missing, left over or of another shape; names file and
            tensor.
        UnsupportedError: the weights are in a format that is not read.
    """
    stored = {name: tensor for name, tensor in _read_headers(folder).items() if not name.endswith(_NOT_WEIGHTS)}
    path = folder / "config.json"
    _check_num_layers(path, stored)
    config = _load_config(folder)
    wanted = _wanted_shapes(config, path)
    if config.tie_word_embeddings:
        wanted.pop(_HEAD, None)
        if _HEAD in stored:
            _check_tied(path, stored)
            del stored[_HEAD]
    for name, shape in wanted.items():
        if name not in stored:
            raise InputError(f"{folder}: the weights have no tensor {name}, which {path.name} asks for")
        tensor = stored[name]
        if tensor.shape != shape:
            raise InputError(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}, but {path.name} asks for {list(shape)}"
            )
        if tensor.dtype not in _FLOATS:
            raise UnsupportedError(f"{tensor.file}: {name} has dtype {tensor.dtype}: expected {', '.join(_FLOATS)}")
    for name in stored.keys() - wanted.keys():
        raise InputError(f"{stored[name].file}: the model of {path.name} has no tensor {name}, but the file has it")


def _read_headers(folder: Path) -> dict[str, _Stored]:
    """Every tensor by name, as the bridge finds it: through the index where there is one, else in all files."""
    index = folder / INDEX
    if index.is_file():
        weight_map = _read_index(index)
        files = {file: _read_header(folder / file, index) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if name not in files[file]:
                raise InputError(f"{index}: {name} should be in {file}, which does not have it")
        return {name: files[file][name] for name, file in weight_map.items()}
    stored: dict[str, _Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in _read_header(file, None).items():
            if name in stored:
                raise InputError(f"{file}: {name} is in {stored[name].file.name} too, and no {INDEX} says which counts")
            stored[name] = tensor
    if not stored:
        raise InputError(f"{folder}: no weights: expected model.safetensors or {INDEX}")
    return stored


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        raise InputError(f"{index}: cannot read the file: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{index}: expected a JSON object with weight_map") from error
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{index}: weight_map must give the file of every tensor")
    return weight_map


def _read_header(file: Path, index: Path | None) -> dict[str, _Stored]:
    from safetensors import SafetensorError, safe_open

    if index is not None and not file.is_file():
        raise InputError(f"{index}: names {file.name}, which is not in the folder")
    try:
        with safe_open(file, framework="pt") as stream:
            slices = {name: stream.get_slice(name) for name in stream.keys()}  # noqa: SIM118  (it is no mapping)
            return {name: _Stored(file, tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: not a whole safetensors file: {error}") from error


def _check_num_layers(path: Path, stored: Iterable[str]) -> None:
    """Before anything is built that grows with the number."""
    asked = json.loads(path.read_text(encoding="utf-8")).get("num_hidden_layers")
    layers = max((int(match[1]) for match in map(_LAYER.match, stored) if match), default=-1) + 1
    if asked is not None and asked != layers:
        raise InputError(f"{path}: num_hidden_layers is {asked}, but the weights have {layers}")


def _load_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library checks values with errors of many types
        raise InputError(f"{folder / 'config.json'}: not a usable configuration: {error}") from error


def _wanted_shapes(config: Any, path: Path) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:  # whatever a size that makes no sense leads to
        raise InputError(f"{path}: no model can be built of it: {error}") from error
    return {name: tuple(tensor.shape) for name, tensor in one_by_one(model.state_dict())}


def _check_tied(path: Path, stored: Mapping[str, _Stored]) -> None:
    """A head of its own would be ignored."""
    if _EMBEDDING in stored and stored[_EMBEDDING].shape == stored[_HEAD].shape:
        embedding, head = _load(stored, (_EMBEDDING, _HEAD))
        if embedding.equal(head):
            return
    raise InputError(
        f"{stored[_HEAD].file}: {_HEAD} differs from {_EMBEDDING}, but {path.name} ties them: tie_word_embeddings "
        "must be false"
    )


def _load(stored: Mapping[str, _Stored], names: Iterable[str]) -> list[Any]:
    from safetensors import safe_open

    tensors = []
    for name in names:
        with safe_open(stored[name].file, framework="pt") as stream:
            tensors.append(stream.get_tensor(name))
    return tensors
