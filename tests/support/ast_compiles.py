"""One kernel compiled for a GPU that is not here."""

from collections.abc import Collection, Mapping
from typing import Any

import triton
from triton.compiler import ASTSource

from llmtrain.bench.tune.compiling import platform_of
from llmtrain.kernels.platform import triton_target


def compiled(
    kernel: Any,
    arch: str,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    unaligned: Collection[str] = (),
    **options: int,
) -> Any:
    """A compiled kernel. types: of its arguments, of which those left out are of 32 bits; unaligned: arguments that may be no
    multiple of 16; options: of Triton, such as num_warps."""
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in {*constants, *unaligned}},
    )
    return triton.compile(source, target=triton_target(platform_of(arch)), options=options)
