"""A job on a Ray cluster that is there already: its nodes share files with the driver, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

_OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "object_store_memory")
_OUTPUTS = ("trainer.default_local_dir", "psrl.record_rollouts")
_INPUTS = (
    "trainer.resume_from_path",
    "psrl.replay_rollouts",
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "critic.model.path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
)


def cluster_address(get: Callable[[str], Any]) -> str | None:
    """Of the cluster that the job joins; None where it starts its own. As in Ray, ``RAY_ADDRESS`` comes first.

    Args:
        get: value of a job's key.
    """
    address = os.environ.get("RAY_ADDRESS") or get("ray_kwargs.ray_init.address")
    return None if not address or address == "local" else str(address)


def fit_to_cluster(config: DictConfig) -> None:
    """Make a job's configuration one for nodes of a cluster. Mutates ``config``.

    What describes a cluster that the job would start goes, since Ray refuses it; local paths become absolute, since
    processes on other nodes have working folders of their own.
    """
    address = cluster_address(lambda key: OmegaConf.select(config, key))
    if address is None:
        return
    with open_dict(config):
        init = config.ray_kwargs.ray_init
        given = [name for name in _OF_A_NEW_CLUSTER if init.get(name) is not None]
        for name in given:
            init[name] = None
        for key in (*_OUTPUTS, *_INPUTS):
            value = OmegaConf.select(config, key)
            if value is not None:
                OmegaConf.update(config, key, _absolute(value, is_made=key in _OUTPUTS))
    decides = f", which decides about {', '.join(given)}" if given else ""
    print(f"psrl: joins the Ray cluster at {address}{decides}", flush=True)


def _absolute(value: Any, *, is_made: bool) -> Any:
    """
    Args:
        value: a path, or several.
        is_made: by the job. Other paths are left as they are where there is nothing: a name of the model hub, perhaps.
    """
    if isinstance(value, Sequence | ListConfig) and not isinstance(value, str):
        return [_absolute(one, is_made=is_made) for one in value]
    path = Path(str(value)).expanduser()
    return str(path.absolute()) if "://" not in str(value) and (is_made or path.exists()) else value
