"""HybridLM: what it is made of, what it returns, and that every kind of block compiles and runs in bf16."""

import pytest
import torch

from llmtrain.kernels import platform
from llmtrain.models.backends import backend_problems, servable
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import LossConfig, ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.loss import LossOutput
from llmtrain.models.parameters import parameter_info

CPU = platform.cpu()
MLP = {"type": "swiglu", "d_ff": 48}
ATTENTION = {"type": "attention", "n_heads": 4, "mlp": MLP}
LATENT = {"type": "latent_attention", "n_heads": 4, "kv_rank": 24, "nope_dim": 8, "rope_dim": 4, "value_dim": 10}
BLOCKS = {
    "mha": ATTENTION | {"position": {"type": "rotary"}},
    "gqa": ATTENTION
    | {"n_kv_heads": 2, "qk_norm": "head", "output_gate": True, "mlp": {"type": "gelu", "d_ff": 64, "bias": True}},
    "full_norm": ATTENTION | {"n_kv_heads": 2, "qk_norm": "full", "output_gate": True},
    "alibi": ATTENTION | {"position": {"type": "alibi"}, "qk_norm": "full", "clip_qkv": 1.0, "qkv_bias": True},
    "window": ATTENTION | {"sliding_window": 5, "softcap": 10.0, "head_dim": 16, "out_bias": True, "mlp": None},
    "sinks": ATTENTION | {"sinks": True, "n_kv_heads": 2},
    "latent": LATENT | {"position": {"type": "rotary"}, "q_rank": 12, "mlp": MLP},
    "latent_nope": LATENT,
    "mamba": {"type": "mamba2", "d_state": 16, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "mamba_mlp": {"type": "mamba2", "d_state": 16, "head_dim": 16, "norm_before_gate": True, "mlp": MLP},
    "gdn": {
        "type": "gated_deltanet",
        "n_heads": 4,
        "n_key_heads": 2,
        "key_head_dim": 8,
        "value_head_dim": 6,
        "mlp": MLP,
    },
    "cca": {
        "type": "compressed_attention",
        "n_heads": 4,
        "n_kv_heads": 2,
        "position": {"type": "rotary"},
        "qkv_bias": True,
        "mlp": MLP,
    },
    "mamba3": {"type": "mamba3", "d_state": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "mlp": MLP},
    "kda": {
        "type": "kimi_delta",
        "n_heads": 4,
        "key_head_dim": 8,
        "value_head_dim": 6,
        "lower_bound": -5.0,
        "mlp": MLP,
    },
}
SHARED = {
    "type": "shared_attention",
    "n_heads": 4,
    "n_shared": 2,
    "mlp": {"type": "geglu", "d_ff": 40},
    "adapter_rank": 3,
    "attn_adapter_rank": 2,
    "position": {"type": "rotary"},
}


def build(blocks: dict, layers: str, **config) -> HybridLM:
    settings = {"vocab_size": 80, "d_model": 32, "max_seq_len": 32, "blocks": blocks, "layers": layers, **config}
    model = HybridLM(ModelConfig.model_validate(settings), CPU)
    model.init_weights(seed=1)
    return model


def zamba(**config) -> HybridLM:
    return build({"m": BLOCKS["mamba"], "s": SHARED}, "m (s+m)*3", **config)


def logits(model: HybridLM, ids: torch.Tensor) -> torch.Tensor:
    return CausalLM(model).logits(ids)


def loss(model: HybridLM, ids: torch.Tensor) -> LossOutput:
    """The loss of each token's successor."""
    return CausalLM(model).loss(ids[:, :-1], ids[:, 1:])


def tokens(batch: int = 2, seq_len: int = 21) -> torch.Tensor:
    return torch.randint(0, 80, (batch, seq_len), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_gives_logits_a_loss_and_all_gradients(name):
    model = build({"x": BLOCKS[name]}, "x*2", positions="learned", tie_embeddings=False, logit_softcap=20.0)
    ids = tokens()
    assert logits(model, ids).shape == (2, 21, 80)
    out = loss(model, ids)
    assert abs(out.terms["cross_entropy"] - torch.log(torch.tensor(80.0))) < 0.5  # fresh weights know nothing
    out.loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", [*BLOCKS, "shared"])
def test_outputs_depend_on_the_past_only(name):
    model = zamba() if name == "shared" else build({"x": BLOCKS[name]}, "x*2")
    ids = tokens()
    changed = ids.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 80
    with torch.no_grad():
        a, b = logits(model, ids), logits(model, changed)
    torch.testing.assert_close(a[:, :12], b[:, :12])
    assert (a[:, 12:] - b[:, 12:]).abs().max() > 1e-4


@pytest.mark.parametrize("name", [*BLOCKS, "shared"])
def test_every_block_traces_as_one_graph(name):
    """The graph holds no dispatch and no break, and computes what eager does, gradients included."""
    shared = {"m": BLOCKS["mamba"], "x": SHARED | {"n_shared": 1}}
    model = build(shared, "x+m") if name == "shared" else build({"x": BLOCKS[name]}, "x")
    ids = tokens()
    expected = loss(model, ids).loss
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    compiled = loss(model, ids).loss
    torch.testing.assert_close(compiled, expected)
    for a, b in zip(torch.autograd.grad(compiled, list(model.parameters())), expected_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layers", ["m s+g a", pytest.param("m s+m a d s+g m", marks=pytest.mark.slow)])
def test_unlike_blocks_trace_in_one_model(layers):
    """Blocks share their code, so torch.compile turns sizes that differ between them into symbols."""
    shared = SHARED | {"n_heads": 2, "position": {"type": "none"}}
    blocks = {"m": BLOCKS["mamba"], "a": BLOCKS["alibi"], "g": BLOCKS["gqa"], "d": BLOCKS["gdn"], "s": shared}
    model = build({name: block for name, block in blocks.items() if name in layers}, layers)
    ids = tokens()
    expected = logits(model, ids)
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(model, ids), expected)


@pytest.mark.parametrize("name", [*BLOCKS, "shared"])
def test_bf16_parameters_and_activations(name):
    """No autocast: with bf16 weights (but fp32 SSM parameters) activations stay bf16 and the loss is fp32."""
    model = zamba() if name == "shared" else build({"x": BLOCKS[name]}, "x*2")
    ids = tokens()
    exact = loss(model, ids).loss
    model.to(torch.bfloat16)
    for parameter, info in parameter_info(model).items():
        if info.fp32:
            parameter.data = parameter.data.float()
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    seen: list[torch.dtype] = []
    out = loss(model, ids)
    out.loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert out.loss.dtype == torch.float32
    assert abs(out.loss - exact) < 0.02


def test_builds_on_the_meta_device_without_buffers():
    config = zamba().config
    with torch.device("meta"):
        model = HybridLM(config, platform=CPU)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not list(model.buffers())
    assert logits(model, torch.zeros(1, 16, dtype=torch.long, device="meta")).shape == (1, 16, 80)


def test_constructors_do_not_touch_the_random_state():
    before = torch.get_rng_state()
    zamba()
    assert torch.equal(before, torch.get_rng_state())


def test_shared_blocks_are_registered_once_and_used_in_turn():
    model = zamba()
    names = dict(model.named_parameters(remove_duplicate=False))
    assert len(names) == len(dict(model.named_parameters()))
    assert {n.split(".")[2] for n in names if n.startswith("shared.s.")} == {"0", "1"}
    assert {n.split(".")[3] for n in names if n.startswith("blocks.1.shared_input.")} == {
        "linear",
        "mlp_adapter",
        "qkv_adapter",
    }
    copies = model.shared["s"]
    assert isinstance(copies, torch.nn.ModuleList)
    first, second = copies
    assert model.shared_uses() == [first, second, first]


def test_shared_output_steers_the_mixer_but_stays_out_of_the_residual_stream():
    """With the mixers' outputs cut off, the blocks pass the embedding through, whatever the shared block says."""
    model = zamba()
    with torch.no_grad():
        for block in model.blocks:
            block.get_parameter("mixer.out_proj.weight").zero_()
        ids = tokens()
        expected = torch.nn.functional.linear(model.norm(model.embed(ids)), model.embed.weight)
        torch.testing.assert_close(logits(model, ids), expected)


def test_names_of_parameters():
    blocks = {"a": ATTENTION, "m": BLOCKS["mamba"], "g": BLOCKS["gdn"] | {"mlp": None}}
    model = build(blocks, "a m g", positions="learned", tie_embeddings=False)
    assert list(dict(model.named_parameters())) == [
        "embed.weight",
        "positions.weight",
        "blocks.0.norm.weight",
        "blocks.0.mixer.wqkv.weight",
        "blocks.0.mixer.wo.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.w_in.weight",
        "blocks.0.mlp.w_out.weight",
        "blocks.1.norm.weight",
        "blocks.1.mixer.in_proj.weight",
        "blocks.1.mixer.conv.weight",
        "blocks.1.mixer.conv.bias",
        "blocks.1.mixer.ssm.A_log",
        "blocks.1.mixer.ssm.D",
        "blocks.1.mixer.ssm.dt_bias",
        "blocks.1.mixer.norm.weight",
        "blocks.1.mixer.out_proj.weight",
        "blocks.2.norm.weight",
        "blocks.2.mixer.in_proj.weight",
        "blocks.2.mixer.conv.weight",
        "blocks.2.mixer.decay.A_log",
        "blocks.2.mixer.decay.dt_bias",
        "blocks.2.mixer.norm.weight",
        "blocks.2.mixer.out_proj.weight",
        "norm.weight",
        "head.weight",
    ]


def test_blocks_with_equal_specs_share_a_context():
    model = build({"a": BLOCKS["mha"], "b": BLOCKS["alibi"]}, "a b a")
    first, second, third = model._contexts(model.layer_mixers(), 16, torch.device("cpu"))
    assert first.mixer is third.mixer
    assert first.mixer is not second.mixer
    assert model._contexts(model.layer_mixers(), 16, torch.device("cpu"))[0].mixer is first.mixer


def test_contexts_made_in_inference_mode_serve_training():
    model = build({"a": BLOCKS["mha"]}, "a")
    ids = tokens()
    with torch.inference_mode():
        logits(model, ids)
    loss(model, ids).loss.backward()


def test_old_sequence_lengths_are_forgotten():
    model = build({"a": BLOCKS["alibi"]}, "a")
    for seq_len in range(1, 20):
        model._contexts(model.layer_mixers(), seq_len, torch.device("cpu"))
    assert len(model._contexts._by_length) == model._contexts.lengths


def test_dropout_acts_in_training_only():
    model = zamba(dropout=0.5)
    ids = tokens()
    with torch.no_grad():
        assert not torch.equal(logits(model.train(), ids), logits(model, ids))
        assert torch.equal(logits(model.eval(), ids), logits(model, ids))


def test_sequences_longer_than_learned_positions_are_refused():
    model = build({"a": ATTENTION}, "a", positions="learned")
    with pytest.raises(ValueError, match=r"33 tokens.*max_seq_len is 32"):
        logits(model, tokens(1, 33))


def test_a_backend_that_cannot_serve_is_refused_at_construction():
    with pytest.raises(ValueError, match="no ALiBi"):
        build({"a": BLOCKS["alibi"] | {"backend": "sdpa:flash"}}, "a")
    with pytest.raises(ValueError, match="need a GPU"):
        build({"a": ATTENTION}, "a", norm={"backend": "triton"})


def test_norms_that_a_backend_cannot_serve_are_problems_of_the_config():
    shared = {"type": "shared_attention", "n_heads": 4, "mlp": {"type": "gelu", "d_ff": 64}}

    def found(layers: str = "s+m", d_model: int = 5120, norm: str = "auto", **blocks: dict) -> list[tuple[str, str]]:
        given = {"vocab_size": 64, "d_model": d_model, "layers": layers, "norm": {"backend": norm}}
        config = ModelConfig.model_validate({**given, "blocks": {"m": {"type": "mamba2"}, **blocks}})
        return [(problem.path, problem.message) for problem in backend_problems(config)]

    ours = {"norm": {"backend": "triton"}}
    ((path, message),) = found(s=shared | ours)
    assert path == "blocks.s.norm.backend" and "up to 8192 channels, not 10240" in message
    assert found(s=shared | ours, d_model=4096) == []
    # The model's is reported once; with the names of blocks where it is their width.
    ((path, message),) = found(norm="triton", s=shared)
    assert path == "norm.backend" and "block s takes model.norm at 10240 channels" in message
    ((path, message),) = found("s+m t+m", norm="triton", s=shared, t=shared)
    assert path == "norm.backend" and "blocks s, t take model.norm at 10240 channels" in message
    ((path, message),) = found(norm="triton", s=shared, d_model=9216)
    assert path == "norm.backend" and "not 9216" in message and "block" not in message
    own = {"norm": {"backend": "reference"}}
    ((path, _),) = found(norm="triton", m={"type": "mamba2"} | own, s=shared | own, d_model=9216)
    assert path == "norm.backend"  # the final norm's


def test_a_blocks_norm_is_not_made_another_by_naming_a_backend_alone():
    config = {"vocab_size": 64, "d_model": 64, "layers": "a", "norm": {"type": "layernorm", "bias": True}}
    own = {"norm": {"backend": "reference"}}
    with pytest.raises(ValueError, match=r"one of type rmsnorm with eps 1e-05, unlike model\.norm: write"):
        ModelConfig.model_validate({**config, "blocks": {"a": ATTENTION | own}})
    ModelConfig.model_validate({**config, "blocks": {"a": ATTENTION | {"norm": {**config["norm"], **own["norm"]}}}})
    ModelConfig.model_validate({**config, "norm": {}, "blocks": {"a": ATTENTION | own}})
    ModelConfig.model_validate(
        {**config, "blocks": {"a": ATTENTION | {"norm": {}}}}
    )  # says that it is the default norm


def test_a_model_trained_elsewhere_runs_by_what_serves_here():
    blocks = {
        "a": ATTENTION | {"backend": "sdpa:cudnn"},
        "m": {"type": "mamba2", "head_dim": 16, "backend": "reference"},
    }
    config = ModelConfig.model_validate(
        {"vocab_size": 64, "d_model": 64, "layers": "a m", "norm": {"backend": "triton"}, "blocks": blocks}
    )
    here = servable(config, platform.cpu(), "float32")
    kernels = [block.kernel(config.d_model) for block in here.blocks.values()]
    assert [kernel and kernel.backend for kernel in kernels] == ["auto", "reference"] and here.norm.backend == "auto"
    HybridLM(here, platform=platform.cpu())


def test_gradient_accumulation_over_labels_equals_one_batch():
    """Microbatches weighted by their number of labels give the gradient of the whole batch."""
    model = zamba()
    causal_lm = CausalLM(model, LossConfig(z_loss=0.01))
    ids = tokens(4)
    labels = ids.roll(-1, 1).clone()
    labels[0, :] = -100
    labels[1, 5:] = -100
    whole = torch.autograd.grad(causal_lm.loss(ids, labels).loss, list(model.parameters()))
    total = (labels != -100).sum()
    for x, y in zip(ids.split(1), labels.split(1), strict=True):
        out = causal_lm.loss(x, y)
        (out.loss * out.n_tokens / total).backward()
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=1e-4)
