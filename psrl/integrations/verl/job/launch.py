"""Compose a job, check it, and run veRL's trainer on it with the plug-in in every process."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from psrl.errors import ConfigError, PSRLError
from psrl.integrations.verl.job.config import PLUGIN, PLUGIN_VARIABLE, job_settings, plain, validate_job
from psrl.integrations.verl.job.joined_cluster import fit_to_cluster
from psrl.integrations.verl.job.reaper import reap_after_this_process
from psrl.integrations.verl.trainer.durable_checkpoint import find_latest

CONFIG_DIR_VARIABLE = "PSRL_CONFIG_DIR"
"""Read by the configurations, for the files beside them."""
_ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"


def holds_configs(folder: Path) -> bool:
    """Whether it is psrl's configs folder or a copy."""
    return (folder / "psrl" / "job.yaml").is_file()


def find_config_dir(given: Path | None) -> Path:
    """
    Raises:
        ConfigError: there is no such folder.
    """
    candidates = [given] if given else [Path("configs"), Path(__file__).resolve().parents[4] / "configs"]
    for folder in candidates:
        if holds_configs(folder):
            return folder.resolve()
    raise ConfigError(
        f"--config-dir: no psrl/job.yaml in {' or '.join(map(str, candidates))}: give psrl's configs folder or a copy"
    )


@contextlib.contextmanager
def hydra_errors() -> Iterator[None]:
    """Hydra's and OmegaConf's errors as ours, with the innermost message, which names the key."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        text = str(error) if str(cause) in str(error) else f"{error}: {cause}"
        raise ConfigError(text) from error


def compose_job(config_dir: Path, config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The configuration of a job.

    Raises:
        ConfigError: the file, an override or an interpolation is wrong.
    """
    with hydra_errors():
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(config_dir), version_base=None, job_name="psrl"):
            return compose(config_name.removesuffix(".yaml"), overrides=list(overrides))


def job_environment(config_dir: Path, config_name: str, overrides: Sequence[str]) -> dict[str, str]:
    """Environment variables that the file itself and the overrides ask for. veRL reads them when it is imported, which
    composing the whole job does.

    Raises:
        ConfigError: there is no such file, or it is no YAML mapping.
    """
    path = config_dir / f"{config_name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in config_dir.glob("*.yaml")))
        raise ConfigError(f"--config-name {config_name}: no such file in {config_dir} (it has: {names})")
    with hydra_errors():
        values = OmegaConf.select(OmegaConf.load(path), _ENVIRONMENT) or {}
        found = {str(key): str(value) for key, value in values.items()}
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key.startswith(f"{_ENVIRONMENT}."):
            found[key.removeprefix(f"{_ENVIRONMENT}.")] = value.strip("'\"")
    return found


def set_environment(variables: dict[str, str], config_dir: Path) -> None:
    """Put the job's variables into this process; those that are set already win. The plug-in joins other modules."""
    for name, value in variables.items():
        if name != PLUGIN_VARIABLE:
            os.environ.setdefault(name, value)
    os.environ.setdefault(CONFIG_DIR_VARIABLE, str(config_dir))
    modules = [name for name in os.environ.get(PLUGIN_VARIABLE, "").split(",") if name]
    os.environ[PLUGIN_VARIABLE] = ",".join([*modules, *([] if PLUGIN in modules else [PLUGIN])])


class PSRLTaskRunner:
    """veRL's task runner, in a process that has the plug-in or fails with the reason."""

    def run(self, config: DictConfig) -> None:
        importlib.import_module(PLUGIN).require()
        from verl.trainer import main_ppo

        runner: Any = main_ppo.TaskRunnerV1
        runner.__ray_actor_class__().run(config)


