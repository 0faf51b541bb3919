"""Models and adapters built by Megatron-Bridge, with layers that need no TransformerEngine."""

import pytest
import torch
from safetensors.torch import load_file

from psrl.config import PSRLConfig
from psrl.errors import UnsupportedError
from psrl.integrations.verl.engine.export import full_grads
from tests.helpers import batch_tensordict, make_worker, ppo_loss_fn, relative_errors
from tests.helpers.engines import at_targets
from tests.helpers.forests import tree_rows
from tests.helpers.megatron_bridge import import_megatron_bridge

SHARING = PSRLConfig(attention_backend="sdpa")
UNFUSED = {"apply_rope_fusion": False, "moe_permute_fusion": False, "attention_backend": "auto"}
"""What Megatron-Bridge would choose, or choose otherwise than mbridge, with TransformerEngine."""


@pytest.fixture(autouse=True)
def megatron_bridge():
    import_megatron_bridge()


def worker_of(folder, psrl=None, **options):
    return make_worker(
        folder, loss_fn=ppo_loss_fn(entropy_coeff=0.1), psrl=psrl, override_transformer_config=UNFUSED, **options
    )


def gradients(worker, rows, budget):
    """Loss, log-probs, and gradients of what is trained, by Megatron's names."""
    engine = worker.engine
    data = batch_tensordict(rows, max_tokens=budget, calculate_entropy=True)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, worker.loss_fn, forward_only=False)
        grads = {
            name: param.main_grad.clone()
            for chunk in engine.module
            for name, param in chunk.named_parameters()
            if param.requires_grad
        }
    return float(sum(output["loss"])), at_targets(output["model_output"]["log_probs"], rows), grads


def check_equal(got, want):
    assert got[0] == pytest.approx(want[0], abs=1e-9)
    for mine, theirs in zip(got[1], want[1], strict=True):
        assert mine.tolist() == pytest.approx(theirs.tolist(), abs=1e-9)
    errors = relative_errors(got[2], want[2])
    assert max(errors.values()) <= 1e-9, errors


@pytest.mark.parametrize(
    ("kind", "tied"), [("qwen2", True), ("qwen3", False), ("llama", False), ("llama", True), ("qwen3_moe", False)]
)
def test_gradients_and_weights_are_those_of_mbridge(checkpoint, kind, tied):
    """mbridge's are compared with transformers in ``test_exactness.py``."""
    folder, rows = checkpoint(kind, tied=tied, layers=2), tree_rows()
    want = gradients(worker_of(folder), rows, 4096)
    worker = worker_of(folder, SHARING, vanilla_mbridge=False)
    for budget in (5, 1000):
        check_equal(gradients(worker, rows, budget), want)
    assert worker.engine.last_report.stats.unique_tokens < worker.engine.last_report.stats.num_tokens
    weights = load_file(f"{folder}/model.safetensors")
    for name, exported in worker.engine.get_per_tensor_param()[0]:
        assert torch.equal(exported.float(), weights[name]), name


LORA = {"type": "lora", "rank": 3, "alpha": 6, "dropout": 0.0, "merge": False}
TARGETS = {
    "all": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "no-grad-in-first-keys": ["linear_proj"],
    "attention": ["linear_qkv", "linear_proj"],
    "last-layer": ["*.layers.1.*.linear_fc1", "*.layers.1.*.linear_qkv"],
}


def lora_worker(folder, targets, psrl=None, **options):
    model = {"lora": {**LORA, "target_modules": TARGETS[targets]}}
    worker = worker_of(folder, psrl, vanilla_mbridge=False, model=model, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for chunk in worker.engine.module:
            for _, param in sorted(chunk.named_parameters()):
                if param.requires_grad:  # the second matrix begins as zeros, which would hide the first one's gradient
                    param.copy_(0.2 * torch.randn(param.shape, generator=generator, dtype=param.dtype))
    return worker


@pytest.mark.parametrize(
    ("kind", "targets", "recompute"),
    [
        ("qwen2", "all", None),
        ("qwen3", "all", "selective"),
        ("llama", "all", "full"),
        ("qwen3", "no-grad-in-first-keys", None),
        ("qwen3", "last-layer", None),
        ("qwen3", "last-layer", "full"),
        ("qwen3_moe", "attention", None),
        ("qwen3_moe", "attention", "full"),
    ],
)
def test_gradients_of_adapters(checkpoint, kind, targets, recompute):
    folder, rows = checkpoint(kind, layers=2), tree_rows()
    want = gradients(lora_worker(folder, targets), rows, 4096)
    assert want[2] and all(".adapter." in name and grad.abs().max() > 0 for name, grad in want[2].items())
    worker = lora_worker(folder, targets, SHARING, recompute=recompute)
    for budget in (5, 1000):
        check_equal(gradients(worker, rows, budget), want)


def test_the_reference_is_the_engine_without_its_adapters(checkpoint):
    """As veRL's trainer asks for it: ``no_lora_adapter``."""
    folder, rows = checkpoint("qwen3", layers=2), tree_rows()

    def log_probs(worker, budget=7, **options):
        output = worker.infer_batch(batch_tensordict(rows, max_tokens=budget, **options))
        return torch.cat(at_targets(output["log_probs"], rows))

    worker = lora_worker(folder, "all", SHARING)
    base = log_probs(worker_of(folder), 1000)
    adapted = log_probs(worker)
    assert torch.allclose(log_probs(worker, no_lora_adapter=True), base, rtol=0, atol=1e-9)
    assert (adapted - base).abs().max() > 1e-2
    assert torch.allclose(log_probs(worker), adapted, rtol=0, atol=1e-12)


def test_adapters_have_no_names_of_the_checkpoint(checkpoint):
    with pytest.raises(UnsupportedError, match=r"model\.lora\.rank: gradients of adapters"):
        full_grads(lora_worker(checkpoint("qwen3", layers=2), "attention", SHARING).engine)
