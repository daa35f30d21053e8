"""CUDA graphs of a microbatch: its forward and its backward pass, each launched by one call of the host.

A model of a hundred million parameters launches some thousand kernels per microbatch, which may take the host longer than they
take the GPU. The graphs hold all of them but those by which FSDP2 gathers weights and reduces gradients: weights are gathered and
cast once a step (PersistentUnshardedWeights), gradients added to their sum as soon as they are there, and reduced after the last
microbatch. Loss and gradients are those of the passes as they are, by the same kernels in the same order. Clipping, the optimizer,
logging, validation and every microbatch of another shape run as before.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from llmtrain.distributed.world import World
from llmtrain.errors import RunError, UserError, first_line
from llmtrain.logs import run_log
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.layer_part import step_sums
from llmtrain.models.loss import LossOutput
from llmtrain.objectives.base import Batch, Objective, compute_loss, loss_in
from llmtrain.plan.graph_gain import reason_against
from llmtrain.schema.config import Config
from llmtrain.train.graphs.persistent_weights import PersistentUnshardedWeights
from llmtrain.train.ranks.fsdp_reset import reset_fsdp

MEMORY_LEFT = 0.06
"""Share of the device's memory that must be left beside the graphs and what PersistentUnshardedWeights names, for the optimizer,
validation and evaluation: memory of graphs serves nothing else."""


def graphed_loss(config: Config, model: CausalLM, objective: Objective, world: World) -> GraphedLoss | None:
    """The loss by train.cuda_graphs, or None where there are no graphs. Raises UserError where they are asked for and cannot be."""
    parameters, one_node = sum(p.numel() for p in model.parameters()), world.size == world.local_size
    reason = reason_against(config, model.hybrid.platform, parameters, world.size, one_node)
    setting = config.train.cuda_graphs
    if reason is None:
        return GraphedLoss(model, objective, config.grad_accum(world.size), setting == "on", world.size)
    if setting == "on":
        raise UserError(f"train.cuda_graphs = on: there can be no CUDA graphs here, as {reason}; use auto or off")
    if setting == "auto" and model.hybrid.platform.vendor != "cpu":
        run_log.info(f"CUDA graphs: off, as {reason}")
    return None


class GraphedLoss:
    """compute_loss, which launches graphs once it has made them.

    microbatches: of a step; the first step runs without graphs, since it compiles layers and allocates the optimizer's state. 0:
    there will be none, as an attempt has failed.
    required: an attempt that fails ends the run; otherwise a line says why, and the run goes on without graphs. ranks: all of which
    call it with batches of the same shape; where one cannot make graphs, none does.
    """

    def __init__(
        self, model: CausalLM, objective: Objective, microbatches: int, required: bool = False, ranks: int = 1
    ):
        self.model, self.objective, self.microbatches = model, objective, microbatches
        self.required, self.ranks = required, ranks
        self.graph: MicrobatchGraph | None = None
        self._before = microbatches  # calls until there are graphs

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss of a microbatch on the device, or of a batch of validation."""
        if self.model.training and torch.is_grad_enabled():
            if self._before:
                self._before -= 1
            elif self.graph is None and self.microbatches:
                self._capture(batch)
            if self.graph is not None and self.graph.serves(batch):
                return self.graph(batch)
        return compute_loss(self.model, self.objective, batch)

    def hand_over(self) -> None:
        """Give the gradients of a step's microbatches to the parameters, once all of them are there."""
        if self.graph is not None:
            self.graph.hand_over()

    def _capture(self, batch: Batch) -> None:
        """Make the graphs on every rank, or never try again."""
        self.graph, reason = make_graph(self.model, self.objective, batch, self.ranks)
        if self.graph is not None:
            run_log.info(f"CUDA graphs: on, {self.graph.nbytes / 2**30:.1f} GiB of the GPU's memory are theirs")
            return
        self.microbatches = 0
        if self.required:
            raise RunError(f"train.cuda_graphs = on, but they cannot be made: {reason}; use auto or off")
        run_log.warning(f"CUDA graphs: off, as they cannot be made: {reason}")


