"""Options under which prefixes cannot be shared, refused by name before a model is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from psrl.errors import UnsupportedError
from psrl.integrations.megatron.router_options import replays_routes, uses_statistics

SUPPORTED_MODELS = ("deepseek_v3", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of Hugging Face configurations that are tested."""
EXPERT_MODELS = ("deepseek_v3", "qwen3_moe")
"""Of these, those with experts."""

_DROPPED_BIASES = {
    "deepseek_v3": ("attention_bias",),
    "llama": ("attention_bias", "mlp_bias"),
    "qwen3": ("attention_bias",),
    "qwen3_moe": ("attention_bias",),
}
"""Options of mbridge's models whose biases, some of them or all, are neither loaded nor exported."""


_SILU = ("silu", "swish")
"""Names of the one activation that the bridges build, whatever the configuration says."""


_LORA_ATTENTION = ("linear_qkv", "linear_proj")
_LORA_TARGETS = (*_LORA_ATTENTION, "linear_fc1", "linear_fc2")
"""Where adapters are unless ``model.lora.target_modules`` says otherwise."""


class Refusal(NamedTuple):
    option: str
    """As users write it."""
    value: Any
    reason: str
    way_out: str

    def error(self, place: str = "") -> UnsupportedError:
        """
        Args:
            place: what goes before the option, with its dot.
        """
        return UnsupportedError(
            f"{place}{self.option}={self.value!r} rules out prefix sharing ({self.reason}): {self.way_out}, or set "
            "psrl.enable=false"
        )


def check_model(hf_config: Any) -> None:
    """Raises:
    UnsupportedError: the architecture is not among ``SUPPORTED_MODELS``, or its weights would be read wrongly.
    """
    model_type = getattr(hf_config, "model_type", None)
    if model_type not in SUPPORTED_MODELS:
        raise UnsupportedError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(SUPPORTED_MODELS)}"
        )
    for name in _DROPPED_BIASES.get(model_type, ()):
        if getattr(hf_config, name, False):
            raise UnsupportedError(f"{name}=True: the bridge for {model_type} drops these biases; use a model without")
    if model_type == "qwen3_moe":
        _check_experts(hf_config)
    if model_type == "deepseek_v3":
        _check_deepseek(hf_config)
    activation = getattr(hf_config, "hidden_act", None)
    if activation is not None and activation not in _SILU:
        raise UnsupportedError(
            f"hidden_act={activation!r}: the bridge for {model_type} computes silu whatever it says; use a model with "
            "silu"
        )
    if getattr(hf_config, "quantization_config", None) is not None:
        raise UnsupportedError("quantization_config: quantized weights are not supported; use a model without")


def _check_experts(hf_config: Any) -> None:
    """What the bridge builds whatever the configuration says: experts in every layer, normalised weights."""
    if not getattr(hf_config, "norm_topk_prob", False):
        raise UnsupportedError("norm_topk_prob=False: the bridge for qwen3_moe normalises the experts' weights")
    if getattr(hf_config, "decoder_sparse_step", 1) != 1 or getattr(hf_config, "mlp_only_layers", None):
        raise UnsupportedError("decoder_sparse_step, mlp_only_layers: the bridge for qwen3_moe puts experts everywhere")


def _check_deepseek(hf_config: Any) -> None:
    """What Megatron-Core computes whatever the configuration says."""

    def option(name: str, default: Any) -> Any:
        value = getattr(hf_config, name, None)
        return default if value is None else value

    if not option("norm_topk_prob", True):
        raise UnsupportedError("norm_topk_prob=False: Megatron-Core normalises the experts' weights")
    if not option("rope_interleave", True):
        raise UnsupportedError("rope_interleave=False: Megatron-Core rotates neighbouring dimensions; use True")
    groups, chosen, experts = option("n_group", 8), option("topk_group", 4), option("num_experts_per_tok", 8)
    if groups > chosen and experts // chosen != 2:
        raise UnsupportedError(
            f"topk_group={chosen} with num_experts_per_tok={experts}: a group's score is the sum of its two best "
            f"experts, Megatron-Core takes its {experts // chosen} best; use a model with two experts a chosen group"
        )
    rope = _rope(hf_config)
    if _rope_type(rope) == "yarn":
        is_odd = rope.get("mscale_all_dim") and not rope.get("mscale")
        if is_odd or not rope.get("factor") or rope.get("attention_factor") or not rope.get("truncate", True):
            raise UnsupportedError(
                f"rope_parameters={dict(rope)!r}: YaRN is computed from factor, mscale and mscale_all_dim only, with "
                "rounded bounds; set factor, mscale where mscale_all_dim is set, and neither attention_factor nor "
                "truncate=false"
            )


