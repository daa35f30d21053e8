"""Inputs of the kernels of cached decoding, shared by the tests on CPU, in Triton's interpreter and on a GPU."""

import torch
from torch import Tensor

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.ssd.spec import SSDSpec

ATTENTION = {
    "mha": AttentionSpec(3, 3, 64, 0.125),
    "gqa": AttentionSpec(6, 2, 64, 0.125),
    "mqa": AttentionSpec(5, 1, 32, 0.2),
    "mqa-40-heads": AttentionSpec(40, 1, 16, 0.25),
    "alibi": AttentionSpec(6, 6, 32, 0.2, alibi_max_bias=8.0),
    "alibi-gqa": AttentionSpec(6, 2, 32, 0.2, alibi_max_bias=8.0),
    "window": AttentionSpec(2, 2, 32, 0.2, sliding_window=23),
    "window-gqa": AttentionSpec(4, 2, 32, 0.2, sliding_window=23),
    "softcap": AttentionSpec(2, 2, 32, 0.5, softcap=2.0),
    "sinks": AttentionSpec(2, 2, 32, 0.2, sinks=True),
    "sinks-window-gqa": AttentionSpec(4, 2, 32, 0.2, sliding_window=23, sinks=True),
    "everything": AttentionSpec(2, 2, 40, 0.3, alibi_max_bias=4.0, sliding_window=50, softcap=3.0),
    "everything-gqa": AttentionSpec(4, 2, 40, 0.3, alibi_max_bias=4.0, sliding_window=50, softcap=3.0),
    **{f"mha-{d}": AttentionSpec(2, 2, d, d**-0.5) for d in (8, 80, 96, 112, 128, 160, 224, 256)},
    **{f"gqa-{d}": AttentionSpec(4, 2, d, d**-0.5) for d in (8, 80, 96, 112, 128, 160, 224, 256)},
}
SSD = {
    "one group": SSDSpec(4, 8, 16, 1, 64),
    "groups": SSDSpec(4, 16, 16, 2, 64),
    "odd sizes": SSDSpec(3, 24, 5, 3, 64),
    "usual sizes": SSDSpec(2, 64, 128, 1, 64),
    "limited dt": SSDSpec(4, 8, 16, 1, 64, dt_limit=(0.4, 1.0)),
    "dt with a floor only": SSDSpec(4, 8, 16, 1, 64, dt_limit=(0.4, None)),
}
CONV = {f"{c} x {w}": Conv1dSpec(c, w) for c, w in ((40, 4), (300, 3), (300, 2), (7, 1), (9, 6))}


def attention_inputs(
    spec: AttentionSpec, capacity: int, position: int, first: list[int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """q (a strided slice, as of a projection), k_cache, v_cache, position, first, and sinks where there are some. Slots that no row
    may see hold NaN."""
    g = torch.Generator().manual_seed(capacity + position)
    batch = len(first)
    q = torch.randn(batch, spec.n_heads * spec.head_dim + 8, generator=g, dtype=torch.float64).to(device, dtype)
    q = q[:, 8:].unflatten(1, (spec.n_heads, spec.head_dim))
    caches = torch.randn(2, batch, spec.n_kv_heads, capacity, spec.head_dim, generator=g, dtype=torch.float64)
    caches[..., position + 1 :, :] = float("nan")
    for row, start in enumerate(first):
        caches[:, row, :, :start] = float("nan")
    if spec.sliding_window is not None:
        caches[..., : max(0, position - spec.sliding_window + 1), :] = float("nan")
    k, v = caches.to(device, dtype)
    sinks = [torch.randn(spec.n_heads, generator=g, dtype=torch.float64).to(device, dtype)] * spec.sinks
    return (
        q,
        k,
        v,
        torch.tensor([position], device=device),
        torch.tensor(first, dtype=torch.int32, device=device),
        *sinks,
    )


def in_pages(inputs: tuple[Tensor, ...], size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """The inputs with caches in pages of some slots each, and the table of each row's, in no order. Pages that hold nothing that a
    row may see, and page 0, are NaN; the table has further columns."""
    q, k, v, position, first, *sinks = inputs
    batch, count = k.shape[0], -(-k.shape[2] // size)
    numbers = 1 + torch.randperm(batch * count, generator=torch.Generator().manual_seed(size)).view(batch, count)
    table = torch.zeros(batch, count + 2, dtype=torch.int32)
    table[:, :count] = numbers

    def paged(cache: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(cache, (0, 0, 0, count * size - cache.shape[2]), value=float("nan"))
        made = cache.new_full((1 + batch * count, cache.shape[1], size, cache.shape[3]), float("nan"))
        made[numbers.to(cache.device)] = padded.unflatten(2, (count, size)).transpose(1, 2)
        return made

    return (q, paged(k), paged(v), position, first, *sinks), table.to(q.device)


def ssd_inputs(spec: SSDSpec, batch: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """x, dt, A, B, C, D, dt_bias, state. x, B and C are slices of one row, as after a projection, and dt of another.

    Time steps go from 1e-5 to 20: softplus must be right at both ends.
    """
    g = torch.Generator().manual_seed(spec.head_dim)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(device)

    wide = torch.promote_types(dtype, torch.float32)
    d_inner, d_bc = spec.n_heads * spec.head_dim, spec.n_groups * spec.d_state
    x, B, C = draw(batch, d_inner + 2 * d_bc).to(dtype).split([d_inner, d_bc, d_bc], dim=-1)
    x = x.unflatten(-1, (spec.n_heads, spec.head_dim))
    B, C = (t.unflatten(-1, (spec.n_groups, spec.d_state)) for t in (B, C))
    dt = (8 * draw(batch, 3 + spec.n_heads)).clamp(-12, 20).to(dtype)[:, 3:]
    A, D, dt_bias = -draw(spec.n_heads).exp().to(wide), draw(spec.n_heads).to(wide), draw(spec.n_heads).to(wide)
    return [x, dt, A, B, C, D, dt_bias, draw(batch, spec.n_heads, spec.head_dim, spec.d_state).to(wide)]


def conv_inputs(
    spec: Conv1dSpec, batch: int, biased: bool, dtype: torch.dtype, channels_last: bool = True, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x (a slice), window, weight, bias."""
    g = torch.Generator().manual_seed(spec.channels)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(device, dtype)

    x = draw(batch, spec.channels + 8)[:, 8:]
    window = draw(batch, spec.width - 1, spec.channels).transpose(1, 2)
    if not channels_last:
        window = window.contiguous()
    return x, window, draw(spec.channels, spec.width), draw(spec.channels) if biased else None


def widened(tensors) -> list:
    """The same in float64 and apart from the originals; integers and None as they are."""
    return [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]
