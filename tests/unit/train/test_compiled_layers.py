"""What compile_layers asks of the compiler."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.train.parallel import _selective, compile_layers
from tests.support import experts
from tests.support.models import VOCAB

WIDTH = 1100  # rows of 4,400 bytes, no whole lines of memory


@torch.library.custom_op("llmtrain_tests::read_rows", mutates_args=())
def read_rows(x: Tensor) -> Tensor:
    return x[..., :8].clone()


@read_rows.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 8))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return read_rows(self.proj(x))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.linear(x).sin())


@pytest.mark.ci
@pytest.mark.parametrize("contexts", [None, _selective({"aten.sin.default"}, [((8, 8), True)])])
def test_a_later_process_takes_what_was_compiled(contexts, tmp_path):
    """Of a layer with a torch.autograd.Function, and of one that recomputes some of what it needs."""
    counted = counters["aot_autograd"]
    with fresh_cache(dir=str(tmp_path)):
        for _ in range(2):
            torch._dynamo.reset()
            counted.clear()
            layer = Product()
            if contexts is not None:
                layer = checkpoint_wrapper(layer, context_fn=contexts)
            compile_layers(cast("Any", SimpleNamespace(config=SimpleNamespace(blocks={"layer": None}), blocks=[layer])))
            layer.forward(torch.ones(2, 8)).sum().backward()
    assert counted["autograd_cache_hit"] == 1, counted


def test_an_operator_reads_what_a_product_wrote():
    """Not a copy of it: Inductor would pad the product's rows (on CPUs where it is told to), and hand the operator whole ones."""
    layer = Layer()
    model: Any = SimpleNamespace(config=SimpleNamespace(blocks={"layer": None}), blocks=[layer])
    padded = {"comprehensive_padding": True, "disable_padding_cpu": False, "force_disable_caches": True}
    with config.patch(padded), torch.no_grad():
        compile_layers(model)
        _, (code,) = run_and_get_code(layer.forward, torch.ones(1, 16, 8))
    assert code.count("empty_strided_cpu((") == 1, code  # of the product


def test_layers_that_count_their_experts_together_share_one_compilation(monkeypatch):
    """More of them than a function may have compilations (recompile_limit)."""
    settings = experts.config(balance={"weight": 0.3, "over": "model"}).model_dump() | {"layers": "a*5 m*5 d"}
    model = CausalLM(HybridLM(ModelConfig.model_validate(settings), platform.cpu()))
    model.hybrid.init_weights(seed=1)
    graphs = []

    def traced(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = cast("Any", torch.compile)
    monkeypatch.setattr(torch, "compile", lambda forward, **rest: compiled(forward, **rest | {"backend": traced}))
    compile_layers(model.hybrid)
    ids = torch.randint(VOCAB, (2, 24))
    for _ in range(2):
        model.loss(ids, ids).loss.backward()
    assert len(graphs) == 3  # one of each kind
