"""Specification of the gated delta rule (Gated DeltaNet), and the backends that can serve it. No torch here."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.refusals import refuse_package, refuse_triton


@dataclass(frozen=True)
class GatedDeltaSpec:
    """The recurrence of one Gated DeltaNet layer (Yang et al., arXiv:2412.06464).

    S_t = alpha_t S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,  y_t = S_t q_t, per head, with alpha_t = exp(log_decay_t).
    A key head serves n_heads / n_key_heads heads that follow each other.
    """

    n_heads: int
    n_key_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: str = "bfloat16"
    """Dtype of q, k and v. Decays, beta and states are always fp32 or wider."""
    chunk_size: int = 64
    """Tokens that the reference takes at once. Results depend on it only by rounding."""

    def chunks(self, seq_len: int) -> tuple[int, int]:
        """(number of chunks, tokens per chunk) that cover seq_len."""
        size = min(self.chunk_size, seq_len)
        return -(-seq_len // size), size

    def flops(self, seq_len: int) -> int:
        """Forward FLOP of one sequence, by the recurrence: per token and element of the state, one multiply-add each for S k,
        for the outer product into S, and for S q. Decays and gates are elementwise and free.
        """
        return 6 * seq_len * self.n_heads * self.key_head_dim * self.value_head_dim


def refuse_sizes(who: str, spec: GatedDeltaSpec, most: int) -> str | None:
    """Reason by dtype or by channels of the keys, of which `who` takes at most so many."""
    if spec.dtype not in ("bfloat16", "float16"):
        return f"{who} takes bfloat16 or float16, not {spec.dtype}"
    return f"{who} takes a key_head_dim up to {most}, not {spec.key_head_dim}" if spec.key_head_dim > most else None


def refuse_triton_chunks(spec: GatedDeltaSpec, platform: Platform | None) -> str | None:
    return refuse_sizes("our Triton gated delta rule", spec, 256) or refuse_triton(spec.dtype, platform)


def refuse_fla(spec: GatedDeltaSpec, platform: Platform | None) -> str | None:
    missing = refuse_sizes("fla's gated delta rule", spec, 256) or refuse_package(("fla",), "fla-core", platform)
    if (
        missing is None
        and platform is not None
        and platform.arch == "sm90"
        and not importlib.util.find_spec("tilelang")
    ):
        triton = importlib.metadata.version("triton")
        if (3, 4, 0) <= tuple(map(int, re.findall(r"\d+", triton)[:3])) < (3, 7, 1):
            return (
                f"fla-core refuses to compute gradients on Hopper with Triton {triton}, by which they come out wrong (its "
                "issue 640); install tilelang beside it"
            )
    return missing


def preference(spec: GatedDeltaSpec, platform: Platform) -> tuple[str, ...]:
    """Backends from fastest to slowest, for `auto`. Ours, `triton`, on Hopper, where they were measured; fla's where it is
    installed: the reference takes the states of chunks one after another in fp32, and keeps every square of a chunk in memory,
    of Kimi Delta Attention several tensors like k for each of its halvings.
    """
    if platform.vendor == "cpu":
        return ("reference",)
    return ("triton", "fla", "reference") if platform.arch == "sm90" else ("fla", "reference")
