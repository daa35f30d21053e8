"""The casts to float8 compile for the GPUs of NVIDIA that have it, and move 16 bytes a thread. Their results:
interpreted_float8_cast.py, and tests/gpu/test_float8_cast.py."""

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmtrain.kernels.float8_cast import triton as casts

pytestmark = pytest.mark.compile
CAST = {"x": "*bf16", "scale": "*fp32", "result": "*fp8e4nv", "transposed": "*fp8e4nv", "rows": "i32", "columns": "i32"}
TRANSPOSE = {"x": "*i8", "transposed": "*i8", "rows": "i32", "columns": "i32"}


@pytest.mark.parametrize("arch", [89, 90, 100])
@pytest.mark.parametrize("kernel, signature", [(casts._cast, CAST), (casts._transpose, TRANSPOSE)])
def test_they_move_sixteen_bytes_a_thread(kernel: Any, signature: dict[str, str], arch: int):
    constants: dict[str, Any] = {"BLOCK_ROWS": casts.BLOCK_ROWS, "BLOCK_COLUMNS": casts.BLOCK_COLUMNS}
    constants |= {"LARGEST": 448.0} if kernel is casts._cast else {}
    place = {parameter.name: (parameter.num,) for parameter in kernel.params}
    source = ASTSource(
        kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in signature},
    )
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": casts.NUM_WARPS})
    moves = re.findall(r"\b(?:ld|st)\.global\.(v4\.b32|\S+)", compiled.asm["ptx"])
    assert moves and {move for move in moves if move != "v4.b32"} <= {"b32"}  # of the scale
    assert moves.count("b32") == (kernel is casts._cast)
