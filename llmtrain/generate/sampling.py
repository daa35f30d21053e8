"""Sampling from a HybridLM, one full forward pass per token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint import store
from llmtrain.data.tokenizer import TextTokenizer, load_tokenizer
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM


def load_model(path: Path) -> tuple[HybridLM, TextTokenizer]:
    """The model and tokenizer of a run's folder (its newest complete checkpoint) or of one checkpoint.

    Raises ValueError when there is no checkpoint, or its run's tokenizer is gone.
    """
    if (path / manifests.NAME).exists():
        folder, manifest = path, manifests.read(path)
    else:
        found = manifests.latest(path / "checkpoints", warn=print) if path.is_dir() else None
        if found is None:
            raise ValueError(
                f"{path} holds no complete checkpoint; give a run's folder (runs/NAME) or RUN/checkpoints/step-N"
            )
        folder, manifest = found
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = HybridLM(ModelConfig.model_validate_json(json.dumps(manifest.config["model"])))
    model.to_empty(device=device)
    store.load(folder, model)
    return model.eval(), load_tokenizer(tokenizer_path(manifest.config["data"]))


def tokenizer_path(data: dict) -> str:
    """Where the shards of a run (its config's `data` section) keep their tokenizer. Raises ValueError if nowhere."""
    prepare, train = data["prepare"], data["train"]
    candidates = [prepare["out"]] if prepare else []
    candidates += [stream["local"] for stream in train["streams"].values()] if train else []
    for candidate in candidates:
        if (Path(candidate) / "tokenizer").is_dir():
            return str(Path(candidate) / "tokenizer")
    raise ValueError(f"no tokenizer/ folder beside the run's shards ({', '.join(candidates)})")


@torch.no_grad()
def sample(
    model: HybridLM,
    ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_id: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yields new token ids. temperature 0 is greedy. Reads at most the last max_seq_len tokens."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(ids)
    for _ in range(max_new_tokens):
        context = torch.tensor([ids[-model.config.max_seq_len :]], device=device)
        logits = model(context)[0, -1].float().cpu()
        token = int(_choose(logits, temperature, top_k, generator))
        if token == stop_id:
            return
        ids.append(token)
        yield token


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax()
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
