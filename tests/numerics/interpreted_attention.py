"""Cases of test_attention_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself.

`-m slow` runs the whole grid, otherwise what is not marked so.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.kernels import registry
from llmtrain.kernels.attention import triton as kernels
from llmtrain.kernels.attention import triton_call, triton_select
from llmtrain.kernels.attention.documents import documents
from llmtrain.kernels.attention.reference import ReferenceAttention
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.sum_groups import sum_groups
from llmtrain.kernels.attention.triton_launch import Launch
from llmtrain.kernels.platform import Platform
from llmtrain.models.costs import Flops
from llmtrain.models.mixers.base import Mixer
from llmtrain.schema.training import ActivationCheckpointing
from llmtrain.train.parallel import checkpoint_activations
from tests.support import attention
from tests.support.attention import CASES, Case, assert_agree

TILES = [(32, 16), (16, 32), (16, 16), (32, 32)]
HOPPER = Platform("nvidia", "sm90", "", 1 << 36, 132)
ALONE = ["causal", "full", "everything", "sinks"]  # a sequence of one token, by default
GRID = [
    pytest.param(CASES[name], T, tiles, id=f"{name}-{T}-{tiles[0]}x{tiles[1]}", marks=pytest.mark.slow)
    for name in CASES
    for T in (1, 31, 64, 97)
    for tiles in (TILES if T > 1 else TILES[:1])
] + [
    pytest.param(CASES[name], T, TILES[(at + t) % 4], id=f"{name}-{T}")
    for at, name in enumerate(CASES)
    for t, T in enumerate((61, 1) if name in ALONE else (61,))
]


@pytest.fixture
def tiles(monkeypatch, request):
    block_m, block_n = request.param
    monkeypatch.setattr(triton_call, "choose", lambda *_: Launch(block_m, block_n, 4, 1))


@pytest.mark.parametrize("case, seq_len, tiles", GRID, indirect=["tiles"])
def test_all_agrees_with_the_definition(case, seq_len, tiles):
    assert_agree(case, 2 if case.packed else 1, seq_len)


@pytest.fixture
def described(monkeypatch):
    """A list of the rows of each tensor descriptor that is made, on a GPU that has them."""
    monkeypatch.setattr(triton_call, "_platform_of", lambda device: HOPPER)
    rows, made = [], triton_call.Call._descriptor
    monkeypatch.setattr(
        triton_call.Call, "_descriptor", lambda call, t, n, launch: rows.append(n) or made(call, t, n, launch)
    )
    return rows


@pytest.mark.parametrize(
    "case, part",
    [
        (Case(), None),
        (Case(causal=False, n_heads=4, n_kv_heads=2), None),
        (Case(24, n_heads=4, n_kv_heads=2, window=23), 32),
        (Case(48), 32),
        (Case(32), 16),
    ],
)
def test_tiles_through_descriptors(case, part, monkeypatch, described):
    monkeypatch.setattr(triton_call, "choose", lambda *_: Launch(32, 16, 4, 1, use_tma=True, part=part))
    assert_agree(case, 2, 64)
    assert described == [16, 16, 16, 16, 32, 32]
    described.clear()
    assert_agree(case, 2, 45)  # the last tile of a sequence has rows of the next one, or lies beyond them all
    assert described == [16, 16, 16, 16, 32, 32]


def test_a_padded_part_does_not_see_the_head_beside_it(monkeypatch, described):
    """Zeros, by TMA too: 0 times the NaN of another head would be NaN."""
    monkeypatch.setattr(triton_call, "choose", lambda *_: Launch(16, 16, 4, 1, use_tma=True, part=32))
    case = Case(24, n_heads=2, n_kv_heads=2)
    wanted = attention.ours(case, attention.inputs(case, 1, 32, torch.float32))
    poisoned = attention.inputs(case, 1, 32, torch.float32)
    with torch.no_grad():
        for t in poisoned:
            t[:, :, 1] = torch.nan
    found = attention.ours(case, poisoned)
    assert described
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(found[name][:, :, 0], wanted[name][:, :, 0], atol=0, rtol=0)


FORMS = {
    "dv first": {"dv_first": True},
    "single_loop": {"single_loop": True},
    "both": {"dv_first": True, "single_loop": True},
    "split": {"split": True},
    "split, single_loop": {"split": True, "single_loop": True},
    "one loop": {"one_loop": True},
    "one loop, dv first": {"one_loop": True, "dv_first": True},
    "one loop, split": {"one_loop": True, "split": True},
    "padded": {"part": 64},
    "in registers": {"in_registers": 2},
    "one loop, one in registers": {"one_loop": True, "in_registers": 1},
}


@pytest.mark.parametrize(
    "name", [*(pytest.param(one, marks=pytest.mark.ci) for one in ("full", "window")), "everything"]
)
@pytest.mark.parametrize(
    "form",
    [name if "," in name or name in ("both", "padded") else pytest.param(name, marks=pytest.mark.ci) for name in FORMS],
)
def test_every_form_of_a_kernel(form, name, monkeypatch):
    monkeypatch.setattr(triton_call, "choose", lambda *_: Launch(16, 16, 4, 1, **FORMS[form]))
    assert_agree(CASES[name], 1, 61)


@pytest.mark.ci
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("form", [{}, {"single_loop": True}, {"one_loop": True}], ids=str)
def test_a_program_takes_any_number_of_the_heads_that_share_keys(heads, form, monkeypatch):
    monkeypatch.setattr(triton_call, "choose", lambda *_: Launch(16, 16, 4, 1, **form))
    monkeypatch.setattr(triton_call.Call, "_heads_of_a_program", lambda *_: heads)
    assert_agree(Case(16, 8, 2, window=20, alibi=True, packed=(20, 30, -5)), 2, 61)


def test_programs_are_fewer_than_heads_where_they_fill_the_device(monkeypatch):
    def heads(n_heads, n_kv, batch, seq_len):
        q, k = (torch.empty(batch, seq_len, n, 64, device="meta", dtype=torch.bfloat16) for n in (n_heads, n_kv))
        call = triton_call.Call(q, k, k, 0.1, platform=HOPPER)
        return call._heads_of_a_program(Launch(64, 64, 4, 2))

    assert heads(32, 8, 2, 8192) == 4  # 2048 programs
    assert heads(32, 8, 1, 1024) == 1
    assert heads(32, 1, 4, 4096) == 8  # 1024 programs, where 16 heads would leave 512
    assert heads(24, 8, 1, 4096) == 1  # 512 with 3
    assert heads(16, 16, 1, 64) == 1


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_any_order_of_programs(in_flight, monkeypatch):
    """Three pairs of sequence and head: rounds of one, of two and one, of all."""
    monkeypatch.setattr(triton_call, "pairs_in_flight", lambda *_: in_flight)
    assert_agree(Case(n_heads=3, n_kv_heads=3), 1, 40)


def test_fp16():
    case = Case(n_heads=2, n_kv_heads=1)
    tensors = attention.inputs(case, 1, 50, torch.float16)
    found, wanted = attention.ours(case, tensors), attention.exact(case, tensors)
    assert [found[name].dtype for name in found] == [torch.float16, torch.float32, *[torch.float16] * 3]
    for name in wanted:
        assert (found[name].double() - wanted[name]).norm() < 2e-3 * wanted[name].norm(), name


def test_padding_gives_zeros_and_takes_no_gradient():
    case = Case(packed=(20, -15, 30))
    tensors = attention.inputs(case, 1, 50, torch.float32)
    found = attention.ours(case, tensors)
    assert all((found[name][:, 20:35] == 0).all() for name in ("out", "dq", "dk", "dv"))
    assert (found["lse"][:, :, 20:35] == -torch.inf).all()


def test_a_packed_sequence_equals_its_documents_apart():
    lengths = (17, 1, 30, 5)
    case, alone = Case(packed=lengths, window=12), Case(window=12)
    tensors = attention.inputs(case, 1, sum(lengths), torch.float32)
    q, k, v = (t.detach() for t in tensors)
    ids = case.ids(1, sum(lengths))
    assert ids is not None
    whole, _ = kernels.attend(q, k, v, 0.2, window=12, packed=documents(ids))
    at = 0
    for n in lengths:
        part, _ = kernels.attend(*(t[:, at : at + n] for t in (q, k, v)), scale=alone.scale, window=12)
        torch.testing.assert_close(whole[:, at : at + n], part, atol=1e-6, rtol=1e-6)
        at += n


def test_the_backend_agrees_with_the_reference():
    spec = AttentionSpec(4, 2, 32, 0.3, alibi_max_bias=8.0, sliding_window=20, softcap=3.0, dtype="float32")
    q, k, v = (t.detach() for t in attention.inputs(CASES["gqa"], 2, 37, torch.float32))
    backend, reference = kernels.build(spec, Platform("cpu", "cpu", "", 1), ""), ReferenceAttention(spec)
    device = torch.device("cpu")
    out = backend(q, k, v, backend.prepare(37, device))
    assert out.is_contiguous()
    torch.testing.assert_close(out, reference(q, k, v, reference.prepare(37, device)), atol=1e-5, rtol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tma, length", [(False, kernels.WHOLE), (True, 37)], ids=["by pointers", "by TMA"])
def test_on_a_gpu_tokens_are_added_until_all_tiles_are_whole_unless_tma_loads_them(tma, length, packed, monkeypatch):
    launch = Launch(32, 16, 4, 1, use_tma=tma)
    for module in (triton_call, triton_select):
        monkeypatch.setattr(module, "choose", lambda *_: launch)
    spec = AttentionSpec(4, 2, 32, 0.3, alibi_max_bias=8.0, sliding_window=20, documents=packed, dtype="float32")
    leaves = [t.detach().requires_grad_() for t in attention.inputs(CASES["gqa"], 2, 37, torch.float32)]
    ids = Case(packed=(20, 9, 5)).ids(2, 37) if packed else None
    lengths, forward = [], triton_call.Call.forward
    monkeypatch.setattr(triton_call.Call, "forward", lambda call: lengths.append(call.seq_len) or forward(call))
    upstream, found = torch.randn(2, 37, 4, 32), []
    both: tuple[Any, Any] = (kernels.build(spec, HOPPER, ""), ReferenceAttention(spec))
    for kernel in both:
        out = kernel(*leaves, kernel.prepare(37, torch.device("cpu"), ids))
        found.append((out, *torch.autograd.grad(out, leaves, upstream)))
    assert lengths == [length]
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-4)


def test_strides_of_every_kind():
    """Heads before tokens, a gradient of stride 0, and a last dimension that is not contiguous."""
    case = Case()
    q, k, v = (t.detach() for t in attention.inputs(case, 1, 40, torch.float32))
    plain = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(kernels.attend(*plain, scale=0.2)[0].sum(), plain)
    odd = [
        q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        k.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_(),
        v.repeat_interleave(2, dim=1)[:, ::2].requires_grad_(),
    ]
    found = torch.autograd.grad(kernels.attend(*odd, scale=0.2)[0].sum(), odd)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_two_runs_are_equal_bit_by_bit():
    case = CASES["everything"]
    tensors = attention.inputs(case, 1, 33, torch.float32)
    runs = [attention.ours(case, tensors) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_no_graph_break():
    """Forward and backward in one graph each, on real tensors."""
    case = CASES["everything"]
    tensors = attention.inputs(case, 1, 33, torch.float32)
    compiled = torch.compile(kernels.attend, fullgraph=True, backend="aot_eager")
    found, wanted = attention.ours(case, tensors, compiled), attention.ours(case, tensors)
    for part in wanted:
        torch.testing.assert_close(found[part], wanted[part], atol=0, rtol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("tiles", TILES[:1], indirect=True)
def test_suffix_attention_equals_the_last_rows(softcap, tiles):
    """Several calls put together, forward and backward: 15 queries and 45 keys, of which a third is theirs."""
    spec = AttentionSpec(4, 2, 16, 0.3, softcap=softcap, dtype="float32", lower_right=True)
    leaves = [torch.randn(2, n, heads, 16, requires_grad=True) for n, heads in ((15, 4), (45, 2), (45, 2))]
    upstream = torch.randn(2, 15, 4, 16)
    found = []
    both: tuple[Any, Any] = (kernels.build(spec, HOPPER, ""), ReferenceAttention(spec))
    for kernel in both:
        out = kernel(*leaves, kernel.prepare(45, torch.device("cpu"), None, 15))
        found.append((out, *torch.autograd.grad(out, leaves, upstream)))
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-4)


def test_the_operators_say_what_they_do():
    """Schema, fake tensors, autograd and tracing, by torch's own checks."""
    q, k, v = attention.inputs(Case(n_heads=2, n_kv_heads=1), 1, 20, torch.float32)
    arguments = (q, k, v, 0.2, True, 9, None, None, None, None, None)
    torch.library.opcheck(torch.ops.llmtrain.attention_forward.default, arguments)
    out, lse = (t.detach() for t in kernels.attend(q, k, v, 0.2, window=9))
    plain = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in arguments)
    torch.library.opcheck(torch.ops.llmtrain.attention_backward.default, (out, lse, out, lse, *plain))


