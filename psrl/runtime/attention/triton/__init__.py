"""Attention under an interval mask as Triton kernels. Importing it imports Triton."""

from psrl.runtime.attention.triton.backend import PathGrads, attend_path, triton_attention
from psrl.runtime.attention.triton.path import CachedPath

__all__ = ["CachedPath", "PathGrads", "attend_path", "triton_attention"]
