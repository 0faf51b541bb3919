"""veRL's own Megatron engine on the CPU (sharing off) against transformers, through veRL's TrainingWorker."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils import tensordict_utils as tu

from psrl.integrations.verl.engine.export import full_grads
from tests.helpers import (
    Row,
    batch_tensordict,
    hf_truth,
    make_checkpoint,
    make_worker,
    ppo_loss_fn,
    random_rows,
    relative_errors,
    value_loss_fn,
)

MODELS = {"qwen2": ("qwen2", False), "qwen2-tied": ("qwen2", True), "qwen3": ("qwen3", False)}
TOLERANCE = {"float64": 2e-6, "float32": 1e-5}
"""Relative, against transformers in float64. Its rotary table is float32."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(folder / name, kind, tied) for name, (kind, tied) in MODELS.items()}


def accumulated_grads(worker, rows: list[Row], dtype: str, **batch) -> tuple[dict[str, torch.Tensor], list]:
    """Gradients and losses of one mini-batch, without the optimizer step."""
    engine = worker.engine
    with engine.train_mode():
        engine.optimizer_zero_grad()
        data = batch_tensordict(rows, dtype=getattr(torch, dtype), **batch)
        output = engine.forward_backward_batch(data, worker.loss_fn, forward_only=False)
        return full_grads(engine), output["loss"]


def weights_of(worker) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in worker.engine.get_per_tensor_param()[0]}


def train(worker, rows: list[Row], dtype: str = "float64", **batch) -> dict[str, list]:
    """Metrics of one update on one mini-batch."""
    output = worker.train_mini_batch(batch_tensordict(rows, dtype=getattr(torch, dtype), **batch))
    return tu.get(output, "metrics")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_grads_equal_transformers(checkpoints: dict[str, str], name: str, dtype: str):
    rows = random_rows()
    loss_fn = ppo_loss_fn(entropy_coeff=0.01)
    truth = hf_truth(checkpoints[name], rows, loss_fn, calculate_entropy=True, temperature=0.75)
    worker = make_worker(checkpoints[name], dtype=dtype, loss_fn=loss_fn)
    batch = {"calculate_entropy": True, "temperature": 0.75}

    out = worker.infer_batch(batch_tensordict(rows, dtype=getattr(torch, dtype), **batch))
    for key, wanted in (("log_probs", truth.log_probs), ("entropy", truth.entropies)):
        got = [row[:-1] for row in out[key].unbind()]
        assert all(row.dtype == getattr(torch, dtype) for row in got)
        torch.testing.assert_close(torch.cat(got).double(), torch.cat(wanted), rtol=0, atol=TOLERANCE[dtype] * 6)

    grads, losses = accumulated_grads(worker, rows, dtype, **batch)
    assert all(grad.dtype == getattr(torch, dtype) for grad in grads.values())
    assert max(relative_errors(grads, truth.grads).values()) <= TOLERANCE[dtype]
    assert float(sum(losses)) == pytest.approx(truth.loss, abs=TOLERANCE[dtype])


def test_micro_batches_and_recompute_do_not_change_the_gradient(checkpoints: dict[str, str]):
    rows = random_rows()
    grads, _ = accumulated_grads(make_worker(checkpoints["qwen3"]), rows, "float64")
    for options in ({"recompute": "full"}, {"recompute": "selective"}, {"use_distributed_optimizer": False}):
        other, _ = accumulated_grads(make_worker(checkpoints["qwen3"], **options), rows, "float64", max_tokens=20)
        assert max(relative_errors(other, grads).values()) <= 1e-12


def test_bfloat16_runs_with_float32_gradients(checkpoints: dict[str, str]):
    rows = random_rows()
    truth = hf_truth(checkpoints["qwen2"], rows, ppo_loss_fn())
    worker = make_worker(checkpoints["qwen2"], dtype="bfloat16")
    grads, _ = accumulated_grads(worker, rows, "bfloat16")
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    assert max(relative_errors(grads, truth.grads).values()) <= 0.05


@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied"])
def test_critic_equals_transformers(checkpoints: dict[str, str], name: str):
    rows = random_rows()
    generator = torch.Generator().manual_seed(1)
    for row in rows:
        values, returns = torch.randn(2, sum(row.loss_mask), generator=generator).tolist()
        row.extra = {"values": values, "returns": returns}
    worker = make_worker(checkpoints[name], model_type="value_model", loss_fn=value_loss_fn())
    head = weights_of(worker)["lm_head.weight"]
    again = make_worker(checkpoints[name], model_type="value_model", loss_fn=value_loss_fn())
    assert torch.equal(head, weights_of(again)["lm_head.weight"])

    truth = hf_truth(checkpoints[name], rows, value_loss_fn(), value_head=head)
    out = worker.infer_batch(batch_tensordict(rows))
    got = torch.cat([row[:-1] for row in out["values"].unbind()])
    torch.testing.assert_close(got, torch.cat(truth.values), rtol=0, atol=2e-6)
    grads, _ = accumulated_grads(worker, rows, "float64")
    assert max(relative_errors(grads, truth.grads).values()) <= 2e-6


