"""Megatron-Bridge and LoRA under parallel layouts, against one process without sharing, as in ``test_parallel.py``."""

import pytest
import torch

from tests.helpers import value_loss_fn
from tests.helpers.forests import value_rows
from tests.helpers.megatron_bridge import import_megatron_bridge
from tests.helpers.parallel import Job, Layout, reference
from tests.helpers.parallel_checks import ROWS, check, split
from tests.helpers.parallel_jobs import log_probs_of_base, save_and_resume

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


def test_float32(pool, checkpoint):
    """A checkpoint in the dtype of the model, so that nothing is cast while it is loaded; a small step, as there."""
    job = {"dtype": "float32", "budgets": (3, 1000), "lr": 1e-4}
    check(pool, Layout(tp=2, pp=2), forest="tree", checkpoint=checkpoint(), engine=BRIDGE, **job)


CRITICS = {
    "qwen3-tp-pp": ("qwen3", False, Layout(tp=2, pp=2)),
    "qwen3-dp-tp": ("qwen3", False, Layout(tp=2)),
    "qwen2-tied-tp-pp": ("qwen2", True, Layout(tp=2, pp=2)),
    "qwen3_moe-tp-ep": ("qwen3_moe", False, Layout(tp=2, ep=2)),
}


@pytest.mark.parametrize("name", CRITICS)
def test_critics(pool, checkpoint, name):
    kind, tied, layout = CRITICS[name]
    shares = split(value_rows(), pool.size // (layout.tp * layout.pp))
    critic = {"shares": shares, "model_type": "value_model", "loss": (value_loss_fn, {})}
    check(pool, layout, forest="critic", checkpoint=checkpoint(kind, tied=tied), engine=BRIDGE, **critic)


DENSE = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
ADAPTERS = {
    "qwen3-tp-pp": ("qwen3", DENSE, Layout(tp=2, pp=2), "tree", {}),
    "qwen2-tp-pp-full": ("qwen2", DENSE, Layout(tp=2, pp=2), "step", {"recompute": "full"}),
    "qwen3-dp-tp": ("qwen3", DENSE, Layout(tp=2), "tree", {}),
    "llama-dp-plain": ("llama", DENSE, Layout(), "step", PLAIN),
    "qwen3-vpp": ("qwen3", DENSE, Layout(pp=2, vpp=2), "degenerate", {}),
    "qwen3-tp-cp-selective": ("qwen3", DENSE, Layout(tp=2, cp=2), "tree", {"recompute": "selective"}),
    "qwen3_moe-tp-ep": ("qwen3_moe", DENSE[:2], Layout(tp=2, ep=2), "tree", {}),
    "qwen3_moe-pp-ep-full": ("qwen3_moe", DENSE[:2], Layout(pp=2, ep=2), "step", {"recompute": "full"}),
}


def adapted(targets, engine):
    lora = {"type": "lora", "rank": 4, "alpha": 6, "dropout": 0.0, "merge": False, "target_modules": targets}
    return {**BRIDGE, **engine, "model": {"lora": lora}}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(pool, checkpoint, name):
    """Gradients and weights, which a rollout gets as base weights and adapters; the reference is the base alone."""
    kind, targets, layout, forest, engine = ADAPTERS[name]
    folder, engine = checkpoint(kind), adapted(targets, engine)
    results, want = check(pool, layout, forest=forest, checkpoint=folder, engine=engine)
    assert {name.rpartition(".lora_")[1] for name in results[0].weights} == {"", ".lora_"}
    (with_adapters,) = want.outputs.values()

    shares = split(ROWS[forest](), pool.size // (layout.tp * layout.pp * layout.cp))
    base = reference(Job(folder, shares, adam=False), f"base {kind} {forest} {len(shares)}")
    (outputs,) = base.outputs.values()
    for dp_rank, log_probs in pool.run(log_probs_of_base, Job(folder, shares, engine=engine), layout):
        if log_probs is None:  # a stage without outputs
            continue
        mine = slice(sum(map(len, shares[:dp_rank])), sum(map(len, shares[: dp_rank + 1])))
        got = torch.cat(log_probs)
        assert torch.allclose(got, torch.cat(outputs["log_probs"][mine]), rtol=0, atol=1e-9)
        assert (got - torch.cat(with_adapters["log_probs"][mine])).abs().max() > 1e-2


RESUMED = {
    "qwen3-dp-tp": ("qwen3", Layout(tp=2), BRIDGE, {}),
    "qwen3-tp-pp": ("qwen3", Layout(tp=2, pp=2), BRIDGE, {}),
    "qwen3_moe-tp-ep": ("qwen3_moe", Layout(tp=2, ep=2), BRIDGE, {}),
    "critic-tied": ("qwen2", Layout(tp=2, pp=2), BRIDGE, {"model_type": "value_model", "loss": (value_loss_fn, {})}),
    "mbridge-qwen3_moe-tp-ep": ("qwen3_moe", Layout(tp=2, ep=2), {}, {}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_continues(pool, checkpoint, tmp_path, name):
    kind, layout, engine, critic = RESUMED[name]
    rows = value_rows() if critic else ROWS["tree"]()
    shares = split(rows, pool.size // (layout.tp * layout.pp))
    job = Job(checkpoint(kind, tied=kind == "qwen2"), shares, engine=engine, **critic)
    found = pool.run(save_and_resume, job, layout, str(tmp_path / "saved"))
    assert max(rank["moved"] for rank in found) > 1e-3
    assert [(rank["weights"], rank["loaded"], rank["continued"]) for rank in found] == [(0.0, 0.0, 0.0)] * 4
