"""Megatron-Bridge and LoRA under parallel layouts, against one process without sharing, as in ``test_parallel.py``."""

import pytest

from tests.helpers.megatron_bridge import import_megatron_bridge
from tests.helpers.parallel import Layout
from tests.helpers.parallel_checks import check

pytestmark = pytest.mark.slow

BRIDGE = {
    "vanilla_mbridge": False,
    "override_transformer_config": {
        "apply_rope_fusion": False,
        "moe_permute_fusion": False,
        "attention_backend": "auto",
    },
}
"""Without what Megatron-Bridge would choose, or choose otherwise than mbridge, with TransformerEngine."""
PLAIN = {"use_distributed_optimizer": False}


@pytest.fixture(autouse=True)
def megatron_bridge():
    import_megatron_bridge()


MODELS = {
    "qwen3-tp-pp-full": ("qwen3", False, Layout(tp=2, pp=2), "tree", {"recompute": "full"}),
    "qwen2-tied-tp-pp": ("qwen2", True, Layout(tp=2, pp=2), "step", {}),
    "qwen2-tied-vpp": ("qwen2", True, Layout(pp=2, vpp=2), "tree", {}),
    "qwen3-dp-tp": ("qwen3", False, Layout(tp=2), "step", {}),
    "llama-dp-tp-plain": ("llama", False, Layout(tp=2), "degenerate", PLAIN),
    "qwen3-cp-dp": ("qwen3", False, Layout(cp=2), "tree", {}),
    "qwen3-tp-cp": ("qwen3", False, Layout(tp=2, cp=2), "step", {"recompute": "selective"}),
    "qwen3_moe-tp-ep": ("qwen3_moe", False, Layout(tp=2, ep=2), "tree", {}),
    "qwen3_moe-pp-ep-etp": ("qwen3_moe", False, Layout(tp=2, pp=2, ep=2, etp=1), "step", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(pool, checkpoint, name):
    """The reference is built by mbridge."""
    kind, tied, layout, forest, engine = MODELS[name]
    check(pool, layout, forest=forest, checkpoint=checkpoint(kind, tied=tied), engine={**BRIDGE, **engine})
