"""Adapters and weights in 4 bits within compiled layers: one graph, and the gradients of layers that are not compiled."""

import pytest
import torch

from llmtrain.adapt.base import adaptations, adapted
from llmtrain.adapt.nf4 import _Product, quantised
from llmtrain.kernels.platform import cpu
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.adapt import AdaptConfig, LoraConfig
from llmtrain.schema.training import ActivationCheckpointing
from llmtrain.train.parallel import checkpoint_activations

MLP = {"type": "swiglu", "d_ff": 24}
SHARED = {"type": "shared_attention", "n_heads": 2, "mlp": MLP | {"type": "geglu"}, "adapter_rank": 2}
MODEL = {
    "vocab_size": 50,
    "d_model": 16,
    "norm": {"type": "rmsnorm"},
    "blocks": {"a": {"type": "attention", "n_heads": 2, "position": {"type": "rotary"}, "mlp": MLP}, "s": SHARED},
    "layers": "s+a s+a",
}


@pytest.mark.ci
@pytest.mark.parametrize("dora", [True, False])
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_adapted_layers_are_one_graph(dora, base):
    adapt = AdaptConfig(lora=LoraConfig(rank=2, dora=dora), base=base)
    with torch.device("meta"):
        model = adapted(HybridLM(ModelConfig.model_validate(MODEL), cpu()), adapt)
    model.to_empty(device="cpu")
    model.init_weights(1)
    torch.manual_seed(1)
    for converter in adaptations(adapt):
        converter.begin(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".up." in name:
                parameter.normal_(std=0.1)
    for converter in adaptations(adapt):
        converter.finish(model, torch.device("cpu"))
    ids, found = torch.randint(50, (2, 8)), []
    for compiled in (False, True):
        for block in model.blocks if compiled else ():
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend="aot_eager")
        model.zero_grad()
        CausalLM(model).loss(ids, ids).loss.backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(one is not None and one.norm() > 0 for one in found[0])
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-7)


def test_the_compiler_keeps_a_weight_in_4_bits_for_the_gradient_and_nothing_wider():
    """From what it keeps it may choose: what concatenates halves of a byte is not computed again, and stayed, a byte per weight."""
    one = quantised(torch.randn(512, 256))

    def product(x):
        return _Product.apply(x, one.codes, one.scales, one.steps, one.mean, *one.shape)

    kept = torch.compile(product, backend="aot_eager_decomp_partition")(torch.randn(3, 256, requires_grad=True))
    assert sum(t.numel() * t.element_size() for t in kept.grad_fn.saved_tensors) < 0.6 * 512 * 256


@pytest.mark.parametrize("compiled", [True, False])
def test_a_recomputed_layer_in_4_bits_keeps_no_product(compiled):
    adapt = AdaptConfig(lora=LoraConfig(rank=2), base="nf4")
    one = MODEL | {"blocks": {"a": MODEL["blocks"]["a"]}, "layers": "a"}
    with torch.device("meta"):
        model = adapted(HybridLM(ModelConfig.model_validate(one), cpu()), adapt)
    model.to_empty(device="cpu")
    model.init_weights(1)
    for converter in adaptations(adapt):
        converter.finish(model, torch.device("cpu"))
    checkpoint_activations(model, ActivationCheckpointing(type="full"), compiled=compiled)
    [block], seen = model.blocks, []
    block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    block.register_forward_hook(lambda module, given, output: seen.append(output))
    ids = torch.zeros(1, 32, dtype=torch.int64)
    CausalLM(model).loss(ids, ids)
    shapes = [tuple(one.shape) for one in seen[0].grad_fn.saved_tensors]
    assert any(shape[-1:] == (2 * MLP["d_ff"],) for shape in shapes) != compiled, "what fails without the policy"
