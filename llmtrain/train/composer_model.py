"""The adapters between our model, objective and loader and Composer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from composer.core import DataSpec
from composer.models import ComposerModel
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from torchmetrics import Metric

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.loss import LossOutput
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.tensor_parallel import TensorRanks
from llmtrain.objectives.base import Batch, Objective, compute_loss
from llmtrain.train.batches import microbatches


class ComposerHybridLM(ComposerModel):
    """Gives Composer the model, and the sums that its validation needs. Training goes through Step.

    validation_streams: see Objective.metrics; a batch of validation holds samples of one stream alone. segments: this rank's, where
    ranks share sequences.
    """

    def __init__(
        self,
        model: CausalLM,
        objective: Objective,
        validation_streams: Mapping[str, range] | None = None,
        segments: ContextParallelRanks | None = None,
    ):
        super().__init__()
        self.model, self.objective, self.segments = model, objective, segments
        self.validation_streams = validation_streams or {}

    def forward(self, batch: Batch) -> LossOutput:
        return compute_loss(self.model, self.objective, batch, self.segments)

    def loss(self, outputs: LossOutput, batch: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        return outputs.loss

    def eval_forward(self, batch: Batch, outputs: LossOutput | None = None) -> LossOutput:
        return outputs if outputs is not None else self.forward(batch)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {} if is_train else self.objective.metrics(self.validation_streams)

    def update_metric(self, batch: Batch, outputs: LossOutput, metric: Metric) -> dict:
        self.objective.update(metric, batch, outputs)
        return {}


def data_spec(
    loader: DataLoader,
    objective: Objective,
    segments: ContextParallelRanks | None = None,
    ranks: TensorRanks | None = None,
    counts: bool = True,
    per_sample: int = 1,
) -> DataSpec:
    """Wrapper by which Composer counts samples and tokens, as throughput and schedules do, and splits batches of validation.

    segments: this rank's, where ranks share sequences. The loader's batches are of whole ones, microbatches of this rank's part.
    ranks: tensor-parallel ones; microbatches are the same on all of them. counts: this rank counts; Composer adds up the ranks'.
    per_sample: sequences that are trained of one of the loader's.
    """
    return DataSpec(
        loader,
        split_batch=lambda batch, size: microbatches(batch, int(size), objective, segments, ranks),
        get_num_samples_in_batch=lambda batch: len(batch["sample_ids"]) * counts,
        get_num_tokens_in_batch=lambda batch: batch["input_ids"].numel() * counts * per_sample,
    )


@contextmanager
def evaluating(model: CausalLM) -> Iterator[None]:
    """Context with the model in eval mode; afterwards its mode is restored and its weights are sharded.

    FSDP2 keeps the root's weights gathered after a forward pass, for the backward pass that follows in training. As there is none
    here, they are resharded after each call (decoding sees sharded weights and records no CUDA graph), and all others at
    the end.
    """
    was_training = model.training
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    model.eval()
    if isinstance(model, FSDPModule):
        model.set_reshard_after_forward(True, recurse=False)
    try:
        yield
    finally:
        if isinstance(model, FSDPModule):
            model.set_reshard_after_forward(False, recurse=False)
        for module in sharded:
            module.reshard()
        model.train(was_training)
