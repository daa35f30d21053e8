"""What modules say they cost, against PyTorch's own counter; and the published parameter counts."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmtrain.flops.count import count_parameters, training_flops_per_token
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.costs import Flops, Work
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.mixers.compressed_attention import CompressedAttention
from llmtrain.models.mixers.gated_deltanet import DeltaRule
from llmtrain.models.mixers.kimi_delta import KimiDelta
from llmtrain.models.mixers.mamba2 import Mamba2
from llmtrain.models.mixers.mamba3 import Mamba3
from llmtrain.models.parameters import parameter_info
from llmtrain.plan.parameters import components

D, V, T, BATCH = 64, 128, 96, 2
ATTENTION = {"type": "attention", "n_heads": 4, "backend": "reference"}
BLOCKS = {
    "mha": ATTENTION,
    "gqa": ATTENTION | {"n_kv_heads": 2, "head_dim": 32},
    "gelu": ATTENTION | {"mlp": {"type": "gelu", "d_ff": 256}},
    "swiglu": ATTENTION | {"mlp": {"type": "swiglu", "d_ff": 160}},
    "geglu": ATTENTION | {"mlp": {"type": "geglu", "d_ff": 160}},
    "relu2 beside attention": ATTENTION | {"mlp": {"type": "relu2", "d_ff": 256}, "parallel": True},
    "geglu by tanh, norms on both sides": ATTENTION
    | {"mlp": {"type": "geglu_tanh", "d_ff": 160}, "norm": {"type": "rmsnorm", "place": "both"}},
    "mamba2": {"type": "mamba2", "d_state": 32, "head_dim": 32, "chunk_size": 32},
    "mamba2-groups-ragged": {"type": "mamba2", "d_state": 16, "head_dim": 16, "n_groups": 2, "chunk_size": 40},
    "mamba3-groups-ragged": {"type": "mamba3", "d_state": 16, "head_dim": 16, "n_groups": 2, "chunk_size": 40},
    "gated attention": ATTENTION | {"n_kv_heads": 2, "output_gate": True},
    "latent attention": {
        **{"type": "latent_attention", "n_heads": 4, "kv_rank": 24, "q_rank": 20, "nope_dim": 8, "rope_dim": 8},
        **{"value_dim": 12, "position": {"type": "rotary"}, "backend": "reference"},
    },
    "gated deltanet": {"type": "gated_deltanet", "n_heads": 4, "key_head_dim": 16, "value_head_dim": 32},
    "gated deltanet-groups": {
        "type": "gated_deltanet",
        "n_heads": 6,
        "n_key_heads": 2,
        "key_head_dim": 8,
        "value_head_dim": 24,
    },
    "compressed attention": ATTENTION | {"type": "compressed_attention", "n_kv_heads": 2, "d_head_conv": 3},
    "kimi delta": {"type": "kimi_delta", "n_heads": 4, "key_head_dim": 8, "value_head_dim": 24, "gate_rank": 12},
}
SHARED = {
    "type": "shared_attention",
    "n_heads": 4,
    "mlp": {"type": "geglu", "d_ff": 160},
    "adapter_rank": 8,
    "attn_adapter_rank": 4,
    "backend": "reference",
}


def build(blocks: dict, layers: str, device: str = "meta", **config) -> HybridLM:
    settings = {"vocab_size": V, "d_model": D, "blocks": blocks, "layers": layers, **config}
    with torch.device(device):
        return HybridLM(ModelConfig.model_validate(settings), platform=platform.cpu())


def counted(run) -> int:
    """FLOP that PyTorch counts while `run` runs.

    PyTorch 2.11 counts the weight gradient of a grouped convolution as if it had one group (it passes no
    groups on to conv_flop_count), so the backward of convolutions is taken as twice their forward here.
    """
    aten = torch.ops.aten

    def solve(system, given, **how) -> int:
        """A triangular system of all tokens of a chunk as the product with its inverse, of which half are zeros."""
        return 2 * math.prod(system) * given[-1]

    with FlopCounterMode(display=False, custom_mapping={aten.linalg_solve_triangular: solve}) as counter:
        run()
    by_operation = counter.get_flop_counts()["Global"]
    if aten.convolution_backward in by_operation:
        by_operation[aten.convolution_backward] = 2 * by_operation[aten.convolution]
    return sum(by_operation.values())


def executed(model: HybridLM) -> int:
    """FLOP of one sequence on the reference backends: as the modules say, but scans as the references compute them, in
    whole chunk-by-chunk squares, with padding, and with running sums and the passing of states as matrix products."""
    total = model.flops(T).forward.total
    for block in model.blocks:
        if isinstance(block.mixer, Mamba2):
            spec = block.mixer.spec
            count, size = spec.chunks(T)
            tokens, state = count * size, spec.n_heads * spec.head_dim * spec.d_state
            squares = 2 * tokens * size * (spec.n_groups * spec.d_state + spec.n_heads * spec.head_dim)
            running_sums = 2 * spec.n_heads * (tokens * size + count * count)
            total += squares + 4 * tokens * state + 2 * (count + 1) ** 2 * state + running_sums - spec.flops(T)
        if isinstance(block.mixer, Mamba3):
            section, heads = block.mixer.block, block.mixer.n_heads
            size = section.chunk_size
            total += 2 * -(-T // size) * size * size * heads * (section.d_state + section.head_dim)
            total += 4 * (-T % size) * heads * section.d_state * section.head_dim  # of padding
        if isinstance(block.mixer, CompressedAttention):
            total -= 2 * T * block.mixer.conv.weight.numel()  # number by number, where the counter sees none
        if isinstance(block.mixer, DeltaRule):
            spec = block.mixer.spec
            count, size = spec.chunks(T)
            tokens, heads, k, v = count * size, spec.n_heads, spec.key_head_dim, spec.value_head_dim
            # By channel, the products of two tokens are those of halves, of halves of halves and so on.
            between = heads * k * (size - 1) if isinstance(block.mixer, KimiDelta) else 2 * size * spec.n_key_heads * k
            squares = 2 * tokens * (between + size * heads * (k + 2 * v))
            transitions = 2 * heads * k * k * (tokens + count * v)
            total += squares + transitions + 3 * 2 * tokens * heads * k * v - spec.flops(T)
    return total


@pytest.mark.parametrize("name, tied", [*((name, True) for name in [*BLOCKS, "shared"]), ("shared", False)])
def test_modules_agree_with_the_flop_counter(name, tied):
    """On the reference backends, forward and forward + backward, within 1 %; the counter sees shapes only."""
    if name == "shared":
        model = build({"m": BLOCKS["mamba2"], "s": SHARED}, "s+m m s+m", tie_embeddings=tied)
    else:
        model = build({"x": BLOCKS[name]}, "x*2", tie_embeddings=tied)
    ids = torch.zeros(BATCH, T, dtype=torch.long, device="meta")
    said = BATCH * executed(model)
    assert counted(lambda: CausalLM(model).logits(ids)) == pytest.approx(said, rel=0.01)
    assert counted(lambda: CausalLM(model).loss(ids, ids).loss.backward()) == pytest.approx(3 * said, rel=0.01)


@pytest.mark.parametrize("trained", ["blocks.2.norm", "blocks.1.norm", "blocks.0.norm", "norm.", "embed."])
@pytest.mark.parametrize("tied", [True, False])
def test_frozen_weights_have_no_gradient_and_layers_below_the_trained_ones_none_at_all(trained, tied):
    """trained: the beginning of the names of what is. Of the first trained layer it is the norm, so that all of it is behind."""
    model = build({"a": BLOCKS["swiglu"], "m": BLOCKS["mamba2"]}, "a m a", tie_embeddings=tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    ids = torch.zeros(BATCH, T, dtype=torch.long, device="meta")
    forward, causal_lm = BATCH * executed(model), CausalLM(model)
    flops = model.flops(T)
    beside = (
        forward - BATCH * flops.forward.total
    )  # of the scan, whose reference computes more; in the backward pass twice
    behind = 0 if trained in ("blocks.2.norm", "norm.") else 2
    said = BATCH * flops.total + (1 + behind) * beside
    assert counted(lambda: causal_lm.loss(ids, ids).loss.backward()) == pytest.approx(said, rel=0.01)
    infos = parameter_info(model)
    assert count_parameters(model).trained == sum(p.numel() for p, info in infos.items() if info.trainable)
    frozen = {kind: getattr(flops.grad_weight, kind) for kind in ("projection", "convolution", "scan", "attention")}
    assert frozen == {"projection": 0, "convolution": 0, "scan": 0, "attention": 0}
    foundry = training_flops_per_token(model, T)["foundry"]
    counts, work = count_parameters(model), flops.forward
    assert foundry == 4 * counts.active + 2 * counts.trained + 3 * (work.attention + work.scan) / T


def test_the_head_alone():
    model = build({"x": ATTENTION}, "x")
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.linear(torch.empty(BATCH, T, D, device="meta"), model.head_weight)
    assert counter.get_total_flops() == BATCH * model.flops(T).forward.head


def test_causal_counts_half_the_square_and_the_same_projections():
    model = build({"x": ATTENTION}, "x*3")
    full, causal = model.flops(T).forward, model.flops(T, causal=True).forward
    assert full.attention == 3 * 4 * T * T * D
    assert causal.attention == 3 * 4 * (T * (T + 1) // 2) * D
    assert (full.projection, full.head) == (causal.projection, causal.head)


def test_a_scan_costs_what_the_recurrence_does():
    """Per token, 2 FLOP for every element of the state that x B^T goes into, and 2 for every one that C reads."""
    (n_heads, head_dim, d_state) = (2 * D // 32, 32, 32)
    model = build({"x": BLOCKS["mamba2"]}, "x*3")
    assert (
        model.flops(T).forward.scan
        == model.flops(T, causal=True).forward.scan
        == 3 * T * 4 * n_heads * head_dim * d_state
    )
    flops = training_flops_per_token(model, T)
    assert flops["foundry"] == 6 * count_parameters(model).active + 12 * 3 * (2 * D) * d_state


def test_a_gated_delta_rule_costs_what_the_recurrence_does():
    """Per token and head 2 FLOP for every element of the state, three times: S k, the outer product, S q. In LLM Foundry's
    convention, backward pass included: 18 beside 6 per parameter."""
    model = build({"x": BLOCKS["gated deltanet-groups"]}, "x*3")
    assert model.flops(T).forward.scan == model.flops(T, causal=True).forward.scan == 3 * T * 6 * 6 * 8 * 24
    assert training_flops_per_token(model, T)["foundry"] == 6 * count_parameters(model).active + 3 * 18 * 6 * 8 * 24


def test_no_setting_of_the_scan_changes_a_count():
    """Per token a scan costs the same whatever the chunks and however long the sequence."""

    def scan(seq_len: int, **changed) -> dict[str, float]:
        return training_flops_per_token(build({"x": BLOCKS["mamba2"] | changed}, "x"), seq_len)

    first = scan(2048)
    assert all(scan(2048, chunk_size=size) == first for size in (16, 64, 256, 1024, 4096))
    assert scan(2048, backend="reference") == first == pytest.approx(scan(131_072, chunk_size=64))


def test_flops_add_by_kind():
    total = Work(projection=1, scan=2) + Work(scan=3, convolution=4, head=5)
    assert total == Work(projection=1, scan=5, convolution=4, head=5)
    assert total.total == 15
    both = Flops.with_weight(total, trained=False) + Flops.between_activations(Work(attention=7))
    assert (both.forward.total, both.grad_input.total, both.grad_weight.total) == (22, 29, 0)


def mpt(d_model: int, n_heads: int, n_layers: int) -> HybridLM:
    """As in LLM Foundry's benchmarks: its default is a bias everywhere, which the published counts include."""
    block = {
        "type": "attention",
        "n_heads": n_heads,
        "qkv_bias": True,
        "out_bias": True,
        "mlp": {"type": "gelu", "d_ff": 4 * d_model, "bias": True},
    }
    return build(
        {"attn": block},
        f"attn*{n_layers}",
        vocab_size=50368,
        d_model=d_model,
        max_seq_len=2048,
        positions="learned",
        norm={"type": "layernorm", "bias": True},
    )


