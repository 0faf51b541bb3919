"""The CPU device mode, its hooks, and the surroundings of a worker on a machine without a GPU."""

import importlib.util
import logging
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from psrl.config import PSRLConfig
from psrl.errors import ConfigError, UnsupportedError
from psrl.integrations.megatron import cpu_device, cpu_experts, float64
from psrl.integrations.megatron.hooks import HookSet
from psrl.integrations.megatron.local_spec import LocalLayerProvider, PackedCoreAttention, RMSNorm, rms_norm
from psrl.integrations.verl import compat, platform
from psrl.integrations.verl.engine.config import PSRLEngineConfig

HOOKS = [hook for module in (cpu_device, cpu_experts, float64, compat, platform) for hook in module.HOOKS.hooks]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the device mode is off where there is a GPU")


def function_modes() -> int:
    return torch._C._len_torch_function_stack()


@no_gpu
def test_cuda_devices_are_redirected_inside_only():
    with cpu_device.device_mode():
        assert torch.zeros(2, device="cuda").device == cpu_device.CPU
        assert torch.empty(1, device=torch.device("cuda", 0)).device == cpu_device.CPU
        x = torch.ones(2)
        assert x.cuda() is x
        assert x.to("cuda").device == cpu_device.CPU
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.double().type() == "torch.cuda.FloatTensor"
        assert x.long().type() == "torch.LongTensor"
        assert x.to(torch.float64).dtype == torch.float64
    assert torch.ones(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@no_gpu
def test_device_mode_nests():
    before = function_modes()
    with cpu_device.device_mode(), cpu_device.device_mode():
        assert function_modes() == before + 1
    assert function_modes() == before


@no_gpu
def test_an_iterator_leaves_the_mode_between_items():
    def devices():
        for _ in range(2):
            yield torch.zeros(1, device="cuda").device

    for device in cpu_device.in_device_mode(devices()):
        assert device == cpu_device.CPU
        assert function_modes() == 0


def test_nothing_happens_with_cuda(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    applied = []
    monkeypatch.setattr(cpu_device.HOOKS, "install", lambda: applied.append("device"))
    monkeypatch.setattr(platform.HOOKS, "install", lambda: applied.append("platform"))
    cpu_device.install()
    platform.install()
    assert applied == []
    with cpu_device.device_mode():
        assert function_modes() == 0


def test_float64_mode_keeps_float64_only():
    wide, narrow = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16)
    with float64.float64_mode():
        assert wide.float() is wide
        assert narrow.float().dtype == torch.float32
        assert wide.to(torch.float32).dtype == torch.float32
    assert wide.float().dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_computes_in_float32_or_wider(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(16, generator=generator, dtype=torch.float64).to(dtype)
    wide = x.double()
    wanted = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()).to(dtype)
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps * 4, atol=0)


def test_what_only_transformer_engine_has_is_refused():
    options = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "normalization": "RMSNorm"}
    with pytest.raises(UnsupportedError, match=r"attention_dropout=0\.1"):
        PackedCoreAttention(TransformerConfig(**options, attention_dropout=0.1), 1)
    attention = PackedCoreAttention(TransformerConfig(**options, attention_dropout=0.0), 1)
    with pytest.raises(UnsupportedError, match="use_remove_padding=False"):
        attention(*torch.zeros(3, 4, 2, 8), attention_mask=None)
    with pytest.raises(UnsupportedError, match="layernorm_zero_centered_gamma=True"):
        RMSNorm(TransformerConfig(**options, layernorm_zero_centered_gamma=True), 16)
    with pytest.raises(UnsupportedError, match="moe_grouped_gemm=False"):
        LocalLayerProvider().grouped_mlp_modules(False, False)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_every_hook_names_cause_place_and_end(hook):
    assert len(hook.cause) > 20
    assert len(hook.remove_when) > 10
    places = re.findall(r"([\w/]+\.py):(\d+)", hook.upstream)
    assert places
    for place, line in places:
        package, _, relative = place.partition("/")
        folders = importlib.util.find_spec(package).submodule_search_locations
        files = [file for folder in folders if (file := Path(folder) / relative).is_file()]
        assert files, place
        assert int(line) <= len(files[0].read_text().splitlines())


def test_hooks_are_applied_once():
    applied = []
    hooks = HookSet()

    @hooks.add(cause="a test", upstream="nowhere.py:1", remove_when="never")
    def one() -> None:
        applied.append(1)

    hooks.install()
    hooks.install()
    assert applied == [1]


def test_quiet_upstream_lets_errors_and_psrl_through(capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture):
    with compat.quiet_upstream():
        print("TF config")
        warnings.warn("deprecated", FutureWarning, stacklevel=1)
        logging.getLogger("verl.engine").warning("noise")
        logging.getLogger("verl.engine").error("trouble")
        logging.getLogger("psrl.planner").warning("slower path")
    assert capsys.readouterr().out == ""
    assert [record.getMessage() for record in caplog.records] == ["trouble", "slower path"]
    with pytest.raises(RuntimeError), compat.quiet_upstream():
        print("what led to it")
        raise RuntimeError
    assert capsys.readouterr().err == "what led to it\n"


@pytest.mark.parametrize(("package", "version"), [("verl", "0.9.0"), ("megatron-core", "0.15.2"), ("verl", None)])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None):
    compat.check_versions()
    installed = compat._version
    monkeypatch.setattr(compat, "_version", lambda name: version if name == package else installed(name))
    with pytest.raises(UnsupportedError, match=rf"{package} .*psrl needs {package}"):
        compat.check_versions()


def test_engine_config_takes_the_psrl_group():
    config = PSRLEngineConfig(psrl={"max_tokens": 7}, dtype="float32")
    assert config.psrl == PSRLConfig(max_tokens=7)
    assert config.strategy == "psrl"
    assert config.sequence_parallel is False
    with pytest.raises(ConfigError, match=r"psrl\.max_token;"):
        PSRLEngineConfig(psrl={"max_token": 7})
    with pytest.raises(ConfigError, match="dtype must be one of"):
        PSRLEngineConfig(dtype="int8")


@no_gpu
def test_megatron_bridge_is_refused_where_it_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(UnsupportedError, match="vanilla_mbridge=False needs Megatron-Bridge"):
        PSRLEngineConfig(vanilla_mbridge=False)
