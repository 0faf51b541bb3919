"""Every configuration composes and is accepted; every mistake is refused before workers start, by name."""

import copy
import os
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from typer.testing import CliRunner

from psrl.cli.main import app
from psrl.config import PSRLConfig
from psrl.errors import ConfigError, PSRLError
from psrl.integrations.verl.job import launch
from psrl.integrations.verl.job.config import OrchestratorConfig, split_settings, validate_job
from psrl.integrations.verl.job.joined_cluster import fit_to_cluster
from psrl.integrations.verl.job.launch import check_files, compose_job, find_config_dir, job_environment

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "agents")


@pytest.fixture(autouse=True, scope="module")
def every_file_is_parsed_once():
    """A job has dozens of files, most of them veRL's, and PyYAML's parser takes half of the time to compose it."""
    load, known = yaml.load, {}

    def load_once(stream, Loader):
        text = stream if isinstance(stream, str) else stream.read()
        if (text, Loader.__name__) not in known:
            known[text, Loader.__name__] = load(text, Loader)
        return copy.deepcopy(known[text, Loader.__name__])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(yaml, "load", load_once)
        yield


@pytest.fixture(autouse=True)
def no_job_was_here(tmp_path, monkeypatch):
    """Jobs look for their model in the working folder; in the repository a quick start may have left one."""
    monkeypatch.chdir(tmp_path)


def compose(name: str, *overrides: str) -> DictConfig:
    return compose_job(CONFIGS, name, overrides)


@pytest.mark.parametrize("name", NAMES)
def test_composes_and_is_accepted(name):
    config = compose(name)
    settings, orchestrator = validate_job(config)
    assert settings == PSRLConfig()
    assert orchestrator.balance
    OmegaConf.resolve(config)
    assert config.model_engine == "megatron"
    assert config.actor_rollout_ref.ref.megatron.forward_only is True


def test_every_scale_has_a_configuration():
    assert NAMES == ["cpu_quickstart", "multi_node_qwen3_moe_235b", "psrl_trainer", "single_node_qwen2.5_1.5b"]


def test_the_group_is_complete_and_nothing_else():
    group = OmegaConf.to_container(compose("psrl_trainer").psrl)
    assert split_settings(group) == (PSRLConfig(), OrchestratorConfig())
    assert set(group) == set(PSRLConfig.__dataclass_fields__) | set(OrchestratorConfig.__dataclass_fields__)


def test_settings_reach_every_engine():
    config = compose("cpu_quickstart", "psrl.max_tokens=77", "psrl.enable=false", "algorithm.adv_estimator=gae")
    settings, _ = validate_job(config)
    assert (settings.max_tokens, settings.enable) == (77, False)
    for section in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        assert section.megatron.psrl.max_tokens == 77
        assert section.megatron.psrl.enable is False
        assert section.megatron.dtype == "float32"


