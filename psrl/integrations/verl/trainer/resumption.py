"""A trainer whose job, ended anywhere and started again, goes on as if nothing had happened.

Hooks of ``verl/trainer/ppo/v1/trainer_base.py``: ``_save_checkpoint`` and ``_load_checkpoint`` (whole checkpoints
only), ``_fetch_one_gen_batch`` (names of prompts, which the rollout's random numbers derive from) and
``on_sample_end`` (a batch that a dead rollout server has thinned out is not trained on).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import AdaptiveKLController
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

from psrl.integrations.verl.trainer.durable_checkpoint import (
    begin,
    prune,
    publish,
    read_manifest,
    resume_folder,
    seal,
    step_folder,
)
from psrl.placement.cells import RowKey


def row_order(keys: Sequence[str]) -> list[int]:
    """Indices of rows by their names, where veRL has them in the order in which rollouts ended."""
    return sorted(range(len(keys)), key=lambda row: RowKey.parse(keys[row]))


class ResumableTrainer(PPOTrainer):
    """Goes before one of veRL's trainers in the bases."""

    _prompts_fetched: tuple[int, int] = (-1, 0)
    """A step, and the number of prompts fetched in it."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        trainer = self.config.trainer
        self._root = Path(trainer.default_local_dir).absolute()
        # Before workers start: what cannot be resumed from is an error, or known to be left out.
        self._resume = resume_folder(trainer.resume_mode, self._root, trainer.resume_from_path)

    # ------------------------------------------------------------------------------------------------ checkpoints
    def _load_checkpoint(self) -> None:
        for reason in self._resume.skipped:
            print(f"psrl: not resumed from: {reason}", flush=True)
        folder, trainer = self._resume.folder, self.config.trainer
        with open_dict(trainer):
            trainer.resume_mode = "resume_path" if folder else "disable"
            trainer.resume_from_path = str(folder) if folder else None
        super()._load_checkpoint()
        if folder is None:
            print("psrl: starts from scratch", flush=True)
            return
        self._load_trainer_state(read_manifest(folder)["trainer_state"])
        print(f"psrl: resumed from {folder}", flush=True)

    def _save_checkpoint(self) -> None:
        """veRL's, made whole. Older checkpoints go last: veRL's workers remove them when their own part is written, so
        that a job that is killed then has none."""
        folder = step_folder(self._root, self.global_steps)
        trainer = self.config.trainer
        limits = ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "remove_previous_ckpt_in_save")
        asked = {name: trainer.get(name) for name in limits}
        begin(folder)
        with open_dict(trainer):
            OmegaConf.update(self.config, "trainer", dict.fromkeys(limits))
            try:
                super()._save_checkpoint()
            finally:
                OmegaConf.update(self.config, "trainer", asked)
        seal(folder, self.global_steps, self._trainer_state())
        publish(self._root, self.global_steps)
        keep = _num_to_keep(asked, self.use_critic)
        if keep is not None:
            prune(self._root, self.global_steps, keep)

    def _trainer_state(self) -> dict[str, Any]:
        """What veRL's checkpoint leaves out."""
        controller = getattr(self, "kl_ctrl_in_reward", None)
        return {"kl_coef": float(controller.value)} if isinstance(controller, AdaptiveKLController) else {}

    def _load_trainer_state(self, state: dict[str, Any]) -> None:
        controller = getattr(self, "kl_ctrl_in_reward", None)
        if isinstance(controller, AdaptiveKLController) and "kl_coef" in state:
            controller.value = state["kl_coef"]

    # --------------------------------------------------------------------------------------------------- rollouts
    def _fetch_one_gen_batch(self) -> TensorDict:
        """Prompts named by step and number, where veRL draws names at random."""
        batch = super()._fetch_one_gen_batch()
        step, count = self._prompts_fetched
        first = count if step == self.global_steps else 0
        self._prompts_fetched = (self.global_steps, first + len(batch))
        names = [f"{self.global_steps:08d}-{first + row:06d}" for row in range(len(batch))]
        tu.assign_non_tensor_stack(batch, "uid", names)
        return batch

    def on_sample_end(self) -> None:
        """A server that died has left its prompts' groups smaller, which veRL trains on."""
        servers = [
            server
            for manager in self._rollout_server_managers()
            for replica in manager.get_replicas()
            for server in replica.servers
        ]
        ray.get([server.__ray_ready__.remote() for server in servers])
        super().on_sample_end()


def _num_to_keep(asked: dict[str, Any], use_critic: bool) -> int | None:
    """Checkpoints to keep; None: all. Of two limits the larger: a checkpoint is kept or removed whole."""
    if asked["remove_previous_ckpt_in_save"]:
        return 1
    limits = [asked["max_actor_ckpt_to_keep"], *([asked["max_critic_ckpt_to_keep"]] if use_critic else [])]
    return None if any(not limit or limit < 1 for limit in limits) else max(limits)