def make_graph(
    model: CausalLM, objective: Objective, batch: Batch, ranks: int = 1
) -> tuple[MicrobatchGraph | None, str]:
    """The graphs of a microbatch, or a reason for which there are none; then the model is as it was before. Every one of `ranks`
    calls it: all make them or none does. batch: as for MicrobatchGraph."""
    graph, reason = None, ""
    try:
        graph = MicrobatchGraph(model, objective, batch)
    except (RuntimeError, NoGraph) as error:  # OutOfMemoryError is one, as are all of CUDA's
        reason = first_line(error)
    if ranks > 1:
        failed = torch.tensor(bool(reason), dtype=torch.int32, device=next(model.parameters()).device)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed and not reason:
            graph, reason = None, "another rank cannot make them"
    if graph is None:
        kept = [(p, p.grad) for p in model.parameters()]  # of earlier microbatches of a step
        reset_fsdp(model)
        for parameter, gradient in kept:
            parameter.grad = gradient
        gc.collect()
        torch.cuda.empty_cache()
    return graph, reason


def replay_seconds(
    model: CausalLM, objective: Objective, batch: Batch, clock: Callable[[], float], ranks: int = 1
) -> float | None:
    """Time of one microbatch by its graphs, which are dropped again; None where they cannot be made. Gradients are None afterwards.

    batch, ranks: as for make_graph. clock: the time in seconds, once the GPU has done everything so far.
    """
    graph, _ = make_graph(model, objective, batch, ranks)
    if graph is None:
        return None
    for _ in range(2):  # the first is slower, and exchanges weights
        began = clock()
        graph(batch).loss.backward()
        seconds = clock() - began
    del graph
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return seconds


def graph_memory() -> int:
    """Bytes of the current GPU's memory that belong to graphs, as long as these exist."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


class NoGraph(Exception):
    """Reason against the graphs of a microbatch, found by an attempt."""


class MicrobatchGraph:
    """Forward and backward pass of one microbatch's loss, as two graphs in one pool of memory.

    They read weights of their own, which are brought up to date before a step's first microbatch, and add to sums of their own,
    one for each parameter that has a gradient, which `hand_over` gives to the parameters after the last one. batch: whose values do
    not matter. Raises NoGraph, or the error of CUDA against it.
    """

    def __init__(self, model: CausalLM, objective: Objective, batch: Batch):
        self.model, self.objective = model, objective
        self.batch = {name: batch[name].clone() for name in self._read(batch)}
        self.stream = torch.cuda.Stream()
        self._backward_of = self._forwards = 0
        self._within_step = False
        self.weights = PersistentUnshardedWeights(model)
        with _without_gradients(model), _collected():
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            with self.weights.read():
                self.sums = self.weights.zeros()
                with added_to(self.sums, self.weights.leaves) as reached:
                    self._rehearse()
                    torch.cuda.empty_cache()
                    self._record()
                self.reached = sorted(reached)
            self.nbytes = torch.cuda.memory_reserved() - before
        self.anchor = torch.zeros((), device=self.output.loss.device, requires_grad=True)
        free, total = torch.cuda.mem_get_info()
        if free < MEMORY_LEFT * total + self.weights.nbytes_beside:
            raise NoGraph(
                f"{free / 2**30:.1f} GiB of memory would be left beside them; a smaller microbatch leaves more"
            )

    def _read(self, batch: Batch) -> list[str]:
        """Names of the tensors of a batch that the graphs read."""
        return [name for name in ("input_ids", "document_ids", *self.objective.columns) if name in batch]

    def serves(self, batch: Batch) -> bool:
        """True if the graphs are of batches of this shape."""
        return self._read(batch) == list(self.batch) and all(
            (batch[name].shape, batch[name].dtype) == (here.shape, here.dtype) for name, here in self.batch.items()
        )

    def __call__(self, batch: Batch) -> LossOutput:
        """The loss of a batch that the graphs serve. Its backward pass must come before the next call."""
        for name, here in self.batch.items():
            here.copy_(batch[name], non_blocking=True)
        loss = _Replay.apply(self.anchor, self)
        assert isinstance(loss, Tensor)
        return replace(self.output.each(torch.clone), loss=loss)

    def forward(self) -> tuple[Tensor, int]:
        """The loss, and the number of this forward pass, for `backward`."""
        if not self._within_step:
            self._within_step = True
            self.weights.refresh()
            torch._foreach_zero_([self.sums[i] for i in self.reached])
        self.forward_graph.replay()
        self._forwards += 1
        return self.output.loss.clone(), self._forwards

    def backward(self, d_loss: Tensor, number: int) -> None:
        """Add the gradients to their sums."""
        if number != self._forwards or number == self._backward_of:
            raise RuntimeError("the graph of a backward pass follows that of its forward pass, once and at once")
        self._backward_of = number
        self.d_loss.copy_(d_loss)
        self.backward_graph.replay()

    def hand_over(self) -> None:
        """Add the sums of the microbatches since the last call, if there were any, to the parameters' gradients."""
        if self._within_step:
            self._within_step = False
            self.weights.hand_over(self.sums, self.reached)

    def _loss(self) -> LossOutput:
        # Kept: the graphs read what is in it, and the model forgets contexts of lengths that it has not seen for long.
        self.context = self.model.context(self.batch["input_ids"], self.batch.get("document_ids"))
        return loss_in(self.context, self.model, self.objective, self.batch)

    def _rehearse(self) -> None:
        """One microbatch without graphs, on the stream of the graphs. Raises NoGraph where the host waits for the GPU."""
        devices = [torch.cuda.current_device()]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.random.fork_rng(devices), torch.cuda.stream(self.stream), _waits() as waits:
            self._loss().loss.backward()
        torch.cuda.current_stream().wait_stream(self.stream)
        if waits:
            raise NoGraph(waits[0])

    def _record(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with self._recording(self.forward_graph, pool):
            output = self._loss()
        self.d_loss = torch.ones_like(output.loss)
        with self._recording(self.backward_graph, pool):
            output.loss.backward(self.d_loss)
        self.output = output.each(torch.detach)

    @contextlib.contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        # thread_local: threads of the loader and of checkpoints go on with calls that this one must not make meanwhile.
        recorded = torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local")
        # The outer one: where recording fails, torch.cuda.graph leaves its own stream current.
        with torch.cuda.stream(torch.cuda.current_stream()), recorded:
            yield
            for stream in _fsdp_streams(self.model):
                with torch.cuda.stream(stream):
                    forked = torch.cuda.is_current_stream_capturing()
                if forked:
                    self.stream.wait_stream(stream)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graph: MicrobatchGraph) -> Tensor:
        """anchor: a tensor that requires a gradient, so that the loss does."""
        ctx.graph = graph
        loss, ctx.number = graph.forward()
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[None, None]:
        ctx.graph.backward(d_loss, ctx.number)
        return None, None


