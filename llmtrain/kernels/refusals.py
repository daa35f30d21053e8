"""Reasons to refuse that several operations share. No torch here."""

import importlib.util

from llmtrain.kernels.platform import DTYPES, Platform


def refuse_triton(dtype: str, platform: Platform | None) -> str | None:
    """Reason that holds for all of our Triton kernels."""
    if dtype not in DTYPES:
        return f"our Triton kernels take {', '.join(DTYPES)}, not {dtype}"
    if platform is not None and platform.vendor == "cpu":
        return "our Triton kernels need a GPU"
    if platform is not None:
        from llmtrain.kernels import tuning  # here: without a platform, as in `llmtrain check`, no table is read

        try:
            tuning.nearest(platform)
        except ValueError as error:
            return str(error)
    return None


def refuse_untuned(
    kernels: tuple[str, ...], dtype: str, sizes: dict[str, int], platform: Platform | None
) -> str | None:
    """Reason if no row of a tuning table fits: large sizes on GPUs with less shared memory than the data center's."""
    if platform is None:
        return None
    from llmtrain.kernels import tuning

    try:
        for kernel in kernels:
            tuning.select(kernel, dtype, sizes, platform)
    except ValueError as error:
        return str(error)
    return None


def refuse_package(packages: tuple[str, ...], install: str, platform: Platform | None) -> str | None:
    """Reason if a third-party package is missing, found without importing it. Without a platform nothing is missing."""
    if platform is None:
        return None
    if platform.vendor == "cpu":
        return f"{packages[0]} needs a GPU"
    for name in packages:
        if not _installed(name):
            return f"{name} is not installed: pip install {install}"
    return None


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of what a.b is in
        return False
