"""What activation checkpointing keeps of every kind of layer, and FLOPs of what it computes again beside those that HFU counts."""

import json
from typing import Any, cast

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from llmtrain.adapt.float8 import Float8
from llmtrain.errors import UserError
from llmtrain.kernels import platform
from llmtrain.models.block import Block
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import LossConfig, ModelConfig
from llmtrain.models.costs import SavedBytes
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.sections.float8 import Float8Config
from llmtrain.models.tensor_parallel import TensorRanks
from llmtrain.schema.load import load_config
from llmtrain.schema.training import ActivationCheckpointing, TrainConfig
from llmtrain.train import parallel
from llmtrain.train.callbacks.throughput import token_cost
from tests.support import experts
from tests.support.contributing import ROOT
from tests.support.models import ATTENTION, GDN, GELU, KDA, MAMBA, MODELS, ROTARY, SHARED

TOKENS = 32
CPU = torch.device("cpu")
H200 = platform.Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30, 132)
BIASED = ATTENTION | {"qkv_bias": True, "out_bias": True, "mlp": GELU | {"bias": True}}
QWEN2 = ATTENTION | {"qkv_bias": True, "n_kv_heads": 2, "position": ROTARY}
SHAPES: dict[str, dict[str, Any]] = MODELS | {
    "q, k, v with biases": {"blocks": {"a": QWEN2}, "layers": "a*3"},
    "biases everywhere": {"norm": {"type": "layernorm", "bias": True}, "blocks": {"a": BIASED}, "layers": "a*3"},
    "biases side by side": {"blocks": {"a": BIASED | {"parallel": True}}, "layers": "a*2"},
    "equal shapes": {"blocks": {"a": BIASED | {"mlp": GELU | {"d_ff": 32}, "n_kv_heads": 1}}, "layers": "a*2"},
    "a gate of attention": {"blocks": {"a": ATTENTION | {"output_gate": True}}, "layers": "a*2"},
    "mamba2 with biases, and attention": {
        "blocks": {"m": MAMBA | {"proj_bias": True}, "a": QWEN2},
        "layers": "(m*2 a)*2",
    },
    "kimi delta rule": {"blocks": {"k": KDA}, "layers": "k*2"},
    "gated delta rule and an MLP": {"blocks": {"g": GDN | {"mlp": GELU}}, "layers": "g*2"},
    "zamba2 with biases": {
        "blocks": {"m": MAMBA, "s": SHARED | {"attn_adapter_rank": 4, "qkv_bias": True, "out_bias": True}},
        "layers": "m s+m m s+m",
    },
}
KINDS: list[dict[str, Any]] = [
    {"type": "none"},
    {"type": "full"},
    {"type": "every_k", "k": 2},
    {"type": "kernels"},
    {"type": "selective"},
    {"type": "none", "mlp_tokens": 12},
    {"type": "full", "mlp_tokens": 12},
]


def blocks_of(model: HybridLM) -> list[Block]:
    return cast("list[Block]", list(model.blocks))


def hybrid(settings: dict[str, Any]) -> HybridLM:
    config = ModelConfig.model_validate_json(
        json.dumps({"vocab_size": 96, "d_model": 32, "max_seq_len": 64} | settings)
    )
    return HybridLM(config, platform.cpu(), torch.float32)


def step(model: HybridLM) -> None:
    ids = torch.arange(TOKENS)[None]
    CausalLM(model, LossConfig(type="plain")).loss(ids, ids).loss.backward()


def products_of(model: HybridLM) -> int:
    """FLOPs of products with weights in a forward and a backward pass."""
    model.init_weights(seed=1)
    with FlopCounterMode(display=False) as counter:
        step(model.train())
    counts = {str(op).split(".")[-1]: flops for op, flops in counter.get_flop_counts()["Global"].items()}
    return counts.get("mm", 0) + counts.get("addmm", 0)


def train_config(kind: dict[str, Any], **more: Any) -> TrainConfig:
    sizes = {"duration": "1 steps", "global_batch_size": 1, "microbatch_size": 1}
    return TrainConfig.model_validate(sizes | {"activation_checkpointing": kind} | more)


def counted(model: HybridLM, config: TrainConfig) -> int:
    """FLOPs of a sequence that HFU counts beyond the model's."""
    cost = token_cost(model, config, TOKENS, CPU)
    return round((cost.hardware - cost.causal) * TOKENS)


