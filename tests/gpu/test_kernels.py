"""Kernels that need a GPU, against the reference in float64 on the same device: forward and every gradient."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import platform, registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import LossConfig, ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.loss import ChunkedLoss, PlainLoss
from tests.support import kernels as support
from tests.support.selection import cases

pytestmark = pytest.mark.gpu

B, T = 2, 333  # no multiple of any tile
SPECS = {
    "mha-64": AttentionSpec(4, 4, 64, 0.125),
    "mha-128": AttentionSpec(4, 4, 128, 128**-0.5),
    "gqa": AttentionSpec(8, 2, 64, 0.125),
    "zamba-160": AttentionSpec(4, 4, 160, 80**-0.5),
    "gqa-256": AttentionSpec(4, 2, 256, 1 / 16),
    "alibi": AttentionSpec(6, 6, 64, 0.125, alibi_max_bias=8.0),
    "alibi-gqa": AttentionSpec(8, 2, 64, 0.125, alibi_max_bias=8.0),
    "window": AttentionSpec(4, 4, 64, 0.125, sliding_window=100),
    "softcap": AttentionSpec(4, 4, 64, 0.5, softcap=5.0),
    "everything": AttentionSpec(4, 2, 128, 0.3, alibi_max_bias=4.0, sliding_window=100, softcap=5.0),
    "documents": AttentionSpec(8, 2, 64, 0.125, documents=True),
    "documents-alibi": AttentionSpec(6, 6, 64, 0.125, alibi_max_bias=8.0, documents=True),
}
DOCUMENTS = (1, 100, 31, 128, 73)
BACKENDS = ["sdpa:flash", "sdpa:cudnn", "sdpa:efficient", "flex", "varlen"]
HYBRID = {
    "m": {"type": "mamba2", "d_state": 32, "head_dim": 32, "chunk_size": 64},
    "a": {"type": "attention", "n_heads": 4, "position": {"type": "rotary"}, "mlp": {"type": "swiglu", "d_ff": 256}},
    "s": {"type": "shared_attention", "n_heads": 4, "mlp": {"type": "geglu", "d_ff": 256}, "adapter_rank": 8},
}


def inputs(spec: AttentionSpec) -> list[Tensor]:
    return support.inputs("attention", replace(spec, dtype="bfloat16"), B, T, "cuda")


def documents(device: torch.device) -> Tensor:
    """[B, T]: the second sequence holds the documents of the first in reverse."""
    of_first = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
    return torch.stack((of_first, len(DOCUMENTS) - 1 - of_first.flip(0))).to(device, torch.int32)


def outcome(function, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, in float64."""
    return [t.double() for t in support.outcome(function, tensors, dtype)]


def assert_close(ours: list[Tensor], exact: list[Tensor], relative: float) -> None:
    for a, b in zip(ours, exact, strict=True):
        assert torch.isfinite(a).all()
        assert (a - b).norm() < relative * b.norm()


@pytest.mark.parametrize("compiled", cases({"eager": False, "compiled": True}, "compiled"))
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spec", cases(SPECS, "mha-128", "everything"))
def test_attention_backends_agree_with_the_reference(spec, name, compiled):
    here = platform.detect()
    if reason := registry.refusal("attention", name, spec, here):
        pytest.skip(reason)
    device = torch.device("cuda")
    kernel = registry.resolve("attention", name, spec, here).build(spec, here)
    reference = registry.resolve("attention", "reference", spec, here).build(spec, here)
    ids = documents(device) if spec.documents else None
    context, exact_context = kernel.prepare(T, device, ids), reference.prepare(T, device, ids)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k, v, context)

    torch._dynamo.reset()
    run = torch.compile(run, fullgraph=True) if compiled else run
    exact = outcome(lambda q, k, v: reference(q, k, v, exact_context), inputs(spec), torch.float64)
    assert_close(outcome(run, inputs(spec), torch.bfloat16), exact, 0.01)


