"""Models with weights as at the start of training, their tensors as they are published, and the time of what they do."""

import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from llmtrain.data.tokenize.tokenizer import TextTokenizer
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


def export_random(
    config: ModelConfig, folder: Path, dtype: torch.dtype, tokenizer: TextTokenizer | None = None
) -> None:
    """Write a folder in Hugging Face format with weights as at the start of training."""
    model, family = random_model(config, torch.float32), family_for_model(config)
    tensors = {name: tensor.to(dtype).cpu().contiguous() for name, tensor in published_tensors(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {"bos_token_id": None, "eos_token_id": tokenizer and tokenizer.eod_id, "pad_token_id": None}
    content = family.write_config(config) | {"dtype": str(dtype).removeprefix("torch.")} | ids
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for those who read it


def clock() -> float:
    """Seconds, when the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
