"""The `train.float8` section of the YAML. No torch here."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import Problem, Section, free

MULTIPLE = 16
"""Of the three sizes of a float8 matrix product, as the matrix units take them."""


class Float8Config(Section):
    """Matrix products of linear layers in float8, through torchao (pip install 'llmtrain[float8]'). Weights, optimizer state and
    checkpoints stay in fp32, so a run may go on without float8, on another device too. The head is left out, as are products whose
    sizes are no multiple of 16, or so small that the conversion costs more than is gained: `llmtrain describe` names them."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = free("tensorwise")
    """Scales: tensorwise, one for each tensor, the fastest; rowwise, one for each row, closer to bf16; rowwise_with_gw_hp, the
    same with the gradients of weights in bf16, the closest."""
    all_gather: bool | None = free(None)
    """Ranks exchange weights in float8 rather than bf16. Default: with tensorwise, which alone allows it."""
    exclude: list[Annotated[str, Field(min_length=1)]] = free([])
    """Linear layers to leave in bf16, as patterns of their names in checkpoints without `.weight`: `blocks.0.*`, `*.out_proj`; and
    experts, `*.mlp.experts`. `*` also stands for dots."""
    experts: bool = free(False)
    """The products of experts too, by our Triton kernels: in the forward pass and of their inputs' gradients; gradients of experts'
    weights stay in bf16, whatever the recipe, since an expert has any number of rows. Ranks exchange these weights in bf16."""
    casts: Literal["auto", "compiled", "triton"] = free("auto")
    """Kernels that round to float8, with recipe: tensorwise. compiled: PyTorch's compiler makes them, as in torchao. triton: ours,
    which read a tensor once for both of its products; on NVIDIA. auto: triton on Hopper, where it is measured to be the faster,
    else compiled."""
    small_products: bool = free(False)
    """Do not leave out small products."""
    emulate: bool = free(False)
    """Compute in bf16 what float8 would give: slower, for tests of a recipe where no float8 unit is, on a CPU too."""

    def problems(self) -> Iterator[Problem]:
        if self.all_gather and self.recipe != "tensorwise":
            yield self.problem_at("all_gather", "needs recipe: tensorwise, whose scales all ranks share")
        if self.casts == "triton" and self.recipe != "tensorwise":
            yield self.problem_at("casts", "needs recipe: tensorwise; use compiled")
        if self.casts == "triton" and self.emulate:
            yield self.problem_at("casts", "emulate computes without them; use compiled")

    @property
    def gathers(self) -> bool:
        return self.recipe == "tensorwise" if self.all_gather is None else self.all_gather
