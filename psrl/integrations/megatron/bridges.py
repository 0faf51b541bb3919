"""mbridge's models that psrl adds or completes, registered in place of its own (``mbridge.core.register_model``)."""

from __future__ import annotations

from typing import Any

from mbridge.core import register_model
from mbridge.models.llama import LLaMABridge


@register_model("mistral")
class MistralBridge(LLaMABridge):
    """Mistral without sliding windows: Llama's layers under Llama's parameter names, biases nowhere.

    Cause: mbridge has no bridge for it (mbridge/models/__init__.py). Remove when it has.
    """

    def _build_config(self) -> Any:
        return self._build_base_config(add_qkv_bias=False)
