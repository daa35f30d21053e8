"""Forward and backward passes of a batch through the stages of a pipeline, by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import FULL_BACKWARD, RECV_B, RECV_F

from llmtrain.models.hybrid import Stream
from llmtrain.models.layer_part import step_sums
from llmtrain.models.loss import LossOutput
from llmtrain.objectives.base import loss_in
from llmtrain.train.pipeline.stages import StagedLM
from llmtrain.train.step import Observer, Part, Step, to_device


class PipelineStep(Step):
    """The passes of this rank's stage. All stages read the same samples; losses are computed by the last, and known to all once
    the passes are done, so that observers see them as in a run without stages, but after the backward passes."""

    model: StagedLM
    _names: list[str] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._schedules: dict[tuple[int, ...], tuple[Schedule1F1B | ScheduleInterleaved1F1B, list[_Stage]]] = {}
        self._rehearsed: set[tuple[int, int]] = set()
        self.backward_left = 0
        # FSDP2 gathers layers again for each backward pass. What is read outside of a call of its own stays gathered while
        # other microbatches are under way, of which some backward pass needs it.
        layers = set(self.model.hybrid.blocks)
        self.stays = [one for one in self.model.modules() if isinstance(one, FSDPModule) and one not in layers]
        # Every stage but the first reduces gradients when the last activations' gradients are sent: those before it would wait.
        self.apart = self.sync.alone or (self.model.stages.rank > 0 and not self.sync.every_microbatch)

    def _passes(self, parts: list[Part], mean: float, observe: Observer) -> dict[str, Tensor]:
        model = self.model
        passes = _Passes(self, parts, mean)
        rows, tokens = parts[0]["input_ids"].shape
        schedule, stages = self._schedule_of(len(parts), rows, tokens)
        if model.hybrid.compiled and (rows, tokens) not in self._rehearsed:
            self._rehearsed.add((rows, tokens))
            self._rehearse(passes, stages)
        for stage in stages:
            stage.submod.passes = passes
        self.backward_left = len(parts) * len(stages)
        numbers = torch.arange(len(parts))
        try:
            schedule.step(target=numbers if model.hybrid.ends else None, return_outputs=False, number=numbers)
        except RuntimeError as error:  # torch wraps what a forward pass raises
            raise error.__cause__ or error from None
        if self.apart:
            self.sync.finish()
        return self._reported(passes, observe)

    def _schedule_of(
        self, count: int, rows: int, tokens: int
    ) -> tuple[Schedule1F1B | ScheduleInterleaved1F1B, list[_Stage]]:
        """The schedule of batches of so many microbatches [rows, tokens], and this rank's part of it."""
        key = (count, rows, tokens)
        if key not in self._schedules:
            stages = [_Stage(self, span, rows, tokens) for span in range(len(self.model.hybrid.spans))]
            options: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
            if len(stages) == 1:
                [stage] = stages
                schedule = Schedule1F1B(stage, count, **options)
                stage.buffers = (min(stage.num_stages - stage.stage_index, count), 1)
            else:
                schedule = ScheduleInterleaved1F1B(list(stages), count, **options)
                for stage in stages:
                    stage.buffers = _most_received(schedule, stage)
            self._schedules[key] = schedule, stages
        return self._schedules[key]

    def _rehearse(self, passes: _Passes, stages: list[_Stage]) -> None:
        """One pass through each span, of a microbatch that was not received, whose gradients and sums are thrown away: so that all
        stages compile their layers at the same time. In a schedule each would wait until those before it, and in the backward pass
        those behind it, had compiled theirs."""
        model, device = self.model, self.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for span, stage in enumerate(stages):
                self.mark(True)  # else FSDP2 looks for sums of spans whose weights it has not gathered yet
                received = tuple(
                    torch.randn(one.shape, dtype=one.dtype, device=device).requires_grad_() for one in stage.reads
                )
                sent = passes.forward(0, span, received)
                outputs = [one for one in (sent if isinstance(sent, tuple) else (sent,)) if one.requires_grad]
                torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])
        model.zero_grad(set_to_none=True)
        passes.found.clear()
        for total in (*step_sums(model.hybrid), *(model.hybrid.losses.terms.values() if model.hybrid.losses else ())):
            total.zero_()

    def mark(self, last: bool) -> None:
        """Called before each backward pass. last: of the step."""
        self.sync.mark(last)
        for module in self.stays:
            module.set_reshard_after_backward(last, recurse=False)

    def _reported(self, passes: _Passes, observe: Observer) -> dict[str, Tensor]:
        """Weighted sums of the losses of all microbatches, which every stage has and observes."""
        stages, device, parts = self.model.stages, self.model.device, passes.parts
        if self._names is None:
            names = [list(passes.found[0]) if passes.found else []]
            dist.broadcast_object_list(names, stages.peer(stages.size - 1), stages.group, device=device)
            [self._names] = names
        losses = torch.zeros(len(parts), len(self._names), device=device)
        if self.model.hybrid.ends:
            losses += torch.stack([torch.stack([one[name] for name in self._names]) for one in passes.found])
        dist.all_reduce(losses, group=stages.group)
        for part, values in zip(parts, losses, strict=True):
            terms = dict(zip(self._names, values, strict=True))
            output = LossOutput(terms.pop("total"), terms, values.new_tensor(part["n_labels"]))
            observe("before_forward", part, None)
            for moment in ("after_forward", "before_loss", "after_loss", "before_backward"):
                observe(moment, part, output)
            observe("after_backward", part, None)
        weights = losses.new_tensor([passes.weight(number) for number in range(len(parts))])
        return dict(zip(self._names, weights @ losses, strict=True))


