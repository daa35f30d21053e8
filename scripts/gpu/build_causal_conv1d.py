"""Builds Dao's causal-conv1d from its sources, for a benchmark that has minutes: bf16 and width 4 alone, this GPU alone.

    python scripts/gpu/build_causal_conv1d.py peers/causal-conv1d runs/built

SOURCES is a checkout of the package. OUT gets the folder causal_conv1d and the module causal_conv1d_cuda: put it on
PYTHONPATH. The kernels are the package's own; its other types and widths are refused in words, so that nothing else is
measured by mistake. The whole package takes five minutes on 16 cores, this half a minute.
"""

import argparse
import re
import shutil
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "causal_conv1d_cuda"
# As its setup.py has them.
FLAGS = [
    "-O3",
    "--use_fast_math",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    *(
        f"-U__CUDA_NO_{kind}__"
        for kind in (
            "HALF_OPERATORS",
            "HALF_CONVERSIONS",
            "BFLOAT16_OPERATORS",
            "BFLOAT16_CONVERSIONS",
            "BFLOAT162_OPERATORS",
            "BFLOAT162_CONVERSIONS",
        )
    ),
]


def trimmed(source: str) -> str:
    """A source file without what is not bf16 of width 4. Raises ValueError for a file that has none of it."""
    refused = 'TORCH_CHECK(false, "built for bfloat16 and width 4 alone");'
    edits = [
        (r"template void \w+<(?!at::BFloat16, at::BFloat16>).*\n", ""),
        (r"(using (?:input|weight)_t = )(?:at::Half|float);", rf"{refused} \1at::BFloat16;"),
        (r"(\w+_launch<\w+), [23],", rf"{refused} \1, 4,"),
    ]
    found = source
    for pattern, replacement in edits:
        found = re.sub(pattern, replacement, found)
    if found == source:
        raise ValueError("the sources are not as this script knows them; build the package with its own setup.py")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder)
        for file in (arguments.sources / "csrc").iterdir():
            text = file.read_text()
            (build / file.name).write_text(text if file.suffix == ".h" else trimmed(text))
        cpp_extension.load(
            NAME,
            [str(file) for file in sorted(build.iterdir()) if file.suffix in (".cpp", ".cu")],
            extra_cflags=["-O2"],
            extra_cuda_cflags=FLAGS,
            build_directory=folder,
            is_python_module=torch.cuda.is_available(),  # without a GPU it can be built, not loaded
        )
        arguments.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(build / f"{NAME}.so", arguments.out)
    shutil.copytree(arguments.sources / "causal_conv1d", arguments.out / "causal_conv1d", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
