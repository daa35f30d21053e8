"""A small forward and backward of every backend against float64, in a second or so each."""

from llmtrain.kernels import tuning
from llmtrain.kernels.attention import measured
from llmtrain.kernels.operation import (
    TOLERANCE,
    Function,
    Operation,
    Shape,
    leaves,
    relative_error,
    run_both,
    wide,
    wide_up,
)
from llmtrain.kernels.platform import Platform


def check(here: Platform) -> None:
    """Read the files that runs here would read, and on a machine without a GPU those of every architecture.

    Raises UserError for one that is wrong, or that LLMTRAIN_TUNING names and is missing.
    """
    if named := tuning.named_arch():
        architectures = [named]
    elif here.vendor == "cpu":
        architectures = [arch for known in tuning.TABLES.values() for arch in known]
    else:
        architectures = [here.arch]
    for arch in architectures:
        tuning.own_rows(arch)
        measured.read(measured.own_file(arch))


DTYPES = tuple(TOLERANCE)


def tolerance(one: Operation, dtype: str) -> float:
    """Largest error that passes: twice that of our own kernels, for those of others."""
    return 2 * one.tolerance(dtype)


def error(one: Operation, shape: Shape, backend: str, here: Platform) -> float:
    """Largest relative error of output and gradients against the reference in float64. Raises whatever the backend does."""
    tensors, up = one.draw(shape, here.device_type)
    found = run_both(function(one, shape, backend, here), leaves(tensors), up)
    exact = run_both(function(one, shape, "reference", here), wide(tensors), wide_up(up))
    return max(relative_error(a, b) for a, b in zip(found, exact, strict=True))


def function(one: Operation, shape: Shape, backend: str, here: Platform) -> Function:
    if backend == "reference":
        return one.reference(shape, here.device_type)
    return one.bind(one.kernel(backend, shape.spec, here), shape, here.device_type)