SUFFIX = {
    "gqa-128": AttentionSpec(8, 2, 128, 128**-0.5, lower_right=True),
    "zamba-160": AttentionSpec(4, 4, 160, 80**-0.5, lower_right=True),
    "softcap": AttentionSpec(4, 4, 64, 0.5, softcap=5.0, lower_right=True),
}


@pytest.mark.parametrize("queries", [512, 333, 1536])
@pytest.mark.parametrize("name", ["sdpa:flash", "sdpa:cudnn", "triton", "flex"])
@pytest.mark.parametrize("spec", cases(SUFFIX, "gqa-128", "zamba-160"))
def test_suffix_attention_agrees_with_the_reference(spec, name, queries):
    """Of three segments of each, for ranks that share sequences; 1536: of one."""
    found = errors_of_suffix(spec, name, queries, queries if queries == 1536 else 3 * queries)
    if isinstance(found, str):
        pytest.skip(found)
    assert max(found) < 0.01


def errors_of_suffix(spec: AttentionSpec, name: str, queries: int, keys: int) -> list[float] | str:
    """Relative errors of output, dq, dk and dv, compiled; or why the backend cannot serve."""
    here, device = platform.detect(), torch.device("cuda")
    if reason := registry.refusal("attention", name, spec, here):
        return reason
    g = torch.Generator("cuda").manual_seed(0)
    shapes = [(queries, spec.n_heads), (keys, spec.n_kv_heads), (keys, spec.n_kv_heads)]
    tensors = [torch.randn(B, n, h, spec.head_dim, generator=g, device="cuda").bfloat16() for n, h in shapes]
    kernel, reference = (registry.resolve("attention", n, spec, here).build(spec, here) for n in (name, "reference"))
    context, exact_context = (k.prepare(keys, device, None, queries) for k in (kernel, reference))
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v: kernel(q, k, v, context), fullgraph=True)
    exact = outcome(lambda q, k, v: reference(q, k, v, exact_context), tensors, torch.float64)
    ours = outcome(run, tensors, torch.bfloat16)
    return [float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]


def test_efficient_attention_in_fp32():
    """What `auto` takes for fp32 training on a GPU."""
    here, spec = platform.detect(), AttentionSpec(4, 4, 64, 0.125, dtype="float32")
    backend = registry.resolve("attention", "auto", spec, here)
    assert backend.name == "sdpa:efficient"
    kernel = backend.build(spec, here)
    reference = registry.resolve("attention", "reference", spec, here).build(spec, here)
    context = reference.prepare(T, torch.device("cuda"))
    exact = outcome(lambda *qkv: reference(*qkv, context), inputs(spec), torch.float64)
    assert_close(outcome(lambda *qkv: kernel(*qkv, None), inputs(spec), torch.float32), exact, 1e-3)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_ssd_compiled_in_bf16(name):
    here, spec = platform.detect(), SSDSpec(8, 64, 64, 2, 128)
    kernel, reference = (registry.resolve("ssd", n, spec, here).build(spec, here) for n in (name, "reference"))
    tensors = [t.bfloat16() for t in support.inputs("ssd", spec, B, T, "cuda")]
    exact = outcome(lambda *t: reference(*t)[0], tensors, torch.float64)
    compiled = torch.compile(kernel, fullgraph=True)
    assert_close(outcome(lambda *t: compiled(*t)[0], tensors, torch.bfloat16), exact, 0.03)


@pytest.mark.parametrize("name", ["reference", "aten"])
def test_conv1d_in_bf16(name):
    here, spec = platform.detect(), Conv1dSpec(96, 4)
    kernel = registry.resolve("conv1d", name, spec, here).build(spec, here)
    tensors = support.inputs("conv1d", spec, B, T, "cuda")
    exact = outcome(kernel, tensors, torch.float64)
    assert_close(outcome(torch.compile(kernel, fullgraph=True), tensors, torch.bfloat16), exact, 0.02)


