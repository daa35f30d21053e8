"""gpt-oss (arXiv:2508.10925) as transformers' GptOssForCausalLM: sinks beside the scores of attention, a window in every second
layer, experts with biases and a clamped unit, whose matrices are stored input by output."""

from typing import Any

from transformers import GptOssConfig

from llmtrain.kernels.glu.reference import CLAMP, CLAMPED_SLOPE
from llmtrain.models.hf import row_orders, tensors
from llmtrain.models.hf.experts import ExpertLayers
from llmtrain.models.hf.family import Part, Weight
from llmtrain.models.hf.settings import Refusals


class GptOss(ExpertLayers):
    """Not read, because without effect on the outputs: hidden_act."""

    kind = GptOssConfig
    has_layer_types = True
    block = {"sinks": True}
    number = "num_local_experts"
    width = "intermediate_size"
    router = {"type": "top_k_softmax", "bias": True}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        for key, only in (("swiglu_alpha", CLAMPED_SLOPE), ("swiglu_limit", CLAMP)):
            refusals.unless(getattr(config, key) == only, key, getattr(config, key), f"experts here have {only:g}")
        config.hidden_act = "silu"
        return super().read_block(config, layer_type, refusals)

    def read_experts(self, config: Any, mlp: dict[str, Any]) -> dict[str, Any]:
        return super().read_experts(config, mlp) | {"activation": "swiglu_clamped", "bias": True}

    def feed_forward_weights(self, ours: str, theirs: str, mlp: Any, d_model: int) -> list[Weight]:
        of, n, width = f"{theirs}.mlp.experts", mlp.n_experts, mlp.d_ff
        pairs = row_orders.by_group(2 * width, (1, 1))  # a gate, its up, the next gate
        return [
            *tensors.linear(f"{ours}.router", {f"{theirs}.mlp.router": n}, d_model, bias=True),
            _stacked(f"{ours}.experts.w_in", Part(f"{of}.gate_up_proj", (n, d_model, 2 * width), (), pairs, True, 1)),
            _stacked(f"{ours}.experts.w_out", Part(f"{of}.down_proj", (n, width, d_model), transposed=True)),
            _stacked(f"{ours}.experts.b_in", Part(f"{of}.gate_up_proj_bias", (n, 2 * width), (), pairs, rows=1)),
            tensors.same(f"{ours}.experts.b_out", f"{of}.down_proj_bias", n, d_model),
        ]


def _stacked(ours: str, part: Part) -> Weight:
    *outer, rows, columns = part.shape
    return Weight(ours, (*outer, columns, rows) if part.transposed else part.shape, (part,))
