"""The Triton kernels of Mamba-3: through Triton's interpreter on a CPU, and compiled for GPUs that are not here."""

import json
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from llmtrain.kernels import platform, registry
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.platform import Platform
from tests.support import kernels as support
from tests.support.interpreter import compiled, run_interpreted
from tests.support.mamba3 import state_of
from tests.support.offline import MEASURED_SPILL

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30, 132)
PROGRAM = """
import json, sys
import torch
from llmtrain.bench.tune.compiling import compile_only, platform_of
from llmtrain.kernels.mamba3 import step_triton, triton
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.operation import operation
from tests.support.mamba3 import state_of

arch, found = sys.argv[1], []
for sizes in json.loads(sys.argv[2]):
    spec = Mamba3Spec(*sizes)
    options = triton.build(spec, platform_of(arch), "").options
    tensors, dy = operation("mamba3").inputs(spec, 2, 4096, "meta", state=True)  # so many tokens that a program has several heads
    of_token, (h, angle, last_k, last_v) = tensors[:10], tensors[10:]
    ids = torch.empty(2, 4096, dtype=torch.int64, device="meta")
    given = (*of_token, h, angle, ids)
    with compile_only(arch) as training:
        *_, sums = triton.launch_forward(*of_token, None, None, ids, options)
        triton.launch_backward(dy, None, None, None, *of_token, None, None, ids, sums, options)
    with compile_only(arch) as taken:
        *_, sums = triton.launch_forward(*given, options)
        triton.launch_backward(dy, h, angle, last_k, *given, sums, options)
        step = step_triton.build(spec, platform_of(arch), "")
        step(*(t[:, 0] for t in of_token[:7]), *of_token[7:], state_of(tensors))
    found.append((training, taken))
print(json.dumps(found))
"""
SIZES = ((8, 64, 128, 1, 32), (4, 64, 128, 2, 64), (4, 128, 64, 1, 16))
OURS = ("_rotation_sums", "_rotate", "_rotate_bwd", "_rotate_ends", "_decays", "_decays_bwd", "_step")


def test_the_interpreted_kernels_agree_with_the_reference():
    run_interpreted("mamba3")


ROTATE_BWD_SPILLS = (16, 192)
"""Bytes a thread on NVIDIA's GPUs, as it is trained, and from a state and to one. A form that loads later spills less, and took
397 us where one that loads early took 302 (H200, 64 heads)."""


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "gfx90a", "gfx942", "gfx950"])
def test_every_kernel_compiles(arch):
    """Within the GPU's shared memory; our own without spills, but where they were measured."""
    spills = MEASURED_SPILL if arch == "sm90" else 0
    sizes, limit = SIZES if arch in ("sm90", "gfx942") else SIZES[:1], platform.shared_limit(arch)
    for (*_, d_state, _, turning), found in zip(sizes, compiled(PROGRAM, arch, json.dumps(sizes)), strict=True):
        ours = {*OURS, *(["_rest_bwd"] if d_state > 2 * turning else [])}
        assert limit is not None and ours < {one["kernel"] for one in found[1]}
        for taken, most in zip(found, ROTATE_BWD_SPILLS, strict=True):
            may_spill = dict.fromkeys(ours, spills) | {"_rotate_bwd": most if arch.startswith("sm") else 0}
            assert [
                one for one in taken if one["shared"] > limit or one["spilled"] > may_spill.get(one["kernel"], math.inf)
            ] == []


@pytest.mark.parametrize("here, expected", [(H200, "triton"), (platform.cpu(), "reference")])
def test_auto_takes_them_on_a_gpu(here, expected):
    spec = Mamba3Spec(4, 64, 128, 1, 32)
    assert registry.resolve("mamba3", "auto", spec, here).name == expected
    assert registry.resolve("mamba3_step", "auto", spec, here).name == expected


@pytest.mark.parametrize("with_state", [False, True])
def test_a_compiled_layer_sees_the_right_shapes(with_state):
    spec = Mamba3Spec(4, 24, 40, 2, 10)
    built = registry.resolve("mamba3", "triton", spec, H200).build(spec, H200)
    tensors = support.inputs("mamba3", spec, 2, 70, state=with_state)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [mode.from_tensor(t.requires_grad_()) for t in tensors]
        ids = mode.from_tensor(torch.zeros(2, 70, dtype=torch.long))
        y, last = built(*leaves[:10], state_of(leaves), ids)
        gradients = torch.autograd.grad(y.float().sum() + sum(t.float().sum() for t in last), leaves)
    assert (y.shape, y.dtype) == ((2, 70, 4, 24), torch.bfloat16)
    assert [tuple(t.shape) for t in last] == [(2, 4, 24, 40), (2, 4, 10), (2, 4, 40), (2, 4, 24)]
    assert [(g.shape, g.dtype) for g in gradients] == [(t.shape, t.dtype) for t in tensors]
