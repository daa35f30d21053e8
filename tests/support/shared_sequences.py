"""Losses and gradients of a model whose sequences ranks share, beside those of one rank, in fp64."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmtrain.distributed.world import world_from_environment
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.init import clean_name
from llmtrain.models.loss import IGNORE
from llmtrain.schema.training import TrainConfig
from llmtrain.train import parallel
from llmtrain.train.composer_model import own_part

VOCAB = 61


@dataclass(frozen=True)
class Case:
    """One forward and backward pass. samples: per context-parallel group; borders: share of tokens that begin a document, or
    `everywhere`: row i has a border before token i; None: one document per sequence."""

    model: dict[str, Any]
    seq_len: int
    samples: int = 2
    borders: float | str | None = None
    train: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def model_config(self) -> ModelConfig:
        settings = {"vocab_size": VOCAB, "d_model": 16, "max_seq_len": self.seq_len, **self.model}
        return ModelConfig.model_validate_json(json.dumps(settings))

    def train_config(self) -> TrainConfig:
        settings = {"duration": "1 steps", "global_batch_size": 8, "microbatch_size": 1, "compile": "off", **self.train}
        return TrainConfig.model_validate_json(json.dumps(settings))


def batch_of(case: Case, groups: int) -> dict[str, torch.Tensor]:
    """The samples of all groups: [groups * samples, seq_len]. A third of the labels is missing, and all of a row's, perhaps."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (groups * case.samples, case.seq_len)
    input_ids = torch.randint(0, VOCAB, shape, generator=generator)
    labels = F.pad(input_ids[:, 1:], (0, 1), value=IGNORE)
    labels[torch.rand(shape, generator=generator) < 0.3] = IGNORE
    batch = {"input_ids": input_ids, "labels": labels, "text_bytes": torch.zeros(shape[0])}
    if case.borders is not None:
        begins = torch.rand(shape, generator=generator) < (case.borders if isinstance(case.borders, float) else 0)
        if case.borders == "everywhere":
            begins = torch.eye(*shape, dtype=torch.bool)
        batch["document_ids"] = begins.long().cumsum(1).to(torch.int32)
    return batch


def differences(cases: list[Case]) -> list[tuple[float, float, str]]:
    """A job of every rank: per case the relative difference of the loss, the largest of a gradient, and its parameter."""
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(parallel, "init_device_mesh", _mesh):
            return [_difference(case) for case in cases]
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def _mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
    """One mesh for all cases that are alike: gloo polls in every process group as long as the process lives."""
    return init_device_mesh(*args, **kwargs)


def _difference(case: Case) -> tuple[float, float, str]:
    train = case.train_config()
    world = world_from_environment().split(train.parallel.context)
    documents = case.borders is not None
    batch = batch_of(case, world.data_size)

    with torch.device("meta"):
        shared = HybridLM(case.model_config(), dtype=torch.float64, documents=documents)
    causal_lm = CausalLM(shared, train.loss)
    segments = parallel.parallelize(causal_lm, train, world, torch.device("cpu"))
    shared.init_weights(case.seed)
    rows = slice(world.data_rank * case.samples, (world.data_rank + 1) * case.samples)
    part = {key: value[rows] for key, value in batch.items()}
    part = part if segments is None else own_part(part, segments)
    out = causal_lm.loss(part["input_ids"], part["labels"], part.get("document_ids"), segments)
    # As Composer weighs them: FSDP2 averages the ranks' gradients.
    labelled = int((batch["labels"] != IGNORE).sum())
    (out.loss * out.n_tokens * (world.size / labelled)).backward()
    loss = out.loss.detach() * out.n_tokens / labelled
    dist.all_reduce(loss)
    gradients = {
        clean_name(name): parameter.grad.full_tensor()  # type: ignore[union-attr]
        for name, parameter in shared.named_parameters()
        if parameter.grad is not None
    }
    if not world.is_main:
        return 0.0, 0.0, ""

    alone = HybridLM(case.model_config(), dtype=torch.float64, documents=documents)
    alone.init_weights(case.seed)
    expected = CausalLM(alone, train.loss).loss(batch["input_ids"], batch["labels"], batch.get("document_ids"))
    expected.loss.backward()
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys()
    # The gradient of some biases is zero, but for rounding.
    floor = 1e-6 * max(float(gradient.norm()) for gradient in wanted.values())
    apart = {name: float((gradients[name] - g).norm()) / max(float(g.norm()), floor) for name, g in wanted.items()}
    worst = max(apart, key=lambda name: apart[name])
    return abs(float(loss / expected.loss) - 1), apart[worst], worst


