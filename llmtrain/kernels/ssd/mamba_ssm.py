"""state-spaces/mamba's Triton scan, where the mamba_ssm package is installed. It times its variants on its first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec


def build(spec: SSDSpec, platform: Platform, variant: str) -> MambaSSM:
    return MambaSSM(spec)


class MambaSSM:
    """The signature of ReferenceSSD. Autotuned kernels do not trace: compiled layers (train.compile) cannot hold it."""

    def __init__(self, spec: SSDSpec):
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # type: ignore[import-not-found]

        self.spec = spec
        self.kernel: Any = torch.compiler.disable(mamba_chunk_scan_combined)

    def __call__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
        initial_state: Tensor | None = None, document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x: [batch, T, heads, head_dim] and so on, as in ReferenceSSD -> y like x, and the last state in fp32.

        The first document_id of a row must be 0 if there is an initial state.
        """
        least, most = self.spec.dt_limit or (0.0, None)
        return self.kernel(
            x, dt, A, B, C, self.spec.chunk_size, D=D, dt_bias=dt_bias, initial_states=initial_state,
            seq_idx=None if document_ids is None else document_ids.to(torch.int32).contiguous(),
            dt_softplus=True,
            dt_limit=(least, float("inf") if most is None else most),
            return_final_states=True,
        )  # fmt: skip
