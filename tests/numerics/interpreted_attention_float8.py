"""Cases of test_attention_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

from dataclasses import replace

import pytest
import torch
from triton.runtime import interpreter

from llmtrain.kernels.attention import float8_call
from llmtrain.kernels.attention.float8 import Float8Attention
from llmtrain.kernels.attention.float8_call import Float8Call
from llmtrain.kernels.attention.reference import ReferenceAttention
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.triton_launch import Launch
from llmtrain.kernels.operation import relative_error
from llmtrain.kernels.platform import Platform

PLAIN = AttentionSpec(1, 1, 64, 0.125, dtype="float32")
SPECS = {
    "plain": PLAIN,
    "head_dim 128": replace(PLAIN, head_dim=128, scale=128**-0.5),
    "grouped": replace(PLAIN, n_heads=4, n_kv_heads=2),
    "window": replace(PLAIN, sliding_window=50),
    "ALiBi": replace(PLAIN, n_heads=2, n_kv_heads=2, alibi_max_bias=8.0),
    "documents": replace(PLAIN, documents=True),
    "all": replace(PLAIN, n_heads=4, n_kv_heads=1, sliding_window=70, alibi_max_bias=8.0, documents=True),
}
BOUNDS = (0.07, 0.1, 0.1, 0.07)
"""Relative errors of the output, dq, dk and dv: a number of e4m3 is 2.6 % off, in root mean square, and each is of two to five
products behind one another. Every mistake in a mask, a scale or the order of tokens is ten times as large."""


@pytest.fixture(autouse=True)
def rounded(monkeypatch):
    """Rounding to float8 as GPUs do: the interpreter's own loses carries."""
    convert = interpreter._convert_float

    def rounding(data, source, target, mode):
        if target.name != "fp8e4nv":
            return convert(data, source, target, mode)
        return torch.from_numpy(data).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounding)


def drawn(spec, seq_len, batch=1, outliers=1.0):
    """q, k, v and the output's gradient; every 500th number of q and k is `outliers` times as large."""
    generator = torch.Generator().manual_seed(0)
    heads = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads, spec.n_heads)
    tensors = [torch.randn(batch, seq_len, n, spec.head_dim, generator=generator) for n in heads]
    for t in tensors[:2]:
        t.view(-1)[::500] *= outliers
    return tensors


def both(attention, tensors, ids=None):
    """Output and gradients."""
    *leaves, up = tensors
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = attention(*leaves, attention.prepare(leaves[0].shape[1], torch.device("cpu"), ids))
    return [out.detach(), *torch.autograd.grad(out, leaves, up)]


