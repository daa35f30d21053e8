"""Initial weights: the same for any sharding, distributed as their rules say, and complete."""

import hashlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmtrain.kernels import platform
from llmtrain.models import init
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM


def build(**config) -> HybridLM:
    blocks = {
        "m": {
            "type": "mamba2",
            "d_state": 16,
            "head_dim": 8,
            "dt_min": 0.01,
            "dt_max": 0.2,
            "a_init_range": (2.0, 9.0),
        },
        "a": {"type": "attention", "n_heads": 4, "qkv_bias": True, "mlp": {"type": "swiglu", "d_ff": 128}},
    }
    settings = {"vocab_size": 200, "d_model": 64, "blocks": blocks, "layers": "m a", **config}
    return HybridLM(ModelConfig.model_validate(settings), platform=platform.cpu())


def initialised(seed: int = 3, **config) -> dict[str, torch.Tensor]:
    model = build(**config)
    model.init_weights(seed)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_seed_decides():
    a, b, c = initialised(3), initialised(3), initialised(4)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embed.weight"], c["embed.weight"])


def test_values_do_not_change_between_releases():
    """A checkpoint's ancestry is its seed: these numbers must stay."""
    weight = torch.empty(2, 2, dtype=torch.float64)
    init.fill(weight, init.uniform(0.0, 1.0), "embed.weight", seed=17)
    expected = [splitmix64_uniform("17/embed.weight", i) for i in range(4)]
    assert weight.flatten().tolist() == expected


def splitmix64_uniform(name: str, i: int) -> float:
    """SplitMix64 in Python's unbounded integers."""
    mask = (1 << 64) - 1
    state = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    z = ((state + i + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return ((z >> 12) + 0.5) * 2.0**-52


def test_weights_have_the_scale_their_rules_say():
    w = initialised()
    assert w["embed.weight"].std() == pytest.approx(0.02, rel=0.03)
    assert abs(w["embed.weight"].mean()) < 3 * 0.02 / math.sqrt(w["embed.weight"].numel())
    scaled = ["blocks.1.mixer.wo.weight", "blocks.1.mlp.w_out.weight", "blocks.0.mixer.out_proj.weight"]
    for name in scaled:
        assert w[name].std() == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.05), name
    shared = {"type": "shared_attention", "n_heads": 4, "mlp": {"type": "gelu", "d_ff": 128}}
    mamba = {"type": "mamba2", "d_state": 16, "head_dim": 8}
    fed = initialised(blocks={"m": mamba, "s": shared}, layers="m s+m")
    assert fed["blocks.1.shared_input.linear.weight"].std() == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.05)
    unscaled = initialised(init={"std": 0.05, "scale_residual": False})
    assert unscaled["blocks.1.mixer.wo.weight"].std() == pytest.approx(0.05, rel=0.05)
    for name, value in w.items():
        if name.endswith("norm.weight") or name.endswith(".D"):
            assert (value == 1).all(), name
        if name.endswith("wqkv.bias"):
            assert (value == 0).all(), name


def test_normal_draws_are_normal():
    values = torch.empty(200_000, dtype=torch.float64)
    init.fill(values, init.normal(1.0), "x", seed=0)
    z = values.sort().values
    uniform = torch.special.ndtr(z)
    # Kolmogorov-Smirnov: beyond 1.63 / sqrt(n) with probability 1 %.
    distance = (uniform - (torch.arange(len(z)) + 0.5) / len(z)).abs().max()
    assert distance < 1.63 / math.sqrt(len(z))
    assert abs((values[1:] * values[:-1]).mean()) < 0.01


def test_mamba_parameters_follow_their_ranges():
    w = initialised()
    dt = F.softplus(w["blocks.0.mixer.ssm.dt_bias"])
    assert (dt >= 0.0099).all() and (dt <= 0.201).all() and dt.max() > 2 * dt.min()
    a = w["blocks.0.mixer.ssm.A_log"].exp()
    assert (a >= 1.999).all() and (a <= 9.001).all() and a.max() > 1.5 * a.min()
    bound = 1 / math.sqrt(4)
    conv = w["blocks.0.mixer.conv.weight"]
    assert conv.abs().max() <= bound and conv.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_kaiming():
    """sqrt(2 / inputs), LLM Foundry's default; embeddings sum over d_model channels."""
    w = initialised(init={"type": "kaiming"})
    for name, weight in w.items():
        if name.endswith(("embed.weight", "wqkv.weight", "w_in.weight", "in_proj.weight")):
            assert weight.std() == pytest.approx(math.sqrt(2 / weight.shape[1]), rel=0.05), name
        elif name.endswith(("wo.weight", "w_out.weight")):
            assert weight.std() == pytest.approx(math.sqrt(2 / weight.shape[1]) / math.sqrt(2 * 2), rel=0.05), name


def test_names_ignore_wrappers():
    """Activation checkpointing and torch.compile put prefixes into names; weights must not depend on them."""
    assert init.clean_name("blocks.0._checkpoint_wrapped_module._orig_mod.mixer.D") == "blocks.0.mixer.D"
    plain, wrapped = initialised(), build()
    for i, block in enumerate(wrapped.blocks):
        wrapped.blocks[i] = checkpoint_wrapper(block)
    wrapped.init_weights(3)
    for name, parameter in wrapped.named_parameters():
        assert torch.equal(parameter, plain[init.clean_name(name)]), name


def test_a_parameter_without_a_rule_is_a_bug():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.extra = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))

        def init_rules(self, scale):
            return {"weight": init.constant(1.0)}

    with pytest.raises(AssertionError, match="extra"):
        init.init_weights(Odd(), init.InitScale(1.0, 1.0), 0)


def test_meta_parameters_are_refused():
    with torch.device("meta"):
        model = build()
    with pytest.raises(AssertionError, match="to_empty"):
        model.init_weights(0)


def test_slices_do_not_show(monkeypatch):
    whole = initialised()
    monkeypatch.setattr(init, "_SLICE", 100)
    sliced = initialised()
    assert all(torch.equal(whole[name], sliced[name]) for name in whole)


@pytest.fixture
def fake_ranks():
    """One process that can play any rank of a process group that never communicates."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int, world: int):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield start
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "mesh_shape, placements, shape",
    [
        ((4,), [Shard(0)], (8, 6)),
        ((4,), [Shard(0)], (10, 3)),  # 3, 3, 3 and 1 rows
        ((4,), [Shard(0)], (3,)),  # the last rank holds nothing
        ((4,), [Replicate()], (5, 2)),
        ((2, 2), [Replicate(), Shard(0)], (7, 3)),  # hybrid sharding
        ((4,), [Shard(1)], (3, 10)),
    ],
)
def test_every_rank_computes_its_part_of_the_same_tensor(fake_ranks, mesh_shape, placements, shape):
    whole = torch.empty(shape)
    init.fill(whole, init.normal(1.0), "w", seed=5)
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank in range(4):
        fake_ranks(rank, 4)
        mesh = init_device_mesh("cpu", mesh_shape)
        size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        local = torch.full(size, torch.nan)
        sharded = DTensor.from_local(local, mesh, placements, shape=torch.Size(shape), stride=whole.stride())
        init.fill(sharded, init.normal(1.0), "w", seed=5)
        where = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
        assert torch.equal(local, whole[where])
        seen[where] += 1
    assert (seen > 0).all()
