"""Refusal of what a config asks for and this machine does not have, before anything heavy starts: kernels, float8, graphs."""

from collections.abc import Iterator

from llmtrain.config.base import Problem
from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform, float8_refusal
from llmtrain.models.backends import chosen
from llmtrain.models.config import ModelConfig
from llmtrain.schema.training import TrainConfig


def refuse_what_is_missing(model: ModelConfig, train: TrainConfig, documents: bool, here: Platform) -> None:
    """Raises UserError for the first thing that a config asks for and this machine cannot do. documents: as HybridLM's."""
    for problem in (*missing_backends(model, train.dtype, documents, here), *missing_units(train, here)):
        found = "" if problem.found is None else f" = {problem.found}"
        raise UserError(f"{problem.path}{found}: {problem.message}")


def missing_backends(model: ModelConfig, dtype: str, documents: bool, here: Platform) -> Iterator[Problem]:
    """Named backends that cannot serve here."""
    for one in chosen(model, here, dtype, documents):
        if one.refusal is not None:
            block = "model" if one.block == "model" else f"model.blocks.{one.block}"
            norm = ".norm" if one.kernel.operation == "norm" else ""
            yield Problem(f"{block}{norm}.backend", one.kernel.backend, one.refusal)


def missing_units(train: TrainConfig, here: Platform) -> Iterator[Problem]:
    """Settings of `train` that need what this machine does not have."""
    float8 = train.float8
    if float8 is not None and not float8.emulate and (reason := float8_refusal(here)):
        yield Problem("train.float8", None, f"{reason}; use null (the run may go on without it)")
    if train.cuda_graphs == "on" and here.vendor == "cpu":
        yield Problem(
            "train.cuda_graphs", "on", "there can be no CUDA graphs here, as they need a GPU; use auto or off"
        )
