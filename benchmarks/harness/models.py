"""Models with weights as at the start of training, their tensors as they are published, and the time of what they do."""

import time

import torch

from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import family_for_model
from llmtrain.models.hybrid import HybridLM


def random_model(config: ModelConfig, dtype: torch.dtype) -> HybridLM:
    """Model on the GPU if there is one."""
    with torch.device("meta"):
        model = HybridLM(config, dtype=dtype)
    model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    model.init_weights(0)
    return model


def published_tensors(model: HybridLM) -> dict[str, torch.Tensor]:
    """Weights by the names of the class in transformers."""
    parameters = dict(model.named_parameters())
    found = [
        weight.split(parameters[weight.ours].detach())
        for weight in family_for_model(model.config).weights(model.config)
    ]
    return {name: tensor for tensors in found for name, tensor in tensors.items()}


def clock() -> float:
    """Seconds, when the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
