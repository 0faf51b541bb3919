"""Attention of a micro-batch under an interval mask: two integers per key, no dense mask."""

from psrl.runtime.attention.dispatch import attend, attend_layout, resolve_backend
from psrl.runtime.attention.layout import AttentionLayout

__all__ = ["AttentionLayout", "attend", "attend_layout", "resolve_backend"]
