"""Layers of the stages of a pipeline, compiled (train.compile)."""

import json
from datetime import timedelta
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from llmtrain.distributed.world import gloo_group, world_from_environment
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.objectives.next_token import NextToken
from llmtrain.schema.training import TrainConfig
from llmtrain.train.parallel import parallelize
from llmtrain.train.pipeline.schedule import PipelineStep
from llmtrain.train.pipeline.stages import StagedLM, shared_gradients
from llmtrain.train.step import GradientSync
from tests.support.tiny import BLOCKS
from tests.support.whole import whole_tensors

VOCAB, SEQ_LEN, SAMPLES = 48, 16, 4
ZAMBA2 = {"blocks": BLOCKS | {"s": BLOCKS["s"] | {"n_shared": 2}}, "layers": "m s+m m s+m m s+m m s+m"}
EXPERTS = {"type": "experts", "n_experts": 4, "top_k": 2, "d_ff": 16, "z_loss": 1e-2, "balance": {"weight": 0.1}}
ROUTED = {"blocks": {"e": {"type": "attention", "n_heads": 2, "mlp": EXPERTS}, "m": BLOCKS["m"]}, "layers": "m e m e"}


def two_steps(
    model: dict[str, Any], parallel: dict[str, Any], compile: str, precision: str
) -> tuple[list[int], dict[str, Any]]:
    """Compilations of this rank after each of two steps, each of which all stages begin at the same time; and losses, gradients and
    experts' loads of the second."""
    size, group = dist.get_world_size(), gloo_group()
    graphs = []

    def together(graph: torch.fx.GraphModule, _: Any) -> Any:
        dist.monitored_barrier(group, timeout=timedelta(seconds=100))
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    settings = {"duration": "1 steps", "global_batch_size": SAMPLES, "microbatch_size": 1, "compile": compile}
    settings |= {"parallel": parallel, "precision": precision}
    train = TrainConfig.model_validate_json(json.dumps(settings))
    sizes = {"vocab_size": VOCAB, "d_model": 32, "max_seq_len": SEQ_LEN, "dropout": 0.1}
    with torch.device("meta"):
        lm = StagedLM(
            HybridLM(ModelConfig.model_validate_json(json.dumps(sizes | model)), dtype=getattr(torch, train.dtype)),
            train.loss,
        )
    compiled = cast("Any", torch.compile)
    with patch.object(torch, "compile", lambda forward, **rest: compiled(forward, **rest | {"backend": together})):
        parallelize(lm, train, world_from_environment().split(1, 1, size), torch.device("cpu"))
    lm.hybrid.init_weights(1)
    step = PipelineStep(lm, NextToken(), 1, GradientSync(lm, train.sharding), group, copies=size)
    counts, losses = list[int](), dict[str, Any]()
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (SAMPLES, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "sample_ids": torch.arange(SAMPLES), "text_bytes": torch.zeros(SAMPLES)}
    for _ in range(2):
        losses = step.forward_backward(batch, lambda *_: None).losses
        counts.append(len(graphs))
    cast("Any", shared_gradients(lm)).add_up()
    found = whole_tensors(lm.hybrid, lambda parameter: parameter.grad)
    loads = {name: one for name, one in lm.hybrid.named_buffers() if name.endswith("load")}
    return counts, losses | found | loads


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "virtual", "precision"), [(ZAMBA2, 1, "fp32"), (ROUTED, 1, "fp32"), (ZAMBA2, 2, "amp_bf16")]
)
def test_all_stages_compile_each_kind_of_layer_once_and_at_the_same_time(ranks, model, virtual, precision):
    """And what they compile with leaves no trace in the first step: not in gradients, sums, or the numbers that are drawn."""
    parallel = {"pipeline": 2, "virtual_stages": virtual}
    (counts, found), (others, _) = ranks(2).run(two_steps, model, parallel, "on", precision)
    assert counts == others == [2, 2]  # each stage has layers of two kinds
    plain, wanted = ranks(2).run(two_steps, model, parallel, "off", precision)[0]
    assert plain == [0, 0]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
