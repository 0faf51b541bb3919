"""One memory budget for ranks that have to agree on a plan."""

from __future__ import annotations

import torch
import torch.distributed as dist

from psrl.integrations.megatron.passes import replica_groups


def agreed_budget(budget_bytes: int | None, num_layers: int, device: torch.device) -> int | None:
    """This rank's share of the tightest budget: the least, over ranks that share a plan, of bytes per layer.

    Waves depend on whether the cache fits its budget, and all stages run the same waves. A stage's cache is
    proportional to its layers, so comparing bytes per layer gives every stage the same answer.

    Args:
        budget_bytes: of this rank; None: no limit, then on all of them.
        num_layers: attention layers that this rank plans with, at least 1.
        device: of the collective's tensor.
    """
    groups = replica_groups()
    if budget_bytes is None or not groups:
        return budget_bytes
    least = torch.tensor(budget_bytes // num_layers, device=device)
    for group in groups:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return int(least) * num_layers
