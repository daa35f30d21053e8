"""Backends of other packages: refused where those are not installed, and called with what our specs mean."""

import importlib.metadata
import importlib.util
import itertools
import math
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from llmtrain.bench.kernels import peers
from llmtrain.errors import UserError
from llmtrain.kernels import registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_delta import fla as gated_delta_fla
from llmtrain.kernels.gated_delta.reference import ReferenceGatedDelta
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.kimi_delta import fla as kimi_delta_fla
from llmtrain.kernels.kimi_delta.reference import ReferenceKimiDelta
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.mamba3.reference import ReferenceMamba3
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.operation import Shape, operation
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)
SPECS = {
    "attention": ("flash_attn", AttentionSpec(4, 4, 64, 0.125), "flash-attn"),
    "ssd": ("mamba_ssm", SSDSpec(4, 64, 64, 1, 256), "mamba-ssm"),
    "conv1d": ("causal_conv1d", Conv1dSpec(64, 4), "causal-conv1d"),
    "gated_norm": ("mamba_ssm", GatedNormSpec(64, 2, 1e-5), "mamba-ssm"),
    "gated_delta": ("fla", GatedDeltaSpec(4, 2, 64, 64), "fla-core"),
    "kimi_delta": ("fla", KimiDeltaSpec(4, 2, 64, 64), "fla-core"),
}


@pytest.mark.parametrize("operation", SPECS)
def test_what_is_not_installed_explains_how_to_install_it(operation):
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
        ("gated_delta", GatedDeltaSpec(4, 2, 64, 64, "float32"), "bfloat16 or float16, not float32"),
        ("gated_delta", GatedDeltaSpec(4, 2, 320, 64), "key_head_dim up to 256, not 320"),
        ("kimi_delta", KimiDeltaSpec(4, 2, 64, 64, "float32"), "bfloat16 or float16, not float32"),
        ("kimi_delta", KimiDeltaSpec(4, 2, 320, 64), "key_head_dim up to 256, not 320"),
        ("gated_norm", GatedNormSpec(64, 2, 1e-5, gate="sigmoid"), "its gate is silu, not sigmoid"),
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


def test_the_norm_of_mamba_ssm_is_reported_groups_and_order(monkeypatch):
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
    assert reason is not None and "keeps no documents apart" in reason


def test_fla_is_taken_by_itself_where_it_is_installed_and_ours_was_not_measured(monkeypatch):
    spec, here = SPECS["gated_delta"][1], replace(H200, arch="sm80")
    assert registry.resolve("gated_delta", "auto", spec, here).name == "reference"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert registry.resolve("gated_delta", "auto", spec, here).name == "fla"
    assert registry.resolve("gated_delta", "auto", replace(spec, dtype="float32"), here).name == "reference"


@pytest.mark.parametrize(
    ("arch", "triton", "refused"),
    [("sm90", "3.6.0", True), ("sm90", "3.4.0+cu130", True), ("sm90", "3.3.1", False), ("sm90", "3.7.1", False),
     ("sm90", "3.10.0", False), ("sm80", "3.6.0", False)],
)  # fmt: skip
def test_fla_is_refused_where_its_gradients_would_be_wrong(monkeypatch, arch, triton, refused):
    """It raises in the first backward pass: on Hopper, Triton 3.4 to 3.7.0 computes them wrongly. With tilelang it does not."""
    spec, here = SPECS["gated_delta"][1], replace(H200, arch=arch)
    installed = {"fla"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: triton)
    reason = registry.refusal("gated_delta", "fla", spec, here)
    assert (reason is not None) == refused
    if reason is not None:
        assert f"on Hopper with Triton {triton}" in reason and "install tilelang" in reason
    installed.add("tilelang")
    assert registry.refusal("gated_delta", "fla", spec, here) is None


