"""Collectives of tensor-parallel ranks and the products beside them, as the compiler's pass makes one operator of both
(train.parallel.async_tensor). On CPUs the operators are PyTorch's own plain definitions of them, over gloo."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._inductor import config as inductor
from torch.distributed import _symmetric_memory

from llmtrain.schema.config import Config
from tests.distributed.test_context_parallel import ATTENTION
from tests.distributed.test_gradients import ONE_STEP, Step, assert_same_step, one_step
from tests.support.tiny import tiny_config

GATHER, SCATTER = "symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default"
PLAIN = ("_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.reduce_scatter_tensor.default")


def one_fused_step(config: Config) -> tuple[Step, list[Counter[str]]]:
    """A job: a step of layers that Inductor has compiled up to the generation of code, and each graph's operators."""
    from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V

    graphs: list[Counter[str]] = []

    def inner(
        graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: object
    ) -> Callable[[list[object]], object]:
        view_to_reshape(graph)
        with V.set_fake_mode(fake_tensor_prop(graph, inputs)):
            _recursive_post_grad_passes(graph)
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph)

    backend = functools.partial(compile_fx, inner_compile=cast("Any", inner))
    with operators_on_cpus(), patch("llmtrain.train.parallel.overlap_products", overlapped):
        step = one_step(config, backend)
    return step, graphs


def overlapped(*_: object) -> None:
    """The compiler told, as on GPUs; one_step's ranks compile nothing else."""
    inductor._micro_pipeline_tp = True


@contextmanager
def operators_on_cpus() -> Iterator[None]:
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    with _symmetric_memory._test_mode(), inductor.patch(_micro_pipeline_tp=False):
        yield
    library._destroy()


@pytest.mark.ci
def test_every_exchange_of_attention_and_mlp_is_part_of_a_product(ranks, shards, tmp_path):
    """Forward two that gather and two that scatter, and backward their transposes."""
    blocks = {"model.blocks": {"w": ATTENTION | {"mlp": {"type": "swiglu", "d_ff": 64}}}, "model.layers": "w*2"}
    changes = {"train.parallel": {"tensor": 2}, "train.compile": "on"}
    config = tiny_config(shards, tmp_path / "run", ONE_STEP | blocks | changes)
    step, graphs = ranks(2).run(one_fused_step, config)[0]
    assert len(graphs) >= 2  # validation is compiled too
    for graph in graphs:
        assert (graph[GATHER], graph[SCATTER]) == (2, 2) and not any(graph[name] for name in PLAIN), graph
    assert_same_step(step, ranks(1).run(one_step, tiny_config(shards, tmp_path / "alone", ONE_STEP | blocks))[0])


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["none", pytest.param("selective", marks=pytest.mark.slow)])
def test_the_hybrid_computes_what_one_rank_does(ranks, shards, tmp_path, kind):
    """Mamba-2 with one norm group, whose sums stay collectives of their own, and shared blocks with adapters."""
    changes = {"train.parallel": {"tensor": 2}, "train.compile": "on", "train.activation_checkpointing": {"type": kind}}
    config = tiny_config(shards, tmp_path / "run", ONE_STEP | changes)
    step, graphs = ranks(2).run(one_fused_step, config)[0]
    assert sum(graph[GATHER] for graph in graphs) >= 6 and sum(graph[SCATTER] for graph in graphs) >= 4, graphs
    assert_same_step(step, ranks(1).run(one_step, tiny_config(shards, tmp_path / "alone", ONE_STEP))[0])
