"""With TransformerEngine's layers, psrl replaces attention (of experts also the router) and leaves the rest.

TransformerEngine is not installed where this runs: ``tests/helpers/te_specs.py`` lets Megatron-Core's own code build
the specs of its TransformerEngine layers, and no layer.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.models.gpt import gpt_layer_specs

REPOSITORY = Path(__file__).resolve().parents[2]
ATTENTION = {"TEDotProductAttention": "PrefixCoreAttention"}
LATENT_ATTENTION = {"TEDotProductAttention": "LatentCoreAttention"}


@pytest.fixture(scope="module")
def found():
    if gpt_layer_specs.HAVE_TE:
        pytest.skip("TransformerEngine is installed: its layers are built for real")
    command = [sys.executable, str(REPOSITORY / "tests" / "helpers" / "te_specs.py")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    lines = [line for line in outcome.stdout.splitlines() if line.startswith("result ")]
    return json.loads(lines[0].removeprefix("result "))


def changes(spec: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """What was replaced by what, by place."""
    before, after = spec["before"], spec["after"]
    assert before.keys() == after.keys()
    return {place: {before[place]: after[place]} for place in before if before[place] != after[place]}


def test_megatron_core_takes_its_path_with_transformer_engine(found):
    assert found["have_te"] and found["uses_transformer_engine"]
    layer = found["specs"]["dense"]["after"]
    assert layer["layer_specs[0].self_attention.linear_qkv"] == "TELayerNormColumnParallelLinear"
    assert layer["layer_specs[0].self_attention.linear_proj"] == "TERowParallelLinear"
    assert layer["layer_specs[0].mlp.linear_fc1"] == "TELayerNormColumnParallelLinear"
    assert layer["layer_norm"] == "TENorm"
    assert found["specs"]["qk_layernorm"]["after"]["self_attention.q_layernorm"] == "TENorm"
    experts = found["specs"]["experts"]["after"]
    assert experts["layer_specs[1].mlp.experts.linear_fc1"] == "TEColumnParallelGroupedLinear"


def test_dense_layers_change_in_core_attention_only(found):
    assert changes(found["specs"]["dense"]) == {
        "layer_specs[0].self_attention.core_attention": ATTENTION,
        "layer_specs[1].self_attention.core_attention": ATTENTION,
    }
    assert changes(found["specs"]["qk_layernorm"]) == {"self_attention.core_attention": ATTENTION}


def test_layers_with_experts_change_in_their_router_too(found):
    assert changes(found["specs"]["experts"]) == {
        "layer_specs[0].self_attention.core_attention": ATTENTION,
        "layer_specs[1].self_attention.core_attention": ATTENTION,
        "layer_specs[1].mlp.router": {"TopKRouter": "PrefixRouter"},
    }


def test_latent_attention_changes_in_its_forward_too(found):
    """PrefixLatentAttention is MLASelfAttention with another forward: the same submodules."""
    assert changes(found["specs"]["latents"]) == {
        "layer_specs[0].self_attention.module": {"MLASelfAttention": "PrefixLatentAttention"},
        "layer_specs[0].self_attention.core_attention": LATENT_ATTENTION,
        "layer_specs[1].self_attention.module": {"MLASelfAttention": "PrefixLatentAttention"},
        "layer_specs[1].self_attention.core_attention": LATENT_ATTENTION,
        "layer_specs[1].mlp.router": {"TopKRouter": "PrefixRouter"},
    }


def test_core_attention_takes_what_transformer_engine_s_takes(found):
    for kind in ("constructor", "forward"):
        upstream = found[kind]["TEDotProductAttention"]
        assert len(upstream) > 7
        for ours in ("PrefixCoreAttention", "LatentCoreAttention"):
            assert sorted(found[kind][ours]) == sorted(upstream)
