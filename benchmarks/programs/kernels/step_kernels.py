"""Memory bandwidth of the kernels of cached decoding: attention_step and ssd_step on one GPU.

    python -m benchmarks step_kernels

Every call runs from a CUDA graph, as in decoding, which holds one call on each of several copies of the inputs: together
they are larger than the L2 cache, so that each call finds its own in HBM. GB/s counts the least bytes that a kernel must move:
keys and values once, or the state once in and once out. The fill of the caches is full.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.arguments import Parser
from benchmarks.harness.report import Report
from llmtrain.errors import UserError
from llmtrain.kernels import platform, registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.ssd.spec import SSDSpec

if TYPE_CHECKING:
    from torch import Tensor

WORKING_SET = 512 << 20  # bytes; eight times the L2 of an H200, twice the Infinity Cache of an MI300X
HEAD_DIM = 128
ATTENTION = {"16 heads": (16, 16), "32 heads on 8": (32, 8)}
SLOTS, BATCHES = (1920, 16384), (1, 64)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    report = Report(parser.parse(argv).out)
    import torch

    if not torch.cuda.is_available():
        raise UserError("benchmarks step_kernels: needs a GPU")
    here = platform.detect()
    print(f"{here.device_name}, {here.num_sms} multiprocessors, bf16")
    for label, (n_heads, n_kv_heads) in ATTENTION.items():
        for slots in SLOTS:
            for batch in BATCHES:
                spec = AttentionSpec(n_heads, n_kv_heads, HEAD_DIM, HEAD_DIM**-0.5)
                _attention(
                    f"attention_step {label} x {HEAD_DIM}, {slots} slots, batch {batch}", spec, slots, batch, report
                )
    for batch in BATCHES:
        _ssd(f"ssd_step 64 heads x 64, d_state 128, batch {batch}", SSDSpec(64, 64, 128, 1, 256), batch, report)
    return 0


def _attention(title: str, spec: AttentionSpec, slots: int, batch: int, report: Report) -> None:
    import torch
    import torch.nn.functional as F

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    cache = (batch, spec.n_kv_heads, slots, spec.head_dim)
    moved = 2 * 2 * batch * spec.n_kv_heads * slots * spec.head_dim
    position = torch.tensor([slots - 1], device="cuda")
    first = torch.zeros(batch, dtype=torch.int32, device="cuda")
    q = random(batch, spec.n_heads, spec.head_dim)
    inputs = [(q, random(*cache), random(*cache), position, first) for _ in range(_copies(moved))]
    mask = torch.ones(batch, 1, 1, slots, dtype=torch.bool, device="cuda")

    def sdpa(q: Tensor, k: Tensor, v: Tensor, position: Tensor, first: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q[:, :, None], k, v, attn_mask=mask, scale=spec.scale, enable_gqa=spec.n_heads != spec.n_kv_heads
        )

    _compare(report, title, "attention_step", spec, inputs, moved, {"SDPA, mask": sdpa})


def _ssd(title: str, spec: SSDSpec, batch: int, report: Report) -> None:
    from llmtrain.kernels.operation import operation

    moved = 2 * 4 * batch * spec.n_heads * spec.head_dim * spec.d_state
    tensors, _ = operation("ssd").inputs(spec, batch, 1, "cuda", state=True)
    *token, state = (t[:, 0] if t.ndim in (3, 4) and t.shape[1] == 1 else t for t in tensors)
    inputs = [(*token, state.clone()) for _ in range(_copies(moved))]
    _compare(report, title, "ssd_step", spec, inputs, moved, {})


def _copies(moved: int) -> int:
    return max(2, -(-WORKING_SET // moved))


def _compare(
    report: Report,
    title: str,
    operation: registry.Operation,
    spec: registry.Spec,
    inputs: Sequence[tuple[Any, ...]],
    moved: int,
    peers: dict[str, Callable[..., Tensor]],
) -> None:
    here = platform.detect()
    ours = {n: registry.resolve(operation, n, spec, here).build(spec, here) for n in ("triton", "reference")}
    for name, step in (ours | peers).items():
        seconds = _seconds(step, inputs)
        report.add(f"{title}, {name}", time_us=1e6 * seconds, tb_per_s=moved / seconds / 1e12)


def _seconds(step: Callable[..., Tensor], inputs: Sequence[tuple[Any, ...]]) -> float:
    """Seconds of one call, the median over replays of a graph."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        step(*inputs[0])  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for arguments in inputs:
            step(*arguments)
    times: list[float] = []
    graph.replay()
    while len(times) < 5 or (sum(times) < 0.1 and len(times) < 50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times) / len(inputs)
