"""The FlashAttention that answers PyTorch's own operators: version 2, which it has, or 3 or 4 from a package (torch.nn.attention).

PyTorch has one answer per process, so kernels of two versions cannot stand side by side in one.
"""

import gc
import weakref
from typing import Any, Literal

from torch.nn import attention

from llmtrain.errors import UserError

Implementation = Literal["FA2", "FA3", "FA4"]

_users: weakref.WeakKeyDictionary[Any, Implementation] = weakref.WeakKeyDictionary()


def use(kernel: Any, wanted: Implementation) -> None:
    """Make `wanted` the answer for as long as `kernel` lives. Raises UserError while a kernel of another version does."""
    active = attention.current_flash_attention_impl() or "FA2"
    if active != wanted:
        if any(other != wanted for other in _users.values()):
            gc.collect()  # a compiled graph keeps its kernel in a cycle
        if others := sorted({other for other in _users.values() if other != wanted}):
            raise UserError(
                f"attention backends of {wanted} and {others[0]} cannot stand in one process: PyTorch calls both by the same "
                "operator; name one of sdpa:flash (also varlen), sdpa:flash3 and sdpa:flash4 in all blocks"
            )
        if wanted == "FA2":
            attention.restore_flash_attention_impl()
        else:
            attention.activate_flash_attention_impl(wanted)
    _users[kernel] = wanted