@pytest.mark.parametrize("rule", ["gated_delta", "kimi_delta"])
def test_another_version_of_fla_is_refused_when_the_model_is_built(monkeypatch, rule):
    fla, package, names = {
        "gated_delta": (
            gated_delta_fla,
            "gated_delta_rule.chunk",
            ("chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"),
        ),
        "kimi_delta": (kimi_delta_fla, "kda.chunk_fwd", ("chunk_kda_fwd", "chunk_kda_bwd")),
    }[rule]
    module = f"fla.ops.{package}"
    with pytest.raises(
        UserError, match=rf"the {rule} backend 'fla' cannot be used: No module named 'fla'; fla-core 0\.6\.0"
    ):
        fla.build(SPECS[rule][1], H200, "")
    recorded(monkeypatch, module, "another")
    with pytest.raises(UserError, match=rf"cannot be used: .*{names[0]}.*; fla-core 0\.6\.0 is known"):
        fla.build(SPECS[rule][1], H200, "")
    older = types.SimpleNamespace(**dict.fromkeys(names, lambda q, k: q))
    monkeypatch.setitem(sys.modules, module, older)
    monkeypatch.setitem(sys.modules, "fla.ops.kda.chunk_bwd", older)
    with pytest.raises(UserError, match="its functions take other options; fla-core"):
        fla.build(SPECS[rule][1], H200, "")


