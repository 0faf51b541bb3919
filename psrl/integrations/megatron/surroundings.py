"""What surrounds the layers in a GPTModel forward: rotary positions and the rows that reach the output layer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from psrl.errors import UnsupportedError
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
        """Angles [T, 1, 1, rotary dim] in float32."""
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
        return angles[:, None, None, :]


def install_surroundings(model: nn.Module) -> None:
    """Hook one model chunk (an unwrapped GPTModel): positions, and on the last stage the output rows. Mutates it.

    Raises:
        UnsupportedError: the model uses another position embedding.
    """
    if getattr(model, "position_embedding_type", "rope") != "rope" or not hasattr(model, "rotary_pos_emb"):
        raise UnsupportedError(
            f"prefix sharing needs rotary position embeddings, this model has "
            f"{getattr(model, 'position_embedding_type', 'none')}; set psrl.enable=false"
        )
    model.rotary_pos_emb = PositionedRotaryEmbedding(model.get_submodule("rotary_pos_emb"))
    if model.post_process:
        model.get_submodule("output_layer").register_forward_pre_hook(_keep_output_rows, with_kwargs=True)


def _keep_output_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Only rows that own an edge reach the output layer: [T, 1, hidden] becomes [R, 1, hidden]."""
    micro_batch = active_micro_batch()
    if micro_batch is None:
        return None
    hidden, *rest = args
    return (hidden.index_select(0, micro_batch.rows_R), *rest), kwargs
