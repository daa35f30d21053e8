"""Products with weights in 8 bits compile for the GPUs of NVIDIA and AMD: without spills, and codes are read 16 bytes a thread.
Their results: interpreted_weight_only.py and tests/gpu/test_weight_only.py."""

from typing import Any

import pytest

from llmtrain.kernels.weight_only import triton as products
from tests.support import ast_compiles

pytestmark = pytest.mark.compile
POINTERS = {"x": "*bf16", "scales": "*fp32", "y": "*bf16", "sums": "*fp32"}
ONE = products.ONE_ROW


def few_rows(rows: int, tile: products.Tile, splits: int) -> tuple[Any, dict[str, Any], int]:
    constants = {
        "ROWS": rows,
        "OUTPUTS": tile.outputs,
        "INPUTS": tile.inputs,
        "STAGES": tile.num_stages,
        "SPLITS": splits,
    }
    return products._few_rows, constants, tile.num_warps


CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "one row": (products._one_row, {"OUTPUTS": ONE.outputs, "INPUTS": ONE.inputs}, ONE.num_warps),
    "16 rows": few_rows(16, products.FEW_ROWS, 1),
    "16 rows, long": few_rows(16, products.FEW_ROWS, 4),
    "64 rows": few_rows(64, products.MORE_ROWS, 4),
    "64 rows, wide": few_rows(64, products.LARGE, 1),
    "64 rows, long": few_rows(64, products.LARGE, 8),
    "sums": (products._add_up, {"SPLITS": 8, "OUTPUTS": products.SUMS}, 4),
}
WITHOUT_PRODUCTS = ("one row", "sums")
NVIDIA = {"sm80": ["i8"], "sm90": ["i8", "fp8e4nv"], "sm100": ["i8", "fp8e4nv"]}
AMD = {"gfx90a": ["i8"], "gfx942": ["i8", "fp8e4b8"], "gfx950": ["i8", "fp8e4nv"]}
"""Architectures, and the formats of codes that the kernels serve there."""


def compiled(name: str, codes: str, arch: str) -> Any:
    kernel, constants, num_warps = CASES[name]
    if "STAGES" in constants:
        constants = constants | {"WEIGHT_LEFT": codes != "i8" and constants["ROWS"] <= 32}
    types = (
        POINTERS
        | {"codes": f"*{codes}"}
        | ({"y": "*fp32"} if constants.get("SPLITS", 1) > 1 and name != "sums" else {})
    )
    return ast_compiles.compiled(kernel, arch, types, constants, ("rows",), num_warps=num_warps)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("arch", "codes"), [(arch, codes) for arch, kinds in NVIDIA.items() for codes in kinds])
def test_nvidia(name: str, arch: str, codes: str):
    made = compiled(name, codes, arch)
    ptx = made.asm["ptx"]
    assert ".local" not in ptx, "spills"
    assert "ld.global.v4.b32" in ptx or "cp.async.cg" in ptx
    if name not in WITHOUT_PRODUCTS:
        assert "mma" in ptx
        assert made.metadata.shared <= 96 * 1024


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("arch", "codes"), [(arch, codes) for arch, kinds in AMD.items() for codes in kinds])
def test_amd(name: str, arch: str, codes: str):
    made = compiled(name, codes, arch)
    assembly = made.asm["amdgcn"]
    assert ".private_segment_fixed_size: 0" in assembly, "spills"
    assert "load_dwordx4" in assembly
    assert made.metadata.shared <= 64 * 1024
    assert name in WITHOUT_PRODUCTS or "v_mfma" in assembly
