"""The memory estimate against hand counts, and the direction in which each setting moves it."""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.generate.engine import Engine
from llmtrain.kernels import tuning
from llmtrain.kernels.attention.spec import STORED_BYTES, STORED_FROM
from llmtrain.kernels.platform import cpu
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.plan.memory import (
    ParameterSizes,
    estimate_memory,
    exchanged_bytes,
    gathered_bytes,
    host_bytes,
    host_state_bytes,
)
from llmtrain.plan.parameters import parameter_sizes
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config
from tests.support.policy import policy_config

MPT_1B = Path(__file__).parents[3] / "yamls" / "pretrain" / "mpt-1b.yaml"
MAMBA = {"type": "mamba2", "d_state": 64, "head_dim": 64}
SIZES = ParameterSizes(total=1_000_000, root=200_000, largest_layer=100_000)


def config(*overrides: str) -> Config:
    return load_config(MPT_1B, overrides)


def test_optimizer_and_shards_divide_by_the_ranks_that_share_a_copy():
    one, eight = (estimate_memory(config(), SIZES, ranks) for ranks in (1, 8))
    assert one.optimizer == 8 * SIZES.total
    assert eight.optimizer == SIZES.total
    assert eight.activations == one.activations


def test_muon_has_one_state_for_matrices_and_adamws_two_for_the_rest():
    sizes = ParameterSizes(total=1_000_000, root=200_000, largest_layer=100_000, matrices=600_000)
    assert (
        estimate_memory(config("optimizer={type: muon, lr: 1e-3}"), sizes, 8).optimizer == (4 * 6 + 8 * 4) * 10**5 // 8
    )
    assert estimate_memory(config(), sizes, 8).optimizer == sizes.total
    of_8_bits = estimate_memory(config("optimizer={type: adamw_8bit, lr: 1e-3}"), sizes, 1).optimizer
    assert of_8_bits == (2 * 6 + 8 * 4) * 10**5 + 2 * 4 * 600_000 / 256  # codes, and a scale for 256 of them


def test_state_in_host_memory_takes_what_a_step_brings_beyond_the_activations():
    """Three parts of 2^25 parameters at most, two moments in fp32 each; the microbatch's memory serves them, where it is enough."""
    large = ParameterSizes(total=2**30, root=2**20, largest_layer=2**20)
    here, there = config("optimizer.offload=false"), config("optimizer.offload=true")
    memory = estimate_memory(there, large, 1)
    assert memory.activations > 3 * 8 * 2**25 and memory.optimizer == 0
    assert (host_state_bytes(here, large, 1), host_state_bytes(there, large, 4)) == (0, 8 * 2**28)
    small_batch = config("optimizer.offload=true", "train.microbatch_size=1", "data.seq_len=8", "model.max_seq_len=8")
    memory = estimate_memory(small_batch, large, 1)
    assert memory.optimizer == 3 * 8 * 2**25 - memory.activations - memory.loss
    embedding = ParameterSizes(total=2**30, root=2**28, largest_layer=2**20)
    assert estimate_memory(small_batch, embedding, 2).optimizer == 3 * 8 * 2**27 - memory.activations - memory.loss


def test_a_moving_average_is_sharded_as_the_weights():
    assert estimate_memory(config("train.ema={}"), SIZES, 8).average == 4 * SIZES.total // 8
    assert estimate_memory(config(), SIZES, 8).average == 0


def test_full_sharding_gathers_the_root_and_two_layers_in_bf16():
    memory = estimate_memory(config(), SIZES, 8)
    assert memory.weights == 4 * SIZES.total // 8 + 2 * (200_000 + 2 * 100_000)


@pytest.mark.parametrize(
    ("override", "ranks"), [("train.sharding.strategy=grad_op", 8), ("train.precision=amp_bf16", 1)]
)
def test_grad_op_and_a_single_gpu_hold_all_weights_gathered(override, ranks):
    memory = estimate_memory(config(override), SIZES, ranks)
    assert memory.weights == 4 * SIZES.total // ranks + 2 * SIZES.total


