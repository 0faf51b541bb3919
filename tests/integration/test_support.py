"""Options that rule out prefix sharing are refused by name."""

from types import SimpleNamespace

import pytest
from megatron.core.transformer import TransformerConfig
from transformers import (
    DeepseekV3Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from verl.workers.config import MtpConfig, QATEngineConfig
from verl.workers.config.engine import EngineRouterReplayConfig

from psrl.config import PSRLConfig
from psrl.errors import UnsupportedError
from psrl.integrations.verl.engine.config import PSRLEngineConfig
from psrl.integrations.verl.engine.support import check_model, check_supported


def transformer(**options) -> TransformerConfig:
    defaults = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    return TransformerConfig(**{**defaults, "hidden_dropout": 0.0, "attention_dropout": 0.0, **options})


def engine(**options) -> PSRLEngineConfig:
    return PSRLEngineConfig(dtype="float32", **options)


def model(hf_config=None, mtp: bool = False, **options) -> SimpleNamespace:
    defaults = {"lora_rank": 0, "lora": {}}
    return SimpleNamespace(hf_config=hf_config or Qwen2Config(), mtp=MtpConfig(enable=mtp), **{**defaults, **options})


def test_a_plain_dense_model_is_supported():
    check_supported(transformer(), engine(), model())
    check_supported(transformer(qk_layernorm=True), engine(), model(Qwen3Config()))
    check_supported(transformer(), engine(), model(LlamaConfig()))
    check_supported(transformer(), engine(), model(MistralConfig(sliding_window=None)))
    check_supported(transformer(), engine(use_fused_kernels=True), model())  # conditions: test_fused_kernels.py
    check_supported(transformer(recompute_granularity="selective"), engine(seed=1), model())
    check_supported(transformer(), engine(), model(lora={"rank": 8, "type": "lora", "dropout": 0.0}))
    attention = {"rank": 8, "target_modules": ["linear_qkv", "*.layers.0.*.linear_proj"]}
    check_supported(transformer(), engine(), model(Qwen3MoeConfig(norm_topk_prob=True), lora=attention))


def test_a_host_tier_needs_the_plans_order():
    host = {"psrl": PSRLConfig(kv_host_bytes=1000)}
    check_supported(transformer(), engine(**host), model())
    for options, reason in (
        ({"pipeline_model_parallel_size": 2}, r"pipeline_model_parallel_size=2.*stages interleave"),
        ({"sharing_system": "radix"}, r"sharing_system='radix'.*psrl's own"),
    ):
        with pytest.raises(UnsupportedError, match=rf"{reason}.*: set psrl\.kv_host_bytes to 0"):
            check_supported(transformer(), engine(**host, **options), model())


LATENTS = {"multi_latent_attention": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def test_latent_attention_is_supported():
    latents = changed(transformer(), **LATENTS)
    for rope in (None, YARN, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}):
        check_supported(latents, engine(), model(DeepseekV3Config(rope_parameters=rope)))
    check_supported(latents, engine(), model(DeepseekV3Config(n_group=1, topk_group=1)))
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    check_supported(changed(transformer(), **LATENTS, **parallel), engine(), model(DeepseekV3Config()))


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("attention_bias=True", {"attention_bias": True}),
        ("norm_topk_prob=False", {"norm_topk_prob": False}),
        ("rope_interleave=False", {"rope_interleave": False}),
        ("topk_group=2 with num_experts_per_tok=8", {"topk_group": 2}),
        ("rope_parameters=.*attention_factor", {"rope_parameters": {**YARN, "attention_factor": 2.0}}),
        ("rope_parameters=.*truncate", {"rope_parameters": {**YARN, "truncate": False}}),
        ("rope_parameters=.*mscale_all_dim", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}),
    ],
)
def test_latent_attention_that_megatron_would_build_differently(option: str, values: dict):
    with pytest.raises(UnsupportedError, match=option):
        check_model(DeepseekV3Config(**values))


EXPERTS = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none"}


