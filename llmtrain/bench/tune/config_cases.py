"""Kernels that a config runs, as cases to tune and as attention to measure every backend on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmtrain.bench.attention_shape import AttentionShape
from llmtrain.bench.tune.attention_block import variant_of
from llmtrain.kernels.attention.measured import OURS
from llmtrain.kernels.platform import Platform
from llmtrain.models.backends import Chosen, chosen
from llmtrain.schema.config import Config


@dataclass(frozen=True)
class Item:
    """One search. operation: as in the tables; module: of its Problem; seq_len, variant: of the rows, None: any."""

    operation: str
    module: str
    case: tuple[tuple[str, Any], ...]
    seq_len: int | None = None
    variant: str | None = None

    @property
    def label(self) -> str:
        shown = {name: value for name, value in self.case if name not in ("dtype", "tokens") and value is not None}
        return f"{self.operation} {' '.join(f'{name}={value}' for name, value in shown.items())}"


def dtype_of(config: Config) -> str:
    """Dtype of a run's activations."""
    return "float32" if config.train.precision == "fp32" else "bfloat16"


def microbatch(config: Config) -> int:
    """Sequences to measure on: train.microbatch_size, or with auto about 16,384 tokens."""
    size = config.train.microbatch_size
    return max(1, 16384 // config.data.seq_len) if size == "auto" else size


def items(config: Config, here: Platform) -> list[Item]:
    """Searches for what runs by our kernels: attention wherever a block does not name another backend, for whether ours is the
    fastest is not known before; other operations where they are ours already. Each once, in the config's order."""
    return list(dict.fromkeys(item for one in _kernels(config, here) if (item := _item(one, config)) is not None))


def shapes(config: Config, here: Platform) -> list[AttentionShape]:
    """Attention of every block whose backend is `auto` or a family, at the run's length and microbatch."""
    seq_len, batch = config.data.seq_len, microbatch(config)
    found = (one.kernel for one in _kernels(config, here) if one.kernel.operation == "attention")
    return list(dict.fromkeys(AttentionShape(k.spec, seq_len, batch) for k in found if k.backend in ("auto", "sdpa")))


def _kernels(config: Config, here: Platform) -> Iterator[Chosen]:
    return chosen(config.model, here, dtype_of(config), config.data.mask_documents)


def _item(one: Chosen, config: Config) -> Item | None:
    operation, spec, name = one.kernel
    if one.backend is None or not (one.backend == OURS or (operation == "attention" and name == "auto")):
        return None
    seq_len, documents = config.data.seq_len, config.data.mask_documents
    case: dict[str, Any] = {"dtype": spec.dtype, "tokens": microbatch(config) * seq_len}
    if operation == "attention":
        variant, window = variant_of(spec), spec.sliding_window
        case |= {"head_dim": spec.head_dim, "heads": spec.n_heads, "kv_heads": spec.n_kv_heads, "seq_len": seq_len}
        case |= {"variant": variant, "alibi_max_bias": spec.alibi_max_bias, "window": window, "softcap": spec.softcap}
        case |= {"documents": documents}
        module = "llmtrain.bench.tune.attention_block"
        return Item(operation, module, tuple(case.items()), min(window or seq_len, seq_len), variant)
    if operation == "ssd":
        case |= {"heads": spec.n_heads, "head_dim": spec.head_dim, "d_state": spec.d_state, "groups": spec.n_groups}
        case |= {"seq_len": seq_len, "packed": documents}
    elif operation == "conv1d":
        case |= {"channels": spec.channels, "width": spec.width, "seq_len": seq_len, "packed": documents}
    elif operation == "gated_norm":
        case |= {"group_size": spec.group_size, "groups": spec.n_groups, "norm_first": spec.norm_before_gate}
    elif operation == "norm":
        case |= {"dim": spec.dim, "centred": spec.type == "layernorm", "biased": spec.bias}
    elif operation == "rotary":
        case |= {"head_dim": spec.head_dim, "seq_len": seq_len}
    else:
        return None
    return Item(operation, operation, tuple(case.items()))
