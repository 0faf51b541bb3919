"""The rollout's part of a job, checked before its workers start."""

from __future__ import annotations

import os

from psrl.errors import ConfigError
from psrl.integrations.verl.job.engine_checks import Get, check_count
from psrl.integrations.verl.job.joined_cluster import cluster_address

CPU_ROLLOUTS = ("hf",)
ROLLOUTS = ("hf", "vllm", "sglang", "trtllm")
GLOO_WEIGHTS = "psrl_gloo"
"""The checkpoint engine that needs no GPU."""
_KEY = "actor_rollout_ref.rollout"


def check_rollout(get: Get) -> None:
    """
    Raises:
        ConfigError: no rollout of that name runs as the job has it; names the key.
    """
    name, device = get(f"{_KEY}.name"), get("trainer.device")
    if name not in ROLLOUTS:
        raise ConfigError(f"{_KEY}.name must be one of {', '.join(ROLLOUTS)}, got {name!r}")
    if get(f"{_KEY}.mode") != "async":
        raise ConfigError(f"{_KEY}.mode must be async, got {get(f'{_KEY}.mode')!r}")
    if device == "cpu" and name not in CPU_ROLLOUTS:
        raise ConfigError(f"{_KEY}.name={name} needs GPUs, but trainer.device is cpu: set it to {CPU_ROLLOUTS[0]}")
    if name in CPU_ROLLOUTS and get(f"{_KEY}.tensor_model_parallel_size") != 1:
        raise ConfigError(f"{_KEY}.tensor_model_parallel_size must be 1 with {_KEY}.name={name}")
    separate = get("trainer.v1.trainer_mode") == "psrl_separate_async"
    if separate:
        _check_separate(get, name)
    _check_slots(get, separate)


def _check_separate(get: Get, name: str) -> None:
    """veRL's assertions of this mode, by key, and what becomes of weights."""
    batch, steps = get("data.train_batch_size"), get("trainer.v1.separate_async.parameter_sync_step")
    mini_batch = get("actor_rollout_ref.actor.ppo_mini_batch_size")
    if batch != steps * mini_batch:
        raise ConfigError(
            f"trainer.v1.separate_async.parameter_sync_step={steps} mini-batches of actor_rollout_ref.actor."
            f"ppo_mini_batch_size={mini_batch} prompts must be data.train_batch_size={batch} in psrl_separate_async"
        )
    key = f"{_KEY}.checkpoint_engine.backend"
    backend = get(key)
    if (name in CPU_ROLLOUTS) != (backend == GLOO_WEIGHTS) or backend == "naive":
        allowed = GLOO_WEIGHTS if name in CPU_ROLLOUTS else "one of veRL's that leave the process, such as nccl"
        raise ConfigError(f"{key} must be {allowed} with {_KEY}.name={name} in psrl_separate_async, got {backend!r}")
    hybrid = "actor_rollout_ref.hybrid_engine"
    if get(hybrid) is False and os.environ.get("VERL_LOGGING_LEVEL", "INFO") in ("INFO", "DEBUG"):
        raise ConfigError(
            f"{hybrid}=false in psrl_separate_async ends in a TypeError of veRL 0.9.1's own log line "
            "(trainer_separate_async.py:182): set VERL_LOGGING_LEVEL=WARN too, or leave it true"
        )
    bypass = get("algorithm.rollout_correction.bypass_mode")
    distributed = "actor_rollout_ref.actor.megatron.use_distributed_optimizer"
    if not bypass and get(distributed) is False:
        raise ConfigError(
            f"{distributed} must be true in psrl_separate_async, where veRL keeps a copy of its flat parameter buffers "
            "for the old log-probs, or algorithm.rollout_correction.bypass_mode"
        )


def _check_slots(get: Get, separate: bool) -> None:
    """A job that starts Ray itself says how many "GPUs" there are: too few, and veRL fails when workers run."""
    needed = check_count(get, "trainer.n_gpus_per_node") * check_count(get, "trainer.nnodes")
    what = "trainer.n_gpus_per_node * trainer.nnodes"
    if separate:
        needed += check_count(get, f"{_KEY}.n_gpus_per_node") * check_count(get, f"{_KEY}.nnodes")
        what += f" and {_KEY}.n_gpus_per_node * {_KEY}.nnodes"
    there = get("ray_kwargs.ray_init.num_gpus")
    if cluster_address(get) is None and there is not None and there < needed:
        raise ConfigError(f"ray_kwargs.ray_init.num_gpus={there} is less than the {needed} of {what}")
