"""The model of a replay: a Hugging Face folder, checked, or a random one made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from psrl.errors import InputError, UnsupportedError
from psrl.integrations.verl.engine.support import check_model
from psrl.models import NAMED_MODELS
from psrl.models.stacked_experts import one_by_one
from psrl.replay.checkpoint import INDEX
from psrl.replay.options import TINY_EXPERTS, TINY_MODELS, TinyModel

MAX_VOCAB = 262_144
"""Largest vocabulary of a random model."""
_MIN_VOCAB, _VOCAB_MULTIPLE = 512, 128
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")


@dataclass(frozen=True)
class ReplayModel:
    """A checkpoint on disk."""

    name: str
    """As the user wrote it."""
    folder: Path
    tokenizer_folder: Path
    """A placeholder for veRL, which wants a tokenizer although the samples are token ids already."""
    vocab_size: int


def check_model_folder(model: str) -> int:
    """Check that a replay can load the folder; returns the size of its vocabulary.

    Raises:
        InputError: files are missing or broken.
        UnsupportedError: the architecture, or an option of it, cannot be replayed; names it.
    """
    if not model:
        raise InputError(f"--model is empty: name a folder, or {' or '.join((*TINY_MODELS, *NAMED_MODELS))}")
    folder = Path(model)
    if not folder.is_dir():
        raise InputError(f"--model {model}: no such folder (or use {' or '.join((*TINY_MODELS, *NAMED_MODELS))})")
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot read the file: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: broken JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object")
    try:
        check_model(SimpleNamespace(**config))
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: unsupported model: {error}") from error
    _refuse_options(path, config)
    _check_sizes(path, config)
    if not any(folder.glob("*.safetensors")) and not (folder / INDEX).is_file():
        raise InputError(f"{folder}: no weights: expected model.safetensors or {INDEX}")
    return config["vocab_size"]


def _check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    for name in ("vocab_size", *(n for n in (*_SIZES, *_OPTIONAL_SIZES) if n in config)):
        value = config.get(name)
        if value is None and name in _OPTIONAL_SIZES:
            continue
        if type(value) is not int or value < 1:
            raise InputError(f"{path}: {name} must be a positive integer, got {value!r}")
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise InputError(f"{path}: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
    hidden = config.get("hidden_size")
    if heads and hidden and not config.get("head_dim") and hidden % heads:
        raise InputError(f"{path}: hidden_size {hidden} must be a multiple of num_attention_heads {heads}")


def _refuse_options(path: Path, config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key.endswith("dropout") and value:
            raise UnsupportedError(
                f"{path}: {key} is {value}, but prefix sharing needs dropout 0: a shared token has one hidden state"
            )
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise UnsupportedError(f"{path}: use_sliding_window is not supported: use a model with full attention")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind != "default":
        raise UnsupportedError(f"{path}: rope type {kind!r} is not supported, only 'default'")


def vocabulary_for(max_id: int, where: str) -> int:
    """Vocabulary of a random model that has ``max_id``.

    Raises:
        InputError: the id is larger than any vocabulary in use; ``where`` says which sample has it.
    """
    size = max(_MIN_VOCAB, -(-(max_id + 1) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE)
    if size > MAX_VOCAB:
        raise InputError(
            f"{where}: token id {max_id} is outside the vocabulary: a random model has at most {MAX_VOCAB} ids"
        )
    return size


def make_random_model(kind: str, sizes: TinyModel, vocab_size: int, seed: int, max_position: int, path: Path) -> None:
    """Write a float32 checkpoint with seeded random weights to ``path``."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config_cls, model_cls = {
        "tiny-qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "tiny-qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "tiny-qwen3-moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[kind]
    extra: dict[str, Any] = {} if kind == "tiny-qwen2" else {"head_dim": sizes.hidden // sizes.heads}
    if kind == "tiny-qwen3-moe":
        extra |= {"num_experts": TINY_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 2 * sizes.hidden}
        extra |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    config = config_cls(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden,
        intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=max(65_536, max_position + 1),
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_cls(config).float()
    config.architectures = [model_cls.__name__]
    config.save_pretrained(path)
    weights = dict(one_by_one(model.state_dict()))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def make_placeholder_tokenizer(path: Path) -> None:
    """Write a tokenizer of four words, for veRL to take the padding id from."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {name: i for i, name in enumerate(("<pad>", "<bos>", "<eos>", "<unk>"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(path)
