"""A Llama model in a GGUF file as a Hugging Face folder: float32 weights, config, tokenizer.

Shape legend: H heads, D head size, I input size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psrl.errors import UnsupportedError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_CONTROL, _USER_DEFINED = 3, 4
"""``tokenizer.ggml.token_type`` of tokens that are no text, and of added ones that are."""


def convert(gguf_file: Path, folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json``, ``model.safetensors`` and the tokenizer's files to ``folder``.

    Raises:
        UnsupportedError: another architecture or tokenizer than what this converts.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if values["general.architecture"] != "llama":
        raise UnsupportedError(f"{gguf_file}: architecture {values['general.architecture']!r}, expected 'llama'")
    weights = _weights(reader, values)
    config = _config(values, tied="lm_head.weight" not in weights)
    config.save_pretrained(folder)
    generation = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)  # as for any other file
    _tokenizer(gguf_file, values).save_pretrained(folder)


def _weights(reader: Any, values: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    from gguf import dequantize

    num_heads = {"attn_q": values["llama.attention.head_count"], "attn_k": values["llama.attention.head_count_kv"]}
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        first, *rest = tensor.name.split(".")
        if first != "blk":
            name = _TOP[first]
        else:
            layer, kind, _ = rest
            name = f"model.layers.{layer}.{_LAYER[kind]}"
            if kind in num_heads:
                value = _halves_apart(value, num_heads[kind])
        weights[f"{name}.weight"] = np.ascontiguousarray(value)
    return weights


def _halves_apart(value: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """[H * D, I]: GGUF interleaves the two halves of a head that transformers rotates against each other."""
    num_rows, num_columns = value.shape
    pairs = value.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def _config(values: dict[str, Any], tied: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(values["tokenizer.ggml.tokens"]),
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=values["llama.attention.head_count"],
        num_key_value_heads=values["llama.attention.head_count_kv"],
        max_position_embeddings=values["llama.context_length"],
        # Stored as float32: 1e-5 comes back as 9.99999974e-06.
        rms_norm_eps=float(str(np.float32(values["llama.attention.layer_norm_rms_epsilon"]))),
        rope_parameters={"rope_type": "default", "rope_theta": float(values["llama.rope.freq_base"])},
        tie_word_embeddings=tied,
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        pad_token_id=values["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def _tokenizer(gguf_file: Path, values: dict[str, Any]) -> Any:
    """Byte-level BPE with every digit on its own, which is what GGUF calls ``smollm``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise UnsupportedError(f"{gguf_file}: tokenizer {'/'.join(kind)}, expected gpt2/smollm")
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, values["tokenizer.ggml.token_type"], strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            tokenizer.add_special_tokens([AddedToken(token, special=token_type == _CONTROL, normalized=False)])
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=values["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{key: tokens[values[f"tokenizer.ggml.{name}_token_id"]] for key, name in named.items()},
    )
    fast.chat_template = values["tokenizer.chat_template"]
    return fast
