"""Release of a microbatch's autograd graph."""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger


class ReleaseAutograd(Callback):
    """Drops the autograd graph of a microbatch after its backward pass, which Composer would keep beyond the next forward pass.

    Its nodes remember the stream that they ran on, for which a CUDA graph that is recorded meanwhile would have to wait.
    """

    def after_backward(self, state: State, logger: Logger) -> None:
        assert isinstance(state.loss, dict)
        state.loss = {name: loss.detach() for name, loss in state.loss.items()}
        state.outputs = None  # pyright: ignore[reportAttributeAccessIssue]
