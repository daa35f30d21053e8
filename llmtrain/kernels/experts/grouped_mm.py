"""Experts whose products are PyTorch's grouped_mm."""

import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.experts.reference import ReferenceExperts, grouped_operators
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.kernels.platform import Platform


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.mT, offs=ends)


def _weight_gradient(d: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(d.mT, rows, offs=ends)


grouped_mm_product = grouped_operators("_aten", _product, _weight_gradient)


def build(spec: ExpertsSpec, platform: Platform, variant: str) -> ReferenceExperts:
    return ReferenceExperts(spec, grouped_mm_product)