def _fsdp_streams(model: CausalLM) -> list[torch.cuda.Stream]:
    """The streams that FSDP2 launches on beside the current one, for which it has no public name."""
    if not isinstance(model, FSDPModule):
        return []
    context = model._get_fsdp_state()._comm_ctx
    names = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
    return [getattr(context, name) for name in names if isinstance(getattr(context, name, None), torch.cuda.Stream)]


@contextlib.contextmanager
def _without_gradients(model: CausalLM) -> Iterator[None]:
    """Parameters have no gradients within, and afterwards those of before, as have the layers' sums of the step."""
    kept = [(p, p.grad) for p in model.parameters()]
    sums = [*step_sums(model), *(model.hybrid.losses.terms.values() if model.hybrid.losses else ())]
    before = [total.clone() for total in sums]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for total, value in zip(sums, before, strict=True):
            total.copy_(value)
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextlib.contextmanager
def added_to(sums: Sequence[Tensor], leaves: Sequence[Tensor]) -> Iterator[set[int]]:
    """Adds each leaf's gradient to its sum as soon as a backward pass has made it; none stays. Yields a set, which gets the indices
    of the leaves that had one."""
    from llmtrain.kernels.accumulate import accumulate  # needs Triton

    reached: set[int] = set()

    def add(number: int, leaf: Tensor) -> None:
        assert leaf.grad is not None
        accumulate(sums[number], leaf.grad)
        reached.add(number)
        leaf.grad = None

    hooks = [
        leaf.register_post_accumulate_grad_hook(partial(add, i)) for i, leaf in enumerate(leaves) if leaf.requires_grad
    ]
    try:
        yield reached
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Garbage is collected before, and not within: what it frees might belong to a graph that is being recorded."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _waits() -> Iterator[list[str]]:
    """Collects what PyTorch warns of meanwhile that a graph cannot hold."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            for warning in caught:
                text, where = str(warning.message), f"{warning.filename}:{warning.lineno}"
                if "called a synchronizing" in text:
                    found.append(f"the host waits for the GPU within the microbatch ({where})")
                elif "AccumulateGrad node's stream" in text:
                    found.append("the autograd graph of an earlier microbatch is still there")
