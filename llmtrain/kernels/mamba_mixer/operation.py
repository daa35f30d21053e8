"""The inside of a Mamba-2 mixer, without its projections, as tests, doctor and bench see it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from llmtrain.kernels import operation as base
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.mamba_mixer.reference import compose
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.operation import BySequence, Draw, Shape, Work
from llmtrain.kernels.ssd.operation import SIZES
from llmtrain.kernels.ssd.spec import SSDSpec


class MambaMixer(BySequence):
    # dA is a number per head, and the error of each is relative to a sum that may come out small: few draws settle nothing.
    name, spec, draws, tuned = "mamba_mixer", MambaMixerSpec, 8, False
    slow_reference = True
    leaves = ("projection", "conv_weight", "conv_bias", "A", "D", "dt_bias", "norm_weight", "_state")

    @property
    def title(self) -> str:
        return "mixer"

    def inputs(
        self, spec: MambaMixerSpec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0, biased: bool = True,
        state: bool = False,
    ) -> tuple[list[Any], Tensor]:  # fmt: skip
        """z | xBC | dt [batch, T, sum of spec.widths], as the first projection gives it, the weight and bias (None unless
        `biased`) of the convolution, A, D, dt_bias, the norm's weight, and an initial state or None. In the spec's dtype, but
        for A, D, dt_bias and the state: as under amp_bf16 and FSDP2."""
        draw, heads, channels = Draw(device, spec.dtype, seed), spec.ssd.n_heads, spec.conv1d.channels
        fused = draw(batch, seq_len, sum(spec.widths))
        A, weight, bias = -(1 + 15 * draw.uniform(heads)), draw(channels, spec.conv1d.width), draw(channels)
        D, dt_bias = draw.wide(heads), draw.wide(heads) - 4
        up, norm = draw(batch, seq_len, spec.gated_norm.dim), (1 + 0.5 * draw.wide(spec.gated_norm.dim)).to(draw.dtype)
        first = draw.wide(batch, heads, spec.ssd.head_dim, spec.ssd.d_state) if state else None
        return [fused, weight, bias if biased else None, A, D, dt_bias, norm, first], up

    def work(self, shape: Shape) -> tuple[Work, Work]:
        """Work of its three parts; fused, it would be less."""
        spec, scan = shape.spec, base.operation("ssd").work(replace(shape, spec=shape.spec.ssd))
        size = shape.batch * shape.seq_len * base.element_size(spec.dtype)
        conv, norm = spec.conv1d.channels * size, spec.gated_norm.dim * size
        forward, backward = (Work(s.flops, s.bytes + n * conv) for s, n in zip(scan, (2, 3), strict=True))
        return Work(forward.flops, forward.bytes + 3 * norm), Work(backward.flops, backward.bytes + 5 * norm)

    def label(self, shape: Shape) -> str:
        scan = shape.spec.ssd
        return f"{scan.n_heads}x{scan.head_dim}, d_state {scan.d_state}"

    def of_sizes(self, heads: int, head_dim: int, d_state: int, dtype: str = "bfloat16", **more: Any) -> MambaMixerSpec:
        """Spec of a mixer. more: n_groups, width, norm_groups, norm_first, dt_limit, chunk_size."""
        n_groups, width, d_inner = more.get("n_groups", 1), more.get("width", 4), heads * head_dim
        return MambaMixerSpec(
            Conv1dSpec(d_inner + 2 * n_groups * d_state, width, dtype),
            SSDSpec(heads, head_dim, d_state, n_groups, more.get("chunk_size", 256), more.get("dt_limit"), dtype),
            GatedNormSpec(d_inner, more.get("norm_groups", 1), 1e-5, more.get("norm_first", False), dtype),
        )

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        if tiny:
            yield Shape(self.of_sizes(2, 16, 16, "float32"), 2, 128)
            return
        for size in SIZES:
            for seq_len in base.LENGTHS:
                yield Shape(self.of_sizes(*size), base.TOKENS // seq_len, seq_len)

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        spec = self.of_sizes(4, 64, 64, dtype, chunk_size=64)
        yield "conv, scan, norm", Shape(spec, base.SELFTEST_BATCH, base.SELFTEST_LEN)

    def of_parts(
        self, spec: MambaMixerSpec, conv: Callable[..., Tensor], scan: Callable[..., Tensor],
        norm: Callable[..., Tensor],
    ) -> Callable[..., Tensor]:  # fmt: skip
        """Function of `inputs` from three operations; scan: (x, dt, A, B, C, D, dt_bias, state or None) -> y."""

        def run(fused, weight, bias, A, D, dt_bias, norm_weight, state=None) -> Tensor:
            return compose(
                spec,
                fused,
                lambda xBC: conv(xBC, weight, bias),
                lambda x, dt, B, C: scan(x, dt, A, B, C, D, dt_bias, *([] if state is None else [state])),
                lambda y, z: norm(y, z, norm_weight),
            )

        return run


OPERATION = MambaMixer()