def test_float8_gathers_weights_and_keeps_inputs_of_products_in_one_byte():
    sizes = ParameterSizes(1_000_000, 200_000, 100_000, float8=600_000, float8_inputs=5_000, float8_copy=700)
    bf16, float8 = (estimate_memory(config(*more), sizes, 1) for more in ((), ("train.float8={}",)))
    assert bf16.weights - float8.weights == 600_000
    assert bf16.activations - float8.activations == 5_000 * 16 * 2048 - 700
    beside = ParameterSizes(1_000_000, 200_000, 100_000, float8=600_000, float8_inputs=5_000, float8_beside=1_000)
    kept = (-4_000 + 1_000) * 16 * 2048  # a byte less for four in five channels, and one more for the fifth
    assert estimate_memory(config("train.float8={}"), beside, 1).activations == bf16.activations + kept
    assert bf16.gradients == float8.gradients and bf16.optimizer == float8.optimizer
    sharded = estimate_memory(config("train.float8={}"), sizes, 8)
    assert sharded.weights == 4 * 1_000_000 // 8 + 2 * 400_000 - 400_000 * 6 // 10
    rowwise = estimate_memory(config("train.float8={recipe: rowwise}"), sizes, 1)
    assert rowwise.weights == bf16.weights and rowwise.activations == float8.activations


def test_products_in_float8_and_their_inputs_are_counted_by_use():
    """An MPT layer: q, k, v of one product, the output's, and the MLP's two. A shared block counts once, its inputs at each use."""
    d_model, layers = 2048, 24
    mpt = parameter_sizes(config("train.float8={}"))
    assert (mpt.float8, mpt.float8_inputs) == (12 * d_model**2 * layers, 7 * d_model * layers)
    assert mpt.float8_beside == d_model * layers
    gated = parameter_sizes(config("model.blocks.attn.output_gate=true", "train.float8={}"))
    assert gated.float8_beside == 0
    shared = {"type": "shared_attention", "n_heads": 16, "adapter_rank": None, "mlp": {"type": "geglu", "d_ff": 8192}}
    once, twice = (
        parameter_sizes(
            config(f"model.blocks={json.dumps({'m': MAMBA, 's': shared})}", f"model.layers={layers}", "train.float8={}")
        )
        for layers in ("s+m m m", "s+m s+m m")
    )
    mixer_inputs = 3 * (2048 + 4096)
    assert once.float8_inputs > mixer_inputs
    assert twice.float8_inputs - mixer_inputs == 2 * (once.float8_inputs - mixer_inputs)
    assert twice.float8 - once.float8 == d_model**2  # of the use's own projection


def test_recomputed_inputs_are_none_that_float8_shrinks():
    sizes = ParameterSizes(1_000_000, 200_000, 100_000, float8=600_000, float8_inputs=5_000)
    full = "train.activation_checkpointing.type=full"
    assert (
        estimate_memory(config("train.float8={}", full), sizes, 1).activations
        == estimate_memory(config(full), sizes, 1).activations
    )


def test_hybrid_sharding_divides_by_the_group_not_by_the_world():
    hybrid = config("train.sharding={strategy: hybrid, shard_size: 4}")
    assert estimate_memory(hybrid, SIZES, 16).optimizer == 8 * SIZES.total // 4


def test_unsynchronised_microbatches_keep_whole_gradients():
    lazy = config("train.sharding.sync_every_microbatch=false")
    difference = estimate_memory(lazy, SIZES, 8).gradients - estimate_memory(config(), SIZES, 8).gradients
    assert difference == 4 * SIZES.total - 4 * SIZES.total // 8


