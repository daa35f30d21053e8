"""Specification of Kimi Delta Attention's rule, and the backends that can serve it. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec, refuse_sizes
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
    sizes = {"key_head_dim": spec.key_head_dim}
    own = refuse_sizes("our Triton Kimi Delta Attention", spec, 128) or refuse_triton(spec.dtype, platform)
    return own or refuse_untuned(("kimi_delta",), spec.dtype, sizes, platform)


def refuse_fla(spec: KimiDeltaSpec, platform: Platform | None) -> str | None:
    return refuse_sizes("fla's Kimi Delta Attention", spec, 256) or refuse_package(("fla",), "fla-core", platform)