def test_parallel_layouts_and_experts_are_supported():
    config = engine(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )
    experts = Qwen3MoeConfig(norm_topk_prob=True)
    check_supported(changed(transformer(), **EXPERTS), config, model(experts))
    balanced = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.1], "moe_z_loss_coeff": 0.1}
    check_supported(changed(transformer(), **{**EXPERTS, **balanced}), config, model(experts))
    replaying = {**EXPERTS, "moe_enable_routing_replay": True, "recompute_granularity": "full"}
    for mode in ("R2", "R3"):
        engine_config = engine(router_replay=EngineRouterReplayConfig(mode=mode))
        check_supported(changed(transformer(), **replaying), engine_config, model(experts))
        check_supported(changed(transformer(), **replaying, **LATENTS), engine_config, model(DeepseekV3Config()))


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("moe_router_fusion=True", {"moe_router_fusion": True}),
        ("recompute_modules=['moe']", {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    ],
)
def test_what_rules_out_router_replay(option: str, values: dict):
    config = changed(transformer(), **{**EXPERTS, "moe_enable_routing_replay": True, **values})
    with pytest.raises(UnsupportedError) as error:
        check_supported(config, engine(router_replay=EngineRouterReplayConfig(mode="R3")), model())
    assert f"override_transformer_config.{option}" in str(error.value)


@pytest.mark.parametrize(
    ("option", "values"),
    [("norm_topk_prob", {}), ("mlp_only_layers", {"norm_topk_prob": True, "mlp_only_layers": [0]})],
)
def test_experts_that_the_bridge_would_build_differently(option: str, values: dict):
    with pytest.raises(UnsupportedError, match=option):
        check_model(Qwen3MoeConfig(**values))


