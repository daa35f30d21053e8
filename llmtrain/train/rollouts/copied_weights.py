"""A second model for rollouts, whose weights are copies of those that are trained, in the format of the computation.

FSDP2's hooks take the host some tens of milliseconds for each token of a hundred answers, and no CUDA graph holds what they do. The
copies stay where they are between rollouts, so that graphs that read them stay valid, and are written before each one.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from llmtrain.adapt.base import adapted
from llmtrain.adapt.nf4 import NF4Linear, store
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.init import clean_name
from llmtrain.models.layers import Linear
from llmtrain.models.parameters import parameter_info
from llmtrain.schema.config import Config
from llmtrain.train.graphs.persistent_weights import local_parts
from llmtrain.train.parallel import chunk_mlps


class CopiedWeights:
    """`model`: the trained one in eval mode, without FSDP2, checkpointing and compilation, whole on each rank. What FSDP2 leaves
    alone (frozen weights where no other rank has a part of them) is the same memory in both; `refresh` copies the rest."""

    def __init__(self, config: Config, trained: CausalLM):
        """config: without `auto`, of the run. trained: whose weights are set."""
        train, device = config.train, trained.device
        with torch.device("meta"):
            made = HybridLM(config.model, dtype=getattr(torch, train.dtype), documents=config.data.mask_documents)
            made = adapted(made, config.adapt)
        chunk_mlps(made, train.activation_checkpointing.mlp_tokens)
        self.model = CausalLM(made, train.loss).requires_grad_(False).eval()
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """Copies and what they are of."""
        for module in trained.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what it gathers does not change when the optimizer steps
        modules = {clean_name(name): one for name, one in trained.hybrid.named_modules()}
        parameters = {clean_name(name): one for name, one in trained.hybrid.named_parameters(remove_duplicate=False)}
        buffers = {clean_name(name): one for name, one in trained.hybrid.named_buffers(remove_duplicate=False)}
        formats = {parameter: made.dtype for parameter, info in parameter_info(made).items() if not info.fp32}
        for prefix, module in list(made.named_modules()):
            stored = modules[prefix]
            if isinstance(module, Linear) and isinstance(stored, NF4Linear):
                store(module, NF4Linear, stored.stored)
            for key, parameter in module.named_parameters(recurse=False):
                source = parameters[f"{prefix}.{key}".lstrip(".")]
                module._parameters[key] = self._parameter(source, formats.get(parameter, torch.float32), device)
            for key, buffer in module.named_buffers(recurse=False):
                module._buffers[key] = self._copy_of(buffers[f"{prefix}.{key}".lstrip(".")], buffer.dtype, device)

    def _parameter(self, source: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        if not isinstance(source, DTensor):
            assert not source.requires_grad, "FSDP2 shards what is trained"
            return source
        return nn.Parameter(self._copy_of(source, dtype, device), requires_grad=False)

    def _copy_of(self, source: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        copy = torch.empty(source.shape, dtype=dtype, device=device)
        self._pairs.append((copy, source))
        return copy

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the weights as they are now. Every rank calls it."""
        alone, shared = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, DTensor]]()
        for copy, source in self._pairs:
            if isinstance(source, DTensor) and source.device_mesh.size() > 1:
                shared.append((copy, source))
            else:
                alone.append((copy, source))
        if alone:
            torch._foreach_copy_([copy for copy, _ in alone], local_parts([source for _, source in alone]))
        for copy, source in shared:
            rounded = cast("DTensor", source.to(copy.dtype))  # before it is sent, as FSDP2 does
            copy.copy_(rounded.full_tensor())
