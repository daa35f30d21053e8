"""Losses and gradients of a model whose sequences or layers ranks share, beside those of one rank."""

import functools
import json
import math
import random
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmtrain.distributed.world import gloo_group, world_from_environment
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layer_part import step_sums
from llmtrain.models.loss import IGNORE
from llmtrain.objectives.next_token import NextToken
from llmtrain.schema.training import TrainConfig
from llmtrain.train import parallel
from llmtrain.train.batches import own_part
from llmtrain.train.pipeline.schedule import PipelineStep
from llmtrain.train.pipeline.stages import StagedLM, shared_gradients
from llmtrain.train.step import GradientSync
from tests.support.whole import whole_tensors

VOCAB = 48
_SIZES = {"vocab_size": VOCAB, "d_model": 16, "max_seq_len": 64}


@dataclass(frozen=True)
class Case:
    """One forward and backward pass. samples: per context-parallel group; borders: share of tokens that begin a document, or
    `everywhere`: row i has a border before token i; None: one document per sequence. dtype: that the ranks compute in; the one
    rank computes in fp64. gpu: each rank has a GPU."""

    model: dict[str, Any]
    seq_len: int
    samples: int = 2
    borders: float | str | None = None
    train: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    dtype: str = "float64"
    gpu: bool = False

    def model_config(self) -> ModelConfig:
        settings = {**_SIZES, "max_seq_len": self.seq_len, **self.model}
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
    labels[0, 0] = input_ids[0, 1]
    batch = {"input_ids": input_ids, "labels": labels, "text_bytes": torch.zeros(shape[0])}
    if case.borders is not None:
        begins = torch.rand(shape, generator=generator) < (case.borders if isinstance(case.borders, float) else 0)
        if case.borders == "everywhere":
            begins = torch.eye(*shape, dtype=torch.bool)
        batch["document_ids"] = begins.long().cumsum(1).to(torch.int32)
    return batch


def differences(cases: list[Case]) -> list[tuple[float, float, str]]:
    """A job of every rank: per case the relative difference of the loss, the largest of a gradient, and its parameter."""
    try:
        with patch.object(parallel, "init_device_mesh", _mesh):
            return [_difference(case) for case in cases]
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def _mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
    """One mesh for all cases that are alike: gloo polls in every process group as long as the process lives."""
    return init_device_mesh(*args, **kwargs)


@functools.cache
def _gloo() -> dist.ProcessGroup:
    return gloo_group()


