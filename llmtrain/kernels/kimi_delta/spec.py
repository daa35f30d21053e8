"""Specification of Kimi Delta Attention's rule, and the backends that can serve it. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.refusals import refuse_package, refuse_triton, refuse_untuned


@dataclass(frozen=True)
class KimiDeltaSpec(GatedDeltaSpec):
    """The gated delta rule with a decay for each channel of the keys (Kimi Linear, arXiv:2510.26692, section 3).

    S_t = (I - beta_t k_t k_t^T) diag(alpha_t) S_(t-1) + beta_t k_t v_t^T,  y_t = S_t^T q_t, per head, with
    alpha_t = exp(log_decay_t), a vector of key_head_dim. FLOP are those of the gated delta rule: decays are free.
    chunk_size: a power of two.
    """

    def chunks(self, seq_len: int) -> tuple[int, int]:
        """(number of chunks, tokens per chunk, a power of two) that cover seq_len."""
        assert self.chunk_size & (self.chunk_size - 1) == 0, self.chunk_size
        size = min(self.chunk_size, 1 << (seq_len - 1).bit_length())
        return -(-seq_len // size), size


def refuse_triton_chunks(spec: KimiDeltaSpec, platform: Platform | None) -> str | None:
    if spec.dtype not in ("bfloat16", "float16"):
        return f"our Triton Kimi Delta Attention takes bfloat16 or float16, not {spec.dtype}"
    if spec.key_head_dim > 128:
        return f"our Triton Kimi Delta Attention takes a key_head_dim up to 128, not {spec.key_head_dim}"
    sizes = {"key_head_dim": spec.key_head_dim}
    return refuse_triton(spec.dtype, platform) or refuse_untuned(("kimi_delta",), spec.dtype, sizes, platform)


def refuse_fla(spec: KimiDeltaSpec, platform: Platform | None) -> str | None:
    if spec.dtype not in ("bfloat16", "float16"):
        return f"fla's Kimi Delta Attention takes bfloat16 or float16, not {spec.dtype}"
    if spec.key_head_dim > 256:
        return f"fla's Kimi Delta Attention takes a key_head_dim up to 256, not {spec.key_head_dim}"
    return refuse_package(("fla",), "fla-core", platform)


def preference(spec: KimiDeltaSpec, platform: Platform) -> tuple[str, ...]:
    """Backends from fastest to slowest, for `auto`, as of the gated delta rule. The reference takes chunk after chunk in fp32, and
    keeps several tensors like k for each of its halvings."""
    if platform.vendor == "cpu":
        return ("reference",)
    return ("triton", "fla", "reference") if platform.arch == "sm90" else ("fla", "reference")