@pytest.mark.parametrize("use_distributed_optimizer", [True, False])
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3"])
def test_update_is_one_adamw_step(checkpoints: dict[str, str], name: str, use_distributed_optimizer: bool):
    """Megatron's defaults: AdamW(betas 0.9, 0.999, eps 1e-8), gradient norm clipped to 1, no decay of 1-D weights."""
    rows, lr, weight_decay = random_rows(), 1e-3, 0.01
    worker = make_worker(checkpoints[name], lr=lr, use_distributed_optimizer=use_distributed_optimizer)
    before = weights_of(worker)
    grads, _ = accumulated_grads(worker, rows, "float64")
    metrics = train(worker, rows)

    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    assert metrics["grad_norm"] == [pytest.approx(norm.item(), rel=1e-12)]
    assert norm > 1.0  # so that clipping is part of the test
    params = {weight: before[weight].clone().requires_grad_() for weight in grads}
    for weight, param in params.items():
        param.grad = grads[weight] / (norm + 1e-6)
    groups = [
        {"params": [p for p in params.values() if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=lr).step()
    after = weights_of(worker)
    for weight, param in params.items():
        assert after[weight].dtype == torch.float64
        torch.testing.assert_close(after[weight], param.detach(), rtol=0, atol=1e-13)


def test_bfloat16_update_keeps_float32_masters(checkpoints: dict[str, str]):
    """Steps smaller than bfloat16's resolution add up."""
    worker = make_worker(checkpoints["qwen2"], dtype="bfloat16", lr=1e-5)
    before = weights_of(worker)["model.norm.weight"]
    for _ in range(3):
        train(worker, random_rows(), "bfloat16")
    assert torch.equal(weights_of(worker)["model.norm.weight"], before)
    optimizer = worker.engine.optimizer.chained_optimizers[0]
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    assert {param.dtype for param in masters} == {torch.float32}
    assert any((param - param.bfloat16().float()).abs().max() > 0 for param in masters)


def test_exported_weights_are_the_checkpoint(checkpoints: dict[str, str]):
    from safetensors.torch import load_file

    for name, folder in checkpoints.items():
        stored = load_file(Path(folder) / "model.safetensors")
        exported = weights_of(make_worker(folder, dtype="float32", forward_only=True))
        assert exported.keys() == stored.keys(), name
        assert all(torch.equal(exported[weight], stored[weight]) for weight in stored)


def test_critic_checkpoint_keeps_the_head_of_a_tied_sharded_model(checkpoints: dict[str, str], tmp_path: Path):
    """The index of the original checkpoint knows no output layer."""
    source, saved = tmp_path / "source", tmp_path / "saved"
    AutoTokenizer.from_pretrained(checkpoints["qwen2-tied"]).save_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(checkpoints["qwen2-tied"])
    model.save_pretrained(source, max_shard_size="40KB")
    assert (source / "model.safetensors.index.json").is_file()

    options = {"model_type": "value_model", "loss_fn": value_loss_fn(), "dtype": "float32"}
    worker = make_worker(str(source), seed=1, **options)
    head = weights_of(worker)["lm_head.weight"]
    worker.save_checkpoint(str(saved))
    other = make_worker(str(source), seed=2, **options)
    assert not torch.equal(weights_of(other)["lm_head.weight"], head)
    other.load_checkpoint(str(saved))
    assert torch.equal(weights_of(other)["lm_head.weight"], head)


@pytest.mark.parametrize(
    ("dtype", "use_distributed_optimizer"), [("float64", True), ("bfloat16", False)], ids=["float64", "bfloat16"]
)
def test_checkpoint_restores_weights_and_optimizer(
    checkpoints: dict[str, str], tmp_path: Path, dtype: str, use_distributed_optimizer: bool
):
    rows = random_rows()
    options = {"dtype": dtype, "lr": 1e-3, "use_distributed_optimizer": use_distributed_optimizer}
    worker = make_worker(checkpoints["qwen2"], **options)
    train(worker, rows, dtype)
    saved = weights_of(worker)
    worker.save_checkpoint(str(tmp_path), global_step=1)
    train(worker, rows, dtype)
    continued = weights_of(worker)

    for restored in (worker, make_worker(checkpoints["qwen2"], **options)):
        restored.load_checkpoint(str(tmp_path))
        assert all(torch.equal(value, saved[name]) for name, value in weights_of(restored).items())
        train(restored, rows, dtype)
        assert all(torch.equal(value, continued[name]) for name, value in weights_of(restored).items())
