"""Requirements for installing llmtrain beside a torch that must stay as it is (the Dockerfile's ROCm target).

keep_torch.py overrides   for `uv pip install --override`: the project's own, but with torch, torchvision and
                          triton required only where sys_platform == 'never', which is nowhere. So no dependency,
                          direct or not, can replace them by the package index's CUDA builds.
keep_torch.py cutoff      the day that resolution must not look past
keep_torch.py versions    what is installed now of those three, to compare before and after
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

KEEP = ("torch", "torchvision", "triton")
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def overrides(given: Iterable[str]) -> list[str]:
    """Requirement lines: `given` without the packages to keep, and those switched off."""
    others = [line for line in given if re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] not in KEEP]
    return [f"{name}; sys_platform == 'never'" for name in KEEP] + others


def versions() -> list[str]:
    found = []
    for name in (*KEEP, "pytorch-triton-rocm"):
        try:
            found.append(f"{name}=={version(name)}")
        except PackageNotFoundError:
            found.append(f"{name}: not installed")
    return found


def main(request: str) -> None:
    uv = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["uv"]
    lines = {
        "overrides": lambda: overrides(uv["override-dependencies"]),
        "cutoff": lambda: [uv["exclude-newer"]],
        "versions": versions,
    }
    print("\n".join(lines[request]()))


if __name__ == "__main__":
    main(sys.argv[1])
