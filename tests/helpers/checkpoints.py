"""Random tiny Hugging Face checkpoints, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
KINDS = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


DEEPSEEK: dict[str, object] = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
"""Head sizes that differ from each other; two of four groups of experts for a token; the first layer dense."""


def _routers_biases(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]


def make_checkpoint(
    path: str | Path,
    kind: str = "qwen2",
    tied: bool = False,
    vocab: int = 128,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    rope_theta: float | None = None,
    head_dim: int | None = None,
    experts: int = 4,
    expert_bias: bool = False,
    query_rank: int | None = 12,
    rope: dict[str, object] | None = None,
) -> str:
    """Write a seeded random checkpoint (float32) with a word-level tokenizer to ``path``; returns ``path`` as str.

    Norms, biases and logits are made non-trivial, so that an error in any of them shows in gradients.
    """
    config_cls, model_cls = KINDS[kind]
    extra: dict[str, object] = {} if kind in ("qwen2", "deepseek_v3") else {"head_dim": head_dim or hidden // heads}
    if kind == "deepseek_v3":
        extra |= DEEPSEEK | {"n_routed_experts": experts, "q_lora_rank": query_rank}
    if kind == "mistral":
        extra |= {"sliding_window": None}
    if kind == "qwen3_moe":
        extra |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        extra |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if rope is not None:
        extra["rope_parameters"] = rope
    if rope_theta is not None:
        extra["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta}
    config = config_cls(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=65536,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_cls(config).float()
        with torch.no_grad():
            for name, param in (*model.named_parameters(), *_routers_biases(model)):
                if "norm" in name or name.endswith("bias"):
                    param.add_(0.1 * torch.randn_like(param))
                else:
                    param.mul_(3.0)
    model.save_pretrained(path)
    if expert_bias:
        _add_expert_biases(Path(path) / "model.safetensors", layers, experts)
    _make_tokenizer(path, vocab)
    return str(path)


EXPERT_BIAS = "model.layers.{layer_number}.mlp.gate.e_score_correction_bias"
"""Where DeepSeek-V3 keeps the bias of its router; Qwen3-MoE has none."""


def _add_expert_biases(weights: Path, layers: int, experts: int) -> None:
    biases = {EXPERT_BIAS.format(layer_number=i): torch.zeros(experts) for i in range(layers)}
    save_file({**load_file(weights), **biases}, weights, metadata={"format": "pt"})


def _make_tokenizer(path: str | Path, vocab: int) -> None:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t3"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
