"""The object that takes a micro-batch through Megatron's layers.

Megatron hands ``packed_seq_params`` to every layer, and activation recompute keeps it with the saved inputs. A
subclass therefore tells attention its micro-batch even when a recomputed forward runs in the middle of a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from psrl.errors import PlanError
from psrl.runtime.session import Execution


@dataclass
class SharedPrefixParams(PackedSeqParams):
    """Packed parameters of one micro-batch: a single ``thd`` sequence of T tokens."""

    execution: Execution | None = None

    @classmethod
    def of(cls, execution: Execution) -> SharedPrefixParams:
        num_tokens = execution.micro_batch.num_tokens
        # On the host: only rotary embedding reads it, as numbers, and would wait for a GPU in every layer.
        cu_seqlens = torch.tensor([0, num_tokens], dtype=torch.int32)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=num_tokens,
            max_seqlen_kv=num_tokens,
            execution=execution,
        )


def execution_of(packed_seq_params: Any) -> Execution:
    """The execution that a layer belongs to.

    Raises:
        PlanError: the layer was called outside psrl's passes.
    """
    execution = getattr(packed_seq_params, "execution", None)
    if execution is None:
        raise PlanError("a model built for prefix sharing was called without a micro-batch of an execution plan")
    return execution