def test_an_mpt_layer_keeps_sixteen_hidden_vectors_per_token():
    """2 d + 3 d + d of attention and its norm, 2 d + 2 * 4 d of the MLP and its norm; fp32 log-sums per head."""
    d_model, heads, tokens = 2048, 16, 16 * 2048
    layer = 2 * 16 * d_model + 4 * heads
    assert estimate_memory(config(), SIZES, 1).activations == tokens * (24 * layer + 3 * 2 * d_model)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_mamba_layer_keeps_less_as_one_operator(backend):
    """in_proj's 10,576 numbers (z and x of 5120, B and C of 128, 80 of dt), the convolution's 5376, y, the norm's output, the
    block's norm; then states and C B^T per chunk of 256, or one number of the gated norm.
    """
    layer = 2 * (2 * 2560 + 10_576 + 5376 + 2 * 5120)
    layer += 4 if backend == "triton" else 4 * (5120 * 128 // 256 + 256)
    mamba = load_config(
        MPT_1B,
        [
            "model.d_model=2560",
            f"model.blocks={{m: {{type: mamba2, d_state: 128, backend: {backend}}}}}",
            "model.layers=m*3",
            "model.positions=none",
        ],
    )
    tokens = mamba.train.microbatch_size * mamba.data.seq_len
    assert estimate_memory(mamba, SIZES, 1).activations == tokens * (3 * layer + 3 * 2 * 2560)


@pytest.mark.parametrize("between", ["every_k, k: 2", "kernels", "selective"])
def test_partial_checkpointing_keeps_more_than_full_and_less_than_none(between):
    def kept(kind: str) -> int:
        return estimate_memory(config(f"train.activation_checkpointing={{type: {kind}}}"), SIZES, 1).activations

    assert kept("none") > kept(between) > kept("full")


def test_full_checkpointing_keeps_each_layers_input_and_one_layer_at_work():
    memory = estimate_memory(config("train.activation_checkpointing.type=full"), SIZES, 1)
    residual, layer = 2 * 2048, 2 * 16 * 2048 + 4 * 16
    assert memory.activations == 16 * 2048 * (24 * residual + layer + 3 * residual)


def test_chunked_loss_is_bounded_by_the_chunk():
    def loss(tokens_per_microbatch: int, kind: str) -> int:
        return estimate_memory(
            config(f"train.microbatch_size={tokens_per_microbatch}", f"train.loss.type={kind}"), SIZES, 1
        ).loss

    assert loss(32, "plain") == 2 * loss(16, "plain")
    hidden_gradient = 16 * 2048 * 2048 * 2
    assert loss(32, "chunked") - loss(16, "chunked") == hidden_gradient


def test_ranks_that_share_sequences_share_their_activations_but_for_keys_and_values():
    """Logits too, where they are kept whole."""
    d_model, tokens = 2048, 16 * 2048
    whole, shared = (
        estimate_memory(config("train.loss.type=plain", *more), SIZES, 4)
        for more in ((), ("train.parallel.context=4",))
    )
    assert shared.loss == whole.loss / 4
    gathered = 24 * 2 * 2 * d_model * tokens * 3 // 4  # in bf16
    assert shared.activations == whole.activations // 4 + gathered


def test_ranks_that_share_layers_share_weights_activations_and_logits_but_keep_whole_inputs():
    """Of 24 layers the inputs of attention and of the MLP, and in the forward pass those and their sums cross, and two more."""
    whole, shared = (
        estimate_memory(config("train.loss.type=plain", *more), sizes, 4)
        for more, sizes in (
            ((), SIZES),
            (("train.parallel.tensor=4",), ParameterSizes(*(n // 4 for n in astuple(SIZES) if n != ()))),
        )
    )
    input_bytes = 2 * 2048 * 16 * 2048
    assert shared.loss == whole.loss / 4
    assert shared.optimizer == pytest.approx(whole.optimizer, abs=8)
    assert shared.activations == pytest.approx(whole.activations / 4 + 2 * 24 * input_bytes * 3 / 4, abs=8)
    assert exchanged_bytes(config("train.parallel.tensor=4")) == (4 * 24 + 2) * input_bytes * 3 / 4
    assert exchanged_bytes(config()) == 0


def test_a_mamba_layer_gathers_states_that_do_not_grow_with_the_sequence():
    """Of six segments: 2 d_model x 16 numbers of the state and 64 decays in fp32, 3 inputs of the convolution in bf16."""
    block = "{m: {type: mamba2, d_state: 16, head_dim: 64}}"
    mamba = ["train.parallel.context=4", f"model.blocks={block}", "model.layers=m*2", "model.positions=none"]
    state, ends = 4 * (2 * 2048 * 16 + 64), 2 * 3 * (2 * 2048 + 2 * 16)
    assert gathered_bytes(config(*mamba)) == 2 * 16 * 6 * (state + ends)
    assert gathered_bytes(config(*mamba, "data.seq_len=1024")) == gathered_bytes(config(*mamba))
    assert gathered_bytes(config()) == 0
    wider = block.replace("d_state", "d_inner: 8192, d_state")
    assert gathered_bytes(config(*mamba, f"model.blocks={wider}")) == gathered_bytes(
        config(*mamba, f"model.blocks={block.replace('d_state', 'expand: 4, d_state')}")
    )


def test_a_gated_deltanet_layer_gathers_what_segments_make_of_states_and_keeps_wider_values():
    """Of six segments: per head 128 x (256 + 128) numbers in fp32, and 3 inputs of the convolution in bf16. Of each token and
    head in bf16: 384 values and what is read for them; by our kernels 128 errors more, and the states of chunks of 64."""
    block = "{g: {type: gated_deltanet, n_heads: 8, n_key_heads: 4, value_head_dim: 256, backend: triton}}"
    delta = [f"model.blocks={block}", "model.layers=g*2", "model.positions=none"]
    state, ends = 4 * 8 * 128 * 384, 2 * 3 * (2 * 4 * 128 + 8 * 256)
    assert gathered_bytes(config(*delta, "train.parallel.context=4")) == 2 * 16 * 6 * (state + ends)
    whole, shared = (
        estimate_memory(config(*delta, f"train.parallel.context={context}"), SIZES, 4).activations for context in (1, 4)
    )
    beside = 2 * 8 * (2 * 384 + 128 + 128 * 128 / 64)
    assert shared == whole / 4 + 2 * 16 * 6 * (state + ends) + 2 * 16 * 512 * beside


def test_a_window_shorter_than_a_segment_gathers_no_more_than_it_reaches():
    """64 tokens at the end of each of the other ranks' six segments."""
    whole, windows = (
        estimate_memory(config("train.parallel.context=4", *more), SIZES, 4).activations
        for more in ((), ("model.blocks.attn.sliding_window=65",))
    )
    kv, samples = 24 * 2 * 2 * 2048, 16
    assert whole - windows == kv * samples * (2048 * 3 // 4 - 6 * 64)


def test_fp32_doubles_what_the_computation_keeps():
    wide = config("train.precision=fp32", "train.loss.type=plain")
    narrow = config("train.loss.type=plain")
    ratio = estimate_memory(wide, SIZES, 1).activations / estimate_memory(narrow, SIZES, 1).activations
    assert ratio == pytest.approx(2, rel=0.01)


def test_a_world_without_ranks_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        estimate_memory(config(), SIZES, 0)


def test_of_an_mlp_that_reads_a_part_at_a_time_the_inside_of_one_part_is_kept():
    """24 layers of 16 sequences; gelu keeps 2 x 8192 channels of a token in bf16."""
    whole, parts = (
        estimate_memory(config(*more), SIZES, 1).activations
        for more in ((), ("train.activation_checkpointing.mlp_tokens=256",))
    )
    assert whole - parts == 16 * 2 * 2 * 8192 * (24 * 2048 - 256)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("type: full", 24), ("type: every_k, k: 3", 8), ("type: kernels", 24)],
    ids=["full", "k", "kernels"],
)
def test_inputs_of_recomputed_layers_in_host_memory_are_not_the_gpus(kind, layers):
    here, there = (
        config(f"train.activation_checkpointing={{{kind}, offload: {offload}}}") for offload in ("false", "true")
    )
    one_input = 2 * here.model.d_model * here.data.seq_len * here.train.least_microbatch
    assert (host_bytes(here), host_bytes(there)) == (0, layers * one_input)
    before, after = (estimate_memory(one, SIZES, 1).activations for one in (here, there))
    assert before - after == (layers - 1) * one_input  # that of the next layer is on its way


def test_wide_heads_and_long_sequences_store_gradients_of_scores():
    """A GiB for a while, whatever the batch; a call's length is a segment's where ranks share sequences."""

    def workspace(seq_len: int, context: int = 1) -> int:
        length = [f"data.seq_len={seq_len}", f"train.parallel.context={context}", "train.microbatch_size=2"]
        wide, narrow = (
            estimate_memory(config(*length, f"model.blocks.attn.n_heads={heads}"), SIZES, 2).activations
            for heads in (8, 16)
        )
        return wide - narrow + 4 * 8 * 24 * 2 * seq_len // context  # log-sum-exps of half as many heads

    assert workspace(STORED_FROM) == STORED_BYTES
    assert workspace(STORED_FROM // 2) == workspace(2 * STORED_FROM, context=2) == 0
    assert workspace(4 * STORED_FROM, context=2) == STORED_BYTES


def test_no_row_stores_more_or_shorter_sequences_than_is_counted():
    rows = [row for archs in tuning.TABLES.values() for arch in archs for row in tuning.read_shipped(arch).rows]
    stored = [row.launch for row in rows if row.kernel == "attention.dscores"]
    assert stored
    for launch in stored:
        assert 2 * launch.rows * launch.queries <= STORED_BYTES and launch.from_seq_len >= STORED_FROM


def policy(tmp_path: Path, weights: str, **changes: Any) -> tuple[Config, ParameterSizes]:
    settings = {"objective.rollout": {"weights": weights, "rows": 8, "prefix_mb": 1.0}, "train.precision": "amp_bf16"}
    config = policy_config(tmp_path, tmp_path / "run", settings | changes)
    return config, parameter_sizes(config)


@pytest.mark.parametrize("precision", ["amp_bf16", "fp32"])
def test_rollouts_take_what_the_engine_allocates(precision: str, tmp_path: Path):
    config, sizes = policy(tmp_path, "gathered", **{"train.precision": precision})
    model = CausalLM(HybridLM(config.model, cpu(), getattr(torch, config.train.dtype)))
    engine = Engine(model, rows=8, max_len=config.data.seq_len)
    found = estimate_memory(config, sizes, 1).rollouts - 10**6
    assert engine.nbytes <= found <= engine.nbytes * 1.1


def test_a_copy_of_the_weights_is_counted_whole_on_each_rank(tmp_path: Path):
    for ranks in (1, 4):
        copied, gathered = (estimate_memory(*policy(tmp_path, weights), ranks) for weights in ("copied", "gathered"))
        assert copied.rollouts - gathered.rollouts == 2 * parameter_sizes(policy(tmp_path, "copied")[0]).total
        assert copied.total - copied.rollouts == gathered.total - gathered.rollouts


def test_frozen_weights_are_not_copied_on_one_rank(tmp_path: Path):
    adapt = {"adapt": {"lora": {"rank": 4}}, "init_from": "a-checkpoint"}
    for ranks, of in ((1, "trained"), (2, "total")):
        copied, gathered = (policy(tmp_path, weights, **adapt) for weights in ("copied", "gathered"))
        more = estimate_memory(*copied, ranks).rollouts - estimate_memory(*gathered, ranks).rollouts
        assert more == 2 * getattr(copied[1], of)


@pytest.mark.parametrize("recomputed", [False, True])
def test_layers_below_the_first_trained_one_keep_nothing(recomputed: bool):
    kind = "full" if recomputed else "none"

    def activations(pattern: str) -> int:
        adapt = f"adapt={{lora: {{rank: 4, targets: ['{pattern}']}}}}"
        found = config(adapt, "init_from=x", "train.microbatch_size=1", f"train.activation_checkpointing.type={kind}")
        return estimate_memory(found, parameter_sizes(found), 1).activations

    whole, middle, last = (activations(f"blocks.{first}.*") for first in (0, 12, 23))
    assert whole > middle > last and (whole - last) * 12 == pytest.approx((whole - middle) * 23)
    assert activations("embed") == whole
