"""One token of the gated delta rule (Yang et al., arXiv:2412.06464), in plain PyTorch: the definition, line by line."""

from torch import Tensor


def gated_delta_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """S = alpha S (I - beta k k^T) + beta v k^T, y = S q, all in the dtype of the state; the state is updated in place.

    q, k: [batch, key heads, key_head_dim]; v: [batch, heads, value_head_dim]; log_decay, beta: [batch, heads], log_decay of each
    channel of the keys perhaps, [batch, heads, key_head_dim];
    state: [batch, heads, key_head_dim, value_head_dim], S^T, fp32 or wider. Returns y like v.
    """
    wide, per_key_head = state.dtype, v.shape[1] // k.shape[1]
    # q, k: [batch, heads, 1, key_head_dim]
    q, k = (t.to(wide).repeat_interleave(per_key_head, dim=1)[:, :, None] for t in (q, k))
    state.mul_(log_decay.to(wide).exp().view(*state.shape[:2], -1, 1))
    error = v.to(wide)[:, :, None] - k @ state  # of what the state says about this key
    state.add_(k.mT @ (beta.to(wide)[..., None, None] * error))
    return (q @ state)[:, :, 0].to(v.dtype)
