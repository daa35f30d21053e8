"""Attention backends that run on a CPU, against the definition and against the reference in float64."""

import importlib
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from llmtrain.kernels import platform, registry
from llmtrain.kernels.attention.spec import AttentionSpec, alibi_slopes
from llmtrain.models.mixers.attention_segments import segment_attention_backward, segment_attention_forward
from tests.support.closeness import rounding

B, T, D = 2, 37, 16  # an odd length: no tile or alignment helps
SPECS = {
    "mha": AttentionSpec(4, 4, D, D**-0.5),
    "gqa": AttentionSpec(4, 2, D, D**-0.5),
    "mqa": AttentionSpec(3, 1, D, 0.3),
    "alibi": AttentionSpec(4, 4, D, D**-0.5, alibi_max_bias=8.0),
    "alibi-6-heads-gqa": AttentionSpec(6, 2, D, D**-0.5, alibi_max_bias=8.0),
    "window": AttentionSpec(4, 4, D, D**-0.5, sliding_window=5),
    "softcap": AttentionSpec(4, 4, D, 1.0, softcap=2.0),
    "everything": AttentionSpec(4, 2, D, 1.0, alibi_max_bias=4.0, sliding_window=9, softcap=3.0),
    "sinks": AttentionSpec(4, 2, D, D**-0.5, sinks=True),
    "sinks-window-alibi": AttentionSpec(4, 2, D, 1.0, alibi_max_bias=4.0, sliding_window=9, sinks=True),
    "wide-keys": AttentionSpec(4, 2, D, D**-0.5, value_dim=24),
}


def inputs(spec: AttentionSpec, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k, v, and sinks where the spec has some."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(B, T, n, spec.head_dim) for n in (spec.n_heads, spec.n_kv_heads)]
    shapes += [(B, T, spec.n_kv_heads, spec.width), *[(spec.n_heads,)] * spec.sinks]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).requires_grad_() for t in made]


def run(name: str, spec: AttentionSpec, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Output and the gradients of all inputs."""
    spec = AttentionSpec(**{**vars(spec), "dtype": str(dtype).removeprefix("torch.")})
    kernel = registry.resolve("attention", name, spec, platform.cpu()).build(spec, platform.cpu())
    ins = inputs(spec, dtype)
    q, k, v, *sinks = ins
    out = kernel(q, k, v, kernel.prepare(T, torch.device("cpu")), *sinks)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    out.backward(upstream.to(dtype))
    return out.detach(), [x.grad for x in ins if x.grad is not None]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_reference_follows_the_definition(spec):
    """One query at a time, from the formula in AttentionSpec's docstring."""
    q, k, v, *sinks = (x.detach() for x in inputs(spec, torch.float64))
    slopes = alibi_slopes(spec.n_heads, spec.alibi_max_bias) if spec.alibi_max_bias else [0.0] * spec.n_heads
    expected = q.new_zeros(B, T, spec.n_heads, spec.width)
    for b in range(B):
        for h in range(spec.n_heads):
            kv = h * spec.n_kv_heads // spec.n_heads
            for i in range(T):
                first = max(0, i - spec.sliding_window + 1) if spec.sliding_window else 0
                scores = []
                for j in range(first, i + 1):
                    score = spec.scale * float(q[b, i, h] @ k[b, j, kv])
                    if spec.softcap:
                        score = spec.softcap * math.tanh(score / spec.softcap)
                    scores.append(score - slopes[h] * (i - j))
                scores += [float(t[h]) for t in sinks]
                weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)[: i + 1 - first]
                expected[b, i, h] = weights @ v[b, first : i + 1, kv]
    out, _ = run("reference", spec, torch.float64)
    # The ALiBi bias is made in fp32.
    torch.testing.assert_close(out, expected, atol=1e-7, rtol=1e-7)