class _Passes:
    """Microbatches of one step. found: losses of each, at the last stage."""

    def __init__(self, step: PipelineStep, parts: list[Part], mean: float):
        self.step, self.parts, self.mean = step, parts, mean
        self.found: list[dict[str, Tensor]] = []

    def weight(self, number: int) -> float:
        return self.parts[number]["n_labels"] / self.mean

    def forward(self, number: int, span: int, received: tuple[Tensor, ...]) -> Stream:
        """Result of a microbatch from the layers of a span: the next one's input, or the weighted loss, [1]."""
        step, model = self.step, self.step.model
        batch, weight = to_device(self.parts[number], model.device), self.weight(number)
        context = model.context(batch["input_ids"], batch.get("document_ids"), step.segments)
        inputs: Any = received if len(received) > 1 else received[0] if received else batch["input_ids"]
        model.scheduled = span
        try:
            if model.hybrid.ends and span == len(model.hybrid.spans) - 1:
                output = loss_in(context, model, step.objective, batch, inputs)
                self.found.append({"total": output.loss.detach(), **output.terms})
                return (output.loss * weight).reshape(1)
            sent = model(inputs, context, _nothing)
        finally:
            model.scheduled = None
        if context.losses is None:
            return sent
        x, *further = sent if isinstance(sent, tuple) else (sent,)
        return (context.losses.weigh(x, weight), *further) if further else context.losses.weigh(x, weight)


def _nothing(*_: Tensor) -> None:
    """The output of a stage that has none."""


def _most_received(schedule: ScheduleInterleaved1F1B, stage: _Stage) -> tuple[int, int]:
    """Most microbatches whose input, and most whose output's gradient, a stage has at a time, received and not yet done with."""
    inputs = gradients = most_inputs = most_gradients = 1
    for action in schedule.pipeline_order_with_comms[stage.group_rank]:
        if action.stage_index == stage.stage_index:
            kind = action.computation_type
            inputs += (kind == RECV_F) - (kind == FULL_BACKWARD)
            gradients += (kind == RECV_B) - (kind == FULL_BACKWARD)
            most_inputs, most_gradients = max(inputs - 1, most_inputs), max(gradients - 1, most_gradients)
    return most_inputs, most_gradients


class _Module(nn.Module):
    """Module of torch's stage. It holds no parameters: FSDP2 is driven by GradientSync, as without stages."""

    def __init__(self, span: int) -> None:
        super().__init__()
        self.span, self.passes = span, cast("_Passes", None)

    def forward(self, *received: Tensor, number: Tensor) -> Stream:
        return self.passes.forward(int(number), self.span, received)


class _Stage(PipelineStage):
    """A span of this rank's layers for microbatches [rows, tokens], which may be this rank's part of sequences.

    buffers: of how many microbatches there are inputs received at a time, and gradients. reads: what is received, without memory.
    """

    submod: _Module
    buffers: tuple[int, int]

    def __init__(self, step: PipelineStep, span: int, rows: int, tokens: int):
        model, stages = step.model, step.model.stages
        hybrid, self.step, d_model = model.hybrid, step, model.hybrid.config.d_model
        number, count = span * stages.size + stages.rank, len(hybrid.spans) * stages.size
        between = tokens // (1 if hybrid.ranks is None else hybrid.ranks.size)
        received, sent = (
            tuple(
                torch.empty(rows, between, channels, dtype=hybrid.dtype, device="meta")
                for channels in hybrid.crossing(border).channels(d_model)
            )
            for border in hybrid.spans[span]
        )
        self.reads = received if number else ()
        super().__init__(
            _Module(span),
            number,
            count,
            model.device,
            input_args=self.reads,
            output_args=sent if number < count - 1 else (torch.empty(1, device="meta"),),
            group=stages.group,
        )

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any) -> tuple[Any, ...]:
        """Buffers for what is received of as many microbatches as are under way at a time, where torch makes some for all."""
        most = self.buffers[0]
        found = super()._prepare_forward_infra(most, *args)
        for number in range(most, num_microbatches):
            self.args_recv_info[number] = self.args_recv_info[number % most]
        return found

    def _prepare_backward_infra(self, num_microbatches: int) -> None:
        most = self.buffers[1]
        super()._prepare_backward_infra(most)
        self.chunks = num_microbatches
        self.grad_recv_info |= {number: self.grad_recv_info[number % most] for number in range(most, num_microbatches)}

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.step.backward_left -= 1
        self.step.mark(self.step.backward_left == 0 and not self.step.apart)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
