"""What expert routers need of a mini-batch: tokens count as often as samples hold them, loads are known beforehand.

A load-balancing loss multiplies each expert's share of the tokens by its mean probability. Over the mini-batch as a
whole that is linear in the probabilities once the shares are known, and so can be added up micro-batch by micro-batch.

Shape legend: T tokens of a micro-batch on this rank, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class RouterLoads:
    """Tokens per expert of every layer, over the whole mini-batch. ``add`` mutates it, ``finish`` closes it."""

    num_tokens: int
    """Tokens of all samples of this rank, shared ones counted once for each sample."""
    tokens_per_expert_X: dict[int, Tensor] = field(default_factory=dict)
    """By layer number, float64 while they are counted."""

    def add(self, layer: int, weights_T: Tensor, routing_map_TX: Tensor) -> None:
        """Count the tokens of a micro-batch that a layer sends to its experts, ``weights`` times each."""
        counts_X = weights_T.to(torch.float64) @ routing_map_TX.to(torch.float64)
        known = self.tokens_per_expert_X.get(layer)
        self.tokens_per_expert_X[layer] = counts_X if known is None else known + counts_X

    def of(self, layer: int, num_experts: int, device: torch.device) -> Tensor:
        """[X] loads of a layer; zeros where the rank has no tokens, and so ran no micro-batch that counts."""
        if not self.num_tokens:
            return torch.zeros(num_experts, dtype=torch.float64, device=device)
        return self.tokens_per_expert_X[layer]

    def finish(self, group: dist.ProcessGroup | None) -> None:
        """Add up the counts of ranks that hold parts of the same tokens. Collective over ``group``."""
        if group is None or not self.tokens_per_expert_X:
            return
        layers = sorted(self.tokens_per_expert_X)
        stacked = torch.stack([self.tokens_per_expert_X[layer] for layer in layers])
        dist.all_reduce(stacked, group=group)
        self.tokens_per_expert_X = dict(zip(layers, stacked.unbind(), strict=True))


@dataclass(frozen=True)
class RouterPass:
    """How routers treat one execution of a micro-batch."""

    loads: RouterLoads | None
    """Known loads in pass 2; what is being filled where ``is_counting``; None without a balancing loss."""
    num_tokens: int
    is_counting: bool
    """A forward over every token of the mini-batch once: loads are counted, nothing else happens."""
    loss_scale: float
    """Undoes what the schedule does to auxiliary losses, so that they enter the gradient once per mini-batch."""
