"""The weights of Composer's own checkpoints, of an llmtrain model or an MPT of LLM Foundry. Nothing else is read.

A checkpoint is one file (torch.save of {"state": {"model": ..., ...}, "rng": ...}), or a folder that torch's distributed
checkpoint wrote (names begin with `state.model.`). The config of an llmtrain model is not in it; a HuggingFaceModel has
its config.json in state.integrations.huggingface.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.format.tensor_file import Entry
from llmtrain.config.decode import decode
from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import read_file
from llmtrain.convert.dcp import DcpTensors
from llmtrain.convert.tensor_reader import TensorReader
from llmtrain.errors import UserError
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import Part, Weight
from llmtrain.models.hf.foreign_files import reason
from llmtrain.models.hf.mpt import FAMILY as MPT
from llmtrain.models.hybrid import HybridLM

_WRAPPERS = ("module.", "_orig_mod.", "model.", "hybrid.")
"""Prefixes of parameter names by DDP, torch.compile and Composer's models."""
# Classes for the state of numpy's generator, times, versions. None of them runs code from the file.
_SAFE_GLOBALS: list[Any] = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np.ndarray,
    np.dtype,
    np.dtypes.UInt32DType,
    datetime.timedelta,
    TorchVersion,
]


class FileTensors(TensorReader):
    """The tensors of a torch.save file, mapped into memory rather than read. config: config.json, if it holds one."""

    def __init__(self, file: Path):
        try:
            with torch.serialization.safe_globals(_SAFE_GLOBALS):
                content = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # unpickling raises what it likes
            raise CheckpointError(f"{file} is damaged, or no checkpoint of plain data: {reason(error)}") from error
        state = content.get("state") if isinstance(content, Mapping) else None
        if not isinstance(state, Mapping) or not isinstance(state.get("model"), Mapping):
            raise CheckpointError(f"{file} is no checkpoint of Composer: it has no state.model")
        self._tensors = {name: value for name, value in state["model"].items() if isinstance(value, Tensor)}
        super().__init__(file, [Entry(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()])
        integrations: Any = state.get("integrations") or {}
        huggingface = integrations.get("huggingface") if isinstance(integrations, Mapping) else None
        self.config: dict[str, Any] | None = None
        if isinstance(huggingface, Mapping):
            self.config = huggingface.get("model", {}).get("config", {}).get("content")

    def elements(self, name: str, counts: Iterable[int]) -> Iterator[Tensor]:
        flat, start = self._tensors[name].detach().reshape(-1), 0
        for count in counts:
            yield flat[start : start + count]
            start += count


def is_composer_checkpoint(path: Path) -> bool:
    """Return True for a file, or a folder of torch's distributed checkpoint without a manifest.json of llmtrain."""
    return path.is_file() or ((path / ".metadata").is_file() and not (path / "manifest.json").exists())


def open_composer_checkpoint(path: Path, config_file: str | None) -> tuple[TensorReader, ModelConfig, list[Weight]]:
    """Open a checkpoint of Composer. Returns its tensors, the model's config, and the tensors that each parameter is made of.

    config_file: a YAML with the `model` section; default: the config in the checkpoint (LLM Foundry's MPT).
    Raises CheckpointError when the tensors are not those of the config, with each that is missing, superfluous, or of
    another shape; UnsupportedModelError for an MPT that llmtrain cannot express.
    """
    source: TensorReader
    if path.is_file():
        source, found = FileTensors(path), None
        found, prefix = source.config, ""
    else:
        source, found, prefix = DcpTensors(path), None, "state.model."
    names = {_strip_wrappers(name.removeprefix(prefix)): name for name in source.names(prefix)}
    if config_file is not None:
        config = _load_model_config(config_file)
    elif found is not None:
        if found.get("model_type") != "mpt":
            raise CheckpointError(
                f"{path} holds a {found.get('model_type')}; of Hugging Face's models only mpt is read here"
            )
        config = ModelConfig.model_validate(MPT.read_config(found))
    else:
        raise CheckpointError(
            f"{path} does not say what model it holds; name a YAML with its `model` section: --config FILE"
        )
    weights = MPT.weights(config) if "transformer.wte.weight" in names else _own_weights(config)
    wrong = list(_mismatches(source, names, weights))
    if wrong:
        raise CheckpointError(f"{path} does not hold the model of its config:\n  " + "\n  ".join(wrong[:20]))
    renamed = [Weight(w.ours, w.shape, tuple(Part(names[part.name], part.shape) for part in w.parts)) for w in weights]
    return source, config, renamed


def _strip_wrappers(name: str) -> str:
    while wrapper := next((wrapper for wrapper in _WRAPPERS if name.startswith(wrapper)), None):
        name = name.removeprefix(wrapper)
    return (
        name.replace("._checkpoint_wrapped_module", "").replace("._orig_mod", "").replace("._fsdp_wrapped_module", "")
    )


def _own_weights(config: ModelConfig) -> list[Weight]:
    with torch.device("meta"):
        model = HybridLM(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return [Weight(name, shape, (Part(name, shape),)) for name, shape in shapes.items()]


def _mismatches(source: TensorReader, names: Mapping[str, str], weights: Iterable[Weight]) -> Iterator[str]:
    taken = set()
    for part in (part for weight in weights for part in weight.parts):
        taken |= set(part.names)
        if part.name not in names:
            yield f"{part.name} {list(part.shape)} is missing"
        elif source.shape(names[part.name]) != part.shape:
            yield f"{part.name} has shape {list(source.shape(names[part.name]) or ())}, expected {list(part.shape)}"
    for name in sorted(set(names) - taken):
        yield f"{name} has no place in this model, and would be lost"


def _load_model_config(file: str) -> ModelConfig:
    """Read the `model` section of any YAML. Raises ConfigError, or ValueError without the section."""
    found = read_file(file)
    if "model" not in found.data:
        raise UserError(f"--config {file} has no `model` section")
    config, problems = decode(ModelConfig, found.data["model"])
    if problems:
        wrong = [replace(problem, path=f"model.{problem.path}".rstrip(".")) for problem in problems]
        raise ConfigError(found.title, wrong, found.origins)
    return config
