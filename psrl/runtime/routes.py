"""Experts of a session's tokens that routers replay, or record.

Shape legend: U unique tokens of the plan, T tokens of a micro-batch that a router of this rank sees, L layers of the
model that have experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.errors import PlanError
from psrl.routes import NATIVE, ExpertArray
from psrl.runtime.transfer import to_device


class TokenRoutes:
    """Experts of every unique token in the expert layers of this rank. ``add`` mutates it."""

    def __init__(
        self, experts_UK: dict[int, Tensor], size: tuple[int, int], device: torch.device, *, is_recording: bool
    ) -> None:
        """
        Args:
            experts_UK: int16, by layer number (from 1); ``NATIVE`` where the router decides, or is not recorded yet.
                Where it records, one row more, in which padding ends.
            size: U and K.
        """
        self._experts_UK, self._size, self._device = experts_UK, size, device
        self.is_recording = is_recording

    @classmethod
    def replaying(cls, experts_ULK: ExpertArray, layers: Mapping[int, int], device: torch.device) -> TokenRoutes:
        """
        Args:
            layers: index in L by the number of the layer; this rank's.
        """
        num_tokens, _, topk = experts_ULK.shape
        by_layer = {layer: to_device(experts_ULK[:, index], device) for layer, index in layers.items()}
        return cls(by_layer, (num_tokens, topk), device, is_recording=False)

    @classmethod
    def recording(cls, size: tuple[int, int], layers: Sequence[int], device: torch.device) -> TokenRoutes:
        """
        Args:
            size: U and K.
            layers: numbers of this rank's expert layers.
        """
        by_layer = {
            layer: torch.full((size[0] + 1, size[1]), NATIVE, dtype=torch.int16, device=device) for layer in layers
        }
        return cls(by_layer, size, device, is_recording=True)

    def of(self, layer: int, unique_T: Tensor) -> Tensor:
        """[T, K] experts, ``NATIVE`` where the router decides.

        Args:
            unique_T: unique tokens, -1 for padding.
        """
        return self._experts_UK[layer][unique_T].long().masked_fill((unique_T < 0).unsqueeze(-1), NATIVE)

    def add(self, layer: int, unique_T: Tensor, experts_TK: Tensor) -> None:
        """Record experts; those of padding (-1) go to the last row, which is none's."""
        known = self._experts_UK[layer]
        known[unique_T] = experts_TK.to(known.dtype)

    def joined(self, layers: Sequence[int], groups: Sequence[dist.ProcessGroup]) -> Tensor:
        """[U, L, K] int16 on the host: what all ranks have recorded. Collective over every group in turn.

        Args:
            layers: numbers of the model's expert layers.
            groups: ranks with other layers (pipeline stages) or other tokens (sequence and context parallel).

        Raises:
            PlanError: a token has no route in some layer.
        """
        num_tokens, topk = self._size
        out_ULK = torch.empty((num_tokens, len(layers), topk), dtype=torch.int16)
        for index, layer in enumerate(layers):
            own_UK = self._experts_UK.get(layer)
            if own_UK is None:
                own_UK = torch.full(self._size, NATIVE, device=self._device)
            experts_UK = own_UK[: self._size[0]].int()  # neither gloo nor NCCL takes int16
            for group in groups:
                dist.all_reduce(experts_UK, op=dist.ReduceOp.MAX, group=group)
            if int(experts_UK.min()) == NATIVE:
                raise PlanError(f"layer {layer}: the experts of some tokens were not recorded")
            out_ULK[:, index] = experts_UK
        return out_ULK
