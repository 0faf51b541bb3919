"""Transformer layers without TransformerEngine, under TransformerEngine's parameter names.

Model bridges map Hugging Face weights to the names of Megatron-Core's TransformerEngine layers
(``linear_qkv.layer_norm_weight``, ...). These layers have the same names, so the maps work unchanged. Dense
models and mixtures of experts.

Shape legend: T packed tokens, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer import multi_latent_attention, transformer_block
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from psrl.errors import UnsupportedError
from psrl.integrations.megatron import cpu_device
from psrl.integrations.megatron.grouped_linear import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from psrl.runtime.attention import AttentionLayout, attend_layout


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension in float32 or wider; the result has the dtype of ``x``."""
    compute = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(compute), weight.shape, weight.to(compute), eps).to(x.dtype)


def _norm_weight(size: int, config: TransformerConfig) -> torch.nn.Parameter:
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
        raise UnsupportedError(
            f"normalization={config.normalization!r} with layernorm_zero_centered_gamma="
            f"{config.layernorm_zero_centered_gamma} needs TransformerEngine; without it only RMSNorm is available"
        )
    weight: Any = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    weight.sequence_parallel = config.sequence_parallel
    return weight


class RMSNorm(torch.nn.Module):
    """Stands in for ``TENorm``."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(hidden_size, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class RMSNormColumnParallelLinear(ColumnParallelLinear):
    """Stands in for ``TELayerNormColumnParallelLinear``: the norm's weight is ``layer_norm_weight``."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = _norm_weight(input_size, config)
        self.return_layernorm_output = False
        """Return ``((output, norm's output), bias)``, for an adapter beside the projection."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        normed = rms_norm(x, self.layer_norm_weight, self.eps)
        output, bias = super().forward(normed, *args, **kwargs)
        return ((output, normed) if self.return_layernorm_output else output), bias


class DuplicatedLinear(torch.nn.Module):
    """Stands in for ``TELinear`` with ``parallel_mode="duplicated"``: the same matrix on every tensor-parallel rank."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Any, **unused: Any
    ) -> None:
        super().__init__()
        shape, device = (output_size, input_size), torch.cuda.current_device()
        weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork(get_data_parallel_rng_tracker_name()):
            init_method(weight)
        # Each rank has the gradient of its share of the tokens; they are summed (finalize_model_grads.py).
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None


class PackedCoreAttention(MegatronModule):
    """Causal attention of packed sequences, each on its own. Stands in for ``TEDotProductAttention``."""

    backend = "auto"

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout > 0:
            raise UnsupportedError(
                f"attention_dropout={config.attention_dropout} needs TransformerEngine's attention: set it to 0.0"
            )
        if config.context_parallel_size > 1:
            raise UnsupportedError(
                f"context_parallel_size={config.context_parallel_size} without prefix sharing needs "
                "TransformerEngine's attention: set it to 1, or psrl.enable=true"
            )
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_TNH: torch.Tensor,
        key_TKH: torch.Tensor,
        value_TKH: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Returns [T, N * H].

        Raises:
            UnsupportedError: the sequences are not packed.
        """
        if packed_seq_params is None:
            raise UnsupportedError("use_remove_padding=False: only packed sequences are supported, set it to True")
        layout = packed_layout(packed_seq_params)
        out_TNH = attend_layout(query_TNH, key_TKH, value_TKH, layout, scale=self.softmax_scale, backend=self.backend)
        return out_TNH.flatten(1)


def packed_layout(packed_seq_params: Any) -> AttentionLayout:
    """The layout of a micro-batch of packed sequences, built by its first layer and kept on its PackedSeqParams."""
    layout = getattr(packed_seq_params, "_psrl_layout", None)
    if layout is None:
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        if cu_seqlens is None:
            cu_seqlens = packed_seq_params.cu_seqlens_q
        layout = AttentionLayout.from_cu_seqlens(cu_seqlens.cpu())
        packed_seq_params._psrl_layout = layout
    return layout


class LocalLayerProvider(BackendSpecProvider):
    """Modules for ``get_gpt_layer_with_transformer_engine_spec`` where TransformerEngine cannot be used."""

    def __init__(self, attention_backend: str = "auto") -> None:
        self.attention_backend = attention_backend

    def linear(self) -> type:
        return DuplicatedLinear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return RMSNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return type("PackedCoreAttention", (PackedCoreAttention,), {"backend": self.attention_backend})

    def activation_func(self) -> Any:
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple:
        if not moe_use_grouped_gemm or moe_use_legacy_grouped_gemm:
            raise UnsupportedError("moe_grouped_gemm=False needs TransformerEngine's experts: set it to True")
        submodules = MLPSubmodules(linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear)
        return TEGroupedMLP, submodules


def uses_transformer_engine() -> bool:
    """Whether layers are built from TransformerEngine: it is installed and there is a GPU to run it."""
    return not cpu_device.is_active() and gpt_layer_specs.HAVE_TE


@contextlib.contextmanager
def layer_specs(attention_backend: str = "auto") -> Iterator[None]:
    """While active, ``get_gpt_decoder_block_spec(use_transformer_engine=True)`` builds layers for this machine.

    Without TransformerEngine they come from this module, with ``attention_backend`` as in ``attend``; with it they are
    Megatron-Core's own.

    Cause: ``TESpecProvider``, ``TENorm`` and ``TELinear`` are unbound without TransformerEngine
    (megatron/core/models/gpt/gpt_layer_specs.py:45, used at :222 and :527;
    megatron/core/transformer/multi_latent_attention.py:56, compared with at :399), and mbridge builds its specs inside
    ``_get_transformer_layer_spec`` (mbridge/core/llm_bridge.py:149). Megatron-Bridge gives the spec of a layer, to
    which Megatron-Core adds a last norm of its choice, without sequence parallelism
    (transformer/transformer_block.py, ``LayerNormImpl``). Remove when Megatron-Core takes the provider as an argument.
    """
    if uses_transformer_engine():
        yield
        return
    provider = functools.partial(LocalLayerProvider, attention_backend)
    replacements: list[tuple[Any, str, Any]] = [
        (gpt_layer_specs, "TESpecProvider", provider),
        (gpt_layer_specs, "TENorm", RMSNorm),
        (multi_latent_attention, "TELinear", DuplicatedLinear),
        (transformer_block, "LayerNormImpl", RMSNorm),
    ]
    missing = object()
    previous = [(module, name, getattr(module, name, missing)) for module, name, _ in replacements]
    for module, name, value in replacements:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in previous:
            if value is missing:
                delattr(module, name)
            else:
                setattr(module, name, value)
