"""The base of every block's section: what the program asks of a block before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Self

from llmtrain.config.base import ByType, PositiveFloat, Problem
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.experts import ExpertsSection
from llmtrain.models.sections.feed_forward import Carried, Divided, FeedForwardSection, ImplementedSection, Kernel
from llmtrain.models.sections.layers import NormConfig

MLP = Annotated[MLPSection | ExpertsSection, ByType("swiglu")]
"""Sections of feed-forward layers, of which a block has one as its `mlp`."""


class BlockSection(ImplementedSection):
    """One named block of the model. A subclass adds `type: Literal[...]` and its own settings; implementation: of the Mixer."""

    without_function: ClassVar[tuple[str, ...]] = ("type", "backend")
    """Fields that change nothing of what is computed from given weights."""

    norm: NormConfig | None = None
    """Default: model.norm."""
    mlp: MLP | None = None
    parallel: bool = False
    """Mixer and MLP read the same input, each through its own norm, rather than the MLP the mixer's result (GPT-NeoX)."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor of what the mixer, and then the MLP, adds to the residual stream (Granite)."""
    residual_scaling: bool = False
    """Wherever the mixer's or the MLP's output is added to the residual stream, either summand has a learned bias, and behind it a
    learned factor, for each channel (ZAYA1)."""
    input_multiplier: PositiveFloat = 1.0
    """Factor of what the mixer reads, behind the norm (Falcon-H1)."""

    def problems(self) -> Iterator[Problem]:
        if self.parallel and self.mlp is None:
            yield self.problem_at("parallel", "needs an mlp beside the mixer; give one, or set parallel: false")
        if self.parallel and self.residual_scaling:
            text = "scales one branch after another; set parallel: false, or residual_scaling: false"
            yield self.problem_at("residual_scaling", text)

    @property
    def carries(self) -> Carried:
        """The value that goes from layer to layer beside the hidden states, where this one reads or hands on one."""
        return Carried() if self.mlp is None else self.mlp.carries

    @property
    def shared_copies(self) -> int:
        """Copies of a shared block, which feeds layers and is none itself; 0 for a block that is a layer."""
        return 0

    def parts(self) -> Iterator[tuple[str, BlockSection]]:
        """(Path from the block, section) of each section that has a kernel of its own."""
        yield "", self

    def input_width(self, d_model: int) -> int:
        """Channels that the block's norm reads."""
        return d_model

    def width_problems(self, d_model: int) -> Iterator[Problem]:
        """Settings that do not fit model.d_model; paths start at the block."""
        yield from ()

    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel | None:
        """The kernel that `backend` chooses, to be checked before a model is built; None for a block without backends.

        documents: as HybridLM's.
        """
        return None

    def kernels(
        self, d_model: int, norm: NormConfig, dtype: str = "bfloat16", documents: bool = False
    ) -> Iterator[Kernel]:
        """Every kernel of the block's mixer: that of `kernel` first, then those beside it, which take the same `backend`
        where they have one of that name. norm: the model's."""
        if (kernel := self.kernel(d_model, dtype, documents)) is not None:
            yield kernel

    def segments_refusal(self, d_model: int, documents: bool = False) -> str | None:
        """Reason why ranks cannot share sequences here on any machine (train.parallel.context), or None.

        documents: as HybridLM's. Default: the mixer has no form for a part of a sequence.
        """
        return f"a block of type {self.type_name} reads whole sequences; use train.parallel.context: 1"

    def divided(self, d_model: int) -> list[Divided] | None:
        """Heads and groups of the mixer that tensor-parallel ranks divide (train.parallel.tensor). Default: None, it cannot be."""
        return None

    def divided_by_layer(self, d_model: int) -> list[Divided] | str:
        """The same of the whole layer, or the reason why it cannot be divided."""
        mixer, mlp = self.divided(d_model), [] if self.mlp is None else self.mlp.divided(d_model)
        if mixer is None:
            return f"its type, {self.type_name}, cannot be divided between ranks"
        if self.mlp is not None and mlp is None:
            return f"its mlp, of type {self.mlp.type}, cannot be divided between ranks"
        return [*mixer, *(mlp or ())]

    def gathered_bytes(self, d_model: int, width: int, seq_len: int, context: int) -> float:
        """Bytes that a rank receives, per sequence, from the others of `context` ranks that share it (train.parallel.context), in
        a forward pass; at most they are kept for the backward pass. width: bytes of an activation. Default: none."""
        return 0.0

    def workspace_bytes(self, d_model: int, width: int, seq_len: int) -> int:
        """Bytes that the layer's backward pass takes for a while, whatever the batch. seq_len: of a call. Default: none."""
        return 0

    def kept_in_segments(self, d_model: int, width: int) -> SavedBytes:
        """Bytes per token that training keeps beyond `saved_bytes` and `gathered_bytes` where ranks share sequences. Default: 0."""
        return SavedBytes(0)

    def function(self, d_model: int, norm: NormConfig) -> dict[str, Any]:
        """The settings that say what the block computes, defaults resolved. norm: model.norm."""
        fields = self.model_dump(exclude={"norm", *self.without_function})
        fields["mlp"] = self.mlp and self.mlp.function()
        return fields | {"norm": (self.norm or norm).model_dump(exclude={"backend"})}

    def with_backends(self, norm: str, backend_of: Callable[[WithBackend], str]) -> Self:
        """The same function by other kernels; backend_of: of a section of `parts` or an mlp, for those that have the setting."""
        changed: dict[str, Any] = {"norm": self.norm and self.norm.model_copy(update={"backend": norm})}
        own: dict[str, Any] = {"backend": backend_of(self)} if "backend" in type(self).model_fields else {}
        if self.mlp is not None and "backend" in type(self.mlp).model_fields:
            own["mlp"] = self.mlp.model_copy(update={"backend": backend_of(self.mlp)})
        return self.model_copy(update=changed | own)

    def describe(self, d_model: int) -> str:
        """The mixer in one line of `llmtrain describe`."""
        return self.type_name

    def describe_wiring(self, d_model: int, norm: NormConfig) -> str:
        """Description of what surrounds the mixer, for the same line. norm: model.norm."""
        place = (self.norm or norm).place
        parts = [f"; {self.mlp.describe(d_model)}"] if self.mlp else []
        parts += ["; parallel"] if self.parallel else []
        parts += [f"; norms {'on both sides' if place == 'both' else place}"] if place != "before" else []
        parts += [f"; residual x {self.residual_multiplier:g}"] if self.residual_multiplier != 1 else []
        parts += ["; scaled residuals"] if self.residual_scaling else []
        parts += [f"; input x {self.input_multiplier:g}"] if self.input_multiplier != 1 else []
        return "".join(parts)

    def kept_products(self, d_model: int) -> dict[str, int]:
        """Channels that selective checkpointing keeps of linear layers' outputs, by the layers' names in the mixer: of the
        products through which the input enters. All others are computed again. Default: none."""
        return {}

    def saved_by_layer(self, d_model: int, width: int, norm: NormConfig) -> SavedBytes:
        """Bytes that training keeps of the whole layer, per token. width: bytes of an activation; norm: model.norm."""
        saved = self.saved_bytes(d_model, width)
        for part in (self, *([self.mlp] if self.mlp else [])):
            saved += SavedBytes(0, products=width * sum(part.kept_products(d_model).values()))
        saved = saved + self.mlp.saved_bytes(d_model, width) if self.mlp else saved
        # Of each branch, with norms on both sides, also the second norm's input (its output is summed at once), and where residuals
        # are scaled both summands.
        further = ((self.norm or norm).place == "both") + 2 * self.residual_scaling
        return saved + SavedBytes(further * (1 + (self.mlp is not None)) * width * d_model)

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Tensors that training keeps of the norm and the mixer, per token, for the memory estimate; the MLP adds its own.

        width: bytes of an activation. Default: input and output of the norm, the mixer's output.
        """
        return SavedBytes(3 * width * d_model)


WithBackend = BlockSection | FeedForwardSection
"""Sections that may have a kernel."""