A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("+psrl.share=true", "unknown key psrl.share"),
        ("psrl.max_tokens=0", "psrl.max_tokens must be at least 1"),
        ("psrl.infer_max_tokens=-4", "psrl.infer_max_tokens must be at least 1"),
        ("psrl.kv_cache_bytes=0", "psrl.kv_cache_bytes must be at least 1"),
        ("psrl.kv_cache_fraction=0", "psrl.kv_cache_fraction"),
        ("psrl.kv_host_bytes=-1", "psrl.kv_host_bytes must be at least 0, got -1"),
        ("psrl.kv_host_flops_per_byte=0", "psrl.kv_host_flops_per_byte must be above 0, got 0"),
        ("psrl.kv_recompute=2", "psrl.kv_recompute must be true or false, got 2"),
        ("psrl.attention_backend=flashy", "psrl.attention_backend"),
        ("psrl.enable=1", "psrl.enable must be true or false"),
        ("psrl.grouping=prompt", "psrl.grouping must be one of fingerprints, uid, session, tokens"),
        ("psrl.balance=maybe", "psrl.balance must be true or false"),
        ("psrl.advantage=gigpo", "psrl.advantage must be one of grpo, step, branch"),
        ("psrl.step_anchor=turn", "psrl.step_anchor must be one of step, state"),
        ("psrl.episode_weight=-1", "psrl.episode_weight"),
        ("psrl.poll_seconds=0", "psrl.poll_seconds must be a number above 0"),
        ("psrl.record_rollouts=3", "psrl.record_rollouts must be a folder or null"),
        ("psrl.replay_rollouts=no/such", "psrl.replay_rollouts=no/such: no such folder"),
        (f"{A}.megatron.override_transformer_config.hidden_dropout=0.1", f"{A}.megatron.override_.*hidden_dropout is"),
        ("+actor_rollout_ref.model.override_config.attention_dropout=0.1", "override_config.attention_dropout is 0.1"),
        (f"{A}.ppo_max_token_len_per_gpu=0", f"{A}.ppo_max_token_len_per_gpu must be at least 1"),
        (f"{A}.use_dynamic_bsz=false", "psrl.max_tokens is needed"),
        (f"{R}.log_prob_max_token_len_per_gpu=0", f"{R}.log_prob_max_token_len_per_gpu must be at least 1, got 0"),
        (
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=0",
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu must be at least 1, got 0",
        ),
        (f"{A}.megatron.dynamic_context_parallel=true", f"{A}.megatron.dynamic_context_parallel=True rules out"),
        (f"{A}.megatron.use_megatron_fsdp=true", f"{A}.megatron.use_megatron_fsdp=True rules out prefix sharing"),
        (
            f"+{A}.megatron.override_transformer_config.fp8=hybrid",
            r"override_transformer_config\.fp8='hybrid' rules out",
        ),
        (
            f"+{A}.megatron.override_transformer_config.cuda_graph_impl=local",
            "cuda_graph_impl='local' rules out prefix",
        ),
        (f"{A}.megatron.qat.enable=true", f"{A}.megatron.qat.enable=True rules out prefix sharing"),
        (f"{A}.megatron.router_replay.mode=R3", f"set {R}.enable_rollout_routing_replay=true"),
        (f"{A}.megatron.vanilla_mbridge=false", f"{A}.megatron.vanilla_mbridge must be true where trainer.device is"),
        ("actor_rollout_ref.model.lora_rank=8", "lora_rank=8 is an option of FSDP: set actor_rollout_ref.model.lora."),
        ("actor_rollout_ref.model.lora.rank=8", f"lora.rank=8 needs Megatron-Bridge: set {A}.megatron.vanilla_mbridge"),
        (
            "actor_rollout_ref.model.lora={rank: 8, dropout: 0.1}",
            "actor_rollout_ref.model.lora.dropout=0.1 rules out prefix sharing",
        ),
        ("actor_rollout_ref.model.use_remove_padding=false", "actor_rollout_ref.model.use_remove_padding=False rules"),
        (
            "actor_rollout_ref.model.use_fused_kernels=true",
            "actor_rollout_ref.model.use_fused_kernels=True rules .*the device is cpu",
        ),
        ("psrl.fingerprint_stride=0", "psrl.fingerprint_stride must be an integer of at least 1, got 0"),
        (
            f"{R}.agent.agent_loop_manager_class=null",
            f"{R}.agent.agent_loop_manager_class is not set, so that nothing writes the fingerprints",
        ),
        (f"{R}.n=0", f"{R}.n must be at least 1, got 0"),
        ("trainer.nnodes=0", "trainer.nnodes must be at least 1, got 0"),
        (f"{A}.ppo_mini_batch_size=0", f"{A}.ppo_mini_batch_size must be at least 1, got 0"),
        ("data.train_batch_size=null", "data.train_batch_size must be at least 1, got None"),
        (f"{A}.strategy=fsdp2", f"{A}.strategy must be megatron"),
        (f"{A}.megatron._target_=verl.workers.config.McoreEngineConfig", f"{A}.megatron._target_ must be"),
        (f"{A}.megatron.psrl.max_tokens=5", f"{A}.megatron.psrl differs"),
        (f"{A}.shuffle=true", f"{A}.shuffle"),
        (f"{A}.loss_agg_mode=seq-mean-token-sum-norm", f"{A}.loss_scale_factor is needed"),
        (f"{A}.ppo_mini_batch_size=8", "data.train_batch_size=4 is smaller"),
        (f"{R}.name=vllm", f"{R}.name=vllm needs GPUs"),
        (f"{R}.name=naive", f"{R}.name must be one of"),
        (f"{R}.mode=sync", f"{R}.mode must be async"),
        (f"{R}.tensor_model_parallel_size=2", f"{R}.tensor_model_parallel_size must be 1"),
        ("ray_kwargs.ray_init.num_gpus=1", "ray_kwargs.ray_init.num_gpus=1 is less than the 2 of trainer.n_gpus"),
        ("trainer.v1.trainer_mode=sync", "trainer.v1.trainer_mode must be one of psrl_sync"),
        ("trainer.use_v1=false", "trainer.use_v1"),
        (
            "trainer.n_gpus_per_node=32",
            f"{A}.ppo_mini_batch_size: 4 prompts times rollout.n=4 are fewer rows than the 32",
        ),
        ("trainer.n_gpus_per_node=3", f"{A}.ppo_mini_batch_size: .* do not divide over 3"),
        (f"{A}.megatron.tensor_model_parallel_size=4", "trainer.n_gpus_per_node .* do not divide"),
    ],
)
def test_mistakes_are_named(override, key):
    with pytest.raises(PSRLError, match=key):
        validate_job(compose("cpu_quickstart", override))


