"""The weights of Composer's own checkpoints, of an llmtrain model, an MPT of LLM Foundry, or its `hf_causal_lm`.

A checkpoint is one file (torch.save of {"state": {"model": ..., ...}, "rng": ...}), or a folder that torch's distributed
checkpoint wrote (names begin with `state.model.`), or the folder of an MPT in Hugging Face format. The config of an llmtrain
model is not in it; a HuggingFaceModel has its config.json in state.integrations.huggingface.
"""

import datetime
import os
import re
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
from llmtrain.config.interpolation import resolve
from llmtrain.config.regular_file import require_regular
from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import read_file
from llmtrain.convert.dcp import DcpTensors
from llmtrain.convert.foundry.model import published_mpt
from llmtrain.convert.foundry.settings import Notes, Settings
from llmtrain.convert.tensor_reader import TensorReader
from llmtrain.errors import UserError, first_few
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import Part, Weight, family_for_model, family_of_hf_config
from llmtrain.models.hf.foreign_files import reason
from llmtrain.models.hf.hf_checkpoint import open_hf_checkpoint
from llmtrain.models.hf.mpt import Mpt
from llmtrain.models.hf.settings import validate_section
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config

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
        others = re.sub(r"rank0(?=\.)", "rank1", file.name), re.sub(r"rank\d+(?=\.)", "rank0", file.name)
        if any(name != file.name and (file.parent / name).exists() for name in others):
            raise CheckpointError(
                f"{file} is one rank's part of a checkpoint (other ranks' lie beside it): parts by rank are not read; "
                "save it whole (fsdp_config.state_dict_type: full) or as a folder of .distcp files (sharded)"
            )
        try:
            require_regular(file)
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


class FolderTensors(TensorReader):
    """The tensors of a folder in Hugging Face format. config: its config.json."""

    def __init__(self, folder: Path):
        self._tensors = open_hf_checkpoint(folder)
        self.config = self._tensors.config
        found = self._tensors
        super().__init__(folder, [Entry(name, found.dtype(name), found.shape(name)) for name in found])

    def elements(self, name: str, counts: Iterable[int]) -> Iterator[Tensor]:
        yield from self._tensors[name].reshape(-1).split(list(counts))


def is_composer_checkpoint(path: Path) -> bool:
    """Return True for a file, and for a folder of torch's distributed checkpoint or in Hugging Face format without a
    manifest.json of llmtrain."""
    folder = os.path.lexists(path / ".metadata") or os.path.lexists(path / "config.json")
    return path.is_file() or (folder and not (path / "manifest.json").exists())


def open_composer_checkpoint(path: Path, config_file: str | None) -> tuple[TensorReader, ModelConfig, list[Weight]]:
    """Open a checkpoint of Composer. Returns its tensors, the model's config, and the tensors that each parameter is made of.

    config_file: a YAML with the `model` section; default: the config in the checkpoint.
    Raises CheckpointError when the tensors are not those of the config, with each that is missing, superfluous, or of
    another shape; UnsupportedModelError for a model that llmtrain cannot express.
    """
    source: TensorReader
    prefix, found = "", None
    if path.is_file() or (path / "config.json").is_file():
        source = FileTensors(path) if path.is_file() else FolderTensors(path)
        found = source.config
    else:
        source, prefix = DcpTensors(path), "state.model."
        found = _config_of_folder(source)
    names = {_strip_wrappers(name.removeprefix(prefix)): name for name in source.names(prefix)}
    if config_file is not None:
        config = _load_model_config(config_file)
        if "transformer.wte.weight" in names:
            weights = Mpt().weights(config)
        else:
            weights = _own_weights(config) if "embed.weight" in names else family_for_model(config).weights(config)
    elif found is not None:
        if found.get("model_type") == "mpt":
            config, family = ModelConfig.model_validate(_mpt_section(found)), Mpt()
        else:
            family = family_of_hf_config(found)
            config = ModelConfig.model_validate(family.read_config(found))
        weights = family.weights(config)
    else:
        raise CheckpointError(
            f"{path} does not say what model it holds; name a YAML with its `model` section: --config FILE"
        )
    shapes = {name: source.shape(stored) or () for name, stored in names.items()}
    weights = [_as_stored(_unfused(weight, shapes), names) for weight in weights]
    wrong = list(_mismatches(source, names, weights))
    if wrong:
        raise CheckpointError(f"{path} does not hold the model of its config:\n  " + first_few(wrong, 20, "\n  "))
    if any(weight.reordered for weight in weights):
        raise CheckpointError(
            f"{path}: rows of its projections stand in another order; save it in Hugging Face format, and import"
        )
    renamed = [
        Weight(w.ours, w.shape, tuple(Part(names[part.name], part.shape) for part in w.parts), w.cut_anywhere)
        for w in weights
    ]
    return source, config, renamed


