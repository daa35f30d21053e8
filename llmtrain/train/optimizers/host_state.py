"""Optimizer state in host memory between steps (optimizer.offload). A step brings it to the device a few parameters at a time.

Copies run on streams of their own: while some parameters are stepped, the state of the next ones comes and that of the last ones
goes. The arithmetic is the device's, so that nothing changes but where the state waits; checkpoints are the same.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmtrain.checkpoint.staging import PinnedBlocks
from llmtrain.plan.memory import OFFLOADED_AT_ONCE


def keep_on_host(optimizer: torch.optim.Optimizer, at_once: int = OFFLOADED_AT_ONCE) -> None:
    """Have an optimizer of any kind, which has no state yet, keep it in host memory.

    at_once: elements of this rank that are stepped together; a larger parameter is stepped alone. The optimizer's own step is
    called several times a step, with some of the parameters each; its hooks are called once.
    """
    assert not optimizer.state
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (HostState, kind), {"_plain_step": _without_hooks(kind.step)})
    optimizer._patch_step_function()
    cast("HostState", optimizer).begin(at_once)


@contextlib.contextmanager
def without_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Meanwhile an optimizer that keeps its state in host memory has none, for code that brings all state to the device, as
    Composer's Trainer does when it is made."""
    if not isinstance(optimizer, HostState):
        yield
        return
    state, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        yield
    finally:
        optimizer.state = state


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    return cast("Any", step).__wrapped__ if getattr(step, "hooked", False) else step


class HostState(torch.optim.Optimizer):
    """The first base of such an optimizer's class. In `state`, what has more than one element is in host memory."""

    _plain_step: Callable[..., Any]

    def begin(self, at_once: int) -> None:
        self.at_once = at_once
        self.blocks = PinnedBlocks()
        self.copies = _Copies()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = self.param_groups
        self.copies.begin()
        try:
            buckets = [_Bucket(group, chosen, self) for group in groups for chosen in self._chosen(group)]
            for bucket, following in zip(buckets, [*buckets[1:], None], strict=False):  # none where the step is skipped
                if bucket is buckets[0]:
                    bucket.load()
                if following is not None:
                    following.load()
                bucket.put()
                self.param_groups = [{**bucket.group, "params": bucket.parameters}]
                self._plain_step()
                bucket.store()
        finally:
            self.param_groups = groups
        return loss

    def _chosen(self, group: dict[str, Any]) -> Iterator[list[nn.Parameter]]:
        """Parameters of a group that have a gradient, as many at a time as may be. The same on all ranks."""
        chosen: list[nn.Parameter] = []
        elements = 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            size = _elements(parameter)
            if chosen and elements + size > self.at_once:
                yield chosen
                chosen, elements = [], 0
            chosen.append(parameter)
            elements += size
        if chosen:
            yield chosen

    def state_dict(self) -> dict[str, Any]:
        self.copies.finish()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """PyTorch's own would bring everything to the device. What waits in host memory is copied there."""
        self.copies.finish()
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        large: dict[nn.Parameter, dict[str, Tensor]] = {}
        small: dict[int, dict[str, Any]] = {}
        for index, parameter in zip(ids, parameters, strict=True):
            values = state_dict["state"].get(index, {})
            large[parameter] = {name: value for name, value in values.items() if _is_large(value)}
            small[index] = {name: value for name, value in values.items() if name not in large[parameter]}
        before = {parameter: dict(self.state[parameter]) for parameter in parameters if parameter in self.state}
        super().load_state_dict({**state_dict, "state": small})
        for parameter, values in large.items():
            for name, value in values.items():
                kept = before.get(parameter, {}).get(name)
                if kept is None or _local(kept).shape != _local(value).shape or kept.dtype != value.dtype:
                    kept = self.on_host(value)
                if _local(kept).data_ptr() != _local(value).data_ptr():
                    _local(kept).copy_(_local(value))
                self.state[parameter][name] = kept

    def on_host(self, like: Tensor) -> Tensor:
        """Host memory for a tensor of the state, with no values yet, sharded as it is."""
        return _with_local(like, self.blocks.empty_like(_local(like)))


