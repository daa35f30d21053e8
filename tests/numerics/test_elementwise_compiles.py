"""Casts to float8, the gradient of gated units, and attention's sums over groups compile for the GPUs of NVIDIA, and move 16 bytes
a thread. Their results: interpreted_float8_cast.py, interpreted_glu.py, interpreted_attention.py, and tests/gpu."""

import re
from typing import Any

import pytest

from llmtrain.kernels.attention import sum_groups
from llmtrain.kernels.float8_cast import triton as casts
from llmtrain.kernels.glu import triton as unit
from llmtrain.kernels.glu.reference import ACTIVATIONS
from tests.support.ast_compiles import compiled

pytestmark = pytest.mark.compile
CAST = {"x": "*bf16", "scale": "*fp32", "result": "*fp8e4nv", "transposed": "*fp8e4nv"}
TRANSPOSE = {"x": "*i8", "transposed": "*i8"}
GLU = {"dy": "*bf16", "h": "*bf16", "d_h": "*bf16"}
SUM = {"dk": "*fp32", "dv": "*fp32", "out_k": "*bf16", "out_v": "*bf16"}
OF_GROUPS = {"K_WIDTH": 104, "V_WIDTH": 64, "PARTS": 5, "BLOCK": sum_groups.BLOCK}
BLOCKS = {"BLOCK_ROWS": casts.BLOCK_ROWS, "BLOCK_COLUMNS": casts.BLOCK_COLUMNS}
# Kernel, types of its arguments, constants, warps, and how often it reads one number alone: the scale.
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], int, int]] = {
    "cast": (casts._cast, CAST, BLOCKS | {"LARGEST": 448.0}, casts.NUM_WARPS, 1),
    "sum_groups": (sum_groups._sum_groups, SUM, OF_GROUPS, sum_groups.NUM_WARPS, 0),
    "transpose": (casts._transpose, TRANSPOSE, BLOCKS, casts.NUM_WARPS, 0),
    **{
        f"glu, {name}": (unit._glu_bwd, GLU, {"ACTIVATION": name, "BLOCK": unit.BLOCK}, unit.NUM_WARPS, 0)
        for name in sorted(ACTIVATIONS)
    },
}


@pytest.mark.parametrize(
    "name, arch",
    [
        (name, arch)
        for name in CASES
        for arch in (("sm89" if name in ("cast", "transpose") else "sm80"), "sm90", "sm100")
    ],
)
def test_it_moves_sixteen_bytes_a_thread(name: str, arch: str):
    kernel, types, constants, num_warps, single = CASES[name]
    made = compiled(kernel, arch, types, constants, num_warps=num_warps)
    moves = re.findall(r"\b(?:ld|st)\.global\.(v4\.b32|\S+)", made.asm["ptx"])
    assert moves and {move for move in moves if move != "v4.b32"} <= {"b32"}
    assert moves.count("b32") == single


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_sums_of_groups_compile_for_amd_without_spills(arch: str):
    kernel, types, constants, num_warps, _ = CASES["sum_groups"]
    made = compiled(kernel, arch, types, constants, (*types, "n_k", "n_v"), num_warps=num_warps)
    assert ".private_segment_fixed_size: 0" in made.asm["amdgcn"]
