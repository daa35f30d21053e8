"""Backends of other packages: refused where those are not installed, and called with what our specs mean."""

import importlib.util
import sys
import types

import pytest
import torch

from llmtrain.kernels import registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)
SPECS = {
    "attention": ("flash_attn", AttentionSpec(4, 4, 64, 0.125), "flash-attn"),
    "ssd": ("mamba_ssm", SSDSpec(4, 64, 64, 1, 256), "mamba-ssm"),
    "conv1d": ("causal_conv1d", Conv1dSpec(64, 4), "causal-conv1d"),
    "gated_norm": ("mamba_ssm", GatedNormSpec(64, 2, 1e-5), "mamba-ssm"),
}


@pytest.mark.parametrize("operation", SPECS)
def test_what_is_not_installed_says_how_to_install_it(operation):
    name, spec, package = SPECS[operation]
    reason = registry.refusal(operation, name, spec, H200)
    assert reason is not None
    assert f"is not installed: pip install {package}" in reason
    assert registry.refusal(operation, name, spec, None) is None, "no reason that holds on every machine"


@pytest.mark.parametrize(
    "operation, spec, words",
    [
        ("attention", AttentionSpec(4, 4, 64, 0.1, dtype="float32"), "bfloat16 or float16, not float32"),
        ("attention", AttentionSpec(4, 4, 60, 0.1), "multiple of 8"),
        ("ssd", SSDSpec(4, 64, 64, 1, 100), "power of two"),
        ("conv1d", Conv1dSpec(64, 5), "width of 2 to 4"),
    ],
)
def test_what_a_package_cannot_do_is_refused_on_every_machine(operation, spec, words):
    reason = registry.refusal(operation, SPECS[operation][0], spec, None)
    assert reason is not None
    assert words in reason


def recorded(monkeypatch, module: str, function: str) -> list[tuple[tuple, dict]]:
    """Puts a package in place that notes its calls and returns its first argument."""
    calls: list[tuple[tuple, dict]] = []

    def record(*args, **options):
        calls.append((args, options))
        return args[0]

    parts = module.split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), types.ModuleType(parts[i]))
    setattr(sys.modules[module], function, record)
    return calls


@pytest.mark.parametrize("window, expected", [(None, (-1, -1)), (100, (99, 0)), (1, (0, 0))])
def test_flash_attn_is_asked_for_the_same_score(monkeypatch, window, expected):
    from llmtrain.kernels.attention import flash_attn

    calls = recorded(monkeypatch, "flash_attn", "flash_attn_func")
    spec = AttentionSpec(4, 4, 64, 0.3, alibi_max_bias=8.0, sliding_window=window, softcap=20.0)
    kernel = flash_attn.build(spec, H200, "")
    q = torch.zeros(1, 8, 4, 64)
    kernel(q, q, q, kernel.prepare(8, torch.device("cpu")))
    options = calls[0][1]
    assert (options["softmax_scale"], options["causal"], options["softcap"]) == (0.3, True, 20.0)
    assert options["window_size"] == expected
    assert options["alibi_slopes"].tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]


@pytest.mark.parametrize(
    "limit, expected", [(None, (0.0, float("inf"))), ((0.1, None), (0.1, float("inf"))), ((0.1, 0.5), (0.1, 0.5))]
)
def test_mamba_ssm_is_asked_for_the_same_scan(monkeypatch, limit, expected):
    from llmtrain.kernels.ssd import mamba_ssm

    calls = recorded(monkeypatch, "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    t = torch.zeros(1)
    mamba_ssm.build(SSDSpec(4, 64, 64, 1, 128, dt_limit=limit), H200, "")(t, t, t, t, t, t + 1, t + 2, t + 3)
    args, options = calls[0]
    assert args[5] == 128
    assert (options["D"].item(), options["dt_bias"].item(), options["initial_states"].item()) == (1, 2, 3)
    assert options["dt_softplus"] and options["return_final_states"] and options["dt_limit"] == expected


def test_causal_conv1d_reads_channels_side_by_side(monkeypatch):
    from llmtrain.kernels.conv1d import causal_conv1d

    calls = recorded(monkeypatch, "causal_conv1d", "causal_conv1d_fn")
    x = torch.randn(2, 5, 64)
    y = causal_conv1d.build(Conv1dSpec(64, 4), H200, "")(x, torch.zeros(64, 4), None)
    (seen, *_), options = calls[0]
    assert seen.shape == (2, 64, 5) and seen.stride(1) == 1 and options == {"activation": "silu", "seq_idx": None}
    assert torch.equal(y, x)


def test_the_norm_of_mamba_ssm_is_told_groups_and_order(monkeypatch):
    from llmtrain.kernels.gated_norm import mamba_ssm

    calls = recorded(monkeypatch, "mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
    x, z, weight = torch.randn(3, 64), torch.randn(3, 64), torch.ones(64)
    y = mamba_ssm.build(GatedNormSpec(64, 2, 1e-5, norm_before_gate=True), H200, "")(x, z, weight)
    (seen, of_norm, bias), options = calls[0]
    assert seen is x and of_norm is weight and bias is None and torch.equal(y, x)
    assert options == {"z": z, "eps": 1e-5, "group_size": 32, "norm_before_gate": True}


def test_around_the_scan_of_mamba_ssm_stand_public_kernels(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    chosen = {
        operation: registry.resolve_beside(operation, "mamba_ssm", SPECS[operation][1], H200).name
        for operation in ("conv1d", "gated_norm")
    }
    assert chosen == {"conv1d": "causal_conv1d", "gated_norm": "mamba_ssm"}


def test_documents_reach_the_kernels_that_take_them_and_are_refused_by_the_others(monkeypatch):
    from llmtrain.kernels.conv1d import causal_conv1d
    from llmtrain.kernels.ssd import mamba_ssm

    ids, t = torch.tensor([[0, 0, 1]]), torch.zeros(1, 3, 8)
    of_conv = recorded(monkeypatch, "causal_conv1d", "causal_conv1d_fn")
    causal_conv1d.build(Conv1dSpec(8, 4), H200, "")(t, torch.zeros(8, 4), None, ids)
    of_scan = recorded(monkeypatch, "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    mamba_ssm.build(SSDSpec(4, 64, 64, 1, 128), H200, "")(t, t, t, t, t, t, t, document_ids=ids)
    for _, options in (*of_conv, *of_scan):
        assert options["seq_idx"].dtype == torch.int32 and torch.equal(options["seq_idx"], ids)
    reason = registry.refusal("attention", "flash_attn", AttentionSpec(4, 4, 64, 0.1, documents=True), None)
    assert reason is not None and "keeps no documents apart; use flex or reference" in reason