ABLE = [
    pytest.param(name, spec, id=f"{name}-{label}")
    for name in ("reference", "sdpa")
    for label, spec in SPECS.items()
    if registry.refusal("attention", name, spec, platform.cpu()) is None
]


@pytest.mark.parametrize("name, spec", ABLE)
def test_fp32_backends_agree_with_the_fp64_reference(name, spec):
    out, gradients = run(name, spec, torch.float32)
    expected, expected_gradients = run("reference", spec, torch.float64)
    for ours, exact in zip([out, *gradients], [expected, *expected_gradients], strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=rounding(exact.abs().max().item(), terms=T), rtol=0)


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_bf16_keeps_dtype_and_stays_close(name):
    out, gradients = run(name, SPECS["gqa"], torch.bfloat16)
    expected, expected_gradients = run("reference", SPECS["gqa"], torch.float64)
    assert {t.dtype for t in [out, *gradients]} == {torch.bfloat16}
    for ours, exact in zip([out, *gradients], [expected, *expected_gradients], strict=True):
        assert (ours.double() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("name", ["reference", "flex"])
@pytest.mark.parametrize("label", SPECS)
def test_documents_of_one_sequence_equal_the_documents_apart(name, label):
    """flex: its forward alone, uncompiled; it has no backward on a CPU."""
    spec = SPECS[label]
    kernel = importlib.import_module(f"llmtrain.kernels.attention.{name}").build(spec, platform.cpu(), "")
    if name == "flex":
        kernel.kernel = flex_attention
    q, k, v, *sinks = (t.detach() for t in inputs(spec, torch.float32))
    lengths = (5, 1, 20, 11)
    ids = torch.cat([torch.full((B, n), i) for i, n in enumerate(lengths)], 1)
    ids[1] = ids[1].flip(0).neg()  # the other sequence is packed in another way
    cpu = torch.device("cpu")
    out = kernel(q, k, v, kernel.prepare(T, cpu, ids), *sinks)
    reference = registry.resolve("attention", "reference", spec, platform.cpu()).build(spec, platform.cpu())
    for row, of_row in ((0, lengths), (1, lengths[::-1])):
        pieces = [t[row : row + 1].split(of_row, 1) for t in (q, k, v)]
        apart = [
            reference(*piece, reference.prepare(piece[0].shape[1], cpu), *sinks) for piece in zip(*pieces, strict=True)
        ]
        expected = torch.cat(apart, 1)[0]
        torch.testing.assert_close(out[row], expected, atol=rounding(expected.abs().max().item(), terms=T), rtol=0)


@pytest.mark.parametrize("name", ["reference", "sdpa", "flex"])
@pytest.mark.parametrize("label", SPECS)
@pytest.mark.parametrize("queries", [1, 11, T])
def test_suffix_attention_equals_the_last_rows(name, label, queries):
    """For ranks that share sequences. flex: its forward alone, uncompiled, as above."""
    spec = replace(SPECS[label], dtype="float32", lower_right=True)
    if name == "sdpa" and registry.refusal("attention", name, spec, platform.cpu()):
        pytest.skip("refused")
    if name == "flex":
        kernel = importlib.import_module("llmtrain.kernels.attention.flex").build(spec, platform.cpu(), "")
        kernel.kernel = flex_attention
    else:
        kernel = registry.resolve("attention", name, spec, platform.cpu()).build(spec, platform.cpu())
    q, k, v, *sinks = (t.detach() for t in inputs(spec, torch.float32))
    ids = None if name == "sdpa" else torch.arange(T).div(7, rounding_mode="floor").expand(B, -1)
    cpu = torch.device("cpu")
    out = kernel(q[:, T - queries :], k, v, kernel.prepare(T, cpu, ids, queries=queries), *sinks)
    reference = registry.resolve("attention", "reference", spec, platform.cpu()).build(spec, platform.cpu())
    expected = reference(q, k, v, reference.prepare(T, cpu, ids), *sinks)[:, T - queries :]
    torch.testing.assert_close(out, expected, atol=rounding(expected.abs().max().item(), terms=T), rtol=0)


@pytest.mark.parametrize("queries", [9, T])
@pytest.mark.parametrize("label", ["mha", "gqa", "sinks"])
def test_gradients_of_suffix_attention_put_together_from_two_calls(label, queries):
    spec = replace(SPECS[label], dtype="float64", lower_right=True)
    leaves = [t.detach().requires_grad_() for t in inputs(spec, torch.float64)]
    found = []
    for name in ("sdpa:cpu", "reference"):
        kernel = registry.resolve("attention", name, spec, platform.cpu()).build(spec, platform.cpu())
        context = kernel.prepare(T, torch.device("cpu"), queries=queries)
        q, k, v, *sinks = leaves
        out = kernel(q[:, T - queries :], k, v, context, *sinks)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-12, rtol=1e-9)


