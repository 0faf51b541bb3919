"""The hf rollout under Ray: a replica on one side, adapters as the trainer's workers have them on the other."""

import asyncio

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM
from verl.utils.ray_utils import auto_await
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

import psrl.rollout
from psrl.errors import ConfigError, RolloutError, UnsupportedError
from psrl.rollout.settings import HFEngineSettings, read_settings
from tests.helpers import make_checkpoint

PROMPT = list(range(10, 40))
GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "logprobs": True}


def rollout_config(**options) -> RolloutConfig:
    return RolloutConfig(name="hf", tensor_model_parallel_size=1, dtype="float32", prompt_length=64, response_length=32,
                         n_gpus_per_node=1, **options)  # fmt: skip


def test_settings():
    assert read_settings(rollout_config()) == HFEngineSettings(num_threads=1, prefix_cache_bytes=1 << 30)
    assert read_settings(rollout_config(enable_prefix_caching=False)).prefix_cache_bytes == 0
    assert read_settings({"engine_kwargs": {"hf": {"num_threads": 2}}}).num_threads == 2


@pytest.mark.parametrize("bad", [
    {"dtype": "int8"}, {"quantization": "fp8"}, {"repetition_penalty": 1.2},
    {"tensor_model_parallel_size": 2}, {"logprobs_mode": "raw_logprobs"}, {"mtp": {"enable": True}},
])  # fmt: skip
def test_options_that_it_cannot_do_are_refused_by_name(bad):
    with pytest.raises(UnsupportedError, match=next(iter(bad))):
        read_settings(bad)


def test_bad_engine_settings_name_the_key():
    for values in ({"threads": 2}, {"num_threads": 0}, {"prefix_cache_bytes": -1}):
        with pytest.raises(ConfigError, match=rf"rollout\.engine_kwargs\.hf\.{next(iter(values))}"):
            read_settings({"engine_kwargs": {"hf": values}})


def test_verl_finds_it():
    psrl.rollout.register()
    psrl.rollout.register()
    assert get_rollout_class("hf", "async").__name__ == "HFServerAdapter"
    assert get_rollout_replica_class("hf").__name__ == "HFReplica"


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, namespace="test_hf_rollout", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path / "model")


class Model:
    def __init__(self, path: str) -> None:
        self.path = path


@auto_await
async def launch(path: str, **options):
    psrl.rollout.register()
    config = rollout_config(**options)
    replica = get_rollout_replica_class("hf")(replica_rank=0, config=config, model_config=Model(path), gpus_per_node=1)
    await replica.launch_servers()
    adapter = object.__new__(get_rollout_class("hf"))  # BaseRollout's constructor wants veRL's whole model config
    adapter.config, adapter.replica_rank = config, 0
    return replica, adapter


def weights_of(path: str):
    return list(AutoModelForCausalLM.from_pretrained(path).named_parameters())


@pytest.mark.slow
def test_generate_update_and_abort(cluster, checkpoint, tmp_path):
    async def scenario():
        replica, adapter = await launch(checkpoint, load_format="dummy")
        server = replica.server_handle
        try:
            with pytest.raises(RolloutError, match="no weights"):
                await server.generate.remote("r", PROMPT, dict(GREEDY))

            seen = []

            def stream(path):
                for name, tensor in weights_of(path):
                    seen.append(name)
                    yield name, tensor

            await adapter.update_weights(stream(checkpoint), global_steps=3, peft_config=None, base_sync_done=True)
            first = await server.generate.remote("r", PROMPT, dict(GREEDY))
            assert (len(first.token_ids), first.stop_reason, first.extra_fields["global_steps"]) == (5, "completed", 3)
            model = AutoModelForCausalLM.from_pretrained(checkpoint)
            want = model.generate(torch.tensor([PROMPT]), max_new_tokens=5, do_sample=False, eos_token_id=None)
            assert first.token_ids == want[0, len(PROMPT) :].tolist()

            many = await asyncio.gather(*(
                server.generate.remote(f"r{i}", PROMPT, {"temperature": 1.0, "logprobs": False}) for i in range(12)
            ))  # fmt: skip
            assert len({tuple(out.token_ids) for out in many}) > 6
            assert {out.log_probs for out in many} == {None}
            assert many[0].extra_fields["num_cached_tokens"] == len(PROMPT) - 1
            stats = await server.stats.remote()
            assert stats["forward_passes"] < 12 * 8  # batched

            # A running request ends before new weights arrive; one that comes meanwhile gets the new ones.
            long = {"temperature": 1.0, "max_tokens": 30, "ignore_eos": True}
            running = server.generate.remote("long", PROMPT, long)
            while not (await server.stats.remote())["generated_tokens"] > stats["generated_tokens"]:
                await asyncio.sleep(0.01)
            other = make_checkpoint(tmp_path / "other", seed=1)
            await adapter.update_weights(stream(other), global_steps=4)
            assert (await running).extra_fields["global_steps"] in (3, 4)
            second = await server.generate.remote("r", PROMPT, dict(GREEDY))
            assert second.extra_fields == {"global_steps": 4, "num_cached_tokens": 0}
            assert second.token_ids != first.token_ids

            # The stream is exhausted even where the server refuses it; requests fail instead of hanging.
            seen.clear()
            with pytest.raises(RolloutError, match=r"unexpected tensor 'x\.model"):
                renamed = (("x." * (i == 2) + name, tensor) for i, (name, tensor) in enumerate(stream(other)))
                await adapter.update_weights(renamed, global_steps=5)
            assert len(seen) == len(weights_of(other))
            with pytest.raises(RolloutError, match="being replaced"):
                await server.generate.remote("r", PROMPT, dict(GREEDY))
            await adapter.update_weights(stream(other), global_steps=5)

            # Abort: what there is comes back, later requests wait until generation resumes.
            running = server.generate.remote("long", PROMPT, {**long, "max_tokens": 10_000})
            await asyncio.sleep(0.3)
            await replica.abort_all_requests()
            assert (await running).stop_reason == "aborted"
            held = server.generate.remote("r", PROMPT, dict(GREEDY))
            done, _ = await asyncio.wait([asyncio.ensure_future(asyncio.wrap_future(held.future()))], timeout=0.5)
            assert not done
            await replica.resume_generation()
            assert (await held).token_ids == second.token_ids
            await replica.abort_all_requests(reject_request=True)
            assert (await server.generate.remote("r", PROMPT, dict(GREEDY))).stop_reason == "aborted"
            await replica.resume_generation()
            await replica.sleep()
            assert (await server.stats.remote())["cached_bytes"] == 0

            with pytest.raises(UnsupportedError, match="min_p"):
                await server.generate.remote("r", PROMPT, {**GREEDY, "min_p": 0.1})
        finally:
            ray.kill(server)

    asyncio.run(scenario())
