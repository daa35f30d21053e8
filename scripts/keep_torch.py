"""Requirements for installing llmtrain beside a torch that must stay as it is (the Dockerfile's ROCm target).

keep_torch.py overrides   for `uv pip install --override`: torch, torchvision and triton are required only where
                          sys_platform == 'never', which is nowhere. So no dependency, direct or not, can replace
                          them by the package index's CUDA builds.
keep_torch.py versions    what is installed now of those three, to compare before and after
"""

import sys
from importlib.metadata import PackageNotFoundError, version

KEEP = ("torch", "torchvision", "triton")


def overrides() -> list[str]:
    return [f"{name}; sys_platform == 'never'" for name in KEEP]


def versions() -> list[str]:
    found = []
    for name in (*KEEP, "pytorch-triton-rocm"):
        try:
            found.append(f"{name}=={version(name)}")
        except PackageNotFoundError:
            found.append(f"{name}: not installed")
    return found


if __name__ == "__main__":
    print("\n".join({"overrides": overrides, "versions": versions}[sys.argv[1]]()))
