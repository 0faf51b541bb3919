"""veRL's trainers with prefix-aware placement, step and branch advantages, and psrl's metrics.

Hooks: ``verl/trainer/ppo/v1/trainer_base.py`` (``PPOTrainer``); registered under names of their own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.utils.padding import response_to_nested

from psrl.integrations.verl.engine.observability import (
    PassRecord,
    headline_metrics,
    phase_metrics,
    step_line,
    trajectory_reward,
)
from psrl.integrations.verl.job.config import validate_job
from psrl.integrations.verl.trainer.advantage import group_advantages, row_groups, row_returns
from psrl.integrations.verl.trainer.recorded_rollouts import RolloutStore, rollout_settings
from psrl.integrations.verl.trainer.resumption import ResumableTrainer, row_order
from psrl.placement.fingerprints import TAG, segments_from_fingerprints
from psrl.placement.orchestrator import (
    Cells,
    RowKey,
    evaluate,
    place_rows,
    placement_metrics,
)
from psrl.placement.segments import Segments, segments_from_lengths, segments_from_tokens
from psrl.types import IntArray


class PSRLTrainerMixin(ResumableTrainer):
    """Goes before one of veRL's trainers in the bases."""

    upstream_mode: ClassVar[str]
    """veRL's name of that trainer, which its base class compares literally."""

    def __init__(self, config: DictConfig) -> None:
        self.psrl_settings, self.psrl = validate_job(config)
        super().__init__(config)

    # ------------------------------------------------------------------------------------------------- set-up
    def _build_replay_buffer(self) -> Any:
        """Under another name veRL would take the asynchronous buffer, generate one prompt at a time and synchronise
        weights every step (trainer_base.py:136-139)."""
        self.trainer_mode = self.upstream_mode
        own = self.config.trainer.v1.get(self.upstream_mode) or {}
        self.parameter_sync_step = own.get("parameter_sync_step", 1)
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = self.psrl.poll_seconds
        self.rollouts = RolloutStore.of(self.psrl, rollout_settings(self.config))
        self.rollouts.attach(buffer)
        return buffer

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        self.rollouts.begin_step(self.global_steps)
        return len(batch) if self.rollouts.replays else super()._submit_batch_to_rollout(batch)

    def _init_resource_pool_mgr(self) -> None:
        from psrl.integrations.verl.trainer.workers import OBSERVED

        super()._init_resource_pool_mgr()
        for role, remote in self.role_worker_mapping.items():
            self.role_worker_mapping[role] = ray.remote(OBSERVED[remote.__ray_actor_class__])

    def on_init_end(self) -> None:
        print(self._startup_line(), flush=True)
        super().on_init_end()

    def _startup_line(self) -> str:
        engine = self.actor_rollout_wg.psrl_describe()[0]
        phases = ["update", "old log-prob"] + ["reference"] * self.use_reference_policy + ["critic"] * self.use_critic
        if engine["sharing"] == "off":
            shared = "prefix sharing is off (psrl.enable=false): veRL's own Megatron path"
        else:
            shared = f"sharing prefixes in {', '.join(phases)}"
        own = self.psrl.advantage
        advantages = self.config.algorithm.adv_estimator if own == "grpo" else f"grpo and {own}"
        placed = f"placement by {self.psrl.grouping}" if self.psrl.balance else "veRL's own placement"
        return (
            f"psrl: {shared}; Megatron on {engine['device']} ({engine['dtype']}), {self._num_ranks()} data-parallel "
            f"ranks, attention {engine['attention']}, micro-batches of {engine['max_tokens']} tokens (forward only "
            f"{engine['infer_max_tokens']}); {placed}; advantages {advantages}; rollout "
            f"{self.config.actor_rollout_ref.rollout.name}"
        )

    # ---------------------------------------------------------------------------------------------- placement
    def _num_ranks(self) -> int:
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return max(group._dispatch_info["actor"]) + 1

    def _mini_batch_rows(self) -> int:
        """Rows of a mini-batch that the placement follows: the actor's, while it is trained."""
        trains_actor = self.config.trainer.critic_warmup <= self.global_steps or not self.use_critic
        section = self.config.actor_rollout_ref.actor if trains_actor else self.config.critic
        return section.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        batch.reorder(row_order(batch.keys))
        if not self.psrl.balance:
            return super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)
        num_ranks = self._num_ranks()
        multiple = self._get_required_batch_multiple(num_ranks)
        batch = upsample_batch_to_divisible_size(batch, multiple, self.tokenizer.eos_token_id)
        start = time.perf_counter()
        keys = [RowKey.parse(key) for key in batch.keys]
        is_padding_S = _is_padding(batch)
        segments = self._segments(batch, keys, is_padding_S)
        cells = Cells.of(len(batch), num_ranks, self._mini_batch_rows())
        before_S = _upstream_order([tag["seq_len"] for tag in batch.tags], num_ranks)
        keep = self.psrl.keep_minibatch or keep_minibatch
        after = place_rows(
            keys,
            is_padding_S,
            segments,
            cells,
            grouping=self.psrl.grouping,
            split_groups=self.psrl.split_groups,
            upstream_S=before_S,
            keep_mini_batches=keep,
        )
        before = evaluate(keys, is_padding_S, segments, cells, before_S, self.psrl.grouping)
        batch.reorder(after.order_S.tolist())
        if self.psrl.log:
            metrics.update(placement_metrics(before, after, time.perf_counter() - start))
            metrics["psrl/placement/padding_rows"] = int(is_padding_S.sum())
            metrics["psrl/placement/rows"] = len(batch)
        return batch

    def _segments(self, batch: KVBatchMeta, keys: Sequence[RowKey], is_padding_S: np.ndarray) -> Segments:
        exact = self.psrl.grouping == "tokens"
        if self.psrl.grouping == "fingerprints":
            if not (self.psrl.replay_rollouts and not any(TAG in tag for tag in batch.tags)):
                return segments_from_fingerprints(batch.keys, batch.tags, is_padding_S)
            exact = True
            print("psrl: the recorded rollouts have no fingerprints: placement by their token ids", flush=True)
        if not exact:
            return segments_from_lengths(keys, batch.tags, is_padding_S)
        data = _fetch(batch, "input_ids")
        return segments_from_tokens([row.numpy() for row in data["input_ids"].unbind()])

    # ---------------------------------------------------------------------------------------------- advantages
    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        result = super()._compute_advantage(batch, metrics)
        if self.psrl.advantage == "grpo":
            return result
        data = _fetch(batch, "advantages", "response_mask", "extra_fields")
        extra_fields = [tu.unwrap_non_tensor_data(row) for row in data["extra_fields"]]
        is_padding_S = _is_padding(batch)
        own_S = self._level_advantages(batch.keys, extra_fields, is_padding_S)
        mask = data["response_mask"]
        trajectory = torch.nested.to_padded_tensor(data["advantages"], 0.0)
        padded_mask = torch.nested.to_padded_tensor(mask, 0).to(trajectory.dtype)
        own = torch.as_tensor(own_S, dtype=trajectory.dtype)[:, None] * padded_mask
        advantages = self.psrl.episode_weight * trajectory + own
        nested = response_to_nested(advantages, mask)
        metrics["psrl/advantage/level_std"] = float(own_S[~is_padding_S].std()) if (~is_padding_S).any() else 0.0
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id or "train",
            fields=TensorDict({"advantages": nested, "returns": nested.clone()}, batch_size=len(batch)),
        )

    def _level_advantages(
        self, row_keys: Sequence[str], extra_fields: Sequence[Mapping[str, Any]], is_padding_S: np.ndarray
    ) -> np.ndarray:
        """[S] advantages of the rows among those they are compared with; 0 for padding."""
        real: list[int] = np.flatnonzero(~is_padding_S).tolist()
        keys = [RowKey.parse(row_keys[row]) for row in real]
        extra = [extra_fields[row] for row in real]
        advantages = np.zeros(len(row_keys))
        advantages[real] = group_advantages(
            row_returns(keys, extra),
            row_groups(keys, extra, self.psrl.advantage, self.psrl.step_anchor),
            normalize=bool(self.config.algorithm.get("norm_adv_by_std_in_grpo", True)),
        )
        return advantages

    # ------------------------------------------------------------------------------------------------- metrics
    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        result = super()._compute_old_log_prob(batch, metrics)
        self._report("old_log_prob", self.actor_rollout_wg, "actor", metrics)
        return result

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        result = super()._compute_ref_log_prob(batch, metrics)
        self._report("ref", self.ref_policy_wg, "actor" if self.ref_in_actor else "ref", metrics)
        return result

    def _compute_values(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        result = super()._compute_values(batch, metrics)
        self._report("values", self.critic_wg, "critic", metrics)
        return result

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        result = super()._update_critic(batch, metrics)
        self._report("update_critic", self.critic_wg, "critic", metrics)
        return result

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        result = super()._update_actor(batch, metrics)
        self._report("update", self.actor_rollout_wg, "actor", metrics)
        if self.psrl.log:
            metrics.update(headline_metrics(metrics))
        return result

    def _compute_metrics(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
        global_steps: int,
        epoch: int,
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self.psrl.log:
            real = np.flatnonzero(~_is_padding(batch)).tolist()
            keys = [RowKey.parse(batch.keys[row]) for row in real]
            rewards = [float(scores.sum()) for scores in _fetch(batch, "rm_scores")["rm_scores"].unbind()]
            metrics["psrl/trajectory_reward"] = trajectory_reward(
                [(key.uid, key.session) for key in keys], [rewards[row] for row in real]
            )
            print(f"psrl: {step_line(metrics, global_steps, self.total_training_steps)}", flush=True)

    def _report(self, phase: str, group: Any, role: str, metrics: dict[str, Any]) -> None:
        """Fetch what the phase's engines recorded. A phase that ran nothing (bypassed old log-probs) adds nothing."""
        if self.psrl.log:
            ranks: list[list[PassRecord]] = [records.get(role, []) for records in group.psrl_records()]
            metrics.update(phase_metrics(phase, ranks))


def _fetch(batch: KVBatchMeta, *fields: str) -> Any:
    """Fields of a batch's rows, in the order of its keys."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id or "train", select_fields=list(fields))


def _is_padding(batch: KVBatchMeta) -> np.ndarray:
    """[S] rows that veRL added to fill the batch up; their extra_fields are copies of another row's."""
    return np.array([bool(tag.get("is_padding", False)) for tag in batch.tags])


def _upstream_order(seqlens: list[int], num_ranks: int) -> IntArray:
    """The order that veRL's own ``_balance_batch`` gives (trainer_base.py:1627-1631)."""
    workload: Any = calculate_workload(torch.tensor(seqlens, dtype=torch.int64))
    partitions: Any = get_seqlen_balanced_partitions(workload, k_partitions=num_ranks, equal_size=True)
    return np.asarray([row for partition in partitions for row in partition], dtype=np.int64)


@register_trainer("psrl_sync")
class PSRLTrainerSync(PSRLTrainerMixin, PPOTrainerSync):
    """Trainer and rollout take turns on the same devices."""

    upstream_mode = "sync"


@register_trainer("psrl_colocate_async")
class PSRLTrainerColocateAsync(PSRLTrainerMixin, PPOTrainerColocateAsync):
    """The same devices; unfinished trajectories go on after an update."""

    upstream_mode = "colocate_async"


@register_trainer("psrl_separate_async")
class PSRLTrainerSeparateAsync(PSRLTrainerMixin, PPOTrainerSeparateAsync):
    """Trainer and rollout on devices of their own."""

    upstream_mode = "separate_async"

    def _startup_line(self) -> str:
        backend = self.config.actor_rollout_ref.rollout.checkpoint_engine.backend
        return f"{super()._startup_line()}, weights by {backend}"
