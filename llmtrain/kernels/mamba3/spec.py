"""Specification of Mamba-3's scan with one input and output per head (SISO), and the backends that can serve it. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec, refuse_triton_scan


@dataclass(frozen=True)
class Mamba3Spec:
    """The recurrence of one Mamba-3 layer (Dao AI Lab and Goomba Lab, 2026), of two inputs per token.

    h_t = a_t h_(t-1) + (1 - l_t) dt_t a_t v_(t-1) k_(t-1)^T + l_t dt_t v_t k_t^T,  y_t = h_t q_t + D v_t, per head, with
    a_t = exp(log_decay_t), and q and k rotated by running sums of dt_t rate_t. angles: pairs of channels that rotate.

    Not with several inputs and outputs per token (MIMO): those of one token read each other, and Mamba-2's scan, which serves here
    with a factor per token, has none of such pairs but its own.
    """

    n_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    angles: int
    chunk_size: int = 64
    dtype: str = "bfloat16"
    """Dtype of q, k and v. Decays, time steps and angles are always fp32 or wider."""

    @property
    def scan(self) -> SSDSpec:
        """The scan of rotated q and k, which each head has of its own."""
        return SSDSpec(self.n_heads, self.head_dim, self.d_state, self.n_heads, self.chunk_size, dtype=self.dtype)

    def flops(self, seq_len: int) -> int:
        """Forward FLOP of one sequence, by the recurrence, as Mamba-2's: a token's two inputs need one outer product."""
        return self.scan.flops(seq_len)


def refuse_triton_rotations(spec: Mamba3Spec, platform: Platform | None) -> str | None:
    return refuse_triton_scan(spec.scan, platform)
