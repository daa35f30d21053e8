"""The Triton attention kernels on a GPU, against the definition in float64, and beside the best public kernel.

Every option and some widths run by default, each at one length; `-m "slow or not slow"` runs the whole grid.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmtrain.kernels.attention import triton_call
from llmtrain.kernels.attention.documents import documents
from llmtrain.kernels.attention.triton import attend
from llmtrain.kernels.attention.triton_launch import StoredLaunch
from tests.support import attention
from tests.support.attention import CASES, Case
from tests.support.selection import cases

pytestmark = pytest.mark.gpu


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCES = {BF16: 0.01, FP16: 0.002, FP32: 2e-5}
LENGTHS = (1, 63, 65, 333)
WIDTHS = ("64", "80", "96", "112", "128", "160", "192", "224", "256")  # by default: of one part, of two and of three
WHOLE = ("causal", "everything")  # every length and dtype
PARTS = ("48", "96")  # in fp32 too: a last part of 16 columns once multiplied wrongly in TF32


def by_default(at: int, name: str, dtype: torch.dtype, seq_len: int) -> bool:
    if (name in WHOLE and (dtype == BF16 or seq_len == 65)) or (name in PARTS and dtype == FP32 and seq_len == 65):
        return True
    return dtype == BF16 and seq_len == LENGTHS[1 + at % 3] and (not name.isdigit() or name in WIDTHS)


GRID = [
    pytest.param(
        case,
        dtype,
        seq_len,
        id=f"{name}-{str(dtype).removeprefix('torch.')}-{seq_len}",
        marks=() if by_default(at, name, dtype, seq_len) else pytest.mark.slow,
    )
    for at, (name, case) in enumerate(CASES.items())
    for dtype in TOLERANCES
    for seq_len in LENGTHS
]
LONG = {
    f"{label}, {seq_len}": (case, seq_len)
    for label, case in {
        "64": Case(64),
        "128": Case(128),
        "160": Case(160),
        "64, gqa, alibi": Case(64, 8, 2, alibi=True),
        "128, window": Case(128, window=1024),
        "64, packed": Case(64, packed=(1500, 9)),
    }.items()
    for seq_len in (4096, 4097)
}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    for name, exact in wanted.items():
        seen = exact.isfinite()  # the log-sum-exp of padding is -inf
        assert torch.equal(found[name].isfinite(), seen), name
        error = (found[name].double() - exact)[seen].norm()
        assert error <= relative * exact[seen].norm() + 1e-12, (name, float(error / exact[seen].norm()))


@pytest.mark.parametrize("case, dtype, seq_len", GRID)
def test_all_agrees_with_the_definition(case, dtype, seq_len):
    tensors = attention.inputs(case, 2, seq_len, dtype, "cuda")
    assert_near(attention.ours(case, tensors), attention.exact(case, tensors), TOLERANCES[dtype])


@pytest.mark.parametrize("case, seq_len", cases(LONG, "128, 4097", "64, gqa, alibi, 4097", "64, packed, 4097"))
def test_long_sequences(case, seq_len):
    tensors = attention.inputs(case, 1, seq_len, torch.bfloat16, "cuda")
    assert_near(attention.ours(case, tensors), attention.exact(case, tensors), 0.01)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq_len", cases({"512": 512, "2048": 2048}, "2048"))
def test_as_exact_as_the_best_public_kernel(head_dim, seq_len):
    """Errors of output and gradients at most 1.1 x those of FlashAttention-2 and of cuDNN, whichever is smaller."""
    case = Case(head_dim, 4, 4, scale=head_dim**-0.5)
    tensors = attention.inputs(case, 2, seq_len, torch.bfloat16, "cuda")
    wanted = attention.exact(case, tensors)
    up = attention.upstream(wanted["out"].bfloat16(), wanted["lse"])[0]
    # Of the output alone: the public kernels do not differentiate the log-sum-exp.
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = _outcome(lambda q, k, v: _plain(q, k, v, case.scale), wide, up)

    def public(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=case.scale).transpose(
            1, 2
        )

    best = [float("inf")] * 4
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            best = [min(a, b) for a, b in zip(best, _errors(_outcome(public, tensors, up), exact), strict=True)]
    found = _errors(_outcome(lambda q, k, v: attend(q, k, v, case.scale)[0], tensors, up), exact)
    assert all(a <= 1.1 * b for a, b in zip(found, best, strict=True)), (found, best)


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (torch.softmax((scale * q @ k.mT).masked_fill(hidden, -torch.inf), -1) @ v).transpose(1, 2)


def _outcome(function, tensors: list[Tensor], up: Tensor) -> list[Tensor]:
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, up.to(out.dtype))]


def _errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("name", cases({name: name for name in ("causal", "gqa", "everything", "160")}, *WHOLE))
def test_two_runs_are_equal_bit_by_bit(name):
    tensors = attention.inputs(CASES[name], 4, 1000, torch.bfloat16, "cuda")
    runs = [attention.ours(CASES[name], tensors) for _ in range(2)]
    assert all(torch.equal(runs[0][part], runs[1][part]) for part in runs[0])


def test_a_packed_batch_equals_its_documents_apart():
    lengths = (700, 1, 300, 1047)
    q, k, v = (t.detach() for t in attention.inputs(Case(64), 1, sum(lengths), torch.bfloat16, "cuda"))
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None].cuda()
    whole, _ = attend(q, k, v, 0.125, packed=documents(ids))
    for part, *pieces in zip(*(t.split(lengths, dim=1) for t in (whole, q, k, v)), strict=True):
        alone, _ = attend(*pieces, scale=0.125)
        assert (part - alone).float().norm() <= 0.005 * alone.float().norm()


@pytest.mark.parametrize("name", cases({name: name for name in ("causal", "everything", "160")}, "everything"))
def test_compiled_without_a_graph_break(name):
    torch._dynamo.reset()
    tensors = attention.inputs(CASES[name], 2, 333, torch.bfloat16, "cuda")
    compiled = torch.compile(attend, fullgraph=True)
    found, eager = attention.ours(CASES[name], tensors, compiled), attention.ours(CASES[name], tensors)
    assert all(torch.equal(found[part], eager[part]) for part in eager)


def test_unaligned_inputs_do_without_descriptors():
    """Rows that start off 16 bytes, which TMA cannot load."""
    case = Case(64)
    fused = torch.randn(2, 300, 3 * 2 * 64 + 1, device="cuda").bfloat16()[..., 1:]
    tensors = [t.unflatten(-1, (2, 64)).detach().requires_grad_() for t in fused.split(128, dim=-1)]
    assert_near(attention.ours(case, tensors), attention.exact(case, tensors), 0.01)


STORED = {
    "160": Case(160),
    "160, full": Case(160, causal=False),
    "256, gqa": Case(256, 8, 2),
    "160, softcap": Case(160, softcap=2.0),
}


@pytest.mark.parametrize("case", cases(STORED, *STORED))
def test_the_backward_pass_by_stored_gradients_of_scores(case, monkeypatch):
    """Several chunks of keys and of queries, with a gradient of the log-sum-exp; twice the same bits."""
    tma = torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9
    block_m, stages = (64, 3) if case.head_dim == 160 else (32, 2)
    launch = StoredLaunch(block_m, 128, 8, stages, rows=2048, keys=256, queries=512, from_seq_len=1, use_tma=tma)
    monkeypatch.setattr(triton_call, "choose_stored", lambda *_: launch)
    monkeypatch.setattr(triton_call.stored_dscores, "fills", lambda *_: True)
    tensors = attention.inputs(case, 2, 1024, torch.bfloat16, "cuda")
    found = [attention.ours(case, tensors) for _ in range(2)]
    assert_near(found[0], attention.exact(case, tensors), 0.01)
    assert all(torch.equal(found[0][part], found[1][part]) for part in found[0])


@pytest.mark.parametrize("case", [Case(160), Case(160, causal=False), Case(160, 8, 2)], ids=["causal", "full", "gqa"])
def test_the_forward_pass_may_be_cudnns(case):
    """Where a row says so: on Hopper at head_dim 160. Its output and log-sum-exp serve our backward pass."""
    tensors = attention.inputs(case, 2, 512, torch.bfloat16, "cuda")
    q, k, v = (t.detach() for t in tensors)
    call = triton_call.Call(q, k, v, case.scale, case.causal)
    assert call.row("forward").cudnn == (torch.cuda.get_device_capability() == (9, 0))
    assert_near(attention.ours(case, tensors), attention.exact(case, tensors), 0.01)
