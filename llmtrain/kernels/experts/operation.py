"""Experts behind their router, as tests, doctor and bench see them."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from llmtrain.kernels import operation as base
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.kernels.operation import Draw, Function, Operation, Shape, Work

SIZES = (
    ExpertsSpec(2048, 1024, 64, 8),
    ExpertsSpec(2048, 768, 128, 8),
    ExpertsSpec(2688, 1856, 128, 6, "relu2"),
)
"""Layers of published models, of 7B, 30B and 30B parameters."""


class Experts(Operation):
    """A function of x [T, d_model], both matrices, and logits [T, n_experts] in fp32: the softmax of the top_k are the weights."""

    name, spec, tuned = "experts", ExpertsSpec, False
    leaves, public = ("x", "logits", "w_in", "w_out"), ("grouped_mm",)

    def inputs(
        self, spec: ExpertsSpec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0, skew: float = 0.0
    ) -> tuple[list[Any], Tensor]:
        """skew: standard deviation of what an expert's logits have in common, against 1 of each token's own; 0: a load that is
        balanced but for chance."""
        draw, tokens = Draw(device, spec.dtype, seed), batch * seq_len
        logits = draw.wide(tokens, spec.n_experts) + skew * draw.wide(spec.n_experts)
        w_in = draw(spec.n_experts, spec.d_in, spec.d_model) * spec.d_model**-0.5
        w_out = draw(spec.n_experts, spec.d_model, spec.d_ff) * spec.d_ff**-0.5
        return [draw(tokens, spec.d_model), logits, w_in, w_out], draw(tokens, spec.d_model)

    def bind(self, kernel: Any, shape: Shape, device: str) -> Function:
        def run(x: Tensor, logits: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
            best, chosen = logits.topk(shape.spec.top_k)
            return kernel(x, chosen, best.softmax(-1), w_in, w_out)

        return run

    def work(self, shape: Shape) -> tuple[Work, Work]:
        spec, tokens = shape.spec, shape.batch * shape.seq_len
        matrices, size = spec.d_model * (spec.d_in + spec.d_ff), base.element_size(spec.dtype)
        flops, weights = 2.0 * tokens * spec.top_k * matrices, size * spec.n_experts * matrices
        return Work(flops, weights + 2 * size * tokens * spec.d_model), Work(
            2 * flops, 2 * weights + 3 * size * tokens * spec.d_model
        )

    def label(self, shape: Shape) -> str:
        spec = shape.spec
        routed = "balanced" if not self.option(shape, "skew", 0.0) else "skewed"
        return f"{spec.top_k} of {spec.n_experts}x{spec.d_ff}, d_model {spec.d_model}, {spec.activation}, {routed}"

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        if tiny:
            yield Shape(ExpertsSpec(32, 24, 4, 2, dtype="float32"), 2, 16)
            return
        for spec in SIZES:
            for skew in (0.0, 1.0):
                yield Shape(spec, 4, base.TOKENS // 4, options=(("skew", skew),))

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        for activation in ("swiglu", "relu2"):
            spec = ExpertsSpec(64, 48, 6, 2, activation, dtype=dtype)
            yield activation, Shape(spec, base.SELFTEST_BATCH, base.SELFTEST_LEN, options=(("skew", 1.0),))


OPERATION = Experts()