def _config_of_folder(source: DcpTensors) -> dict[str, Any] | None:
    """config.json in a distributed checkpoint, whose names are the path of each of its settings."""
    prefix = "state.integrations.huggingface.model.config.content"
    made: dict[str, Any] = {}
    for name, value in source.values(prefix).items():
        *above, last = name.removeprefix(prefix).strip(".").split(".")
        if not last:
            return value if isinstance(value, dict) else None
        at = made
        for key in above:
            at = at.setdefault(key, {})
        at[last] = value
    return made or None


def _mpt_section(found: Mapping[str, Any]) -> dict[str, Any]:
    """Our `model` section of an MPT by LLM Foundry's own settings. Raises CheckpointError for what ours cannot express."""
    notes = Notes()
    section = published_mpt(Settings(dict(found), notes))
    wrong = [f"{problem.path}: {problem.message}" for problem in notes.problems]
    wrong += [
        f"{note.path} = {note.value}: {note.text}" for note in notes.left if note.path.split(".")[0] != "init_config"
    ]
    if wrong:
        raise CheckpointError("the model of the checkpoint cannot be expressed here:\n  " + "\n  ".join(wrong))
    return validate_section(section)


def _unfused(weight: Weight, shapes: Mapping[str, tuple[int, ...]]) -> Weight:
    """The weight whose part Wqkv is Wq, Wk and Wv where those are there (LLM Foundry's `attn_config.fused_qkv: false`)."""

    def parts(part: Part) -> tuple[Part, ...]:
        name = _strip_wrappers(part.name)
        apart = [name.replace(".Wqkv.", f".{one}.") for one in ("Wq", "Wk", "Wv")]
        found = [shapes.get(one, (0,)) for one in apart]
        fits = name not in shapes and sum(shape[0] for shape in found) == part.shape[0]
        return (
            tuple(Part(*one) for one in zip(apart, found, strict=True)) if fits and 0 not in sum(found, ()) else (part,)
        )

    return replace(weight, parts=tuple(one for part in weight.parts for one in parts(part)))


def _as_stored(weight: Weight, names: Mapping[str, str]) -> Weight:
    """The weight, its parts under the names that are there, without wrappers."""

    def part(found: Part) -> Part:
        spelt = [_strip_wrappers(name) for name in found.names]
        here = next((name for name in spelt if name in names), spelt[0])
        return replace(found, name=here, copies=tuple(name for name in spelt if name != here))

    return replace(weight, parts=tuple(map(part, weight.parts)))


def _strip_wrappers(name: str) -> str:
    while wrapper := next((wrapper for wrapper in _WRAPPERS if name.startswith(wrapper)), None):
        name = name.removeprefix(wrapper)
    return (
        name.replace("._checkpoint_wrapped_module", "")
        .replace("._orig_mod", "")
        .replace("._fsdp_wrapped_module", "")
        .replace(".norm_attn_norm.", ".")  # a module of LLM Foundry's `fuse_norm_attn_norm: true`
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
    """The `model` section of a YAML, of a whole run or alone. Raises ConfigError, or UserError without the section."""
    found = read_file(file)
    if "model" not in found.data:
        raise UserError(f"--config {file} has no `model` section")
    resolve(found, Config)
    config, problems = decode(ModelConfig, found.data["model"])
    wrong = [problem for problem in found.problems if problem.path.startswith("model")]
    wrong += [replace(problem, path=f"model.{problem.path}".rstrip(".")) for problem in problems]
    if wrong:
        raise ConfigError(found.title, wrong, found.origins)
    return config