def test_selective_checkpointing_keeps_the_output(monkeypatch):
    """Nothing else is costly here: the kernel runs once where checkpointing in full runs it twice."""
    ran = []
    forward = triton_call.Call.forward
    monkeypatch.setattr(triton_call.Call, "forward", lambda call: ran.append(1) or forward(call))

    class Attention(Mixer):
        def __init__(self):
            torch.nn.Module.__init__(self)

        def forward(self, q, k, v):
            return 2 * kernels.attend(q, k, v, 0.2)[0]

        def flops(self, seq_len, causal=False):
            return Flops()

        def saved_ops(self):
            return registry.saved_ops("attention", "triton")

    found = {}
    for kind in ("none", "full", "selective"):
        model: Any = torch.nn.Module()
        model.blocks, model.config = torch.nn.ModuleList([Attention()]), SimpleNamespace(draws_in_training=False)
        checkpoint_activations(model, ActivationCheckpointing(type=kind))
        leaves = attention.inputs(Case(), 1, 20, torch.float32)
        ran.clear()
        gradients = torch.autograd.grad(model.blocks[0](*leaves).sum(), leaves)
        found[kind] = (len(ran), gradients)
    assert {kind: count for kind, (count, _) in found.items()} == {"none": 1, "full": 2, "selective": 1}
    for kind in ("full", "selective"):
        assert all(map(torch.equal, found[kind][1], found["none"][1]))


@pytest.mark.parametrize(("parts", "widths"), [(2, (16, 16)), (5, (24, 8))])
def test_gradients_of_programs_that_share_keys_are_summed(parts, widths):
    g = torch.Generator().manual_seed(3)
    dk, dv = given = [torch.randn(2, 33, 3 * parts, width, generator=g) for width in widths]
    for dtype in (torch.float32, torch.bfloat16):
        for found, t in zip(sum_groups(dk, dv, 3, dtype), given, strict=True):
            torch.testing.assert_close(found, t.unflatten(2, (3, parts)).sum(3).to(dtype))
