"""What a torch.autograd.Function returns for an input that it passes on, to do something in the backward pass."""

import torch
from torch import Tensor


def passed_on(x: Tensor) -> Tensor:
    """x as the result of a Function: a view; in the compiler's graphs a copy, which it leaves out where it can.

    What a graph returns as a view of an input of it, or of another result, AOTAutograd takes from that one anew outside of the
    graph: past the Function, whose backward pass would then not run, in silence.
    """
    return x.clone() if torch.compiler.is_compiling() else x.view_as(x)
