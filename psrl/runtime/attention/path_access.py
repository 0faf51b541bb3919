"""How attention reaches the cached path: in its blocks, or gathered in front of the local keys."""

from __future__ import annotations

from typing import NamedTuple

IN_PLACE_BACKENDS = ("triton",)
"""Backends whose kernels read keys in the blocks of a cache and add to their accumulators."""


class PathAccess(NamedTuple):
    """Decided once for a model, before anything runs."""

    in_place: bool
    detail: str = ""
    """Why a backend that could read in place does not, or when."""

    def __str__(self) -> str:
        how = "path in place" if self.in_place else "path gathered"
        return f"{how} ({self.detail})" if self.detail else how


def path_access(
    backend: str, *, context_parallel: int = 1, is_latent: bool = False, has_host_tier: bool = False
) -> PathAccess:
    """
    Args:
        backend: as ``resolve_backend`` returns it.
        context_parallel: ranks that share a micro-batch.
        is_latent: the cache holds latents (multi-head latent attention).
        has_host_tier: plans may move layers of blocks to the host; those plans gather.
    """
    if backend not in IN_PLACE_BACKENDS:
        return PathAccess(False)
    if context_parallel > 1:
        return PathAccess(False, "context parallelism: every rank stores a shard of each block")
    if is_latent:
        return PathAccess(False, "latent attention: keys are made of the path's latents in every layer")
    return PathAccess(True, "gathered in mini-batches that use the host tier" if has_host_tier else "")