def errors(spec, tensors, ids=None):
    found, exact = both(Float8Attention(spec), tensors, ids), both(ReferenceAttention(spec), tensors, ids)
    return [relative_error(a, b) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    ("name", "seq_len"),
    [*((name, 150) for name in SPECS), *(pytest.param(name, 300, marks=pytest.mark.ci) for name in ("plain", "all"))],
)
def test_all_agrees_with_the_definition(name, seq_len):
    """Over the borders of blocks of 128; the second sequence of a batch in the last case, and in that of documents."""
    spec = SPECS[name]
    batch = 2 if spec.documents else 1
    ids = (torch.arange(seq_len) // 61).expand(batch, -1) if spec.documents else None
    found = errors(spec, drawn(spec, seq_len, batch), ids)
    assert all(error < bound for error, bound in zip(found, BOUNDS, strict=True)), found


def test_padding_between_documents_sees_nothing():
    spec, ids = SPECS["documents"], (torch.arange(140) // 61)[None].clone()
    ids[:, 40:61] = -1
    tensors = drawn(spec, 140)
    out, *gradients = both(Float8Attention(spec), tensors, ids)
    assert not out[:, 40:61].any() and not any(t[:, 40:61].any() for t in gradients)
    assert all(t.isfinite().all() for t in (out, *gradients))


def test_memory_that_no_tile_has_written_does_no_harm(monkeypatch):
    """Statistics are padded to whole blocks, which tiles of the forward pass need not fill."""
    monkeypatch.setattr(float8_call, "INTERPRETED", Launch(16, 64, 4, 1))
    empty = torch.Tensor.new_empty

    def filled(t, *size, **options):
        made = empty(t, *size, **options)
        return made.fill_(float("nan")) if made.dtype == torch.float32 else made

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    q, k, v, up = drawn(PLAIN, 140)
    call = Float8Call(q, k, v, PLAIN.scale)
    stats = call.forward()
    call = Float8Call(q, k, v, PLAIN.scale, launches={"dq": Launch(128, 16, 4, 1), "dkdv": Launch(128, 16, 4, 1)})
    assert all(t.isfinite().all() for t in call.backward(*stats, up))


def test_the_size_of_numbers_changes_no_error():
    """Scales are powers of two: multiples by others give the same digits."""
    q, k, v, up = drawn(PLAIN, 130)
    small = both(Float8Attention(PLAIN), [q, k, v, up])
    large = both(Float8Attention(PLAIN), [q * 2.0**20, k * 2.0**-20, v * 2.0**30, up * 2.0**-40])
    for a, b, factor in zip(small, large, (30, -30, 10, -40), strict=True):
        assert torch.equal(a * 2.0**factor, b)


def test_tokens_without_a_gradient_leave_the_others_as_they_are():
    """Prompts, whose tokens have no loss."""
    q, k, v, up = drawn(PLAIN, 150)
    up[:, :100] = 0
    found = both(Float8Attention(PLAIN), [q, k, v, up])
    exact = both(ReferenceAttention(PLAIN), [q, k, v, up])
    assert not found[1][:, :100].any()
    assert all(relative_error(a, b) < 0.1 for a, b in zip(found, exact, strict=True))


def test_rows_of_very_different_weight_keep_their_digits():
    """A block's scale is by its largest number: rows far below it have digits by a scale of their own."""
    q, k, v, up = drawn(PLAIN, 128)
    up *= 2.0 ** -torch.arange(0, 128).div(8, rounding_mode="floor")[None, :, None, None]
    found, exact = both(Float8Attention(PLAIN), [q, k, v, up]), both(ReferenceAttention(PLAIN), [q, k, v, up])
    for begin in range(0, 128, 32):
        assert relative_error(found[1][:, begin : begin + 32], exact[1][:, begin : begin + 32]) < 0.12


def test_rotation_spreads_outliers():
    """Numbers 40 times as large as the others are 2.6 % off by themselves; a rotation shares them among all channels."""
    q, k, _, _ = drawn(replace(PLAIN, n_heads=2, n_kv_heads=2), 128, outliers=40.0)
    call = Float8Call(q, k, k, 1.0)
    (rows, _, units, _), (others, _, of_others, _) = (call._operands(t, rows=True) for t in (q, k))
    q, k, found, other = (
        t.double() for t in (q, k, rows.view(1, 2, 128, 64).float(), others.view(1, 2, 128, 64).float())
    )
    found, exact = found @ other.mT * (units * of_others)[..., None], q.transpose(1, 2) @ k.transpose(1, 2).mT
    rounded = [t.float().to(torch.float8_e4m3fn).double().transpose(1, 2) for t in (q, k)]
    assert relative_error(found, exact) < 0.8 * relative_error(rounded[0] @ rounded[1].mT, exact)


@pytest.mark.parametrize("block_m, block_n", [(16, 64), (128, 128), (64, 16)])
def test_any_tiles_that_divide_a_block(block_m, block_n, monkeypatch):
    monkeypatch.setattr(float8_call, "INTERPRETED", Launch(block_m, block_n, 4, 1, dv_first=True))
    found = errors(SPECS["window"], drawn(SPECS["window"], 150))
    assert all(error < bound for error, bound in zip(found, BOUNDS, strict=True)), found


def test_keys_of_a_group_are_summed_in_one_program_or_apart(monkeypatch):
    spec, tensors = SPECS["grouped"], drawn(SPECS["grouped"], 150)
    apart = both(Float8Attention(spec), tensors)
    monkeypatch.setattr(float8_call, "_PROGRAMS_PER_SM", 1 << 20)
    for a, b in zip(apart, both(Float8Attention(spec), tensors), strict=True):
        assert relative_error(a, b) < 0.02


def test_tokens_in_their_own_order_and_a_largest_number_of_240(monkeypatch):
    """What MI300 takes, whose format the interpreter does not know."""
    monkeypatch.setattr(float8_call, "_platform_of", lambda device: Platform("amd", "gfx950", "", 1 << 36, 256))
    made = Float8Call.__init__

    def of_240(call, *args, **options):
        made(call, *args, launches=dict.fromkeys(("forward", "dq", "dkdv"), Launch(32, 32, 4, 1)), **options)
        call.own |= {"LARGEST": 240.0}

    monkeypatch.setattr(Float8Call, "__init__", of_240)
    found = errors(PLAIN, drawn(PLAIN, 150))
    assert all(error < bound for error, bound in zip(found, BOUNDS, strict=True)), found
