"""The engines' part of a job, checked before its workers start. The workers check it again, on what they were given."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from psrl.errors import ConfigError, UnsupportedError
from psrl.integrations.verl.engine.fused_options import fused_refusals
from psrl.integrations.verl.engine.support import (
    EXPERT_MODELS,
    Refusal,
    check_model,
    engine_refusals,
    lora_refusals,
    override_refusals,
)

Get = Callable[[str], Any]
"""Value of a job's key, None where there is none."""

_OF_THE_MODEL = ("use_remove_padding", "use_fused_kernels")
"""Options that the engine takes from the model's section."""
_ROLLOUT_MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Of the embedded rollout."""
_TOKEN_BUDGETS = {
    "actor_rollout_ref.actor": ("ppo_max_token_len_per_gpu",),
    "actor_rollout_ref.ref": ("log_prob_max_token_len_per_gpu",),
    "critic": ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"),
}


def model_key(engine: str) -> str:
    """Key of the model's section of an engine."""
    return "critic.model" if engine == "critic" else "actor_rollout_ref.model"


def check_engine_options(get: Get, engines: Iterable[str]) -> None:
    """Options under which prefixes cannot be shared, by the key that sets them.

    Raises:
        UnsupportedError: names the key.
    """
    for engine in engines:
        model = model_key(engine)
        values = dict(get(f"{engine}.megatron") or {})
        values |= {name: get(f"{model}.{name}") for name in _OF_THE_MODEL}
        groups = {name: SimpleNamespace(**value) for name, value in values.items() if isinstance(value, dict)}
        config, is_critic = SimpleNamespace(**{**values, **groups}), engine == "critic"
        fused = fused_refusals(config, device=get("trainer.device"), is_value_model=is_critic)
        for refusal in itertools.chain(engine_refusals(config), fused):
            _refuse(model if refusal.option in _OF_THE_MODEL else f"{engine}.megatron", refusal)
        for refusal in override_refusals(values.get("override_transformer_config") or {}):
            _refuse(f"{engine}.megatron.override_transformer_config", refusal)
        if get(f"{model}.mtp.enable"):
            raise UnsupportedError(
                f"{model}.mtp.enable=True rules out prefix sharing (not built yet): set it to false, or set "
                "psrl.enable=false"
            )
        _check_adapters(get, engine, model)


def _refuse(place: str, refusal: Refusal) -> NoReturn:
    raise refusal.error(f"{place}.")


def _check_adapters(get: Get, engine: str, model: str) -> None:
    if value := get(f"{model}.lora_rank"):
        raise UnsupportedError(f"{model}.lora_rank={value!r} is an option of FSDP: set {model}.lora.rank")
    lora = dict(get(f"{model}.lora") or {})
    tensor, stages = (get(f"{engine}.megatron.{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline"))
    for refusal in lora_refusals(lora, "", tensor, stages):  # the workers know the model
        _refuse(model, refusal)
    if lora.get("rank", 0) and get(f"{engine}.megatron.vanilla_mbridge"):
        raise ConfigError(
            f"{model}.lora.rank={lora['rank']} needs Megatron-Bridge: set {engine}.megatron.vanilla_mbridge=false"
        )


def check_bridge(get: Get, engines: Iterable[str], device: str) -> None:
    """
    Raises:
        ConfigError: Megatron-Bridge is asked for on the CPU.
    """
    for engine in engines:
        key = f"{engine}.megatron.vanilla_mbridge"
        if device == "cpu" and get(key) is False:
            raise ConfigError(f"{key} must be true where trainer.device is cpu: jobs with Megatron-Bridge need a GPU")


def check_router_replay(get: Get) -> None:
    """R3 replays the rollout's routes, R2 those of the actor's old log-probs.

    Raises:
        ConfigError: the rollout returns routes, or not, against the actor's mode.
    """
    key, returns = "actor_rollout_ref.actor.megatron.router_replay", "actor_rollout_ref.rollout"
    mode, is_returned = (get(key) or {}).get("mode", "disabled"), bool(get(f"{returns}.enable_rollout_routing_replay"))
    if mode == "R3" and not is_returned:
        raise ConfigError(
            f"{key}.mode=R3 replays the rollout's routes: set {returns}.enable_rollout_routing_replay=true"
        )
    if mode == "R2" and is_returned:
        raise ConfigError(
            f"{key}.mode=R2 records routes of its own: set {returns}.enable_rollout_routing_replay=false, or mode=R3"
        )


def check_token_budgets(get: Get, engines: Iterable[str]) -> None:
    """
    Raises:
        ConfigError: a token budget in use is no positive number.
    """
    keys = [f"{engine}.{name}" for engine in engines for name in _TOKEN_BUDGETS[engine]]
    for key in [*keys, "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"]:
        check_count(get, key)


def check_count(get: Get, key: str) -> int:
    """The value of a key that counts something.

    Raises:
        ConfigError: it is no integer of at least 1.
    """
    value = get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be at least 1, got {value!r}")
    return value


def check_dropout(get: Get, engines: Iterable[str]) -> None:
    """
    Raises:
        ConfigError: an override of the model asks for dropout; names the key.
    """
    names = ("hidden_dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    for engine in engines:
        for place in (f"{engine}.megatron.override_transformer_config", f"{model_key(engine)}.override_config"):
            for name in names:
                if value := (get(place) or {}).get(name):
                    raise ConfigError(
                        f"{place}.{name} is {value}, but a shared token has one hidden state for all its samples: set "
                        "it to 0.0, or psrl.enable=false"
                    )


def check_model_folder(get: Get) -> None:
    """A local model folder; a name of a hub is checked by the workers.

    Raises:
        ConfigError: it has dropout.
        UnsupportedError: prefixes cannot be shared in the model.
    """
    path = Path(get("actor_rollout_ref.model.path")).expanduser() / "config.json"
    if not path.is_file():
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    values.update(get("actor_rollout_ref.model.override_config") or {})
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        if values.get(name):
            raise ConfigError(
                f"actor_rollout_ref.model.path: {path} has {name}={values[name]}: set "
                f"+actor_rollout_ref.model.override_config.{name}=0.0"
            )
    check_model(SimpleNamespace(**values))
    kind = values["model_type"]
    if get("actor_rollout_ref.rollout.name") == "hf" and kind not in _ROLLOUT_MODELS:
        raise UnsupportedError(
            f"actor_rollout_ref.rollout.name=hf: the embedded rollout does not take weights of {kind}, only of "
            f"{', '.join(_ROLLOUT_MODELS)}: choose vllm or sglang"
        )
    if get("actor_rollout_ref.rollout.enable_rollout_routing_replay") and kind not in EXPERT_MODELS:
        raise UnsupportedError(
            f"actor_rollout_ref.rollout.enable_rollout_routing_replay=true, but {kind} has no experts: set it to false"
        )
