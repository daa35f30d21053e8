"""Refusal of what a config asks for and this machine does not have, before anything heavy starts: kernels, float8, graphs."""

from collections.abc import Iterator

from llmtrain.config.base import Problem
from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform, float8_refusal
from llmtrain.models.backends import chosen
from llmtrain.schema.config import Config


def refuse_what_is_missing(config: Config, here: Platform) -> None:
    """Raises UserError for the first thing that `config` asks for and this machine cannot do."""
    for problem in (*missing_backends(config, here), *missing_units(config, here)):
        found = "" if problem.found is None else f" = {problem.found}"
        raise UserError(f"{problem.path}{found}: {problem.message}")


def missing_backends(config: Config, here: Platform) -> Iterator[Problem]:
    """Named backends that cannot serve here."""
    for one in chosen(config.model, here, config.train.dtype, config.data.mask_documents):
        if one.refusal is not None:
            block = "model" if one.block == "model" else f"model.blocks.{one.block}"
            norm = ".norm" if one.kernel.operation == "norm" else ""
            yield Problem(f"{block}{norm}.backend", one.kernel.backend, one.refusal)


def missing_units(config: Config, here: Platform) -> Iterator[Problem]:
    """Settings of `train` that need what this machine does not have."""
    float8 = config.train.float8
    if float8 is not None and not float8.emulate and (reason := float8_refusal(here)):
        yield Problem("train.float8", None, f"{reason}; use null (the run may go on without it)")
    if config.train.cuda_graphs == "on" and here.vendor == "cpu":
        yield Problem(
            "train.cuda_graphs", "on", "there can be no CUDA graphs here, as they need a GPU; use auto or off"
        )
