"""Gradients of the engine's model under Hugging Face parameter names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from verl.utils.megatron_utils import unwrap_model

from psrl.errors import UnsupportedError
from psrl.integrations.megatron import cpu_device

_PARAM_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")


def full_grads(engine: Any) -> dict[str, torch.Tensor]:
    """The accumulated gradient (``main_grad``) of every parameter, as transformers names and shapes it.

    Call between ``forward_backward_batch`` and ``optimizer_zero_grad``, before the optimizer step clips in place.
    Tied embeddings have one entry, ``model.embed_tokens.weight``, as ``named_parameters()`` has in transformers.
    The values are veRL's loss's gradient in the dtype of the gradient buffers; the tensors are copies.
    Collective: every rank of the model-parallel group calls it and gets every gradient.

    Raises:
        UnsupportedError: the engine does not use mbridge (``vanilla_mbridge=True``).
    """
    if not engine.vanilla_bridge:
        raise UnsupportedError("vanilla_mbridge=False: gradients are exported through mbridge only, set it to True")
    chunks = [_GradientsOf(chunk) for chunk in unwrap_model(engine.module)]
    with cpu_device.device_mode(), torch.no_grad():
        return {name: grad.clone() for name, grad in engine.bridge.export_weights(chunks)}


class _GradientsOf:
    """A model chunk as the bridge's export sees it, with gradients in place of parameters."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self._model.named_parameters():
            grad = param.main_grad.view_as(param)
            for attribute in _PARAM_ATTRIBUTES:
                if hasattr(param, attribute):
                    setattr(grad, attribute, getattr(param, attribute))
            yield name, grad