def run_job(
    config_name: str,
    config_dir: Path | None,
    overrides: Sequence[str],
    *,
    dry_run: bool = False,
    check_weights: Callable[[Path], None] | None = None,
) -> None:
    """Run a job to its end.

    Args:
        config_name: a file of the configuration folder.
        config_dir: None: ``configs`` in the current folder, else beside the package.
        overrides: Hydra's.
        dry_run: check the job and print its configuration instead.
        check_weights: checks a model folder's weights, before Ray starts.

    Raises:
        ConfigError: the job cannot run; names the key.
        UnsupportedError: the plug-in does not load here, or the model is not supported.
        InputError: the weights of a model folder do not fit its configuration.
        JobError: a process of the job died.
    """
    folder = find_config_dir(config_dir)
    set_environment(job_environment(folder, config_name, overrides), folder)
    importlib.import_module(PLUGIN)
    config = compose_job(folder, config_name, overrides)
    validate_job(config)
    with hydra_errors():
        OmegaConf.resolve(config)  # here, where the environment is the user's
    if dry_run:
        print(OmegaConf.to_yaml(config))
        return
    check_files(config)
    if check_weights is not None:
        _check_model_weights(config, check_weights)
    with open_dict(config):
        for name in (PLUGIN_VARIABLE, CONFIG_DIR_VARIABLE):
            OmegaConf.update(config, f"{_ENVIRONMENT}.{name}", os.environ[name], force_add=True)
    fit_to_cluster(config)
    with reap_after_this_process():
        _run(config)


def check_files(config: DictConfig) -> None:
    """Check that the job's local inputs exist.

    Raises:
        ConfigError: names the key of what is missing, and the command that makes it.
    """
    model = str(config.actor_rollout_ref.model.path)
    if model.startswith((".", "/", "~", "outputs")) and not Path(model).expanduser().is_dir():
        raise ConfigError(
            f"actor_rollout_ref.model.path={model}: no such folder (python -m psrl.models.tiny_chat makes a tiny model)"
        )
    for key in ("train_files", "val_files"):
        files = plain(config.data[key])
        for file in [files] if isinstance(files, str) else files:
            if "://" not in file and not Path(file).expanduser().exists():
                raise ConfigError(f"data.{key}={file}: no such file (python -m psrl.agents.dataset makes it)")
    agents = OmegaConf.select(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path")
    if agents is not None and not Path(agents).expanduser().is_file():
        raise ConfigError(f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}: no such file")


def _check_model_weights(config: DictConfig, check_weights: Callable[[Path], None]) -> None:
    """The folders that Megatron's bridge loads weights from; with ``psrl.enable=false`` they are veRL's matter."""
    if not job_settings(config)[0].enable:
        return
    from verl.trainer.ppo.utils import need_critic

    sections = {"actor_rollout_ref.actor": "actor_rollout_ref.model"}
    if need_critic(config):
        sections["critic"] = "critic.model"
    for section, model in sections.items():
        folder = Path(OmegaConf.select(config, f"{model}.path")).expanduser()
        loads_folder = not OmegaConf.select(config, f"{section}.megatron.use_dist_checkpointing")
        if loads_folder and (folder / "config.json").is_file():
            check_weights(folder)


def _run(config: DictConfig) -> None:
    import ray
    from ray.exceptions import RayTaskError
    from verl.trainer import main_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from psrl.integrations.verl.job.supervision import SupervisedRunner, own_error

    auto_set_device(config)
    try:
        with hydra_errors():
            validate_config(
                config=config,
                use_reference_policy=need_reference_policy(config),
                use_critic=need_critic(config),
            )
    except PSRLError:
        raise
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"veRL refuses the job: {error}") from error
    runner = SupervisedRunner(
        ray.remote(PSRLTaskRunner),
        ranks_per_node=config.trainer.n_gpus_per_node,
        way_on=lambda: _way_on(Path(config.trainer.default_local_dir)),
    )
    starts_ray = not ray.is_initialized()
    try:
        main_ppo.run_ppo(config, task_runner_class=runner)
    except RayTaskError as error:
        own = own_error(error)
        if own is not None:
            raise own from error
        raise
    finally:
        if starts_ray:
            ray.shutdown()


def _way_on(root: Path) -> str:
    """What to do after a death."""
    latest = find_latest(root).folder
    if latest is None:
        return f"There is no whole checkpoint in {root} to go on from (trainer.save_freq)"
    return f"The last whole checkpoint is {latest}: start the job again with trainer.resume_mode=auto to go on from it"
