"""The ``psrl`` group of a training job, and the check of a whole job before its workers start.

Needs OmegaConf only, so that a mistake is found before veRL or Ray are imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from psrl.config import PSRLConfig
from psrl.errors import ConfigError
from psrl.integrations.verl.support import check_model

PLUGIN = "psrl.integrations.verl.plugin"
PLUGIN_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
"""What loads the plug-in where veRL is imported."""
ENGINE_CONFIG = "psrl.integrations.verl.engine_config.PSRLEngineConfig"
TRAINER_MODES = {
    "psrl_sync": "sync",
    "psrl_colocate_async": "colocate_async",
    "psrl_separate_async": "separate_async",
}
"""psrl's trainers, and the trainer of veRL's that each extends."""

GROUPINGS = ("uid", "session", "tokens")
ADVANTAGES = ("grpo", "step", "branch")
STEP_ANCHORS = ("step", "state")
CPU_ROLLOUTS = ("hf",)
ROLLOUTS = ("hf", "vllm", "sglang", "trtllm")


@dataclass(frozen=True)
class OrchestratorConfig:
    """The trainer's part of the ``psrl`` group."""

    balance: bool = True
    """Place samples so that shared prefixes stay together. False: veRL's balancing by length."""
    grouping: str = "uid"
    """Samples kept together: of a prompt (``uid``), of a trajectory (``session``), both with workloads estimated from
    lengths; or of a prompt with workloads from the token ids, which the driver then fetches (``tokens``)."""
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

    def __post_init__(self) -> None:
        for name in ("balance", "split_groups", "keep_minibatch", "log"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"psrl.{name} must be true or false, got {getattr(self, name)!r}")
        for name, choices in (("grouping", GROUPINGS), ("advantage", ADVANTAGES), ("step_anchor", STEP_ANCHORS)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"psrl.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
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
        _check_dropout,
        _check_budget,
        _check_rollout,
        _check_rows,
        _check_algorithm,
        _check_model_folder,
    )
    for check in checks:
        check(_Job(config, settings, orchestrator))
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


def _check_dropout(job: _Job) -> None:
    if not job.settings.enable:
        return
    names = ("hidden_dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    for key in job.engines():
        model = "critic.model" if key == "critic" else "actor_rollout_ref.model"
        for place in (f"{key}.megatron.override_transformer_config", f"{model}.override_config"):
            for name in names:
                value = (job.get(place) or {}).get(name)
                if value:
                    raise ConfigError(
                        f"{place}.{name} is {value}, but a shared token has one hidden state for all its samples: set "
                        "it to 0.0, or psrl.enable=false"
                    )


def _check_budget(job: _Job) -> None:
    actor = "actor_rollout_ref.actor"
    if job.get(f"{actor}.use_dynamic_bsz"):
        for key in (f"{actor}.ppo_max_token_len_per_gpu", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"):
            value = job.get(key)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{key} must be at least 1, got {value!r}")
        return
    for name in ("max_tokens", "infer_max_tokens"):
        if job.settings.enable and getattr(job.settings, name) is None:
            raise ConfigError(f"psrl.{name} is needed with {actor}.use_dynamic_bsz=false, which gives no token budget")


def _check_rollout(job: _Job) -> None:
    key = "actor_rollout_ref.rollout"
    name, device = job.get(f"{key}.name"), job.get("trainer.device")
    if name not in ROLLOUTS:
        raise ConfigError(f"{key}.name must be one of {', '.join(ROLLOUTS)}, got {name!r}")
    if job.get(f"{key}.mode") != "async":
        raise ConfigError(f"{key}.mode must be async, got {job.get(f'{key}.mode')!r}")
    if device == "cpu" and name not in CPU_ROLLOUTS:
        raise ConfigError(f"{key}.name={name} needs GPUs, but trainer.device is cpu: set it to {CPU_ROLLOUTS[0]}")
    if name in CPU_ROLLOUTS:
        if job.get("trainer.v1.trainer_mode") == "psrl_separate_async":
            raise ConfigError(
                f"{key}.name={name} runs beside the trainer's workers: set trainer.v1.trainer_mode to psrl_sync "
                "or psrl_colocate_async, or use vllm or sglang"
            )
        if job.get(f"{key}.tensor_model_parallel_size") != 1:
            raise ConfigError(f"{key}.tensor_model_parallel_size must be 1 with {key}.name={name}")
    if job.has_critic and device == "cpu" and job.get("critic.megatron.vanilla_mbridge") is False:
        raise ConfigError("critic.megatron.vanilla_mbridge must be true where trainer.device is cpu")


def _check_rows(job: _Job) -> None:
    """veRL gives every rank the same number of rows of every mini-batch."""
    rollouts = job.get("actor_rollout_ref.rollout.n")
    world = job.get("trainer.n_gpus_per_node") * job.get("trainer.nnodes")
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
        prompts = job.get(f"{key}.ppo_mini_batch_size")
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
    batch = job.get("data.train_batch_size")
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


def _check_model_folder(job: _Job) -> None:
    """A local model folder; a name of a hub is checked by the workers."""
    path = Path(job.get("actor_rollout_ref.model.path")).expanduser() / "config.json"
    if not job.settings.enable or not path.is_file():
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    values.update(job.get("actor_rollout_ref.model.override_config") or {})
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        if values.get(name):
            raise ConfigError(
                f"actor_rollout_ref.model.path: {path} has {name}={values[name]}: set "
                f"+actor_rollout_ref.model.override_config.{name}=0.0"
            )
    check_model(SimpleNamespace(**values))
