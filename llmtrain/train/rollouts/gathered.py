"""The model that is trained, with all of its weights gathered on each rank for many forward passes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule

from llmtrain.models.causal_lm import CausalLM
from llmtrain.schema.training import Sharding


@contextmanager
def gathered(model: CausalLM, sharding: Sharding) -> Iterator[None]:
    """Context with the model in eval mode and without gradients, whose weights FSDP2 gathers once: ranks call it as often as each
    needs. Afterwards its mode is restored, and the weights are sharded. sharding: without `auto`. Every rank enters it."""
    was_training = model.training
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    blocks = [one for one in model.hybrid.blocks if isinstance(one, FSDPModule)]
    model.eval()
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in blocks:  # others stay gathered after a forward pass (train/parallel.py)
            module.set_reshard_after_forward(sharding.strategy != "grad_op", recurse=False)
        for module in sharded:
            module.reshard()
        model.train(was_training)
