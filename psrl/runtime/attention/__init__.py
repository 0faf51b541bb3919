"""Attention of a micro-batch under an interval mask: two integers per key, no dense mask."""

from psrl.runtime.attention.dispatch import attend, attend_layout, resolve_backend
from psrl.runtime.attention.kept import KEEPING_BACKENDS, KeptAttention, KeptResult
from psrl.runtime.attention.layout import AttentionLayout
from psrl.runtime.attention.path_access import IN_PLACE_BACKENDS, PathAccess, path_access

__all__ = [
    "IN_PLACE_BACKENDS",
    "KEEPING_BACKENDS",
    "AttentionLayout",
    "KeptAttention",
    "KeptResult",
    "PathAccess",
    "attend",
    "attend_layout",
    "path_access",
    "resolve_backend",
]
