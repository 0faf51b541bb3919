"""The ``psrl`` group of a training job, and the check of a whole job before its workers start.

Needs OmegaConf only, so that a mistake is found before veRL or Ray are imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from psrl.config import PSRLConfig
from psrl.errors import ConfigError
from psrl.integrations.verl.job.engine_checks import (
    check_bridge,
    check_count,
    check_dropout,
    check_engine_options,
    check_model_folder,
    check_router_replay,
    check_token_budgets,
)
from psrl.integrations.verl.job.rollout_checks import check_rollout
from psrl.integrations.verl.trainer.durable_checkpoint import check_settings

PLUGIN = "psrl.integrations.verl.plugin"
PLUGIN_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
"""What loads the plug-in where veRL is imported."""
ENGINE_CONFIG = "psrl.integrations.verl.engine.config.PSRLEngineConfig"
AGENT_LOOP_MANAGER = "psrl.integrations.verl.trainer.agent_worker.PSRLAgentLoopManager"
TRAINER_MODES = {
    "psrl_sync": "sync",
    "psrl_colocate_async": "colocate_async",
    "psrl_separate_async": "separate_async",
}
"""psrl's trainers, and the trainer of veRL's that each extends."""

GROUPINGS = ("fingerprints", "uid", "session", "tokens")
ADVANTAGES = ("grpo", "step", "branch")
STEP_ANCHORS = ("step", "state")


@dataclass(frozen=True)
class OrchestratorConfig:
    """The trainer's part of the ``psrl`` group."""

    balance: bool = True
    """Place samples so that shared prefixes stay together. False: veRL's balancing by length."""
    grouping: str = "fingerprints"
    """Samples kept together, and what their workloads are computed from. Samples of a prompt: from hashes of prefixes
    that the agent-loop worker writes (``fingerprints``), from the token ids, which the driver then fetches
    (``tokens``), or estimated from the lengths (``uid``). Of a trajectory, from the lengths: ``session``."""
    fingerprint_stride: int = 64
    """Tokens from one hash to the next."""
    split_groups: bool = True
    """Split a group also where that lowers the critical path, not only where equal rows force it."""
    keep_minibatch: bool = False
    """Every mini-batch holds the samples that veRL's balancing gives it; only their ranks change."""
    advantage: str = "grpo"
    """``grpo``: veRL's, one per trajectory. ``step``: samples of a prompt at the same step are compared with each
    other. ``branch``: samples that continue the same turn are."""
    step_anchor: str = "step"
    """What the same step is: its number (``step``), or the state before it (``state``, GiGPO's anchors)."""
    episode_weight: float = 1.0
    """Weight of veRL's trajectory advantage in the step's or branch's."""
    log: bool = True
    """Report ``psrl/*`` metrics."""
    record_rollouts: str | None = None
    """Folder for what generation produced in every step."""
    replay_rollouts: str | None = None
    """Folder of such a job: train on its rollouts, and generate nothing."""
    poll_seconds: float = 2.0
    """Pause between two looks for finished rollouts."""

    def __post_init__(self) -> None:
        for name in ("balance", "split_groups", "keep_minibatch", "log"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"psrl.{name} must be true or false, got {getattr(self, name)!r}")
        for name, choices in (("grouping", GROUPINGS), ("advantage", ADVANTAGES), ("step_anchor", STEP_ANCHORS)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"psrl.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        stride = self.fingerprint_stride
        if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
            raise ConfigError(f"psrl.fingerprint_stride must be an integer of at least 1, got {stride!r}")
        for name in ("record_rollouts", "replay_rollouts"):
            if getattr(self, name) is not None and not (isinstance(getattr(self, name), str) and getattr(self, name)):
                raise ConfigError(f"psrl.{name} must be a folder or null, got {getattr(self, name)!r}")
        if self.record_rollouts and self.replay_rollouts:
            raise ConfigError("psrl.record_rollouts and psrl.replay_rollouts exclude each other: set one of them")
        seconds = self.poll_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise ConfigError(f"psrl.poll_seconds must be a number above 0, got {seconds!r}")
        weight = self.episode_weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
            raise ConfigError(f"psrl.episode_weight must be a number of at least 0, got {weight!r}")


def split_settings(values: Mapping[str, Any]) -> tuple[PSRLConfig, OrchestratorConfig]:
    """The engine's and the trainer's part of a ``psrl`` group.

    Raises:
        ConfigError: an unknown key, or a value out of range; names the key.
    """
    engine_keys = [f.name for f in fields(PSRLConfig)]
    trainer_keys = [f.name for f in fields(OrchestratorConfig)]
    for key in values:
        if key not in engine_keys and key not in trainer_keys:
            raise ConfigError(f"unknown key psrl.{key}; known keys: {', '.join(engine_keys + trainer_keys)}")
    return (
        PSRLConfig.from_mapping({k: v for k, v in values.items() if k in engine_keys}),
        OrchestratorConfig(**{k: v for k, v in values.items() if k in trainer_keys}),
    )


def job_settings(config: DictConfig) -> tuple[PSRLConfig, OrchestratorConfig]:
    """``split_settings`` of a job.

    Raises:
        ConfigError: there is no ``psrl`` group, or a key of it is wrong.
    """
    group = config.get("psrl")
    if not isinstance(group, DictConfig):
        raise ConfigError("the job has no psrl group: compose psrl/job after ppo_trainer, as configs/psrl_trainer.yaml")
    return split_settings({str(k): v for k, v in plain(group).items()})


def validate_job(config: DictConfig) -> tuple[PSRLConfig, OrchestratorConfig]:
    """Check everything that can be known before workers start.

    Args:
        config: the composed job.

    Raises:
        ConfigError: names the first key that is wrong, and the way out.
        UnsupportedError: the model, where its folder is local, is none that prefixes can be shared in.
    """
    settings, orchestrator = job_settings(config)
    checks: tuple[Callable[[_Job], None], ...] = (
        _check_trainer,
        _check_engines,
        _check_budget,
        _check_rows,
        _check_rollout,
        _check_algorithm,
        _check_checkpoints,
    )
    job = _Job(config, settings, orchestrator)
    for check in checks:
        check(job)
    if settings.enable:
        check_model_folder(job.get)
    return settings, orchestrator


@dataclass(frozen=True, slots=True)
class _Job:
    config: DictConfig
    settings: PSRLConfig
    orchestrator: OrchestratorConfig

    def get(self, key: str, default: Any = None) -> Any:
        value = OmegaConf.select(self.config, key, default=default)
        return plain(value)

    @property
    def has_critic(self) -> bool:
        """As veRL's ``need_critic``."""
        enabled = self.get("critic.enable")
        return bool(enabled) if enabled is not None else self.get("algorithm.adv_estimator") == "gae"

    def engines(self) -> Iterator[str]:
        """Keys of the engine configurations in use."""
        yield "actor_rollout_ref.actor"
        if self.get("actor_rollout_ref.actor.use_kl_loss") or self.get("algorithm.use_kl_in_reward"):
            yield "actor_rollout_ref.ref"
        if self.has_critic:
            yield "critic"


def plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _check_trainer(job: _Job) -> None:
    mode = job.get("trainer.v1.trainer_mode")
    if not job.get("trainer.use_v1", True):
        raise ConfigError("trainer.use_v1=false is veRL's old trainer, which has no plug-ins: set it to true")
    if mode not in TRAINER_MODES:
        raise ConfigError(f"trainer.v1.trainer_mode must be one of {', '.join(TRAINER_MODES)}, got {mode!r}")
    for name in ("record_rollouts", "replay_rollouts"):
        if getattr(job.orchestrator, name) and mode != "psrl_sync":
            raise ConfigError(f"psrl.{name} needs trainer.v1.trainer_mode=psrl_sync, got {mode}")
    replay = job.orchestrator.replay_rollouts
    if replay and not Path(replay).expanduser().is_dir():
        raise ConfigError(f"psrl.replay_rollouts={replay}: no such folder (psrl.record_rollouts makes it)")


def _check_engines(job: _Job) -> None:
    for key in job.engines():
        strategy = job.get(f"{key}.strategy")
        if strategy != "megatron":
            raise ConfigError(f"{key}.strategy must be megatron, got {strategy!r}: sharing is built on Megatron")
        target = job.get(f"{key}.megatron._target_")
        if target != ENGINE_CONFIG:
            raise ConfigError(f"{key}.megatron._target_ must be {ENGINE_CONFIG}, got {target!r}")
        own = PSRLConfig.from_mapping(job.get(f"{key}.megatron.psrl") or {})
        if own != job.settings:
            raise ConfigError(f"{key}.megatron.psrl differs from the psrl group: set psrl.* only")
    check_bridge(job.get, job.engines(), job.get("trainer.device"))
    if job.settings.enable:
        check_dropout(job.get, job.engines())
        check_engine_options(job.get, job.engines())
        check_router_replay(job.get)


def _check_budget(job: _Job) -> None:
    actor = "actor_rollout_ref.actor"
    if job.get(f"{actor}.use_dynamic_bsz"):
        check_token_budgets(job.get, job.engines())
        return
    for name in ("max_tokens", "infer_max_tokens"):
        if job.settings.enable and getattr(job.settings, name) is None:
            raise ConfigError(f"psrl.{name} is needed with {actor}.use_dynamic_bsz=false, which gives no token budget")


def _check_rollout(job: _Job) -> None:
    check_rollout(job.get)
    manager = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    if job.orchestrator.balance and job.orchestrator.grouping == "fingerprints" and not job.get(manager):
        raise ConfigError(
            f"{manager} is not set, so that nothing writes the fingerprints of psrl.grouping=fingerprints: set it to "
            f"{AGENT_LOOP_MANAGER}, or psrl.grouping to uid, session or tokens"
        )


def _check_rows(job: _Job) -> None:
    """veRL gives every rank the same number of rows of every mini-batch."""
    rollouts = check_count(job.get, "actor_rollout_ref.rollout.n")
    world = check_count(job.get, "trainer.n_gpus_per_node") * check_count(job.get, "trainer.nnodes")
    for key in job.engines():
        parallel = 1
        for name in ("tensor", "pipeline", "context"):
            parallel *= job.get(f"{key}.megatron.{name}_{'' if name == 'context' else 'model_'}parallel_size") or 1
        if world % parallel:
            raise ConfigError(
                f"trainer.n_gpus_per_node * trainer.nnodes is {world}, which {key}.megatron's parallel sizes "
                f"({parallel} ranks a replica) do not divide"
            )
        num_ranks = world // parallel
        if key.endswith("ref"):
            continue
        prompts = check_count(job.get, f"{key}.ppo_mini_batch_size")
        if prompts * rollouts < num_ranks:
            raise ConfigError(
                f"{key}.ppo_mini_batch_size: {prompts} prompts times rollout.n={rollouts} are fewer rows than the "
                f"{num_ranks} data-parallel ranks"
            )
        if prompts * rollouts % num_ranks:
            raise ConfigError(
                f"{key}.ppo_mini_batch_size: {prompts} prompts times rollout.n={rollouts} rows do not divide over "
                f"{num_ranks} data-parallel ranks"
            )
        if job.orchestrator.balance and job.get(f"{key}.shuffle"):
            raise ConfigError(f"{key}.shuffle=true undoes psrl's placement: set it to false, or psrl.balance=false")
    batch = check_count(job.get, "data.train_batch_size")
    if batch < job.get("actor_rollout_ref.actor.ppo_mini_batch_size"):
        raise ConfigError(
            f"data.train_batch_size={batch} is smaller than actor_rollout_ref.actor.ppo_mini_batch_size="
            f"{job.get('actor_rollout_ref.actor.ppo_mini_batch_size')}"
        )


def _check_algorithm(job: _Job) -> None:
    estimator = job.get("algorithm.adv_estimator")
    if job.orchestrator.advantage != "grpo" and estimator != "grpo":
        raise ConfigError(
            f"psrl.advantage={job.orchestrator.advantage} adds to GRPO's advantages: set algorithm.adv_estimator=grpo, "
            f"got {estimator!r}"
        )
    actor = "actor_rollout_ref.actor"
    mode, factor = job.get(f"{actor}.loss_agg_mode"), job.get(f"{actor}.loss_scale_factor")
    if job.settings.enable and mode == "seq-mean-token-sum-norm" and factor is None:
        raise ConfigError(
            f"{actor}.loss_scale_factor is needed with loss_agg_mode={mode}, which otherwise divides by the padded "
            "width of a micro-batch"
        )


def _check_checkpoints(job: _Job) -> None:
    check_settings(job.get)
