"""Products with weights in 8 bits, in PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def weight_only_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x W^T, row n of W being codes[n] * scales[n]: [..., d_in] -> [..., d_out] in x's dtype.

    codes: [d_out, d_in], int8 or float8. scales: [d_out], fp32.
    """
    if x.dtype == torch.float16:  # sums of codes would leave its range
        return F.linear(x, (codes.float() * scales[:, None]).to(x.dtype))
    return (F.linear(x, codes.to(x.dtype)) * scales).to(x.dtype)