def test_a_host_tier_keeps_to_one_pipeline_stage():
    stages = f"{A}.megatron.pipeline_model_parallel_size=2"
    with pytest.raises(PSRLError, match=rf"{stages} rules out .*: set psrl\.kv_host_bytes to 0"):
        validate_job(compose("cpu_quickstart", "psrl.kv_host_bytes=1000", stages))


def test_fused_kernels_leave_no_logits_to_bound():
    fused = "actor_rollout_ref.model.use_fused_kernels=true"
    validate_job(compose("psrl_trainer", fused))
    with pytest.raises(
        PSRLError, match=r"model.use_fused_kernels=True rules out .*psrl\.max_logit_rows=64 could bound"
    ):
        validate_job(compose("psrl_trainer", fused, "psrl.max_logit_rows=64"))


def test_routes_come_from_the_rollout_or_the_actor():
    returned = f"{R}.enable_rollout_routing_replay=true"
    with pytest.raises(ConfigError, match=rf"mode=R2 records routes of its own: set {R}.enable_rollout_routing_replay"):
        validate_job(compose("cpu_quickstart", returned, f"{A}.megatron.router_replay.mode=R2"))
    validate_job(compose("cpu_quickstart", f"{A}.megatron.router_replay.mode=R2"))
    validate_job(compose("cpu_quickstart", returned, f"{A}.megatron.router_replay.mode=R3"))


SEPARATE = "trainer.v1.trainer_mode=psrl_separate_async"


def test_separate_rollouts_are_accepted():
    validate_job(compose("cpu_quickstart", SEPARATE))
    validate_job(compose("psrl_trainer", SEPARATE, f"{A}.ppo_mini_batch_size=256", f"{R}.nnodes=1",
                         f"{R}.checkpoint_engine.backend=nccl"))  # fmt: skip


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("trainer.v1.separate_async.parameter_sync_step=2", "trainer.v1.separate_async.parameter_sync_step=2 mini-"),
        (f"{R}.checkpoint_engine.backend=naive", f"{R}.checkpoint_engine.backend must be psrl_gloo with {R}.name=hf"),
        (f"{R}.checkpoint_engine.backend=nccl", f"{R}.checkpoint_engine.backend must be psrl_gloo with {R}.name=hf"),
        (f"{R}.nnodes=0", f"{R}.nnodes must be at least 1, got 0"),
        (f"{R}.n_gpus_per_node=7", "ray_kwargs.ray_init.num_gpus=8 is less than the 9 of trainer.* and"),
        (f"{A}.megatron.use_distributed_optimizer=false", f"{A}.megatron.use_distributed_optimizer must be true in"),
        ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.hybrid_engine=false in psrl_separate_async ends"),
    ],
)
def test_mistakes_with_separate_rollouts_are_named(override, key, monkeypatch):
    monkeypatch.delenv("VERL_LOGGING_LEVEL", raising=False)
    with pytest.raises(ConfigError, match=key):
        validate_job(compose("cpu_quickstart", SEPARATE, override))


def test_weights_of_a_gpu_rollout_leave_the_process():
    with pytest.raises(ConfigError, match=f"{R}.checkpoint_engine.backend must be one of veRL's .* got 'psrl_gloo'"):
        validate_job(compose("psrl_trainer", SEPARATE, f"{A}.ppo_mini_batch_size=256", f"{R}.nnodes=1",
                             f"{R}.checkpoint_engine.backend=psrl_gloo"))  # fmt: skip


@pytest.mark.parametrize("name", ["record_rollouts", "replay_rollouts"])
def test_rollouts_are_recorded_and_replayed_by_the_synchronous_trainer(name):
    with pytest.raises(ConfigError, match=rf"psrl.{name} needs trainer.v1.trainer_mode=psrl_sync"):
        validate_job(compose("cpu_quickstart", f"psrl.{name}=a", "trainer.v1.trainer_mode=psrl_colocate_async"))


def test_step_advantages_need_grpo():
    with pytest.raises(ConfigError, match=r"psrl.advantage=step .*algorithm.adv_estimator=grpo"):
        validate_job(compose("cpu_quickstart", "psrl.advantage=step", "algorithm.adv_estimator=gae"))


def test_a_job_without_the_group_is_refused():
    config = compose("cpu_quickstart")
    with pytest.raises(ConfigError, match="no psrl group"):
        validate_job(OmegaConf.masked_copy(config, [key for key in config if key != "psrl"]))


