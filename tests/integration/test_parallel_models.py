"""Critics and every model under parallel layouts, against one process without sharing, as in ``test_parallel.py``."""

import pytest

from tests.helpers import value_loss_fn
from tests.helpers.forests import value_rows
from tests.helpers.parallel import Layout
from tests.helpers.parallel_checks import check, split

pytestmark = pytest.mark.slow

UNEVEN = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}
MODELS = {
    "qwen2-tp": ("qwen2", False, Layout(tp=2), {}),
    "qwen2-pp": ("qwen2", False, Layout(pp=2), {}),
    "qwen2-tied-tp-pp": ("qwen2", True, Layout(tp=2, pp=2), {}),
    "qwen2-tied-tp-pp-uneven": ("qwen2", True, Layout(tp=2, pp=2), UNEVEN),
    "qwen3-tied-vpp": ("qwen3", True, Layout(pp=2, vpp=2), {}),
    "llama-tp": ("llama", False, Layout(tp=2), {}),
    "llama-pp": ("llama", False, Layout(pp=2), {}),
    "llama-tied-tp-pp": ("llama", True, Layout(tp=2, pp=2), {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(pool, checkpoint, name):
    kind, tied, layout, transformer = MODELS[name]
    engine = {"override_transformer_config": transformer} if transformer else {}
    check(pool, layout, forest="tree", checkpoint=checkpoint(kind, tied=tied), engine=engine)


CRITICS = {
    "qwen3-tp": ("qwen3", Layout(tp=2)),
    "qwen3-pp": ("qwen3", Layout(pp=2)),
    "qwen3-tp-pp": ("qwen3", Layout(tp=2, pp=2)),
    "qwen3-vpp": ("qwen3", Layout(pp=2, vpp=2)),
    "qwen3-tp-cp": ("qwen3", Layout(tp=2, cp=2)),
    "qwen2-tied-tp-pp": ("qwen2", Layout(tp=2, pp=2)),
    "llama-tied-tp-pp": ("llama", Layout(tp=2, pp=2)),
    "qwen3_moe-ep": ("qwen3_moe", Layout(ep=2)),
    "qwen3_moe-tp-ep": ("qwen3_moe", Layout(tp=2, ep=2)),
    "qwen3_moe-pp-ep": ("qwen3_moe", Layout(pp=2, ep=2)),
}


@pytest.mark.parametrize("name", CRITICS)
def test_critics(pool, checkpoint, name):
    """The value head is on the last stage, and sees all rows of its ranks under sequence parallelism too."""
    kind, layout = CRITICS[name]
    check(
        pool,
        layout,
        forest="critic",
        shares=split(value_rows(), pool.size // (layout.tp * layout.pp * layout.cp)),
        checkpoint=checkpoint(kind, tied="tied" in name),
        model_type="value_model",
        loss=(value_loss_fn, {}),
    )
