"""Where attention kernels find the cached path of one execution, and the accumulators of its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psrl.cache import KVCache

if TYPE_CHECKING:  # importing it imports Triton
    from psrl.runtime.attention.triton import CachedPath, PathGrads


@dataclass
class PathTables:
    """Built once for all layers of an execution and their recomputation.

    Holds addresses, no storage: the cache keeps the blocks until the execution's last layer ends, and ``drop`` is
    called then.
    """

    cache: KVCache
    micro_batch: int
    _path: CachedPath | None = field(default=None, init=False)
    _grads: PathGrads | None = field(default=None, init=False)

    def path(self) -> CachedPath:
        """K and V. Built in the first layer's forward, when what the path holds has been written."""
        if self._path is None:
            from psrl.runtime.attention.triton import CachedPath

            self._path = CachedPath.build(*self.cache.path_blocks(self.micro_batch))
        return self._path

    def grads(self) -> PathGrads:
        """The accumulators, allocated where they do not exist yet. Built in the first layer's backward."""
        if self._grads is None:
            from psrl.runtime.attention.triton import PathGrads

            self._grads = PathGrads.build(*self.cache.path_grads(self.micro_batch))
        return self._grads

    def drop(self) -> None:
        """The blocks may be gone from now on."""
        self._path = self._grads = None
