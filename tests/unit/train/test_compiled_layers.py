"""What compile_layers asks of the compiler."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from llmtrain.train.parallel import compile_layers

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


def test_an_operator_reads_what_a_product_wrote():
    """Not a copy of it: Inductor would pad the product's rows (on CPUs where it is told to), and hand the operator whole ones."""
    layer = Layer()
    model: Any = SimpleNamespace(config=SimpleNamespace(blocks={"layer": None}), blocks=[layer])
    padded = {"comprehensive_padding": True, "disable_padding_cpu": False, "force_disable_caches": True}
    with config.patch(padded), torch.no_grad():
        compile_layers(model)
        _, (code,) = run_and_get_code(layer.forward, torch.ones(1, 16, 8))
    assert code.count("empty_strided_cpu((") == 1, code  # of the product