def random_case(seed: int, world_size: int) -> Case:
    """A model, a mesh of so many ranks that share sequences, and a batch, by the seed."""
    rng = random.Random(seed)
    context = rng.choice([size for size in range(2, world_size + 1) if world_size % size == 0])
    sharding: dict[str, Any] = {"strategy": rng.choice(["full", "grad_op", "hybrid"])}
    if sharding["strategy"] == "hybrid":
        sizes = [size for size in range(context, world_size + 1, context) if world_size % size == 0]
        sharding["shard_size"] = rng.choice(sizes)
    checkpointing = rng.choice([{"type": "none"}, {"type": "full"}, {"type": "selective"}, {"type": "every_k", "k": 2}])
    return Case(
        model=_random_model(rng),
        seq_len=rng.randint(2 * context, 6 * context + 20),
        samples=rng.randint(1, 3),
        borders=rng.choice([None, 0.05, 0.3]),
        train={
            "parallel": {"context": context},
            "sharding": sharding,
            "activation_checkpointing": checkpointing,
            "loss": {"type": rng.choice(["plain", "chunked"]), "z_loss": rng.choice([0.0, 1e-3]), "chunk_tokens": 16},
        },
        seed=seed,
    )


def _random_model(rng: random.Random) -> dict[str, Any]:
    positions = [{"type": "none"}, {"type": "alibi"}, {"type": "rotary"}, {"type": "rotary", "fraction": 0.5}]
    mlp = {"type": rng.choice(["gelu", "swiglu"]), "d_ff": 24}

    def attention() -> dict[str, Any]:
        return {
            "n_heads": 4,
            "n_kv_heads": rng.choice([None, 1, 2]),
            "head_dim": 4,
            "position": rng.choice(positions),
            "sliding_window": rng.choice([None, None, 1, 3, 9, 40]),
            "softcap": rng.choice([None, None, 5.0]),
            "qk_norm": rng.choice(["none", "head", "full"]),
        }

    heads = rng.choice([8, 16])
    blocks = {
        "a": {"type": "attention", "mlp": mlp, **attention()},
        "w": {"type": "attention", "parallel": True, "mlp": mlp, **attention()},
        "m": {
            "type": "mamba2",
            "d_state": rng.choice([4, 8]),
            "head_dim": 32 // heads,
            "n_groups": rng.choice([1, 2, 8]),
            "d_conv": rng.randint(1, 5),
            "chunk_size": rng.choice([4, 16]),
            "dt_limit": rng.choice([None, [0.01, 0.5]]),
            "norm_before_gate": rng.choice([True, False]),
        },
        "s": {"type": "shared_attention", "n_shared": 2, "adapter_rank": 2, "mlp": mlp, **attention()},
    }
    layers = rng.choice(["a w", "m m", "m s+m m s+m", "a m w", "s+m w s+m"])
    used = {name: block for name, block in blocks.items() if name in layers}
    return {
        "blocks": used,
        "layers": layers,
        "positions": rng.choice(["none", "learned"]),
        "tie_embeddings": rng.choice([True, False]),
        "norm": {"type": rng.choice(["rmsnorm", "layernorm"])},
    }