def test_operators_of_suffix_attention_pass_opcheck():
    q, k, v = (torch.randn(1, n, 2, 8, requires_grad=True) for n in (5, 15, 15))
    torch.library.opcheck(torch.ops.llmtrain.attention_suffix.default, (q, k, v, None, 0.3, None, "cpu"))
    sinks = torch.randn(2, requires_grad=True)
    torch.library.opcheck(torch.ops.llmtrain.attention_suffix.default, (q, k, v, sinks, 0.3, None, "cpu"))


@pytest.mark.parametrize("batch", [1, 2])
def test_the_operators_of_shared_segments_say_what_they_do(tmp_path, batch):
    """By a group of this process alone, which holds both segments."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        q, k, v = (torch.randn(batch, 10, heads, 8, requires_grad=True) for heads in (4, 2, 2))
        sinks = torch.randn(4, requires_grad=True) if batch == 2 else None
        arguments = (q, k, v, sinks, 0.3, None, "cpu", 0, 1, dist.group.WORLD.group_name)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(segment_attention_forward, arguments, test_utils=checks)
        out, lse = segment_attention_forward(*arguments)
        given = (torch.ones_like(out), out.detach(), lse, *(t if t is None else t.detach() for t in arguments[:4]))
        given = (*given, *arguments[4:])
        torch.library.opcheck(segment_attention_backward, given, test_utils=checks)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["sdpa:flash3", "sdpa:flash4", "varlen", "flash_attn"])
def test_backends_for_whole_sequences_alone_say_so(name):
    refused = registry.refusal("attention", name, replace(SPECS["gqa"], lower_right=True))
    assert refused is not None and "train.parallel.context" in refused and "flex" in refused


@pytest.mark.parametrize("changes", [{"sliding_window": 5}, {"alibi_max_bias": 8.0}, {"documents": True}])
def test_ours_takes_the_suffix_of_plain_attention_alone(changes):
    spec = replace(SPECS["gqa"], dtype="bfloat16", lower_right=True)
    assert registry.refusal("attention", "triton", replace(spec, softcap=9.0)) is None
    refused = registry.refusal("attention", "triton", replace(spec, **changes))
    assert refused is not None and "train.parallel.context" in refused and "flex" in refused


@pytest.mark.parametrize("window", [None, 5])
def test_causal_pairs_count_what_the_mask_shows(window):
    spec = AttentionSpec(1, 1, D, 1.0, sliding_window=window)
    kernel = registry.resolve("attention", "reference", spec, platform.cpu()).build(spec, platform.cpu())
    visible = kernel.prepare(T, torch.device("cpu")) > -torch.inf
    assert spec.pairs(T, causal=True) == int(visible.sum())
    assert spec.pairs(T, causal=False) == T * T


def test_alibi_slopes_in_mpt_order():
    assert alibi_slopes(4, 8.0) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    assert alibi_slopes(3, 8.0) == [2.0**-4, 2.0**-8, 2.0**-2]