def test_a_key_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="shares"):
        compose("cpu_quickstart", "psrl.shares=true")


def test_a_local_model_is_checked(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "attention_dropout": 0.1}')
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.path: .*attention_dropout=0.1"):
        validate_job(compose("cpu_quickstart", f"actor_rollout_ref.model.path={tmp_path}"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(PSRLError, match="model_type 'gpt2' is not supported"):
        validate_job(compose("cpu_quickstart", f"actor_rollout_ref.model.path={tmp_path}"))
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "sliding_window": null}')
    with pytest.raises(PSRLError, match=r"rollout.name=hf: the embedded rollout does not take weights of mistral"):
        validate_job(compose("cpu_quickstart", f"actor_rollout_ref.model.path={tmp_path}"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    routes = f"{R}.enable_rollout_routing_replay"
    with pytest.raises(PSRLError, match=rf"{routes}=true, but qwen2 has no experts"):
        validate_job(compose("cpu_quickstart", f"actor_rollout_ref.model.path={tmp_path}", f"{routes}=true"))


def test_missing_files_are_named(tmp_path):
    config = compose("cpu_quickstart", f"job_dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.path=.*no such folder"):
        check_files(config)
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"data.train_files=.*no such file"):
        check_files(config)


def test_environment_of_a_job():
    found = job_environment(
        CONFIGS, "cpu_quickstart", ["+ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS='2'"]
    )
    assert found == {
        "VERL_PLATFORM": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with pytest.raises(ConfigError, match=r"--config-name nothing: no such file .*cpu_quickstart"):
        job_environment(CONFIGS, "nothing", [])


def test_a_job_that_joins_a_cluster(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "job" / "data").mkdir(parents=True)
    with pytest.raises(ConfigError, match="num_gpus=8 is less than the 16"):
        validate_job(compose("cpu_quickstart", "trainer.n_gpus_per_node=16"))
    validate_job(compose("cpu_quickstart", "trainer.n_gpus_per_node=16", "+ray_kwargs.ray_init.address=10.0.0.1:6379"))
    alone, joining = (compose("cpu_quickstart", "job_dir=job", "data.val_files=[job/data, job/none]") for _ in "12")
    fit_to_cluster(alone)
    assert alone == joining and capsys.readouterr().out == ""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    fit_to_cluster(joining)
    message = "psrl: joins the Ray cluster at 10.0.0.1:6379, which decides about num_cpus, num_gpus\n"
    assert capsys.readouterr().out == message
    assert joining.ray_kwargs.ray_init.num_cpus is joining.ray_kwargs.ray_init.num_gpus is None
    assert joining.trainer.default_local_dir == f"{tmp_path}/job/checkpoints"
    assert joining.data.val_files == [f"{tmp_path}/job/data", "job/none"]
    assert joining.actor_rollout_ref.model.path == joining.critic.model.path == "job/model"  # no such folder: a hub's


def test_configuration_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config_dir(None) == CONFIGS
    with pytest.raises(ConfigError, match="--config-dir"):
        find_config_dir(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("psrl.max_tokens=0", "psrl.max_tokens must be at least 1, got 0"),
        ("+psrl.share=true", "unknown key psrl.share; known keys: enable, "),
        (f"{R}.name=vllm", f"{R}.name=vllm needs GPUs, but trainer.device is cpu: set it to hf"),
        (
            f"{A}.megatron.override_transformer_config.hidden_dropout=0.1",
            f"{A}.megatron.override_transformer_config.hidden_dropout is 0.1, but a shared token has one hidden state",
        ),
        (
            "trainer.n_gpus_per_node=32",
            f"{A}.ppo_mini_batch_size: 4 prompts times rollout.n=4 are fewer rows than the 32 data-parallel ranks",
        ),
        ("psrl.shares=true", "Could not override 'psrl.shares'"),
    ],
)
def test_the_command_line_names_the_mistake_before_ray_starts(override, message, monkeypatch):
    for name in ("VERL_USE_EXTERNAL_MODULES", "PSRL_CONFIG_DIR", "VERL_PLATFORM", "GLOO_SOCKET_IFNAME",
                 "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"):  # fmt: skip
        monkeypatch.setenv(name, os.environ.get(name, ""))  # the job sets them in this process
        if not os.environ[name]:
            monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "_run", lambda config: pytest.fail("the job was started"))
    result = CliRunner().invoke(
        app, ["train", "--config-name", "cpu_quickstart", "--config-dir", str(CONFIGS), override]
    )
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("psrl: error:")]
    assert message in line
