"""Log-probabilities of answers by the reference model of a policy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.adapt.adapters import Adapter, EmbeddingAdapter
from llmtrain.adapt.expert_adapters import ExpertAdapter
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.errors import UserError
from llmtrain.generate.load import load_model
from llmtrain.models.causal_lm import CausalLM
from llmtrain.objectives.base import without_gradient
from llmtrain.objectives.policy.objective import Policy
from llmtrain.train.step import to_device

LogP = Callable[[dict[str, Any]], Tensor]
"""A batch in host memory -> log-probabilities of its labels [batch, T], on the CPU."""


def log_p_of(objective: Policy, model: CausalLM) -> LogP:
    """The function of a model."""

    def compute(batch: dict[str, Any]) -> Tensor:
        on_device = to_device(batch, model.device)
        found = without_gradient(model, on_device, lambda outputs, part: objective.log_p(outputs, part["labels"]))
        return found.float().cpu()

    return compute


def reference_log_p(
    objective: Policy, model: CausalLM, tokenizer: TextTokenizer, began_from: str | None, adapted: bool
) -> LogP:
    """The function of the reference. model: that is trained, whose adapters, if it is `adapted`, are off for it where objective.kl
    names no other; else a model beside it, whole on each rank: that of `began_from`, where objective.kl names none. Raises
    UserError where it does not fit."""
    kl = objective.section.kl
    assert kl is not None
    if kl.reference is None and adapted:
        own = log_p_of(objective, model)

        def without_adapters(batch: dict[str, Any]) -> Tensor:
            with adapters_off(model):
                return own(batch)

        return without_adapters
    source = kl.reference or began_from
    assert source is not None, "Config.problems"
    reference, _ = load_model(source, model.hybrid.dtype, tokenizer, model.device)
    if reference.config.vocab_size != model.config.vocab_size:
        raise UserError(
            f"objective.kl.reference: {source} has {reference.config.vocab_size} tokens, the model {model.config.vocab_size}; a "
            "reference has the same tokens"
        )
    whole = log_p_of(objective, reference.requires_grad_(False))
    # Built to generate, without masks between documents: what follows an answer is not seen by it.
    return lambda batch: whole({name: column for name, column in batch.items() if name != "document_ids"})


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes as the one beneath its adapters, with or without FSDP2; layers are not compiled in it."""
    found = [one for one in model.modules() if isinstance(one, (Adapter, EmbeddingAdapter, ExpertAdapter))]
    units = [one.units for one in found]
    for one in found:
        one.units = [unit._replace(scale=0.0) for unit in one.units]
        if isinstance(one, Adapter):  # DoRA scales rows too
            one.__dict__["forward"] = _unchanged
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for one, kept in zip(found, units, strict=True):
            one.units = kept
            one.__dict__.pop("forward", None)


def _unchanged(x: Tensor, y: Tensor) -> Tensor:
    return y
