"""A tiny random chat model with a tokenizer of its own: ``python -m psrl.models.tiny_chat FOLDER``.

For jobs that are to be quick rather than clever. The tokenizer is byte-level with merges learned from the words of text
games, and ChatML turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SENTENCES = (
    "You are in a room. There is a door to the north, east, south and west. You see a table, a shelf, a box, a key.",
    "You play a text game. Answer with the letter of a command. Commands: take put open close unlock lock with on in",
    "system user assistant Observation Action Task Your goal is to find the key and open the chest, then eat the food.",
    "go north go east go south go west take the key from the table insert it into the box examine look inventory drop",
    "You pick up the apple from the ground. You open the wooden door, revealing a kitchen. That is no verb",
)


def make_tiny_chat(
    folder: str | Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = 512,
    experts: int = 0,
    seed: int = 0,
) -> Path:
    """Write a seeded random model (float32) and its tokenizer; returns the folder.

    Args:
        experts: of each layer, of which a token visits two (Qwen3-MoE); 0: none (Qwen2).
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator(
        list(_SENTENCES) * 4,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=SPECIAL_TOKENS[2], pad_token=SPECIAL_TOKENS[0], chat_template=CHAT_TEMPLATE
    )
    config_cls, model_cls = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen2Config, Qwen2ForCausalLM)
    extra: dict[str, Any] = {}
    if experts:
        extra = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 2 * hidden}
        extra |= {"norm_topk_prob": True, "head_dim": hidden // heads}
    config = config_cls(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_cls(config).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m psrl.models.tiny_chat", description="A tiny random chat model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (default 64)")
    parser.add_argument("--layers", type=int, default=2, help="layers (default 2)")
    parser.add_argument("--experts", type=int, default=0, help="experts of a layer (default 0: a dense model)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    options = parser.parse_args()
    sizes = {"hidden": options.hidden, "layers": options.layers, "experts": options.experts}
    print(make_tiny_chat(options.folder, **sizes, seed=options.seed))


if __name__ == "__main__":
    main()
