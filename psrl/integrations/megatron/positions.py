"""Rotary positions, one for each token, in a GPTModel forward and in layers of latent attention."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from psrl.errors import UnsupportedError
from psrl.runtime.context import ContextRank
from psrl.runtime.session import BoundMicroBatch, active_micro_batch


def rotary_angles(rotary: RotaryEmbedding, micro_batch: BoundMicroBatch) -> tuple[Tensor, float]:
    """Angles [T, 1, 1, rotary dim] in float32, and the factor of their cosines and sines (1, or YaRN's).

    Megatron's packed rotary takes per-token rows when the table is as long as the packed sequence (rope_utils.py,
    ``_apply_rotary_pos_emb_thd``); under context parallelism the rows lie as ``_as_picked`` puts them.
    """
    table = rotary.get_emb(2)
    table, factor = table if isinstance(table, tuple) else (table, 1.0)
    per_position_A = table[1, 0, 0]  # of position 1, so the angles by which a position turns
    angles_TA = torch.outer(micro_batch.position_ids_T.to(per_position_A.dtype), per_position_A)
    if micro_batch.context is not None:
        angles_TA = _as_picked(angles_TA, micro_batch.context.where, micro_batch.num_tokens)
    return angles_TA[:, None, None, :], factor


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


class PositionedRotaryEmbedding(nn.Module):
    """Wraps a model's RotaryEmbedding: inside a micro-batch forward, one table row per token, at its own position.

    GPTModel ignores ``position_ids`` with rotary embeddings (gpt_model.py, ``_preprocess``). Outside a forward of psrl,
    the wrapped module answers.
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
        """Angles as ``rotary_angles`` gives them."""
        micro_batch = active_micro_batch()
        if micro_batch is None:
            return self.inner(max_seq_len, *args, **kwargs)
        return rotary_angles(self.inner, micro_batch)[0]


def rotate_by_position(model: Any) -> None:
    """Hook one model chunk (an unwrapped GPTModel) so that every token is rotated to its own position. Mutates it.

    Layers of latent attention have rotary embeddings of their own, see ``latent_attention.py``.

    Raises:
        UnsupportedError: the model uses another position embedding.
    """
    is_latent = model.config.multi_latent_attention
    if model.position_embedding_type != "rope" or not (is_latent or hasattr(model, "rotary_pos_emb")):
        raise UnsupportedError(
            f"prefix sharing needs rotary position embeddings, this model has {model.position_embedding_type}; set "
            "psrl.enable=false"
        )
    if not is_latent:
        model.rotary_pos_emb = PositionedRotaryEmbedding(model.get_submodule("rotary_pos_emb"))