def without_weights(model: HybridLM, checkpointing: ActivationCheckpointing) -> int:
    """Of the repeated, what is no product with a weight: attention, scans and convolutions, which the counter does not see."""
    repeated = 0
    for index, block in enumerate(blocks_of(model)):
        if checkpointing.recomputes(index):
            forward = block.flops(TOKENS, causal=True).forward
            repeated += forward.total - forward.projection
            if checkpointing.type in ("kernels", "selective"):
                mixers = [mixer for mixer in (block.mixer, block.shared_mixer) if mixer is not None]
                repeated -= sum(mixer.saved_flops(TOKENS, causal=True).total for mixer in mixers)
    return repeated


# Products inside the operator of experts are not seen by FlopCounterMode.
SEEN = [shape for shape in SHAPES if '"experts"' not in json.dumps(SHAPES[shape])]


LIKE_OTHERS = ("zamba2 with biases", "zamba2 as the 1.2B")


@pytest.mark.parametrize("shape", [pytest.param(s, marks=[pytest.mark.ci] * (s in LIKE_OTHERS)) for s in SEEN])
def test_counts_the_products_that_each_kind_repeats(shape):
    once = products_of(hybrid(SHAPES[shape]))
    for kind in KINDS:
        config, model = train_config(kind), hybrid(SHAPES[shape])
        expected = counted(model, config) - without_weights(model, config.activation_checkpointing)
        parallel.chunk_mlps(model, config.activation_checkpointing.mlp_tokens)
        parallel.checkpoint_activations(model, config.activation_checkpointing)
        assert products_of(model) - once == expected, kind


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_counts_what_compiled_layers_repeat(kind):
    """Both branches side by side are only summed, so that compiled layers repeat neither's last product."""
    model = hybrid(SHAPES["biases side by side"])
    wqkv, wo, w_in, _ = (one.linear.product(TOKENS).projection for one in blocks_of(model)[0].products())
    attention = blocks_of(model)[0].flops(TOKENS, causal=True).forward.attention
    repeated = {"full": attention + wqkv + w_in, "selective": 0}[kind]
    assert counted(model, train_config({"type": kind}, compile="on")) == 2 * repeated
    assert counted(model, train_config({"type": kind}, compile="off")) == 2 * (repeated + wo)
    in_parts = train_config({"type": "full", "mlp_tokens": 12}, compile="on")
    assert counted(model, in_parts) == 2 * (attention + wqkv + w_in)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_compiled_layer_keeps_no_gated_unit_that_it_computes_again(compiled):
    """As on GPUs, where the unit is a torch.autograd.Function; its width is that of no weight's input but one."""
    gated = ATTENTION | {"backend": "triton", "mlp": {"type": "swiglu", "d_ff": 352}}
    settings = {"vocab_size": 96, "d_model": 64, "max_seq_len": 64, "blocks": {"a": gated}, "layers": "a"}
    with torch.device("meta"):
        model = HybridLM(ModelConfig.model_validate_json(json.dumps(settings)), H200, torch.bfloat16)
    parallel.checkpoint_activations(model, ActivationCheckpointing(type="full"), compiled=compiled)
    [block], seen = model.blocks, []
    block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    block.register_forward_hook(lambda module, given, output: seen.append(output))
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    CausalLM(model).loss(ids, ids)
    kept = {tuple(one.shape) for one in seen[0].grad_fn.saved_tensors}
    assert ((1, TOKENS, 352) in kept) != compiled, "what fails without the policy"


