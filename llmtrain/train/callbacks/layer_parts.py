"""Changes and measurements of layers once per step: LayerPart.after_step and LayerPart.metrics."""

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import nn

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.init import clean_name
from llmtrain.models.layer_part import LayerPart, parts_of, step_sums
from llmtrain.train.callbacks.stability import Stability
from llmtrain.train.pipeline.stages import StagedLM, Stages


def layer_parts(model: CausalLM, stability: Stability) -> list[Callback]:
    """The callback for this model, where it, or another stage of it, has anything to do. It stands before `stability`, which waits
    for the GPU."""
    made = LayerParts(model.hybrid, stability, model.stages if isinstance(model, StagedLM) else None)
    return [made] if made.stages or made.sums or made.changed or made.measured else []


class LayerParts(Callback):
    """Sums what layers count over the ranks, logs their metrics as PART/METRIC, and has them changed after a step that was taken.

    Metrics travel to the host beside the step's losses, for which it waits anyway. stability: skips steps. stages: of a pipeline
    whose layers have something to do; each sums over its own ranks, and the first logs the metrics of all.
    """

    def __init__(self, model: nn.Module, stability: Stability, stages: Stages | None = None):
        self.stability, self.sums = stability, step_sums(model)
        self.stages = stages if stages is not None and stages.ranks is not None else None
        parts = {clean_name(name): part for name, part in parts_of(model)}
        self.changed = [part for part in parts.values() if type(part).after_step is not LayerPart.after_step]
        self.measured = {name: part for name, part in parts.items() if type(part).metrics is not LayerPart.metrics}
        self._names: list[str] = []
        self._values = torch.empty(0)

    @torch.no_grad()
    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self.sums and dist.get_world_size() > 1:
            together = torch.cat([total.flatten() for total in self.sums])
            dist.all_reduce(together, group=None if self.stages is None else self.stages.ranks)
            for total, part in zip(self.sums, together.split([t.numel() for t in self.sums]), strict=True):
                total.copy_(part.view_as(total))
        found = {f"{at}/{name}": value for at, part in self.measured.items() for name, value in part.metrics().items()}
        self._names = list(found)
        if found:
            self._values = torch.stack([value.float() for value in found.values()]).to("cpu", non_blocking=True)

    @torch.no_grad()
    def batch_end(self, state: State, logger: Logger) -> None:
        # Stability has waited for the GPU since, so that the values are here.
        found = dict(zip(self._names, self._values.tolist(), strict=True))
        if self.stages is not None:
            everyone: list[dict[str, float]] = [{}] * self.stages.size
            torch.distributed.all_gather_object(everyone, found, group=self.stages.group)
            found = {name: value for some in everyone for name, value in some.items()}
        logger.log_metrics(found)
        if not self.stability.skipped_in_a_row:
            for part in self.changed:
                part.after_step()
        for total in self.sums:
            total.zero_()