def _rope(hf_config: Any) -> dict[str, Any]:
    """Options of the rotary embedding, under their name of transformers 5 or the older one."""
    return getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def check_supported(tf_config: Any, engine_config: Any, model_config: Any) -> None:
    """Check everything known before the model is built. Call it only with ``psrl.enable``.

    Args:
        tf_config: Megatron-Core's ``TransformerConfig`` (with Megatron-Bridge, the provider).
        engine_config: ``PSRLEngineConfig``.
        model_config: veRL's ``HFModelConfig``.

    Raises:
        UnsupportedError: names the first option that rules out sharing, and the way out.
    """
    check_model(model_config.hf_config)
    for refusals in (
        engine_refusals(engine_config), _model(model_config), _adapters(model_config, engine_config),
        _transformer(tf_config), _replay(tf_config, engine_config),
    ):  # fmt: skip
        for refusal in refusals:
            raise refusal.error()


_OVERRIDES = "override_transformer_config."
_ONE_SAMPLE = "a shared token has one hidden state for all its samples"


def engine_refusals(config: Any) -> Iterator[Refusal]:
    """Options of an engine's configuration that rule sharing out."""
    if not config.use_remove_padding:
        yield Refusal("use_remove_padding", False, "a micro-batch is one packed sequence", "set it to True")
    if config.dynamic_context_parallel:
        yield Refusal("dynamic_context_parallel", True, "it splits sequences over ranks", "set it to False")
    if config.use_megatron_fsdp:
        yield Refusal("use_megatron_fsdp", True, "not built yet", "set it to False")
    if config.pad_to_length:
        yield Refusal("pad_to_length", True, "a micro-batch holds the tokens of its plan only", "set it to False")
    if config.qat.enable:
        yield Refusal("qat.enable", True, "not built yet", "set it to False")
    if getattr(getattr(config, "psrl", None), "kv_host_bytes", None):
        yield from _host_tier(config)


_WITHOUT_HOST = "set psrl.kv_host_bytes to 0"


def _host_tier(config: Any) -> Iterator[Refusal]:
    if config.pipeline_model_parallel_size > 1:
        yield Refusal(
            "pipeline_model_parallel_size", config.pipeline_model_parallel_size,
            "stages interleave forwards and backwards; transfers to the host keep to the plan's order", _WITHOUT_HOST,
        )  # fmt: skip
    system = getattr(config, "sharing_system", "psrl")
    if system != "psrl":
        yield Refusal("sharing_system", system, "transfers to the host are psrl's own", _WITHOUT_HOST)


