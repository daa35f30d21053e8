"""What a compiled layer in float8 keeps for its backward pass."""

from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

from llmtrain.adapt.float8_linear import convert_linears
from llmtrain.adapt.float8_product import CastOnceProjection
from llmtrain.kernels import platform
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.sections.float8 import Float8Config
from llmtrain.schema.load import load_config

TOKENS = 48
LINEARS = ("mixer.wqkv", "mixer.wo", "mlp.w_in", "mlp.w_out")
SETTINGS = ("d_model=128", "vocab_size=64", "layers=attn", "blocks.attn.n_heads=4", "blocks.attn.n_kv_heads=2")


class Traced(Exception):
    """The graph of the forward pass is there: nothing is run, since the kernels are a GPU's."""


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_inputs_of_products_are_kept_and_no_transposed_weight(mlp):
    """Transposed weights would take the bytes of those that are gathered once more."""
    settings = [f"model.{one}" for one in SETTINGS] + [f"model.blocks.attn.mlp={{type: {mlp}, d_ff: 448}}"]
    model = HybridLM(load_config("llama3-8b", settings).model, platform.cpu(), torch.bfloat16).to(torch.bfloat16)
    convert_linears(model, [f"blocks.0.{one}" for one in LINEARS], Float8Config(), False, CastOnceProjection)
    for name in LINEARS:
        linear: Any = model.blocks[0].get_submodule(name)
        weight = linear.weight.detach().to(torch.float8_e4m3fn)
        one, role = torch.tensor(1.0), GemmInputRole.WEIGHT
        linear.weight = nn.Parameter(
            Float8TrainingTensor(weight, one, torch.bfloat16, linear.linear_mm_config, role)  # as FSDP2 makes it
        )
    kept: list[tuple[int, ...]] = []

    def forward_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        [output] = [node for node in graph.graph.nodes if node.op == "output"]
        results: Any = output.args[0]
        computed = [node.meta["val"] for node in results if node is not None and node.op == "call_function"]
        kept.extend(one.shape for one in computed if one.dtype == torch.float8_e4m3fn)
        raise Traced

    backend = aot_autograd(
        fw_compiler=forward_graph,
        partition_fn=min_cut_rematerialization_partition,  # Inductor's
        decompositions=select_decomp_table(),
    )
    block = model.blocks[0]
    block.forward = torch.compile(block.forward, backend=backend, fullgraph=True, dynamic=False)
    with pytest.raises(Exception, match="Traced"):
        model(torch.zeros(1, TOKENS, dtype=torch.int64), model.context(TOKENS, torch.device("cpu")))
    assert sorted(kept) == sorted([(TOKENS, 128)] * 3 + [(TOKENS, 448)])
