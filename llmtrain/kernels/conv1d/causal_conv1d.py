"""Dao's causal_conv1d CUDA kernel, where the package is installed."""

import torch
from torch import Tensor

from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform


def build(spec: Conv1dSpec, platform: Platform, variant: str):
    from causal_conv1d import causal_conv1d_fn

    def causal_conv1d_silu(
        x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None = None
    ) -> Tensor:
        """x: [batch, T, channels]; weight: [channels, K]; bias: [channels] or None; document_ids: [batch, T], integers
        that never fall -> like x."""
        # It reads [batch, channels, T] with channels side by side in memory, which this view is.
        ids = None if document_ids is None else document_ids.to(torch.int32).contiguous()
        return causal_conv1d_fn(x.transpose(1, 2), weight, bias, seq_idx=ids, activation="silu").transpose(1, 2)

    return causal_conv1d_silu
