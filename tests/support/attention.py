"""Cases of the attention kernels and what they must give, shared by the tests in Triton's interpreter and on a GPU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.attention.documents import documents
from llmtrain.kernels.attention.spec import AttentionSpec, alibi_slopes
from llmtrain.kernels.attention.triton import attend
from llmtrain.kernels.operation import leaves
from tests.support import kernels


@dataclass(frozen=True)
class Case:
    """packed: lengths of the documents of a sequence, cut to T; negative: so much padding."""

    head_dim: int = 32
    n_heads: int = 2
    n_kv_heads: int = 2
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    packed: tuple[int, ...] = ()
    scale: float = 0.2
    sinks: bool = False
    value_dim: int | None = None

    def ids(self, batch: int, seq_len: int, device: str = "cpu") -> Tensor | None:
        """[batch, T]; the sequences are packed differently."""
        if not self.packed:
            return None
        rows = []
        for row in range(batch):
            lengths = self.packed[row % len(self.packed) :] + self.packed[: row % len(self.packed)]
            runs = [torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(lengths)]
            rows.append(torch.cat([*runs, torch.full((seq_len,), len(lengths))])[:seq_len])
        return torch.stack(rows).to(device)

    def slopes(self, device: str = "cpu") -> Tensor | None:
        return torch.tensor(alibi_slopes(self.n_heads, 4.0), device=device) if self.alibi else None


CASES = {
    "causal": Case(),
    "full": Case(causal=False),
    "gqa": Case(n_heads=4, n_kv_heads=2),
    "mqa": Case(n_heads=3, n_kv_heads=1, causal=False),
    "alibi": Case(alibi=True),
    "alibi-full": Case(alibi=True, causal=False, n_heads=3, n_kv_heads=3),
    "window": Case(window=23),
    "window-1": Case(window=1),
    "window-full": Case(window=9, causal=False),
    "softcap": Case(softcap=2.0, scale=1.0),
    "packed": Case(packed=(17, 1, 30, 5)),
    "packed-full": Case(packed=(17, 1, 30, 5), causal=False),
    "padded": Case(packed=(20, -40, 30, -3)),
    "padded-full": Case(packed=(-20, 33, -40), causal=False),
    "sinks": Case(n_heads=4, n_kv_heads=2, sinks=True),
    "sinks, packed": Case(packed=(17, 1, 30, 5, -4), window=7, sinks=True),
    "sinks, everything": Case(24, 4, 2, True, 20, 3.0, True, (33, 30, -5), sinks=True),
    "wide keys": Case(48, value_dim=32),
    "wide values": Case(16, 4, 2, True, 9, packed=(17, 1, 30, 5), value_dim=40),
    "latent": Case(192, value_dim=128, scale=0.07),
    "everything": Case(40, 4, 2, True, 20, 3.0, True, (33, 30, -5)),
    "everything-full": Case(40, 4, 1, False, 20, 3.0, True, (33, 30, -5)),
    **{str(d): Case(d) for d in (8, 16, 48, 64, 80, 96, 104, 112, 128, 160, 192, 224, 256)},
}


def inputs(case: Case, batch: int, seq_len: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """q, k, v as slices of one fused projection, and sinks, each in need of a gradient."""
    spec = AttentionSpec(
        case.n_heads, case.n_kv_heads, case.head_dim, case.scale, dtype=kernels.named(dtype), sinks=case.sinks,
        value_dim=case.value_dim,
    )  # fmt: skip
    return leaves(kernels.inputs("attention", spec, batch, seq_len, device))


def upstream(out: Tensor, lse: Tensor) -> list[Tensor]:
    """Gradients of the output and of the log-sum-exp."""
    g = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in (out, lse)]


def exact(case: Case, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients in float64, from the definition."""
    q, k, v, *sinks = leaves = [t.detach().double().requires_grad_() for t in tensors]
    batch, seq_len = q.shape[:2]
    at = torch.arange(seq_len, device=q.device)
    distance = at[:, None] - at[None, :]
    visible = (distance >= 0) if case.causal else torch.ones_like(distance, dtype=torch.bool)
    if case.window is not None:
        visible = visible & (distance.abs() < case.window)
    visible = visible.expand(batch, 1, seq_len, seq_len)
    ids = case.ids(batch, seq_len, str(q.device))
    if ids is not None:
        visible = visible & (ids[:, :, None] == ids[:, None, :])[:, None] & (ids >= 0)[:, None, :, None]

    group = case.n_heads // case.n_kv_heads
    wide_k, wide_v = (t.repeat_interleave(group, dim=2).transpose(1, 2) for t in (k, v))
    score = case.scale * q.transpose(1, 2) @ wide_k.mT
    if case.softcap is not None:
        score = case.softcap * torch.tanh(score / case.softcap)
    slopes = case.slopes(str(q.device))
    if slopes is not None:
        score = score - slopes.double()[:, None, None] * distance.abs()
    seen = score.masked_fill(~visible, -torch.inf)
    if sinks:
        seen = torch.cat((seen, sinks[0][:, None, None].expand(*seen.shape[:-1], 1)), -1)
    lse = seen.logsumexp(-1)
    blind = ~visible.any(-1) & (not sinks)  # neither these rows nor their gradients may become NaN
    weight = torch.exp(score - lse.masked_fill(blind, 0.0)[..., None]).masked_fill(~visible, 0.0)
    out = (weight @ wide_v).transpose(1, 2)
    ups = upstream(out, lse)
    total = (out * ups[0]).sum() + (lse.masked_fill(blind, 0.0) * ups[1]).sum()
    return named(out, lse, torch.autograd.grad(total, leaves))


def ours(case: Case, tensors: list[Tensor], function: Any = attend) -> dict[str, Tensor]:
    """The same by the kernels."""
    q, k, v, *sinks = tensors
    ids = case.ids(q.shape[0], q.shape[1], str(q.device))
    options: dict[str, Any] = {
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "slopes": case.slopes(str(q.device)),
        "packed": None if ids is None else documents(ids),
        **({"sinks": sinks[0]} if sinks else {}),
    }
    out, lse = function(q, k, v, case.scale, **options)
    return named(out, lse, torch.autograd.grad([out, lse], tensors, upstream(out, lse)))


def named(out: Tensor, lse: Tensor, gradients: Any) -> dict[str, Tensor]:
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False))


def assert_agree(case: Case, batch: int, seq_len: int) -> None:
    """Compare ours in fp32 on the CPU with the definition: results and gradients, of a function of the log-sum-exp too."""
    tensors = inputs(case, batch, seq_len, torch.float32)
    found, wanted = ours(case, tensors), exact(case, tensors)
    for name in wanted:
        torch.testing.assert_close(
            found[name].double(), wanted[name], atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )
