"""Multi-head latent attention (DeepSeek-V3) over shared prefixes: the cache holds latents instead of keys and values.

Of a token are cached the latent that its keys and values are made of, and the rotated part of its key that all heads
share. A micro-batch expands the latents of its path together with its own, so that its backward gives the
up-projection's gradient for every reader of a token, and the latent's gradient reaches the token through the cache.

Shape legend: T local tokens of this rank, S keys of the path and of the whole micro-batch, N heads of this
tensor-parallel rank, L latent dim, R rotary dim, H head dim (of keys: without and with position, then values).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from psrl.errors import UnsupportedError
from psrl.integrations.megatron.packed import execution_of
from psrl.integrations.megatron.positions import rotary_angles
from psrl.runtime.exchange import exchange_kv
from psrl.runtime.session import Execution


class PrefixLatentAttention(MLASelfAttention):
    """Stands where MLASelfAttention would, with the same parameters."""

    linear_kv_down_proj: Any
    kv_layernorm: Any
    core_attention: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_scattered = self.config.sequence_parallel and self.tp_group.size() > 1
        if len(self.linear_kv_down_proj.weight) != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            raise UnsupportedError(
                f"prefix sharing needs latents that are whole on every tensor-parallel rank, not those of "
                f"{type(self.linear_kv_down_proj).__name__}; set psrl.enable=false"
            )

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  no inference, no rotary table from outside
        self, hidden_states: Tensor, attention_mask: Tensor | None, packed_seq_params: Any = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [T, 1, hidden], scattered under sequence parallelism; returns the same, and a bias."""
        execution = execution_of(packed_seq_params)
        angles, factor = rotary_angles(self.rotary_pos_emb, execution.micro_batch)

        def rotate(x_TNR: Tensor) -> Tensor:
            return apply_rotary_pos_emb(
                x_TNR,
                angles,
                config=self.config,
                cu_seqlens=packed_seq_params.cu_seqlens_q,
                mscale=factor,
                cp_group=self.pg_collection.cp,
            )

        query = self._query(hidden_states, rotate)
        key, value = self._key_and_value(hidden_states, rotate, execution)
        if self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(
                query, key, value, attention_mask, packed_seq_params=packed_seq_params
            )
        else:
            out = self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        return self.linear_proj(out[:, None])

    def _query(self, hidden_states: Tensor, rotate: Any) -> Tensor:
        """[T, N, H] of all tokens."""
        if self.config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            compressed, _ = self.linear_q_down_proj(hidden_states)
            query, _ = self.linear_q_up_proj(self.q_layernorm(compressed))
        q_TNH = query.view(len(query), self.num_attention_heads_per_partition, self.q_head_dim)
        plain, rotary = q_TNH.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([plain, rotate(rotary)], dim=-1)

    def _key_and_value(self, hidden_states: Tensor, rotate: Any, execution: Execution) -> tuple[Tensor, Tensor]:
        """[S, N, H] of the path and of all local tokens."""
        config, num_heads = self.config, self.num_attention_heads_per_partition
        combined, _ = self.linear_kv_down_proj(hidden_states)
        latent, rotary = combined.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        latent = self.kv_layernorm(latent)
        if self._is_scattered:
            # Every rank's heads see all rotary parts, so their gradients are summed over ranks; those of the latents
            # come back complete on every rank, see ``_expand``.
            rotary = gather_from_sequence_parallel_region(rotary, group=self.tp_group)
            latent = gather_from_sequence_parallel_region(
                latent, tensor_parallel_output_grad=False, group=self.tp_group
            )
        pair = exchange_kv(execution, self.core_attention.cache_layer, latent, rotate(rotary))
        kv_SNH = self._expand(pair.k).view(len(pair.k), num_heads, config.qk_head_dim + config.v_head_dim)
        plain, value = kv_SNH.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        return torch.cat([plain, pair.v.expand(-1, num_heads, -1)], dim=-1), value.contiguous()

    def _expand(self, latent_S1L: Tensor) -> Tensor:
        """[S, 1, N * H] up-projected. The projection gathers its input under sequence parallelism: give it a share."""
        if not self._is_scattered:
            return self.linear_kv_up_proj(latent_S1L)[0]
        num_keys = len(latent_S1L)
        padded = F.pad(latent_S1L, (0, 0, 0, 0, 0, -num_keys % self.tp_group.size()))
        scattered = scatter_to_sequence_parallel_region(padded, group=self.tp_group)
        return self.linear_kv_up_proj(scattered)[0][:num_keys]
