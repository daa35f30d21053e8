"""Mamba-3's kernels as functions of tensors, for the tests on a CPU, in Triton's interpreter and on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from llmtrain.kernels.mamba3.operation import OPERATION
from llmtrain.kernels.mamba3.reference import State

NAMES = ("y", "h", "angle", "k", "v", *(f"d {name}" for name in OPERATION.leaves))
"""Names of the outcome of `flat`."""


def state_of(tensors: Sequence[Tensor]) -> State | None:
    """The state of an operation's inputs."""
    return State._make(tensors[10:]) if len(tensors) > 10 else None


def flat(kernel: Any, ids: Tensor | None = None) -> Callable[..., tuple[Tensor, ...]]:
    """The kernel as a function of the operation's inputs to y and the tensors of the last state, of its angles the cosines."""

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        y, state = kernel(*tensors[:10], state=state_of(tensors), document_ids=ids)
        return y, state.h, state.angle.cos(), state.k, state.v

    return run