def changed(config, **values):
    for name, value in values.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("option", "tf_config"),
    [
        ("hidden_dropout=0.1", {"hidden_dropout": 0.1}),
        ("attention_dropout=0.2", {"attention_dropout": 0.2}),
        (
            "moe_router_load_balancing_type='seq_aux_loss'",
            {**EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss"},
        ),
        ("moe_expert_capacity_factor=1.5", {**EXPERTS, "moe_expert_capacity_factor": 1.5}),
        ("moe_input_jitter_eps=0.1", {**EXPERTS, "moe_input_jitter_eps": 0.1}),
        ("moe_enable_routing_replay=True", {**EXPERTS, "moe_enable_routing_replay": True}),
        (
            "recompute_modules=['moe']",
            {**EXPERTS, "moe_z_loss_coeff": 0.1, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
        ),
        ("mtp_num_layers=1", {"mtp_num_layers": 1}),
        ("fp8='e4m3'", {"fp8": "e4m3"}),
        ("fp4='e2m1'", {"fp4": "e2m1"}),
        ("quant_recipe='recipe'", {"quant_recipe": "recipe"}),
        ("use_kitchen=True", {"use_kitchen": True}),
        ("batch_invariant_mode=True", {"batch_invariant_mode": True}),
        ("cuda_graph_impl='local'", {"cuda_graph_impl": "local"}),
        ("cuda_graph_impl='transformer_engine'", {"cuda_graph_impl": "transformer_engine"}),
        ("enable_cuda_graph=True", {"enable_cuda_graph": True}),
        ("external_cuda_graph=True", {"external_cuda_graph": True}),
        ("tp_comm_overlap=True", {"tp_comm_overlap": True}),
        ("overlap_moe_expert_parallel_comm=True", {**EXPERTS, "overlap_moe_expert_parallel_comm": True}),
        ("cpu_offloading=True", {"cpu_offloading": True}),
        ("window_size=(8, 0)", {"window_size": (8, 0)}),
        ("apply_rope_fusion=True", {"apply_rope_fusion": True}),
        (
            "recompute_modules=['mla_up_proj']",
            {**LATENTS, "recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
        ),
        ("cache_mla_latents=True", {**LATENTS, "cache_mla_latents": True}),
        ("fine_grained_activation_offloading=True", {**LATENTS, "fine_grained_activation_offloading": True}),
        ("sequence_parallel=False", {**LATENTS, "tensor_model_parallel_size": 2}),
        ("softmax_type='learnable'", {"softmax_type": "learnable"}),
    ],
)
def test_transformer_options(option: str, tf_config: dict):
    with pytest.raises(UnsupportedError) as error:
        check_supported(changed(transformer(), **tf_config), engine(), model())
    assert f"override_transformer_config.{option}" in str(error.value)
    assert "psrl.enable=false" in str(error.value)


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("use_remove_padding=False", engine(use_remove_padding=False)),
        ("dynamic_context_parallel=True", engine(dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=8)),
        ("use_megatron_fsdp=True", engine(use_megatron_fsdp=True)),
        ("pad_to_length=True", engine(pad_to_length=True)),
        ("router_replay.mode='R2' .*no experts", engine(router_replay=EngineRouterReplayConfig(mode="R2"))),
        ("qat.enable=True", engine(qat=QATEngineConfig(enable=True))),
    ],
)
def test_engine_options(option: str, config: PSRLEngineConfig):
    with pytest.raises(UnsupportedError, match=option):
        check_supported(transformer(), config, model())


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("model.attention_dropout=0.1", model(Qwen2Config(attention_dropout=0.1))),
        ("model.use_sliding_window", model(Qwen2Config(use_sliding_window=True, sliding_window=8))),
        ("model.sliding_window=4096", model(MistralConfig(sliding_window=4096))),
        (
            "model.rope_parameters",
            model(Qwen3Config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})),
        ),
        (
            "model.rope_parameters",
            model(DeepseekV3Config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})),
        ),
        ("model.mtp.enable=True", model(DeepseekV3Config(), mtp=True)),
        ("model.lora_rank=8", model(lora_rank=8)),
        ("model.lora.dropout=0.1", model(lora={"rank": 8, "dropout": 0.1})),
        ("model.lora.rank=6 .*splits it over 4 ranks.*: set a multiple of 4", model(lora={"rank": 6})),
        (
            r"model.lora.target_modules=\['\*.layers.3.\*.linear_qkv'\] .*layers within a pipeline stage",
            model(lora={"rank": 8, "target_modules": ["*.layers.3.*.linear_qkv", "linear_proj"]}),
        ),
        ("model.lora.type='dora'", model(lora={"rank": 8, "type": "dora"})),
        (
            r"model.lora.target_modules=\['linear_fc1', 'linear_fc2'\] .*TransformerEngine's grouped layers only",
            model(Qwen3MoeConfig(norm_topk_prob=True), lora={"rank": 8}),
        ),
        (
            r"model.lora.target_modules=\['router'\]",
            model(Qwen3MoeConfig(norm_topk_prob=True), lora={"rank": 8, "target_modules": ["router", "*.linear_qkv"]}),
        ),
        ("model.lora.rank=8 .*DeepSeek-V3 has not been run", model(DeepseekV3Config(), lora={"rank": 8})),
        ("model_type 'gemma'", model(GemmaConfig())),
    ],
)
def test_model_options(option: str, config: SimpleNamespace):
    with pytest.raises(UnsupportedError, match=option):
        check_supported(transformer(), engine(tensor_model_parallel_size=4, pipeline_model_parallel_size=2), config)


def test_a_model_whose_biases_the_bridge_drops_is_refused():
    check_model(Qwen3Config())
    with pytest.raises(UnsupportedError, match="attention_bias=True"):
        check_model(Qwen3Config(attention_bias=True))
    for name in ("attention_bias", "mlp_bias"):
        with pytest.raises(UnsupportedError, match=f"{name}=True"):
            check_model(LlamaConfig(**{name: True}))


@pytest.mark.parametrize("config", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_another_activation_is_refused(config: type):
    check_model(config(hidden_act="silu"))
    check_model(config(hidden_act="swish"))
    for name in ("gelu", "relu"):
        with pytest.raises(UnsupportedError, match=f"hidden_act='{name}'"):
            check_model(config(hidden_act=name))


def test_quantized_weights_are_refused():
    with pytest.raises(UnsupportedError, match="quantization_config"):
        check_model(changed(Qwen2Config(), quantization_config={"quant_method": "gptq", "bits": 4}))
