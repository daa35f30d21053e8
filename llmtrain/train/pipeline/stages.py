"""A rank's place in a pipeline, the model of its stage, and gradients of what several stages hold."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmtrain.models.causal_lm import CausalLM, Output
from llmtrain.models.config import LayerRange
from llmtrain.models.context import Context
from llmtrain.models.hybrid import HybridLM, Stream
from llmtrain.models.init import clean_name
from llmtrain.models.layer_part import step_sums
from llmtrain.models.slices import local_of
from llmtrain.train.ranks.tensor_gradients import SharedGradients


@dataclass(frozen=True)
class Stages:
    """rank: place of this rank's stage among `size`, of which each has the layers of one span or, interleaved, of several. group:
    one rank of each stage, in order, which pass activations on, from the last to the first between spans. holders: of every
    parameter that several stages hold, by name, the process group of those; None where this rank's stage is none of them. ranks: of
    this stage, where layers sum anything over a step (models/layer_part.py)."""

    rank: int
    size: int
    group: dist.ProcessGroup
    holders: dict[str, dist.ProcessGroup | None]
    ranks: dist.ProcessGroup | None = None

    def peer(self, stage: int) -> int:
        """Global rank of another stage of this pipeline, counted on from the last to the first."""
        return dist.get_global_rank(self.group, stage % self.size)


class StagedLM(CausalLM):
    """A CausalLM of which this rank holds one stage.

    In training a schedule (schedule.py) calls it with what the stage before sent, and `scheduled`, the number of the span to
    compute. Every other call, without gradients, is as of a whole model: all ranks of the pipeline make it with the same arguments,
    activations go from stage to stage, and all get what the last stage computes. Logits exist there alone.
    """

    stages: Stages
    scheduled: int | None = None

    def begin(self, mesh: DeviceMesh, spans_of: list[list[LayerRange]]) -> None:
        """Keep this rank's layers of a model on the meta device. mesh: with a dimension `stage`. spans_of: by stage. Every rank
        calls this."""
        whole, size = self.hybrid, len(spans_of)
        parts = [whole.stage(*spans) for spans in spans_of]
        rank = mesh.get_local_rank("stage")
        ranks = _group_of(mesh.mesh.flatten(1).tolist()) if step_sums(whole) else None
        self.stages = Stages(rank, size, mesh.get_group("stage"), _holders(parts, mesh), ranks)
        self.hybrid = parts[self.stages.rank]

    def forward(self, inputs: Stream, context: Context, output: Callable[[Tensor, Tensor], Output]) -> Any:
        """Returns the last stage's result; in a schedule this stage's, which the next one reads."""
        if self.scheduled is not None:
            return self._pass(inputs, context, output, self.scheduled)
        assert not torch.is_grad_enabled(), "gradients come by a schedule"
        found: Any = None
        for number, (first, last) in enumerate(self.hybrid.spans):
            found = self._pass(self._received(first) if first else inputs, context, output, number)
            if last < len(self.hybrid.config.layer_list()):
                self._send(found)
        return self._shared(found)

    def least(self, number: int) -> int:
        found = torch.tensor(super().least(number), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN, self.stages.group)
        return int(found)

    def _pass(self, inputs: Stream, context: Context, output: Callable[[Tensor, Tensor], Output], span: int) -> Any:
        hidden = self.hybrid(inputs, context, span)
        return (
            hidden
            if self.hybrid.spans[span][1] < len(self.hybrid.config.layer_list())
            else self.compute(hidden, output)
        )

    def _send(self, stream: Stream) -> None:
        tensors = stream if isinstance(stream, tuple) else (stream,)
        to, group = self.stages.peer(self.stages.rank + 1), self.stages.group
        shape = torch.tensor([len(tensors), *tensors[0].shape], device=self.device)
        for tensor in (shape, *tensors):
            dist.send(tensor.contiguous(), to, group)

    def _received(self, border: int) -> Stream:
        """Tensors that the stage of the layers before this one sent."""
        source, group = self.stages.peer(self.stages.rank - 1), self.stages.group
        shape = torch.empty(4, dtype=torch.int64, device=self.device)
        dist.recv(shape, source, group)
        count, *sizes = shape.tolist()
        channels, like = (
            self.hybrid.crossing(border).channels(sizes[-1]),
            {"dtype": self.hybrid.dtype, "device": self.device},
        )
        assert len(channels) == count, (channels, count)
        tensors = tuple(torch.empty(*sizes[:-1], width, **like) for width in channels)
        for tensor in tensors:
            dist.recv(tensor, source, group)
        return tensors[0] if count == 1 else tensors

    def _shared(self, result: Output) -> Output:
        """Result of the last stage, with its tensors on this rank's device."""
        stages, file = self.stages, io.BytesIO()
        if self.hybrid.ends:
            torch.save(result, file)
        answer = [file.getvalue()]
        dist.broadcast_object_list(answer, stages.peer(stages.size - 1), stages.group, device=self.device)
        if self.hybrid.ends:
            return result
        return torch.load(io.BytesIO(answer[0]), map_location=self.device, weights_only=False)


def _holders(parts: list[HybridLM], mesh: DeviceMesh) -> dict[str, dist.ProcessGroup | None]:
    """Stages.holders. Every rank calls this, as every rank of the run makes every group."""
    stages_of: dict[str, tuple[int, ...]] = {}
    for stage, part in enumerate(parts):
        for name, _ in part.named_parameters():
            stages_of[name] = (*stages_of.get(name, ()), stage)
    pipelines = mesh.mesh.flatten(1).T.tolist()  # the ranks of each, in order
    groups = {
        some: _group_of([[pipeline[stage] for stage in some] for pipeline in pipelines])
        for some in sorted({some for some in stages_of.values() if len(some) > 1})
    }
    return {name: groups[some] for name, some in stages_of.items() if len(some) > 1}


def _group_of(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """Makes process groups of these ranks, and returns the one that has this rank."""
    found = None
    for ranks in groups:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup)
            found = group
    return found


class StageGradients(SharedGradients):
    """SharedGradients of this rank's stage. Of a shared block, and of an embedding that a tied head reads, each stage that holds it
    has the gradient of its own uses; once they are summed, these copies stay alike, as their optimizers take the same steps."""

    def __init__(self, model: StagedLM):
        super().__init__(model.hybrid, model.hybrid.ranks)
        self.groups = {
            parameter: group
            for name, parameter in model.hybrid.named_parameters()
            if parameter.requires_grad and (group := model.stages.holders.get(clean_name(name))) is not None
        }

    def stages_of(self, parameter: nn.Parameter) -> int:
        group = self.groups.get(parameter)
        return 1 if group is None else group.size()

    @torch.no_grad()
    def add_up(self) -> None:
        super().add_up()
        for parameter, group in self.groups.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_of(parameter.grad), group=group)


def shared_gradients(model: CausalLM) -> SharedGradients | None:
    """Sums and norm of the gradients of a model that ranks divide; None where FSDP2 alone does."""
    if isinstance(model, StagedLM):
        return StageGradients(model)
    return model.hybrid.ranks and SharedGradients(model.hybrid, model.hybrid.ranks)
