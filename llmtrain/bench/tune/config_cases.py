"""Kernels that a config runs, as cases to tune and as attention to measure every backend on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmtrain.kernels import operation
from llmtrain.kernels.attention.measured import OURS
from llmtrain.kernels.operation import Shape
from llmtrain.kernels.platform import Platform
from llmtrain.models.backends import Chosen, chosen
from llmtrain.schema.config import Config


@dataclass(frozen=True)
class Item:
    """One search. operation: as in the tables; seq_len, variant: of the rows, None: any."""

    operation: str
    shape: Shape
    seq_len: int | None = None
    variant: str | None = None

    @property
    def label(self) -> str:
        return f"{self.operation} {operation.operation(self.operation).label(replace(self.shape, variant=None))}"


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


def shapes(config: Config, here: Platform) -> list[Shape]:
    """Attention of every block whose backend is `auto` or a family, at the run's length and microbatch."""
    seq_len, batch = config.data.seq_len, microbatch(config)
    found = (one.kernel for one in _kernels(config, here) if one.kernel.operation == "attention")
    return list(dict.fromkeys(Shape(k.spec, batch, seq_len) for k in found if k.backend in ("auto", "sdpa")))


def _kernels(config: Config, here: Platform) -> Iterator[Chosen]:
    return chosen(config.model, here, dtype_of(config), config.data.mask_documents)


def _item(one: Chosen, config: Config) -> Item | None:
    name, spec, backend = one.kernel
    if one.backend is None or not (one.backend == OURS or (name == "attention" and backend == "auto")):
        return None
    if not (tuned := operation.operation(name)).tuned:
        return None
    seq_len = config.data.seq_len
    shape = tuned.of_model(spec, microbatch(config), seq_len, config.data.mask_documents)
    if name != "attention":
        return Item(name, shape)
    return Item(name, shape, min(spec.sliding_window or seq_len, seq_len), shape.variant)