class _Bucket:
    """Parameters that are stepped together, and their state on the device."""

    def __init__(self, group: dict[str, Any], parameters: list[nn.Parameter], optimizer: HostState):
        self.group, self.parameters, self.optimizer = group, parameters, optimizer
        self.host: dict[tuple[nn.Parameter, str], Tensor] = {}
        self.device: dict[tuple[nn.Parameter, str], Tensor] = {}
        self.arrived: torch.cuda.Event | torch.Event | None = None

    def load(self) -> None:
        """Begin to bring the state."""
        copies = self.optimizer.copies
        copies.follow()
        for parameter in self.parameters:
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if _is_large(value):
                    self.host[parameter, name] = value
        self.device = {
            key: _with_local(value, copies.bring(_local(value), key[0].device)) for key, value in self.host.items()
        }
        self.arrived = copies.mark()

    def put(self) -> None:
        """Give the optimizer the state on the device."""
        if self.arrived is not None:
            self.arrived.wait()
        for (parameter, name), value in self.device.items():
            self.optimizer.state[parameter][name] = value

    def store(self) -> None:
        """Begin to take the state back, and what the step has begun with it."""
        copies = self.optimizer.copies
        copies.stepped()
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            for name, value in list(state.items()):
                if _is_large(value):
                    kept = self.host.get((parameter, name))
                    kept = self.optimizer.on_host(value) if kept is None else kept
                    copies.take(_local(kept), _local(value))
                    state[name] = kept
        self.device.clear()


class _Copies:
    """Copies between host and device. On a CPU they are made at once."""

    def __init__(self) -> None:
        self.up: torch.cuda.Stream | None = None
        self.down: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """A step begins: what was taken is there before it is brought again."""
        if torch.cuda.is_available() and self.up is None:
            self.up, self.down = torch.cuda.Stream(), torch.cuda.Stream()
        if self.up is not None and self.down is not None:
            self.up.wait_stream(self.down)

    def follow(self) -> None:
        """Let what is brought next wait for the step so far, which may have used its memory."""
        if self.up is not None:
            self.up.wait_stream(torch.cuda.current_stream())

    def bring(self, host: Tensor, device: torch.device) -> Tensor:
        found = torch.empty_like(host, device=device, pin_memory=False)
        if self.up is None or not found.is_cuda:
            return found.copy_(host)
        found.record_stream(self.up)
        with torch.cuda.stream(self.up):
            return found.copy_(host, non_blocking=True)

    def mark(self) -> torch.cuda.Event | torch.Event | None:
        """Record an event after what was brought so far, for the current stream to wait for."""
        return self.up.record_event() if self.up is not None else None

    def stepped(self) -> None:
        if self.down is not None:
            self.down.wait_stream(torch.cuda.current_stream())

    def take(self, host: Tensor, device: Tensor) -> None:
        if self.down is None or not device.is_cuda:
            host.copy_(device)
            return
        device.record_stream(self.down)
        with torch.cuda.stream(self.down):
            host.copy_(device, non_blocking=True)

    def finish(self) -> None:
        """Wait until host memory has the state."""
        if self.down is not None:
            self.down.synchronize()


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _elements(parameter: nn.Parameter) -> int:
    """Elements of the rank that has the most."""
    ranks = parameter.device_mesh.size(-1) if isinstance(parameter, DTensor) else 1
    return -(-parameter.numel() // ranks)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _with_local(like: Tensor, local: Tensor) -> Tensor:
    """`local` in the place of what this rank holds of `like`. `DTensor.from_local` would move it to the mesh's device."""
    if not isinstance(like, DTensor):
        return local
    return DTensor(local, like._spec, requires_grad=False)
