"""The Triton kernels of both delta rules: through Triton's interpreter on a CPU, and compiled for GPUs that are not here.

In one process of its own: Triton reads TRITON_INTERPRET when it is imported. The cases are in interpreted_gated_delta.py.
"""

import importlib.util
import json
import os
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from llmtrain.kernels import platform, registry
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.platform import Platform
from tests.support.interpreter import compiled, run_interpreted

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30, 132)
SIZES = {
    "sm80": ((64, 64), (256, 256)),
    "sm90": ((64, 64), (96, 192), (128, 128), (128, 256), (256, 256)),
    "gfx90a": ((64, 64), (256, 256)),
    "gfx942": ((64, 64), (96, 192), (256, 256)),
}
"""Channels of a key and of a value: whatever `launch_for` distinguishes there, and what is no power of two for each vendor."""
PROGRAM = """
import json, sys
import torch
from llmtrain.bench.tune import compiling
from llmtrain.bench.tune.compiling import compile_only, platform_of
from llmtrain.kernels.gated_delta import triton
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec

arch, sizes = sys.argv[1], json.loads(sys.argv[2])
resources = compiling._resources
def with_wgmma(compiled, arch):
    return resources(compiled, arch) | {"wgmma": compiled.asm.get("ptx", "").count("wgmma")}
compiling._resources = with_wgmma
def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")
wide, found = {"dtype": torch.float32}, []
for K, V in sizes:
    options = triton.launch_for(GatedDeltaSpec(4, 2, K, V), platform_of(arch)).dump()
    q, k, v = empty(2, 256, 2, K), empty(2, 256, 2, K), empty(2, 256, 4, V)
    beta, state = empty(2, 256, 4, **wide), empty(2, 4, K, V, **wide)
    given = (q, k, v, beta, beta, state, empty(2, 256, dtype=torch.int64))
    with compile_only(arch) as taken:
        _, _, *kept = triton.launch_forward(*given, 64, options)
        triton.launch_backward(v, state, *given, *kept, 64, options)
    found.append(taken)
print(json.dumps(found))
"""


def test_the_interpreted_kernels_agree_with_the_reference():
    run_interpreted("gated_delta")


@pytest.mark.compile
@pytest.mark.parametrize("arch", SIZES)
def test_every_kernel_compiles_at_every_size(arch):
    """Within the GPU's shared memory, by matrix instructions, on Hopper by mma.sync and never wgmma; without spills, or with few
    where such tiles were measured to be the fastest."""
    limit = platform.shared_limit(arch)
    for (key_head_dim, _), taken in zip(SIZES[arch], compiled(PROGRAM, arch, json.dumps(SIZES[arch])), strict=True):
        assert len({one["kernel"] for one in taken}) == len(taken) == 5 and limit is not None
        may_spill = 96 if arch == "sm90" and key_head_dim % 128 == 0 else 0  # bytes a thread
        assert [one for one in taken if one["spilled"] > may_spill or one["shared"] > limit or not one["matrix"]] == []
        assert not any(one["wgmma"] for one in taken)


@pytest.mark.parametrize(("arch", "expected"), [("sm90", "triton"), ("sm80", "reference"), ("sm100", "reference")])
@pytest.mark.parametrize("spec", [GatedDeltaSpec(4, 2, 64, 64), KimiDeltaSpec(4, 2, 64, 64)], ids=["", "by channel"])
def test_they_are_taken_where_they_were_measured(monkeypatch, spec, arch, expected):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no fla-core
    rule, here = "kimi_delta" if isinstance(spec, KimiDeltaSpec) else "gated_delta", replace(H200, arch=arch)
    assert registry.resolve(rule, "auto", spec, here).name == expected
    assert registry.resolve(rule, "auto", replace(spec, dtype="float32"), here).name == "reference"
    assert registry.resolve(rule, "triton", spec, here).name == "triton"


def test_hopper_gets_no_wgmma_and_the_environment_comes_back(monkeypatch):
    monkeypatch.delenv("DISABLE_MMA_V3", raising=False)
    with platform.without_wgmma():
        assert os.environ["DISABLE_MMA_V3"] == "1"
    assert "DISABLE_MMA_V3" not in os.environ
    monkeypatch.setenv("DISABLE_MMA_V3", "0")
    with pytest.raises(RuntimeError), platform.without_wgmma():
        raise RuntimeError
    assert os.environ["DISABLE_MMA_V3"] == "0"


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("spec", [GatedDeltaSpec(4, 2, 24, 40), KimiDeltaSpec(4, 2, 24, 40)], ids=["", "by channel"])
def test_a_compiled_layer_sees_the_right_shapes(spec, with_state):
    by_channel = isinstance(spec, KimiDeltaSpec)
    built = registry.resolve("kimi_delta" if by_channel else "gated_delta", "triton", spec, H200).build(spec, H200)
    keys, heads = (2, 70, 2, 24), (2, 70, 4)
    narrow = [torch.randn(shape, dtype=torch.bfloat16) for shape in (keys, keys, (*heads, 40))]
    decays = torch.randn((*heads, 24) if by_channel else heads)
    tensors = [*narrow, decays, torch.randn(heads), *([torch.randn(2, 4, 24, 40)] if with_state else [])]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [mode.from_tensor(t.requires_grad_()) for t in tensors]
        y, final = built(*leaves, document_ids=mode.from_tensor(torch.zeros(2, 70, dtype=torch.long)))
        gradients = torch.autograd.grad(y.float().sum() + final.sum(), leaves)
    assert (y.shape, y.dtype, final.shape, final.dtype) == ((*heads, 40), torch.bfloat16, (2, 4, 24, 40), torch.float32)
    assert [(g.shape, g.dtype) for g in gradients] == [(t.shape, t.dtype) for t in tensors]