class StandInForFla:
    """The functions of fla.ops.gated_delta_rule.chunk that are called here, by the reference. A row may hold several sequences."""

    def __init__(self, reference: ReferenceGatedDelta):
        self.reference = reference

    def install(self, monkeypatch) -> types.ModuleType:
        """Put it in the package's place. Returns the module of the backend that calls it."""
        names = ("chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")
        self.put(monkeypatch, "gated_delta_rule.chunk", dict(zip(names, (self.forward, self.backward), strict=True)))
        return gated_delta_fla

    def put(self, monkeypatch, module: str, functions: dict[str, Callable]) -> None:
        for name in functions:
            recorded(monkeypatch, f"fla.ops.{module}", name)
        vars(sys.modules[f"fla.ops.{module}"]).update(functions)

    def rule(self, tensors, state, cu_seqlens):
        if cu_seqlens is None:
            return self.reference(*tensors, initial_state=state)
        assert cu_seqlens.dtype == torch.int64 and all(t.shape[0] == 1 and t.is_contiguous() for t in tensors)
        parts = [
            self.reference(*(t[:, a:b] for t in tensors), initial_state=None if state is None else state[i : i + 1])
            for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
        ]
        return torch.cat([y for y, _ in parts], 1), torch.cat([final for _, final in parts])

    def forward(self, *tensors, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        assert scale == 1 and output_final_state
        y, final = self.rule(tensors, initial_state, cu_seqlens)
        return tensors[3].clone(), y, y.new_zeros(*y.shape[:3], chunk_size), final, initial_state, None

    def backward(self, q, k, v, g, beta, A, scale, initial_state, do, dht, cu_seqlens, chunk_size):
        """In a thread of its own: inside an operator there is no autograd."""
        with ThreadPoolExecutor(1) as thread:
            given = (q, k, v, g, beta, initial_state, do, dht, cu_seqlens)
            return thread.submit(self._backward, *given).result()

    def _backward(self, q, k, v, g, beta, initial_state, do, dht, cu_seqlens):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
            state = None if initial_state is None else initial_state.detach().requires_grad_()
            outputs = self.rule(leaves, state, cu_seqlens)[: 1 if dht is None else 2]
            wanted = leaves if state is None else [*leaves, state]
            found = torch.autograd.grad(outputs, wanted, (do, dht)[: len(outputs)])
        dq, dk, dv, dg, db = found[:5]
        return dq, dk, dv, db, dg, found[5] if state is not None else None, None, None


class StandInForFlaByChannel(StandInForFla):
    """The functions of fla.ops.kda."""

    def install(self, monkeypatch) -> types.ModuleType:
        self.put(monkeypatch, "kda.chunk_fwd", {"chunk_kda_fwd": self.forward})
        self.put(monkeypatch, "kda.chunk_bwd", {"chunk_kda_bwd": self.backward})
        return kimi_delta_fla

    def forward(self, *tensors, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        cumsum, y, square, final, state, _ = super().forward(
            *tensors,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
        )
        return y, final, cumsum, square, square.clone(), None, None, None, None, None, None, state

    def backward(self, q, k, v, beta, Aqk, Akk, scale, initial_state, do, dht, g, cu_seqlens, chunk_size):
        assert Aqk.shape == Akk.shape == (*v.shape[:3], chunk_size)
        return super().backward(q, k, v, g, beta, Akk, scale, initial_state, do, dht, cu_seqlens, chunk_size)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_fla_is_asked_for_the_same_rule(monkeypatch, by_channel, documents, with_state):
    """Its gradients too; documents of all rows reach it as one row, and states of rows as those of documents."""
    sizes = (4, 2, 6, 5, "float32", 8)
    if by_channel:
        stand_in = StandInForFlaByChannel(ReferenceKimiDelta(spec := KimiDeltaSpec(*sizes)))
    else:
        stand_in = StandInForFla(ReferenceGatedDelta(spec := GatedDeltaSpec(*sizes)))
    fla = stand_in.install(monkeypatch)
    keys, heads = (2, 19, 2, 6), (2, 19, 4)
    torch.manual_seed(0)
    k, decay = torch.nn.functional.normalize(torch.randn(keys), dim=-1), (*heads, 6) if by_channel else heads
    tensors = [torch.randn(keys), k, torch.randn(*heads, 5), -torch.rand(decay), torch.rand(heads)]
    tensors += [torch.randn(2, 4, 6, 5)] if with_state else []
    ids = torch.tensor([[0] * 4 + [1] * 15, [7] * 1 + [8] * 9 + [9] * 9]) if documents else None

    def outcome(kernel):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y, final = kernel(*leaves, document_ids=ids)
        weights = torch.randn(y.numel() + final.numel(), generator=torch.Generator().manual_seed(1))
        total = torch.cat([y.flatten(), final.flatten()]) @ weights
        return [y, final, *torch.autograd.grad(total, leaves)]

    found = outcome(fla.build(spec, H200, ""))
    for a, b in zip(found, outcome(stand_in.reference), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # as torch.compile traces it
        leaves = [mode.from_tensor(t.requires_grad_()) for t in tensors]
        y, final = fla.build(spec, H200, "")(*leaves, document_ids=None if ids is None else mode.from_tensor(ids))
        traced = [y, final, *torch.autograd.grad(y.sum() + final.sum(), leaves)]
    assert [(t.shape, t.dtype) for t in traced] == [(t.shape, t.dtype) for t in found]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_fla_beside_our_scan_is_called_with_what_mamba_2_means(monkeypatch, groups):
    """Its kernel is a stand-in here: the recurrence that its documentation states."""

    def chunk_simple_gla(q, k, v, g, scale):
        state, out = torch.zeros(q.shape[0], *q.shape[2:], v.shape[-1], dtype=v.dtype), []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return torch.stack(out, 1), None

    for name in ("fla", "fla.ops", "fla.ops.simple_gla"):
        module = types.ModuleType(name)
        module.chunk_simple_gla = chunk_simple_gla  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    ssd, shape = operation("ssd"), Shape(SSDSpec(4, 8, 16, groups, 256, dtype="float32"), 2, 40)
    tensors, _ = ssd.draw(shape)
    with torch.compiler.set_stance("force_eager"):
        found = peers.gated_linear_attention()(*tensors)
    exact = ssd.reference(shape, "cpu")(*(t.double() for t in tensors))
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-4)


def test_the_authors_kernels_of_mamba_3_are_called_with_what_it_means(monkeypatch):
    """They are a stand-in here: heads come before tokens, and weights and angles before their sigmoid and tanh."""

    def mamba3_siso_combined(q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, chunk_size):
        gates = (adt.mT, dt.mT, trap.sigmoid().mT, math.pi * angles[:, :, 0].tanh())
        assert angles.shape[2] == v.shape[2]
        return ReferenceMamba3(chunk_size)(q, k, v, *gates, q_bias, k_bias, D)[0]

    for name in itertools.accumulate(["mamba_ssm", "ops", "triton", "mamba3", "mamba3_siso_combined"], "{}.{}".format):
        module = types.ModuleType(name)
        module.mamba3_siso_combined = mamba3_siso_combined  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    mamba3 = operation("mamba3")
    shape = Shape(Mamba3Spec(4, 8, 16, 2, 4, dtype="float32"), 2, 40)
    tensors, _ = mamba3.draw(shape)
    with torch.compiler.set_stance("force_eager"):
        found = peers.mamba3_siso()(*tensors)
    exact = mamba3.reference(shape, "cpu")(*(t.double() for t in tensors))
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-4)
