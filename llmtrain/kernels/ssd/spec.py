"""Specification of a state-space-duality (Mamba-2) operation, and the backends that can serve it. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.refusals import refuse_package, refuse_triton, refuse_untuned


@dataclass(frozen=True)
class SSDSpec:
    """The selective scan of one Mamba-2 layer (Dao & Gu, arXiv:2405.21060).

    h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T,  y_t = h_t C_t + D x_t, per head, with
    dt = clamp(softplus(raw + dt_bias), dt_limit).
    """

    n_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    chunk_size: int
    dt_limit: tuple[float, float | None] | None = None
    dtype: str = "bfloat16"
    """Dtype of x, B and C. Decays are always fp32 or wider."""

    def chunks(self, seq_len: int) -> tuple[int, int]:
        """(number of chunks, tokens per chunk) that cover seq_len."""
        size = min(self.chunk_size, seq_len)
        return -(-seq_len // size), size

    def flops(self, seq_len: int) -> int:
        """Forward FLOP of one sequence, by the recurrence: per token and element of the state, one multiply-add for
        x B^T into it and one for h C out of it. Decays and D x are elementwise and free, as attention's softmax is.

        What a chunked algorithm computes beyond that depends on its chunks, and is no more work done for the model.
        """
        return 4 * seq_len * self.n_heads * self.head_dim * self.d_state


def refuse_triton_scan(spec: SSDSpec, platform: Platform | None) -> str | None:
    for name, size, largest in (("head_dim", spec.head_dim, 128), ("d_state", spec.d_state, 256)):
        if size > largest:
            return f"our Triton scan takes a {name} up to {largest}, not {size}"
    sizes = {"head_dim": spec.head_dim, "d_state": spec.d_state}
    return refuse_triton(spec.dtype, platform) or refuse_untuned(("ssd",), spec.dtype, sizes, platform)


def refuse_mamba_ssm(spec: SSDSpec, platform: Platform | None) -> str | None:
    if spec.d_state > 256 or spec.chunk_size & (spec.chunk_size - 1) or spec.chunk_size < 16:
        return (
            f"mamba_ssm takes a d_state up to 256 and a chunk_size that is a power of two from 16 on, not {spec.d_state} and "
            f"{spec.chunk_size}"
        )
    return refuse_package(("mamba_ssm",), "mamba-ssm", platform)


def preference(spec: object, platform: Platform) -> tuple[str, ...]:
    """Backends from fastest to slowest, for `auto`: of scans, and of the operations on one new token per row."""
    return ("reference",) if platform.vendor == "cpu" else ("triton", "reference")