@pytest.fixture
def kept(monkeypatch):
    """kept(model) -> [d_in, d_out] of every product with a weight in a forward pass with selective checkpointing, and whether its
    output is kept."""

    def spied(model: HybridLM) -> list[tuple[tuple[int, ...], bool]]:
        seen, make = [], parallel.create_selective_checkpoint_contexts

        def spy(policy: Any) -> Any:
            def wrapped(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
                found = policy(ctx, op, *args, **kwargs)
                if (weight := parallel._WEIGHT_OF.get(op)) is not None and not ctx.is_recompute:
                    seen.append((tuple(args[weight].shape), found.name == "MUST_SAVE"))
                return found

            return make(wrapped)

        monkeypatch.setattr(parallel, "create_selective_checkpoint_contexts", spy)
        parallel.checkpoint_activations(model, ActivationCheckpointing(type="selective"))
        model.init_weights(seed=1)
        step(model)
        return seen

    return spied


Q, GATED, DENSE = (32, 96), (32, 96), (32, 48)
LAYERS: dict[str, tuple[dict[str, Any], list[tuple[tuple[int, ...], bool]]]] = {
    "attention and a gated MLP": (ATTENTION, [(Q, True), ((32, 32), False), (GATED, True), ((48, 32), False)]),
    "the same with biases": (BIASED, [(Q, True), ((32, 32), False), (DENSE, True), ((48, 32), False)]),
    "equal shapes": (
        {"type": "attention", "n_heads": 1, "head_dim": 8, "mlp": {"type": "gelu", "d_ff": 24}},
        [((32, 24), True), ((8, 32), False), ((32, 24), True), ((24, 32), False)],
    ),
    "mamba2": (MAMBA, [((32, 152), True), ((64, 32), False)]),
    "mamba2 with biases": (MAMBA | {"proj_bias": True}, [((32, 152), True), ((64, 32), False)]),
    "gated delta rule": (GDN, [((32, 136), True), ((40, 32), False)]),
    "kimi delta rule": (KDA, [((32, 106), True), ((7, 24), False), ((7, 40), False), ((40, 32), False)]),
}
TABLE = {name: ({"blocks": {"a": block}, "layers": "a"}, table) for name, (block, table) in LAYERS.items()}
TABLE["zamba2, shared blocks with adapters"] = (
    {"blocks": {"m": MAMBA, "s": SHARED | {"attn_adapter_rank": 4}}, "layers": "s+m"},
    [
        *[((64, 192), True), ((64, 12), False), *[((4, 64), False)] * 3, ((64, 32), False)],
        *[((32, 96), True), ((32, 4), False), ((4, 96), False), ((48, 32), False), ((32, 32), False)],
        *[((32, 152), True), ((64, 32), False)],
    ],
)


@pytest.mark.parametrize("layer", TABLE)
def test_selective_checkpointing_keeps_the_products_of_the_table(layer, kept):
    settings, expected = TABLE[layer]
    assert kept(hybrid(settings)) == expected


def test_experts_keep_what_stands_beside_them(kept):
    """Products of experts are none with a linear layer's weight."""
    found = [one for one in kept(experts.build().hybrid) if one[1]]
    assert found == [(Q, True), ((32, 152), True), (Q, True), (GATED, True)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_in_float8_are_kept_likewise(recipe, kept):
    model = hybrid(TABLE["attention and a gated MLP"][0])
    config = Float8Config.model_validate({"emulate": True, "small_products": True, "recipe": recipe})
    model.init_weights(seed=1)
    Float8(config, shards=1).convert(model, platform.cpu())
    assert kept(model.to(torch.bfloat16)) == TABLE["attention and a gated MLP"][1]


def test_tensor_parallel_ranks_keep_their_part_of_the_same_products(kept):
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with torch.device("meta"):
            model = hybrid(TABLE["the same with biases"][0])
        model.split(TensorRanks(0, 2, torch.distributed.group.WORLD.group_name))  # type: ignore[union-attr]
        model.to_empty(device="cpu")
        assert kept(model) == [((32, 48), True), ((16, 32), False), ((32, 24), True), ((24, 32), False)]
    finally:
        torch.distributed.destroy_process_group()


def test_rejects_a_distance_above_the_number_of_layers():
    """Of 24 layers."""
    path, k = ROOT / "yamls/pretrain/mpt-1b.yaml", "train.activation_checkpointing={type: every_k, k: %d}"
    with pytest.raises(UserError, match=r"activation_checkpointing\.k .* 25: of 24 layers .* use at most 24"):
        load_config(path, [k % 25])
    checkpointing = load_config(path, [k % 24]).train.activation_checkpointing
    assert [layer for layer in range(24) if checkpointing.recomputes(layer)] == [0]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_counts_the_outputs_that_are_kept(shape):
    """Bytes of the sections, from which memory is estimated, are those of the modules' products."""
    model = hybrid(SHAPES[shape])
    config = model.config
    for layer, block in zip(config.layer_list(), blocks_of(model), strict=True):
        used = [config.blocks[name] for name in (layer.block, layer.shared) if name]
        saved = sum((one.saved_by_layer(32, 2, config.norm) for one in used), SavedBytes(0))
        assert saved.products == 2 * sum(one.linear.out_features for one in block.products() if one.kept)
