"""A critic on a checkpoint with tied embeddings, which has no output layer to put the value head in place of."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from mbridge.core.safetensor_io import SafeTensorIO

HEAD = "lm_head.weight"


def allow_missing_head(bridge: Any) -> None:
    """Let ``bridge`` load such a checkpoint into a value model, and save the value head with it.

    Cause: mbridge asks for ``lm_head.weight`` and then discards it (mbridge/core/bridge.py:207), so a checkpoint
    without it fails; on saving, a tensor that the original index does not list is dropped
    (mbridge/core/safetensor_io.py:117). Remove when mbridge skips the head of a value model before it loads.
    """
    bridge._get_safetensor_io = lambda path: _HeadlessIO(bridge._get_actual_hf_path(path))


class _HeadlessIO(SafeTensorIO):
    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, torch.Tensor]:
        missing = {HEAD} & set(hf_weight_names) - set(self.load_hf_weight_names())
        weights = super().load_some_hf_weight([name for name in hf_weight_names if name not in missing])
        # No rows, so that the bridge takes it for a vocabulary projection and leaves the fresh head alone.
        return {**weights, **{name: torch.empty(0) for name in missing}}

    def save_hf_weight(
        self,
        per_tensor_generator: Generator[tuple[str, torch.Tensor], None, None],
        new_hf_dir: str,
        hf_shared_weight_keys: list[str],
    ) -> None:
        if self.index:
            self.index.setdefault(HEAD, next(iter(self.index.values())))
        super().save_hf_weight(per_tensor_generator, new_hf_dir, hf_shared_weight_keys)
