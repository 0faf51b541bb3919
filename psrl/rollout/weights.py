"""Replacing a model's weights, checked by name: none may be missing, none may be left over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from psrl.errors import RolloutError
from psrl.models.stacked_experts import one_by_one


class WeightUpdate:
    """One update, in any number of parts. Between the first part and ``finish`` the model is in pieces.

    Tied tensors (``lm_head.weight`` and ``model.embed_tokens.weight``) are one tensor with two names: either is enough,
    and both must be equal.
    """

    def __init__(self, model: Any) -> None:
        self._targets: dict[str, Tensor] = dict(one_by_one(model.state_dict(keep_vars=True)))
        self._names_by_storage: dict[int, list[str]] = {}
        for name, tensor in self._targets.items():
            self._names_by_storage.setdefault(tensor.data_ptr(), []).append(name)
        self._seen: set[str] = set()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a part into the model, cast to its dtype.

        Raises:
            RolloutError: an unknown name, a wrong shape, or two values for tied tensors.
        """
        with torch.no_grad():
            for name, value in tensors:
                target = self._targets.get(name)
                if target is None:
                    raise RolloutError(f"weight update: unexpected tensor {name!r}: the rollout's model has none")
                if target.shape != value.shape:
                    raise RolloutError(
                        f"weight update: {name} has shape {tuple(value.shape)}, the rollout's model "
                        f"{tuple(target.shape)}"
                    )
                others = self._seen.intersection(self._names_by_storage[target.data_ptr()]) - {name}
                if others and not torch.equal(target, value.to(target.dtype)):
                    raise RolloutError(f"weight update: {name} and {others.pop()} are tied but have different values")
                target.copy_(value)
                self._seen.add(name)

    def finish(self) -> int:
        """Number of tensors loaded.

        Raises:
            RolloutError: tensors are missing; names them.
        """
        missing = [names[0] for names in self._names_by_storage.values() if not self._seen.intersection(names)]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise RolloutError(f"weight update: no values for {', '.join(missing[:3])}{more}")
        return len(self._seen)
