"""mbridge's models that psrl adds or completes, registered in place of its own (``mbridge.core.register_model``)."""

from __future__ import annotations

from typing import Any

from mbridge.core import register_model
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.llama import LLaMABridge


@register_model("mistral")
class MistralBridge(LLaMABridge):
    """Mistral without sliding windows: Llama's layers under Llama's parameter names, biases nowhere.

    Cause: mbridge has no bridge for it (mbridge/models/__init__.py). Remove when it has.
    """

    def _build_config(self) -> Any:
        return self._build_base_config(add_qkv_bias=False)


@register_model("deepseek_v3")
class WholeDeepseekV3Bridge(DeepseekV3Bridge):
    """DeepSeek-V3 with what mbridge's leaves out: YaRN, routing limited to groups of experts, weights of any dtype.

    Cause: mbridge reads ``rope_theta`` and ``rope_scaling``, where transformers 5 has ``rope_parameters``, and names
    the original length as Megatron-Core no longer does (mbridge/models/deepseek_v3.py:123, :157, :162). It does not
    read ``n_group`` and ``topk_group`` (:144), and loads checkpoints in bfloat16 only (:296). Remove when it does.
    """

    hf_config: Any

    def _build_config(self) -> Any:
        self.hf_config.rope_theta = self.hf_config.rope_parameters["rope_theta"]  # as veRL does, but later
        return super()._build_config()

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        hf_config = self.hf_config
        del kwargs["max_position_embeddings"]
        if hf_config.n_group > hf_config.topk_group:
            kwargs |= {"moe_router_num_groups": hf_config.n_group, "moe_router_group_topk": hf_config.topk_group}
        return super()._build_base_config(text_config_key, **{**kwargs, **_latent_rope(hf_config)})

    def _get_safetensor_io(self, weights_path: str) -> Any:
        if getattr(self.hf_config, "quantization_config", None) is not None:
            return super()._get_safetensor_io(weights_path)
        return SafeTensorIO(self._get_actual_hf_path(weights_path))


def _latent_rope(hf_config: Any) -> dict[str, Any]:
    """Megatron-Core's options of the rotary embedding: plain, or YaRN as transformers reads it."""
    rope: dict[str, Any] = hf_config.rope_parameters
    if rope["rope_type"] == "default":
        return {"rope_type": "rope", "rotary_base": rope["rope_theta"], "rotary_scaling_factor": 1.0}
    all_dim = rope.get("mscale_all_dim") or 0.0
    return {
        "rope_type": rope["rope_type"],
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope["mscale"] if all_dim else 1.0,  # without mscale_all_dim transformers takes no mscale either
        "mscale_all_dim": all_dim,
    }
