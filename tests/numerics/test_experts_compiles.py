"""Products of experts compile for the GPUs of NVIDIA and AMD, in their shared memory and registers. Their results:
interpreted_experts.py, and tests/gpu."""

import re
from typing import Any

import pytest

from llmtrain.bench.tune.compiling import platform_of
from llmtrain.kernels.experts import triton as launch
from llmtrain.kernels.experts import triton_float8
from llmtrain.kernels.experts import triton_kernels as kernels
from llmtrain.kernels.platform import float8_format, shared_limit
from tests.support import ast_compiles

pytestmark = pytest.mark.compile
POINTERS = {
    "product": ("a", "w", "out"),
    "weight_gradient": ("left", "right", "out"),
}
ELSE = {"slots": "*i32", "ends": "*i32", "a_scale": "*fp32", "w_scale": "*fp32", "scale": "*fp32"}
ARCHS = ["sm80", "sm89", "sm90", "sm100", "gfx90a", "gfx942", "gfx950"]


def compiled(name: str, arch: str) -> Any:
    tiles = launch.tiles_for(name, platform_of(arch))
    return compiled_kernel(getattr(kernels, name), arch, tiles, dict.fromkeys(POINTERS[name], "*bf16"))


def compiled_kernel(kernel: Any, arch: str, tiles: launch.Tiles, pointers: dict[str, str], **more: Any) -> Any:
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
        **({"stride_k": 1} if kernel is kernels.product else {}),
        **more,
    }
    constants = {key: value for key, value in constants.items() if key in names}
    types = pointers | ELSE
    unaligned = {*names} - {*types, "K", "F", "M", "N", "stride_e", "stride_n"}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return ast_compiles.compiled(kernel, arch, types, constants, unaligned, **options)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", POINTERS)
def test_each_product_fits(name, arch):
    assert_fits(compiled(name, arch), arch)


@pytest.mark.parametrize("arch", ["sm89", "sm90", "sm100", "gfx942", "gfx950"])
@pytest.mark.parametrize("rowwise", [True, False])
def test_products_in_float8_fit(arch, rowwise):
    """Of gradients, in another format with a scale for each tensor."""
    platform = platform_of(arch)
    fnuz = float8_format(platform).endswith("uz")
    weight = "*fp8e4b8" if fnuz else "*fp8e4nv"
    rows = weight if rowwise else "*fp8e5b16" if fnuz else "*fp8e5"
    pointers = {"a": rows, "w": weight, "out": "*bf16"}
    tiles = triton_float8.tiles_for(platform)
    found = compiled_kernel(triton_float8.product_float8, arch, tiles, pointers, ROWWISE=rowwise)
    assert_fits(found, arch)
    if arch.startswith("gfx"):
        assert re.search(r"v_mfma_\w+(fp8|bf8|f8f6f4)", found.asm["amdgcn"])
    elif arch == "sm90":
        assert re.search(r"wgmma\S+e4m3", found.asm["ptx"])


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
@pytest.mark.parametrize("transposed", [True, False])
def test_casts_to_float8_fit(arch, transposed):
    out = "*fp8e4b8" if arch == "gfx942" else "*fp8e4nv"
    options = {"LARGEST": 448.0, "TRANSPOSED": transposed, "BLOCK": 64}
    tiles = launch.Tiles(0, 0, 0, 4, 2)
    assert_fits(
        compiled_kernel(triton_float8.cast_matrices, arch, tiles, {"x": "*bf16", "out": out}, **options), arch, False
    )


def assert_fits(found: Any, arch: str, multiplies: bool = True) -> None:
    assert found.metadata.shared <= (shared_limit(arch) or 0)
    if arch.startswith("gfx"):
        spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", found.asm["amdgcn"])
        assert spilled is not None and int(spilled[1]) == 0
        assert not multiplies or "v_mfma" in found.asm["amdgcn"]
    elif arch == "sm90":
        assert not multiplies or "wgmma" in found.asm["ptx"]
