"""Dense attention under an interval mask: the oracle of the tests. Time and memory grow with T x S.

Shape legend: T queries, S keys, N query heads, K key/value heads, R = N / K, H head dimension (of q and k), W of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from psrl.runtime.attention.layout import AttentionLayout
from psrl.runtime.transfer import to_device


def reference_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKW: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """[T, N, W] by plain autograd, for any float dtype; bfloat16 and float16 are computed in float32."""
    dtype = q_TNH.dtype if q_TNH.dtype == torch.float64 else torch.float32
    q_TKRH = q_TNH.to(dtype).unflatten(1, (k_SKH.shape[1], -1))
    scores_KRTS = torch.einsum("tkrh,skh->krts", q_TKRH, k_SKH.to(dtype)) * scale
    is_hidden_TS = ~visible_mask(layout, q_TNH.device)
    scores_KRTS = scores_KRTS.masked_fill(is_hidden_TS, float("-inf"))
    # A row without any key would be softmax over -inf alone, NaN in value and gradient.
    is_blind_T1 = is_hidden_TS.all(dim=1, keepdim=True)
    weights_KRTS = scores_KRTS.masked_fill(is_blind_T1, 0.0).softmax(dim=-1).masked_fill(is_blind_T1, 0.0)
    return torch.einsum("krts,skw->tkrw", weights_KRTS, v_SKW.to(dtype)).flatten(1, 2).to(q_TNH.dtype)


def visible_mask(layout: AttentionLayout, device: torch.device) -> Tensor:
    """[T, S] bool: the mask of ``layout``, dense."""
    query_T1 = torch.arange(layout.num_queries, device=device)[:, None]
    first_S, last_S = (to_device(x, device) for x in (layout.first_S, layout.last_S))
    return (first_S <= query_T1) & (query_T1 < last_S)
