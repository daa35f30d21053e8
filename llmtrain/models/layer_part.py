"""The contract of what a layer consists of, mixers and feed-forward layers: all that the rest of the program asks of either."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from llmtrain.errors import UserError
from llmtrain.models.costs import Flops, Work
from llmtrain.models.layers import Linear
from llmtrain.models.tensor_parallel import TensorRanks


class Product(NamedTuple):
    """The product of a linear layer in a layer's forward pass. kept: selective checkpointing keeps its output. needed: gradients
    are computed from its output."""

    linear: Linear
    kept: bool
    needed: bool


class LayerPart(nn.Module, ABC):
    """The base of Mixer and FeedForward.

    Constructors allocate and do not initialise, so that a model builds on the meta device. `forward` traces under
    torch.compile as one graph, and is right for parameters and inputs in bf16. Buffers begin at zero. Persistent ones are state,
    the same on all ranks, which `after_step` changes and checkpoints hold. The others are sums over a step, to which `forward`
    adds by `add_in_backward` (models/attached_loss.py): `metrics` and `after_step` find them summed over microbatches and ranks,
    and afterwards they are zero again.
    """

    fp32_parameters: ClassVar[Collection[str]] = ()
    """Names of parameters that stay in fp32 when all others are bf16. They live in submodules that hold no others, and that are
    read, never called: FSDP2 gathers them before the layer runs."""
    no_decay_parameters: ClassVar[Collection[str]] = ()
    """Names of parameters without weight decay. Vectors (norms, biases) have none anyway."""
    losses: ClassVar[Collection[str]] = ()
    """Names of the losses that `forward` attaches (models/attached_loss.py), logged as loss/train/NAME, summed over the layers."""
    pooling: int | None = None
    """Width of what the part counts for a loss of all layers together (attach_pooled), where it does."""
    counts: Tensor | None = None
    """Where `forward` writes these counts: its own of AttachedLosses.counts, which the model sets. A place in that list would be
    a constant of the compiled layer, so that each layer compiled anew."""
    outputs: Collection[str] = ()
    """Names of the linear layers whose outputs, times a number at most, are the part's own: no gradient of the part needs them."""
    kept_products: Collection[str] = ()
    """Names of the linear layers whose outputs selective checkpointing keeps: of the section."""
    ranks: TensorRanks | None = None
    """Set by `split`."""

    @abstractmethod
    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        """FLOP of training on one sequence. See flops/count.py for what `causal` means."""

    def split(self, ranks: TensorRanks) -> None:
        """Keep this rank's part of the parameters, still on the meta device, and choose kernels for it; `forward` then begins with
        TensorRanks.enter and ends with its `leave`.

        Raises UserError where the section's `divided` is None.
        """
        raise UserError(f"a layer's part of type {type(self).__name__} cannot be divided between ranks")

    def split_experts(self, ranks: Any) -> None:
        """Keep this expert-parallel rank's part (ExpertRanks, models/feed_forward/exchange.py), still on the meta device. Default:
        there is nothing to divide."""

    def split_modules(self) -> Sequence[nn.Module]:
        """Submodules that hold what `split_experts` divides and nothing else. They are called, so that FSDP2 gathers and reduces
        their parameters among the ranks that hold the same."""
        return ()

    def fixed_ops(self) -> set[str]:
        """Operators whose outputs every kind of checkpointing keeps, as a second computation must not differ; str() of each."""
        return set()

    def saved_ops(self) -> set[str]:
        """Operators whose outputs selective checkpointing keeps; str() of each. Those of the backends it took, mostly."""
        return set()

    def saved_flops(self, seq_len: int, causal: bool = False) -> Work:
        """The part of the forward pass that saved_ops spare the recomputation; linear layers are counted by `products`."""
        return Work()

    def products(self) -> list[Product]:
        """The part's linear layers in the order of their products, which is that in which they were made."""
        return [
            Product(module, name in self.kept_products, name not in self.outputs)
            for name, module in self.named_modules()
            if isinstance(module, Linear)
        ]

    def matrix_rows(self) -> dict[str, tuple[int, ...]]:
        """Rows of the linear maps that stand one above another in each matrix of a parameter [n, rows, columns], by its name."""
        return {}

    def inactive_parameters(self) -> dict[str, int]:
        """Elements that one token does not meet, by names of parameters: those of experts to which it is not sent."""
        return {}

    def after_step(self) -> None:
        """Change persistent buffers after a step of the optimizer. Every rank calls it."""

    def metrics(self) -> dict[str, Tensor]:
        """Scalars to log for a step, before `after_step`; the same names in every step."""
        return {}


def parts_of(model: nn.Module) -> Iterator[tuple[str, LayerPart]]:
    """Every part of a model's layers with its name, shared ones once."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LayerPart))


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """State that checkpoints hold beside parameters, by name."""
    sums = {id(total) for total in step_sums(model)}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in sums}


def step_sums(model: nn.Module) -> list[Tensor]:
    """The buffers of a model that are sums over a step."""
    return [module.get_buffer(name) for module in model.modules() for name in module._non_persistent_buffers_set]