@pytest.mark.parametrize(
    "d_model, n_heads, n_layers, parameters",
    [(2048, 16, 24, 1_315_950_592), (4096, 32, 32, 6_658_859_008), (7168, 56, 48, 29_975_214_080)],
)
def test_mpt_has_as_many_parameters_as_llm_foundry_states(d_model, n_heads, n_layers, parameters):
    model = mpt(d_model, n_heads, n_layers)
    count = count_parameters(model)
    assert count.total == count.active == sum(part.parameters for part in components(model)) == parameters


def test_the_foundry_convention_is_llm_foundrys_formula():
    """6 N + 12 * n_layers * d_model * seq_len, with N as LLM Foundry counts it."""
    flops = training_flops_per_token(mpt(2048, 16, 24), seq_len=2048)
    assert flops["foundry"] == 6 * 1_315_950_592 + 12 * 24 * 2048 * 2048
    assert flops["causal"] < flops["foundry"]


def test_zamba2_1_2b_has_its_published_parameters():
    """38 layers, shared block at 5, 11, ..., 35, with rotary positions and QKV adapters (transformers' zamba2)."""
    blocks = {
        "m": {"type": "mamba2", "d_state": 128, "head_dim": 64, "dt_limit": (0.001, None)},
        "s": {
            "type": "shared_attention",
            "n_heads": 32,
            "mlp": {"type": "geglu", "d_ff": 8192},
            "adapter_rank": 128,
            "attn_adapter_rank": 128,
            "position": {"type": "rotary"},
        },
    }
    model = build(blocks, "m*5 (s+m m*5)*5 s+m m*2", vocab_size=32000, d_model=2048, max_seq_len=4096)
    assert [i for i, block in enumerate(model.blocks) if block.shared_input is not None] == list(range(5, 36, 6))
    count = count_parameters(model)
    assert count.total == 1_215_064_704
    assert count.active == count.total + 5 * sum(parameter.numel() for parameter in model.shared.parameters())


def test_shared_blocks_cost_flops_at_every_use():
    once = build({"m": BLOCKS["mamba2"], "s": SHARED}, "s+m m").flops(T).forward
    twice = build({"m": BLOCKS["mamba2"], "s": SHARED}, "s+m s+m").flops(T).forward
    assert twice.attention == 2 * once.attention
