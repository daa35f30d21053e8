"""Results and reads of a torch.autograd.Function that does something in the backward pass, right in compiled graphs too."""

import torch
from torch import Tensor


def passed_on(x: Tensor) -> Tensor:
    """x as the result of a Function: a view; in the compiler's graphs a copy, which it leaves out where it can.

    What a graph returns as a view of an input of it, or of another result, AOTAutograd takes from that one anew outside of the
    graph: past the Function, whose backward pass would then not run, in silence.
    """
    return x.clone() if torch.compiler.is_compiling() else x.view_as(x)


def read_in_backward(x: Tensor, d: Tensor) -> Tensor:
    """x as it is in the backward pass, where the gradient d has come.

    What of a backward pass depends on no gradient, the compiler may compute in the forward pass: of what x was then.
    """
    if not torch.compiler.is_compiling():
        return x
    one = d[(0,) * d.ndim]
    return torch.where(one == one, x, x)