def _model(config: Any) -> Iterator[Refusal]:
    hf = config.hf_config
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        if getattr(hf, name, 0.0):
            yield Refusal(f"model.{name}", getattr(hf, name), _ONE_SAMPLE, "set it to 0.0")
    if window := _sliding_window(hf):
        yield Refusal(
            f"model.{window}", getattr(hf, window), "attention must see the whole prefix", "use a full-attention model"
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(hf, name, None):
            yield Refusal(f"model.{name}", getattr(hf, name), "attention kernels have no soft cap", "use another model")
    rope = _rope(hf)
    known = ("default", "yarn") if getattr(hf, "model_type", None) == "deepseek_v3" else ("default",)
    if _rope_type(rope) not in known or "mrope_section" in rope:
        yield Refusal(
            "model.rope_parameters", dict(rope), "positions are rotated plainly", f"use rope_type={' or '.join(known)}"
        )
    if hasattr(hf, "vision_config"):
        yield Refusal("model.vision_config", "...", "image features are not part of the prefix", "use a text model")
    if config.mtp.enable:
        yield Refusal("model.mtp.enable", True, "multi-token prediction reads tokens of one sample", "set it to False")
    if config.lora_rank:
        yield Refusal("model.lora_rank", config.lora_rank, "it is FSDP's", "set model.lora.rank")


def _adapters(config: Any, engine_config: Any) -> Iterator[Refusal]:
    tensor, stages = engine_config.tensor_model_parallel_size, engine_config.pipeline_model_parallel_size
    model_type = getattr(config.hf_config, "model_type", "")
    for option, value, reason, way_out in lora_refusals(config.lora, model_type, tensor, stages):
        yield Refusal(f"model.{option}", value, reason, way_out)


def lora_refusals(lora: Mapping[str, Any], model_type: str, tensor: int, stages: int) -> Iterator[Refusal]:
    """Options of ``model.lora`` that rule sharing out. Adapters beside projections work token by token, as these do.

    Args:
        model_type: "" where it is not known yet.
        tensor, stages: sizes of tensor and pipeline parallelism.
    """
    if not lora.get("rank", 0):
        return
    kind = lora.get("type", "lora")
    if kind != "lora":
        yield Refusal("lora.type", kind, "not tested", "set it to lora")
    if lora.get("dropout", 0.0):
        yield Refusal("lora.dropout", lora["dropout"], _ONE_SAMPLE, "set it to 0.0")
    if lora["rank"] % tensor:
        yield Refusal(
            "lora.rank", lora["rank"], f"Megatron-Bridge splits it over {tensor} ranks", f"set a multiple of {tensor}"
        )
    targets = lora.get("target_modules") or _LORA_TARGETS
    of_layers = [target for target in targets if any(part.isdigit() for part in target.split("."))]
    if stages > 1 and of_layers:
        yield Refusal(
            "lora.target_modules", of_layers, "Megatron-Bridge counts layers within a pipeline stage",
            "name no layers by number",
        )  # fmt: skip
    beyond = [target for target in targets if target.rpartition(".")[2] not in _LORA_ATTENTION]
    if model_type == "qwen3_moe" and beyond:
        yield Refusal(
            "lora.target_modules", beyond,
            "of experts, Megatron-Bridge adapts TransformerEngine's grouped layers only, which have not been run",
            "adapt linear_qkv and linear_proj",
        )  # fmt: skip
    if model_type == "deepseek_v3":
        yield Refusal(
            "lora.rank",
            lora["rank"],
            "Megatron-Bridge has them, whose DeepSeek-V3 has not been run",
            "set it to 0",
        )


def _sliding_window(hf: Any) -> str | None:
    """Name of the option that gives a layer a window, None where all see the whole prefix."""
    if getattr(hf, "model_type", None) == "mistral" and hf.sliding_window is not None:
        return "sliding_window"
    if getattr(hf, "use_sliding_window", False):
        return "use_sliding_window"
    return "layer_types" if "sliding_attention" in (getattr(hf, "layer_types", None) or ()) else None


_UNSET = "leave it unset"
_OPTIONS: dict[str, tuple[str, str]] = {
    "hidden_dropout": (_ONE_SAMPLE, "set it to 0.0"),
    "attention_dropout": (_ONE_SAMPLE, "set it to 0.0"),
    "mtp_num_layers": ("multi-token prediction reads tokens of one sample", _UNSET),
    "fp8": ("scales are taken over a micro-batch, whose tokens sharing changes", _UNSET),
    "fp4": ("scales are taken over a micro-batch, whose tokens sharing changes", _UNSET),
    "quant_recipe": ("scales are taken over a micro-batch, whose tokens sharing changes", _UNSET),
    "use_kitchen": ("it brings quantised layers and an attention of its own", "set it to False"),
    "window_size": ("attention must see the whole prefix", _UNSET),
    "experimental_attention_variant": ("not built yet", _UNSET),
    "apply_rope_fusion": ("the fused kernel takes no position for each token", "set it to False"),
    "fused_single_qkv_rope": ("the fused kernel takes no position for each token", "set it to False"),
    "qk_clip": ("attention keeps no largest logit", "set it to False"),
    "batch_invariant_mode": ("rounding depends on how samples share micro-batches", "set it to False"),
    "enable_cuda_graph": ("micro-batches differ in shape", "set it to False"),
    "external_cuda_graph": ("micro-batches differ in shape", "set it to False"),
    "tp_comm_overlap": ("its buffers have one shape, micro-batches differ", "set it to False"),
    "overlap_moe_expert_parallel_comm": ("its schedule runs two micro-batches at a time", "set it to False"),
    "cpu_offloading": ("not tested with cached K/V", "set it to False"),
}
"""Options of Megatron-Core's ``TransformerConfig`` that are refused wherever they are set."""


def override_refusals(values: Mapping[str, Any]) -> Iterator[Refusal]:
    """Options of ``override_transformer_config`` that rule sharing out in every model."""
    for name, (reason, way_out) in _OPTIONS.items():
        if values.get(name):
            yield Refusal(name, values[name], reason, way_out)
    for name, plain, reason in (
        ("softmax_type", "vanilla", "attention has no sinks"),
        ("cuda_graph_impl", "none", "micro-batches differ in shape"),
    ):
        if values.get(name, plain) != plain:
            yield Refusal(name, values[name], reason, f"set it to {plain}")


def _transformer(config: Any) -> Iterator[Refusal]:
    for refusal in override_refusals(vars(config)):
        yield refusal._replace(option=_OVERRIDES + refusal.option)
    if getattr(config, "multi_latent_attention", False):
        yield from _latents(config)
    if getattr(config, "num_moe_experts", None):
        yield from _experts(config)


def _latents(config: Any) -> Iterator[Refusal]:
    key = _OVERRIDES
    if "mla_up_proj" in (config.recompute_modules or ()) and config.recompute_granularity == "selective":
        yield Refusal(
            key + "recompute_modules", ["mla_up_proj"], "a path is expanded in every micro-batch that reads it",
            "recompute core_attn or whole layers",
        )  # fmt: skip
    for name in ("cache_mla_latents", "fine_grained_activation_offloading"):
        if getattr(config, name, False):
            yield Refusal(key + name, True, "not built yet for latent attention", "set it to False")
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        yield Refusal(key + "sequence_parallel", False, "ranks would have parts of a gradient only", "set it to True")


def _experts(config: Any) -> Iterator[Refusal]:
    key = _OVERRIDES
    kinds = config.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in ("none", "aux_loss"):
            yield Refusal(
                key + "moe_router_load_balancing_type", kind, "it depends on how samples are cut into micro-batches",
                "use aux_loss or none",
            )  # fmt: skip
    for name, reason in (
        ("moe_expert_capacity_factor", "which tokens are dropped depends on their micro-batch"),
        ("moe_input_jitter_eps", _ONE_SAMPLE),
        ("moe_router_force_load_balancing", _ONE_SAMPLE),
    ):
        if getattr(config, name, None):
            yield Refusal(key + name, getattr(config, name), reason, "leave it unset")
    rerun = {"moe", "mlp"} & set(getattr(config, "recompute_modules", None) or ())
    knows_tokens = uses_statistics(config) or replays_routes(config)
    if getattr(config, "recompute_granularity", None) == "selective" and rerun and knows_tokens:
        yield Refusal(
            key + "recompute_modules", sorted(rerun),
            "routers with losses, statistics or replayed routes are rerun without attention",
            "recompute core_attn or whole layers",
        )  # fmt: skip


def _replay(config: Any, engine: Any) -> Iterator[Refusal]:
    """Router replay. The engine sets ``moe_enable_routing_replay`` where its mode asks for it."""
    key, mode = _OVERRIDES, engine.router_replay.mode
    if mode == "disabled":
        if replays_routes(config):
            yield Refusal(
                key + "moe_enable_routing_replay", True, "routes come with the samples",
                "set router_replay.mode to R2 or R3 and leave it unset",
            )  # fmt: skip
    elif not getattr(config, "num_moe_experts", None):
        yield Refusal("router_replay.mode", mode, "the model has no experts", "set it to disabled")
    elif config.moe_router_fusion:
        yield Refusal(key + "moe_router_fusion", True, "the fused router takes no routes", "set it to False")
