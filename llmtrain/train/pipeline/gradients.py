"""Gradients of a model whose stages are on several ranks: sums of what several stages hold, and the norm of all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.init import clean_name
from llmtrain.models.slices import local_of
from llmtrain.train.pipeline.stages import StagedLM
from llmtrain.train.ranks.tensor_gradients import SharedGradients


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
