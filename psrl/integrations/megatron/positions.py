"""Rotary positions of a GPTModel forward, one for each token."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from psrl.errors import UnsupportedError
from psrl.runtime.context import ContextRank
from psrl.runtime.session import active_micro_batch


class PositionedRotaryEmbedding(nn.Module):
    """Wraps a model's RotaryEmbedding: inside a micro-batch forward, one table row per token, at its own position.

    GPTModel ignores ``position_ids`` with rotary embeddings (gpt_model.py, ``_preprocess``); Megatron's packed rotary
    takes per-token rows when the table is as long as the packed sequence (rope_utils.py,
    ``_apply_rotary_pos_emb_thd``). Outside a forward of psrl, the wrapped module answers.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        if type(inner) is not RotaryEmbedding:
            raise UnsupportedError(
                f"prefix sharing knows plain rotary embeddings only, this model has {type(inner).__name__} "
                "(rope scaling); set psrl.enable=false"
            )
        self.inner = inner

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return self.inner.get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        """Angles [T, 1, 1, rotary dim] in float32; under context parallelism as ``_as_picked`` puts them."""
        micro_batch = active_micro_batch()
        if micro_batch is None:
            return self.inner(max_seq_len, *args, **kwargs)
        position_ids_T = micro_batch.position_ids_T
        inv_freq = self.inner.inv_freq.to(position_ids_T.device)
        positions_T = position_ids_T.to(inv_freq.dtype)
        if self.inner.seq_len_interpolation_factor is not None:
            positions_T = positions_T / self.inner.seq_len_interpolation_factor
        freqs = torch.outer(positions_T, inv_freq)
        if self.inner.rotary_interleaved:
            angles = torch.stack((freqs, freqs), dim=-1).flatten(1)
        else:
            angles = torch.cat((freqs, freqs), dim=-1)
        if micro_batch.context is not None:
            angles = _as_picked(angles, micro_batch.context.where, micro_batch.num_tokens)
        return angles[:, None, None, :]


def _as_picked(angles_TA: Tensor, where: ContextRank, num_tokens: int) -> Tensor:
    """A table of the whole micro-batch from which Megatron picks ``angles`` for this context-parallel rank.

    It takes two runs of half as many tokens as the rank has, one from the front, one from the back (rope_utils.py,
    ``_get_thd_freqs_on_this_cp_rank``). psrl splits tokens otherwise, so the rows of others stay empty.

    Args:
        angles_TA: [T, rotary dim] of this rank's tokens, an even number.
    """
    half = len(angles_TA) // 2
    table = angles_TA.new_zeros(num_tokens, angles_TA.shape[1])
    table[where.rank * half : (where.rank + 1) * half] = angles_TA[:half]
    end = num_tokens - where.rank * half
    table[end - half : end] = angles_TA[half:]
    return table


def rotate_by_position(model: nn.Module) -> None:
    """Hook one model chunk (an unwrapped GPTModel) so that every token is rotated to its own position. Mutates it.

    Raises:
        UnsupportedError: the model uses another position embedding.
    """
    if getattr(model, "position_embedding_type", "rope") != "rope" or not hasattr(model, "rotary_pos_emb"):
        raise UnsupportedError(
            f"prefix sharing needs rotary position embeddings, this model has "
            f"{getattr(model, 'position_embedding_type', 'none')}; set psrl.enable=false"
        )
    model.rotary_pos_emb = PositionedRotaryEmbedding(model.get_submodule("rotary_pos_emb"))
