"""The gradient of gated units compiles for every architecture with a table, and moves 16 bytes a thread. Its results:
interpreted_glu.py, and tests/gpu/test_glu.py."""

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmtrain.kernels.glu import triton as unit
from llmtrain.kernels.glu.reference import ACTIVATIONS

pytestmark = pytest.mark.compile
SIGNATURE = {"dy": "*bf16", "h": "*bf16", "d_h": "*bf16", "width": "i32"}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_it_moves_sixteen_bytes_a_thread(activation: str, arch: int):
    kernel: Any = unit._glu_bwd
    constants: dict[str, Any] = {"ACTIVATION": activation, "BLOCK": unit.BLOCK}
    place = {parameter.name: (parameter.num,) for parameter in kernel.params}
    source = ASTSource(
        kernel,
        SIGNATURE | dict.fromkeys(constants, "constexpr"),
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in SIGNATURE},
    )
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": unit.NUM_WARPS})
    moves = re.findall(r"\b(?:ld|st)\.global\.(v4\.b32|\S+)", compiled.asm["ptx"])
    assert moves and set(moves) == {"v4.b32"}