def test_chunked_loss_agrees_with_the_plain_one():
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(4, 100, 64, generator=g, device="cuda").requires_grad_()
    weight = torch.randn(1000, 64, generator=g, device="cuda").requires_grad_()
    labels = torch.randint(0, 1000, (4, 100), generator=g, device="cuda")
    labels[0, :30] = -100
    losses = [PlainLoss(LossConfig(z_loss=0.01), 20.0), ChunkedLoss(LossConfig(z_loss=0.01, chunk_tokens=128), 20.0)]
    plain, chunked = (loss(hidden, weight, labels).loss for loss in losses)
    torch.testing.assert_close(chunked, plain, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in (chunked, plain)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(platform.detect().vendor != "nvidia", reason="cuBLAS's products")
def test_the_heads_gradient_is_summed_in_fp32():
    """Where products add to the sum by themselves, no product of a chunk is rounded to bf16 before."""
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(4, 512, 64, generator=g, device="cuda").bfloat16()
    # As small as a head's are: with large scores the error is that of scores in bf16.
    weight = (0.05 * torch.randn(1000, 64, generator=g, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, 1000, (4, 512), generator=g, device="cuda")
    wide = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(PlainLoss(LossConfig(), None)(hidden.double(), wide, labels).loss, wide)

    def error(wide_products: bool) -> float:
        loss = ChunkedLoss(LossConfig(chunk_tokens=256), None, wide_products)(hidden, weight, labels).loss
        (found,) = torch.autograd.grad(loss, weight)
        return float((found.double() - exact).norm() / exact.norm())

    assert error(True) < 0.85 * error(False)


def test_weights_are_those_of_a_cpu():
    blocks = {"m": {"type": "mamba2", "d_state": 16}, "a": {"type": "attention", "n_heads": 4}}
    config = ModelConfig.model_validate({"vocab_size": 64, "d_model": 128, "blocks": blocks, "layers": "m a"})
    cpu, gpu = HybridLM(config), HybridLM(config).cuda()
    cpu.init_weights(0)
    gpu.init_weights(0)
    for a, b in zip(cpu.parameters(), gpu.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a, atol=0, rtol=1e-6)


def test_a_hybrid_trains_compiled_in_bf16():
    config = ModelConfig.model_validate({"vocab_size": 256, "d_model": 128, "blocks": HYBRID, "layers": "m s+m a s+m"})
    torch._dynamo.reset()
    model = HybridLM(config).cuda()
    model.init_weights(0)
    model.cast(torch.bfloat16)
    for block in model.blocks:
        block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = (torch.arange(T, device="cuda") * torch.arange(1, 5, device="cuda")[:, None]) % 256
    losses = []
    for _ in range(30):
        out = CausalLM(model).loss(ids[:, :-1], ids[:, 1:])
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(out.terms["cross_entropy"]))
    assert losses[0] == pytest.approx(5.545, abs=0.3)  # log 256
    assert losses[-1] < losses[0] / 2


def test_a_hybrid_keeps_packed_documents_apart():
    """With the kernels that `auto` takes, compiled; each document alone through those of unpacked sequences."""
    config = ModelConfig.model_validate({"vocab_size": 256, "d_model": 128, "blocks": HYBRID, "layers": "m s+m a s+m"})
    packing, plain = (HybridLM(config, documents=packed).cuda() for packed in (True, False))
    packing.init_weights(0)
    with torch.no_grad():
        for parameter in packing.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).cuda()
    plain.load_state_dict(packing.state_dict())
    torch._dynamo.reset()
    for block in packing.cast(torch.bfloat16).blocks:
        block.compile(fullgraph=True)
    plain.cast(torch.bfloat16)
    ids = documents(torch.device("cuda"))[:1]
    tokens = torch.randint(0, 256, (1, T), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    with torch.no_grad():
        apart = torch.cat([CausalLM(plain).logits(document) for document in tokens.split(DOCUMENTS, 1)], 1)
        assert (CausalLM(packing).logits(tokens, ids) - apart).norm() < 0.05 * apart.norm()
        assert (CausalLM(packing).logits(tokens) - apart).norm() > 0.2 * apart.norm()
