"""A veRL ``TrainingWorker`` in this process, without Ray."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.workers.config import HFModelConfig, McoreOptimizerConfig, TrainingWorkerConfig

import psrl.integrations.verl.engine.sharing  # noqa: F401  registers the engines
from psrl.config import PSRLConfig
from psrl.errors import ConfigError
from psrl.integrations.verl import compat, platform
from psrl.integrations.verl.engine.config import PSRLEngineConfig
from psrl.integrations.verl.engine.support import check_model
from psrl.integrations.verl.trainer.planning_worker import PlanningWorker

RECOMPUTE: dict[str | None, dict[str, Any]] = {
    None: {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Megatron-Core's settings of activation recompute by name."""

_SINGLE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Read by veRL's ``Worker`` (verl/single_controller/base/worker.py:199); the address is never opened."""

MODEL_TYPES = ("language_model", "value_model")


def group_backend() -> str:
    """``backend`` of process groups on this machine."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def init_single_process() -> None:
    """Make this process a process group of one, over a store in memory (no port). Nothing if there is one."""
    if torch.distributed.is_initialized():
        return
    for name, value in _SINGLE_PROCESS.items():
        os.environ.setdefault(name, value)
    if int(os.environ["WORLD_SIZE"]) != 1:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: initialise torch.distributed before building the worker"
        )
    torch.distributed.init_process_group(
        backend=group_backend(),
        store=torch.distributed.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
        rank=0,
        world_size=1,
    )


def init_local_rank(rank: int, size: int, store: str) -> None:
    """Make this process one of a local process group that meets over a file (no port).

    Args:
        store: path that all ranks name and nobody has used before.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.distributed.init_process_group(
        backend=group_backend(),
        store=torch.distributed.FileStore(store, size),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=size,
    )


def build_training_worker(
    model_dir: str | Path,
    *,
    model_type: str = "language_model",
    dtype: str = "float32",
    psrl_config: PSRLConfig | None = None,
    max_tokens: int = 4096,
    lr: float = 1e-6,
    recompute: str | None = None,
    forward_only: bool = False,
    seed: int = 42,
    quiet: bool = True,
    optimizer: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **engine_overrides: Any,
) -> PlanningWorker:
    """Build and initialise a worker on the checkpoint in ``model_dir``; ``worker.engine`` is the psrl engine.

    Args:
        model_dir: Hugging Face folder with weights, config and tokenizer.
        model_type: ``language_model`` or ``value_model`` (a fresh value head, seeded).
        psrl_config: default ``PSRLConfig()``; ``enable=False`` is veRL's own path.
        max_tokens: veRL's ``max_token_len_per_gpu`` for update and forward-only phases.
        recompute: ``None``, ``"selective"`` or ``"full"``.
        quiet: keep upstream prints and warnings off the terminal.
        optimizer: further fields of ``McoreOptimizerConfig``.
        model: further fields of ``HFModelConfig``.
        engine_overrides: further fields of ``PSRLEngineConfig``.

    Initialises ``torch.distributed`` as one process if that has not happened. The caller sets the loss
    (``worker.set_loss_fn``) before ``train_mini_batch``.

    Raises:
        ConfigError: a value is out of range.
        UnsupportedError: an option that psrl cannot share prefixes with.
    """
    if recompute not in RECOMPUTE:
        raise ConfigError(f"recompute must be one of {list(RECOMPUTE)}, got {recompute!r}")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"model_type must be one of {', '.join(MODEL_TYPES)}, got {model_type!r}")
    transformer = {**RECOMPUTE[recompute], **engine_overrides.pop("override_transformer_config", {})}
    engine_config = PSRLEngineConfig(
        dtype=dtype,
        psrl=psrl_config or PSRLConfig(),
        max_token_len_per_gpu=max_tokens,
        infer_max_token_len_per_gpu=max_tokens,
        forward_only=forward_only,
        seed=seed,
        override_transformer_config=transformer,
        **engine_overrides,
    )
    platform.install()
    init_single_process()
    with compat.quiet_upstream() if quiet else contextlib.nullcontext():
        model_config = HFModelConfig(
            path=str(model_dir), override_config={"attn_implementation": "eager"}, **(model or {})
        )
        check_model(model_config.hf_config)
        worker = PlanningWorker(
            TrainingWorkerConfig(
                model_type=model_type,
                model_config=model_config,
                engine_config=engine_config,
                optimizer_config=McoreOptimizerConfig(
                    lr=lr, **{"total_training_steps": 1000, "lr_decay_style": "constant", **(optimizer or {})}
                ),
                checkpoint_config=CheckpointConfig(),
            )
        )
        worker.reset()
    return worker