def _difference(case: Case) -> tuple[float, float, str]:
    train = case.train_config()
    world = world_from_environment().split(train.parallel.context, train.parallel.tensor, train.parallel.pipeline)
    documents = case.borders is not None
    torch.set_default_dtype(torch.float64)  # in which every rank draws the same batch
    batch = batch_of(case, world.data_size)

    dtype = getattr(torch, case.dtype)
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        shared = HybridLM(case.model_config(), dtype=dtype, documents=documents)
    causal_lm = (StagedLM if world.pipeline > 1 else CausalLM)(shared, train.loss)
    device = torch.device("cuda", world.local_rank) if case.gpu else torch.device("cpu")
    segments = parallel.parallelize(causal_lm, train, world, device)
    shared = causal_lm.hybrid
    shared.init_weights(case.seed)
    rows = slice(world.data_rank * case.samples, (world.data_rank + 1) * case.samples)
    part = {key: value[rows].to(device) for key, value in batch.items()}
    if isinstance(causal_lm, StagedLM):
        sync, copies = GradientSync(causal_lm, train.sharding), world.pipeline * world.tensor
        step = PipelineStep(causal_lm, NextToken(), 1, sync, _gloo(), segments, None, copies)
        result = step.forward_backward(part | {"sample_ids": torch.arange(case.samples)}, lambda *_: None)
        loss = result.losses["total"] / world.size
    else:
        part = own_part(part, segments, shared.ranks)
        out = causal_lm.loss(part["input_ids"], part["labels"], part.get("document_ids"), segments)
        # As Composer weighs them, which counts the labels of every rank: FSDP2 averages the ranks' gradients.
        labelled = int((batch["labels"] != IGNORE).sum()) * world.tensor
        (out.loss * out.n_tokens * (world.size / labelled)).backward()
        loss = out.loss.detach() * out.n_tokens / labelled
    dist.all_reduce(loss)
    norm = None
    if (divided := shared_gradients(causal_lm)) is not None:
        divided.add_up()
        norm = float(divided.clip(math.inf))
    gradients = {name: g.cpu() for name, g in whole_tensors(shared, lambda parameter: parameter.grad).items()}
    staged = isinstance(causal_lm, StagedLM)
    sums = [] if staged else [_over_ranks(total, world.size // world.tensor) for total in sums_of_step(shared)]
    if not world.is_main:
        return 0.0, 0.0, ""

    torch.set_default_dtype(torch.float64)
    alone = HybridLM(case.model_config(), platform.cpu(), dtype=torch.float64, documents=documents)
    alone.init_weights(case.seed)
    expected = CausalLM(alone, train.loss).loss(batch["input_ids"], batch["labels"], batch.get("document_ids"))
    expected.loss.backward()
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys()
    # The gradient of some biases is zero, but for rounding.
    floor = 1e-6 * max(float(gradient.norm()) for gradient in wanted.values())
    apart = {name: float((gradients[name] - g).norm()) / max(float(g.norm()), floor) for name, g in wanted.items()}
    if norm is not None:
        apart["norm"] = abs(norm / float(torch.stack([g.norm() for g in wanted.values()]).norm()) - 1)
    for i, (found, total) in enumerate(zip(sums, [] if staged else sums_of_step(alone), strict=True)):
        apart[f"sum {i} of the step"] = float((found - total).norm() / total.norm().clamp(min=1))
    worst = max(apart, key=lambda name: apart[name])
    return abs(float(loss / expected.loss) - 1), apart[worst], worst


def sums_of_step(model: HybridLM) -> list[torch.Tensor]:
    """Tokens by expert of each layer, and the losses of layers; over ranks the sum of these, and the mean of those
    (over tensor-parallel ones the sum)."""
    return [*step_sums(model), *(model.losses.terms.values() if model.losses else ())]


def _over_ranks(total: torch.Tensor, size: int) -> torch.Tensor:
    total = total.clone()
    dist.all_reduce(total)
    return (total if total.ndim else total / size).cpu()


def random_case(seed: int, world_size: int, staged: bool = False) -> Case:
    """A model, a mesh of so many ranks that share sequences or layers, and a batch, by the seed. staged: in stages too."""
    rng = random.Random(seed)
    sizes = range(1, world_size + 1)
    meshes = [(p, c, t) for p in sizes for c in sizes for t in sizes if world_size % (p * c * t) == 0]
    stages, context, tensor = rng.choice([(p, c, t) for p, c, t in meshes if (p > 1 if staged else p == 1 < c * t)])
    virtual = rng.choice([1, 2]) if staged else 1
    world_size //= stages
    sharding: dict[str, Any] = {"strategy": rng.choice(["full", "grad_op", "hybrid"])}
    if sharding["strategy"] == "hybrid":
        group = context * tensor
        sharding["shard_size"] = rng.choice(
            [size for size in range(group, world_size + 1, group) if world_size % size == 0]
        )
    checkpointing: dict[str, Any] = rng.choice(
        [{"type": "none"}, {"type": "full"}, {"type": "selective"}, {"type": "kernels"}, {"type": "every_k", "k": 2}]
    )
    if checkpointing["type"] != "selective":
        checkpointing["mlp_tokens"] = rng.choice([None, 1, 3])
    model = _random_model(rng, tensor)
    layers = ModelConfig.model_validate_json(json.dumps(_SIZES | model)).layer_list()
    model["layers"] = " ".join([model["layers"]] * math.ceil(stages * virtual / len(layers)))
    return Case(
        model=model,
        seq_len=rng.randint(2 * context, 6 * context + 20),
        samples=rng.randint(1, 3) if not staged else rng.choice(_microbatches(stages, virtual)),
        borders=rng.choice([None, 0.05, 0.3]),
        train={
            "parallel": {"context": context, "tensor": tensor, "pipeline": stages, "virtual_stages": virtual},
            "sharding": sharding,
            "activation_checkpointing": checkpointing,
            "loss": {"type": rng.choice(["plain", "chunked"]), "z_loss": rng.choice([0.0, 1e-3]), "chunk_tokens": 16},
        },
        seed=seed,
    )


def _microbatches(stages: int, virtual: int) -> list[int]:
    """Numbers of them that a schedule takes."""
    return [n for n in range(stages, stages + 4) if virtual == 1 or n % (n // stages) == 0]


def _random_model(rng: random.Random, tensor: int) -> dict[str, Any]:
    positions = [{"type": "none"}, {"type": "alibi"}, {"type": "rotary"}, {"type": "rotary", "fraction": 0.5}]
    mlp = {"type": rng.choice(["gelu", "swiglu"]), "d_ff": 24, "bias": rng.choice([True, False])}

    def groups_of(heads: int) -> int:
        """A number of groups that ranks can divide, or have several times."""
        return rng.choice([n for n in range(1, heads + 1) if heads % n == 0 and (n % tensor == 0 or tensor % n == 0)])

    def heads(most: int) -> int:
        return rng.choice([n for n in range(tensor, max(most, tensor) + 1, tensor) if n % 2 == 0 or tensor % 2])

    def attention() -> dict[str, Any]:
        n_heads = heads(6)
        return {
            "n_heads": n_heads,
            "n_kv_heads": groups_of(n_heads),
            "head_dim": 4,
            "position": rng.choice(positions),
            "sliding_window": rng.choice([None, None, 1, 3, 9, 40]),
            "softcap": rng.choice([None, None, 5.0]),
            "qk_norm": rng.choice(["none", "head", "full"]),
            "qkv_bias": rng.choice([True, False]),
            "out_bias": rng.choice([True, False]),
            "output_gate": rng.choice([True, False]),
            "sinks": rng.choice([True, False]),
        }

    def mamba() -> dict[str, Any]:
        n_heads, head_dim = heads(12), rng.choice([2, 4])
        return {
            "type": "mamba2",
            "d_state": rng.choice([4, 8]),
            "head_dim": head_dim,
            "d_inner": n_heads * head_dim,
            "n_groups": groups_of(n_heads),
            "d_conv": rng.randint(1, 5),
            "chunk_size": rng.choice([4, 16]),
            "dt_limit": rng.choice([None, [0.01, 0.5]]),
            "norm_before_gate": rng.choice([True, False]),
            "gated_norm": rng.choice([True, True, False]),
            "proj_bias": rng.choice([True, False]),
        }

    shared = {"type": "shared_attention", "n_shared": 2, "adapter_rank": 2, "mlp": mlp, **attention()}
    if not shared["output_gate"]:
        shared["attn_adapter_rank"] = rng.choice([None, 2])
    n_heads = heads(6)
    blocks = {
        "a": {"type": "attention", "mlp": mlp, **attention()},
        "w": {"type": "attention", "parallel": True, "mlp": mlp, **attention()},
        "m": mamba(),
        "p": {"type": "parallel_mixers", "mlp": mlp, "mixers": [{"type": "attention", **attention()}, mamba()]},
        "s": shared,
        "g": {
            "type": "gated_deltanet",
            "n_heads": n_heads,
            "n_key_heads": groups_of(n_heads),
            "key_head_dim": 4,
            "value_head_dim": 6,
            "d_conv": rng.randint(1, 5),
            "negative_eigenvalues": rng.choice([True, False]),
        },
        "k": {
            "type": "kimi_delta",
            "n_heads": heads(6),
            "key_head_dim": 4,
            "value_head_dim": 6,
            "d_conv": rng.randint(1, 5),
            "lower_bound": rng.choice([None, -5.0]),
        },
        "l": {
            "type": "latent_attention",
            "n_heads": heads(6),
            "q_rank": rng.choice([None, 5]),
            "kv_rank": 6,
            "nope_dim": 4,
            "rope_dim": 2,
            "value_dim": rng.choice([6, 5]),
            "position": rng.choice([{"type": "none"}, {"type": "rotary"}]),
        },
    }
    layers = [
        "a w",
        "m m",
        "m s+m m s+m",
        "a m w",
        "s+m w s+m",
        "m p",
        "g a",
        "g s+g",
        "m g w",
        "k a",
        "k w",
        "l a",
        "k l",
    ]
    chosen = rng.choice(layers)
    return {
        "blocks": {name: block for name, block in blocks.items() if name in chosen},
        "layers": chosen,
        "positions": rng.choice(["none", "learned"]),
        "tie_embeddings": rng.choice([True, False]),
        "norm": {
            "type": rng.choice(["rmsnorm", "layernorm"]),
            "place": "before" if "s" in chosen else rng.choice(["before", "both"]),
        },
    }
