"""Loading a published checkpoint as a HybridLM, with one tensor in memory at a time beside the model."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmtrain.errors import UserError, first_few
from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import Weight, family_of_hf_config
from llmtrain.models.hf.hf_checkpoint import HFCheckpoint, open_hf_checkpoint
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layer_part import persistent_buffers

# Tables that old versions of transformers stored beside the weights; computed here.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_hf(
    folder: str | os.PathLike[str], platform: Platform | None = None, dtype: torch.dtype | None = None
) -> HybridLM:
    """The model in a folder of config.json and weights (see hf_checkpoint.find_hf_folder for names), on the CPU, in eval mode.

    dtype: of the parameters and of activations in the kernels; default fp32. The recurrence's own parameters (A_log,
    D, dt_bias) stay in fp32 at least. platform: as for HybridLM.
    Raises UnsupportedModelError for a model that llmtrain cannot express, ValueError for weights that do not fit it.
    """
    published = open_hf_checkpoint(folder)
    return model_from_tensors(published.config, published, platform, dtype)


def model_from_tensors(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    platform: Platform | None = None,
    dtype: torch.dtype | None = None,
) -> HybridLM:
    """Build a model like load_hf, from the content of config.json and the tensors by name."""
    dtype = dtype or torch.float32
    family = family_of_hf_config(config)
    model_config = ModelConfig.model_validate(family.read_config(config))
    weights = family.weights(model_config)
    check_tensors(tensors, weights)
    with torch.device("meta"):
        model = HybridLM(model_config, platform=platform, dtype=dtype).cast(dtype)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    parameters = {**dict(model.named_parameters()), **persistent_buffers(model)}
    with torch.no_grad():
        for weight in weights:
            try:
                joined = weight.join(tensors)
            except ValueError as error:
                place = f"{tensors.folder}: " if isinstance(tensors, HFCheckpoint) else ""
                raise UserError(f"{place}{error}") from error
            parameters.pop(weight.ours).copy_(joined)
    assert not parameters, f"no published tensor for {', '.join(parameters)}"
    return model.eval()


def check_tensors(tensors: Mapping[str, Tensor], weights: Sequence[Weight]) -> None:
    """Check that tensors and weights correspond, from the headers alone when `tensors` is an HFCheckpoint.

    Raises UserError with all errors, by file and tensor: missing, of another shape, quantised, or superfluous (it would be
    lost).
    """
    wrong = []
    for weight in weights:
        names = [name for part in weight.parts for name in part.names if name in tensors]
        shapes = {name: _header(tensors, name)[0] for name in names}
        for part in weight.parts:
            expected = weight.shape_in_file(part, shapes)
            present = [name for name in part.names if name in tensors]
            if not present:
                wrong.append(f"tensor {part.name} {list(part.shape)} is missing")
            for name in present:
                shape, dtype = _header(tensors, name)
                if shape != expected:
                    wrong.append(f"{_where(tensors, name)} has shape {list(shape)}, expected {list(expected)}")
                if dtype not in _READABLE:
                    wrong.append(f"{_where(tensors, name)} is stored as {dtype}; only plain floating point is read")
    known = {name for weight in weights for part in weight.parts for name in part.names}
    lost = sorted(name for name in tensors if name not in known and not _HARMLESS.search(name))
    wrong += [
        f"{_where(tensors, name)} has no place in this model, by its config.json, and would be lost" for name in lost
    ]
    if wrong:
        place = f" in {tensors.folder}" if isinstance(tensors, HFCheckpoint) else ""
        raise UserError(f"the weights{place} do not fit config.json:\n  " + first_few(wrong, 20, "\n  "))


def _header(tensors: Mapping[str, Tensor], name: str) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(tensors, HFCheckpoint):
        return tensors.shape(name), tensors.dtype(name)
    return tuple(tensors[name].shape), tensors[name].dtype


def _where(tensors: Mapping[str, Tensor], name: str) -> str:
    return f"{tensors.file(name).name}: tensor {name}" if isinstance(tensors, HFCheckpoint) else f"tensor {name}"
