"""Products of experts compile for the GPUs of NVIDIA and AMD, in their shared memory and registers. Their results:
interpreted_experts.py, and tests/gpu."""

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmtrain.bench.tune.compiling import platform_of
from llmtrain.kernels.experts import triton as launch
from llmtrain.kernels.experts import triton_kernels as kernels
from llmtrain.kernels.platform import shared_limit

pytestmark = pytest.mark.compile
POINTERS = {
    "product": ("a", "w", "out"),
    "weight_gradient": ("left", "right", "out"),
}
ELSE = {"slots": "*i32", "ends": "*i32"}
ARCHS = ["sm80", "sm89", "sm90", "sm100", "gfx90a", "gfx942", "gfx950"]


def compiled(name: str, arch: str) -> Any:
    amd = arch.startswith("gfx")
    kernel, tiles = getattr(kernels, name), launch.tiles_for(name, platform_of(arch))
    names = [parameter.name for parameter in kernel.params]
    constants = {
        "GATHER_LEFT": True,
        "GATHER": True,
        "SCATTER": True,
        "E": 128,
        "E_POW2": 128,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "GROUP": launch.GROUP,
        "EVEN_K": True,
        # An inner stride of 1 is a constant to Triton.
        **({"stride_k": 1} if name == "product" else {}),
    }
    constants = {key: value for key, value in constants.items() if key in names}
    types = dict.fromkeys(POINTERS[name], "*bf16") | ELSE
    signature = {key: "constexpr" if key in constants else types.get(key, "i32") for key in names}
    divisible = [
        key for key in names if signature[key].startswith("*") or key in ("K", "F", "M", "N", "stride_e", "stride_n")
    ]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(key),): value for key, value in constants.items()},
        {(names.index(key),): [["tt.divisibility", 16]] for key in divisible},
    )
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch.removeprefix("sm")), 32)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return triton.compile(source, target=target, options=options)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", POINTERS)
def test_each_product_fits(name, arch):
    found = compiled(name, arch)
    assert found.metadata.shared <= (shared_limit(arch) or 0)
    if arch.startswith("gfx"):
        spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", found.asm["amdgcn"])
        assert spilled is not None and int(spilled[1]) == 0
        assert "v_mfma" in found.asm["amdgcn"]
    elif arch == "sm90":
        assert "wgmma" in found.asm["ptx"]
