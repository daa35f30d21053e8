"""A microbatch by its CUDA graphs has the loss and the gradients of the microbatch as it is."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import yaml

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import LossConfig, ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layer_part import step_sums
from llmtrain.models.loss import LossOutput
from llmtrain.objectives.base import Batch, compute_loss
from llmtrain.objectives.next_token import NextToken
from llmtrain.train.graphs.cuda_graphs import GraphedLoss, MicrobatchGraph, NoGraph
from llmtrain.train.parallel import compile_layers
from tests.support import experts
from tests.support.models import VOCAB

pytestmark = pytest.mark.gpu
OBJECTIVE = NextToken()
MODEL = yaml.safe_load("""
vocab_size: 512
d_model: 256
max_seq_len: 256
blocks:
  m: {type: mamba2, d_state: 64, head_dim: 64, chunk_size: 64}
  a: {type: attention, n_heads: 4, position: {type: rotary}, mlp: {type: swiglu, d_ff: 512}}
layers: m a m
""")


def model(compiled: bool = True, **changes: object) -> CausalLM:
    torch._dynamo.reset()  # each model compiles the same functions anew, of which it keeps eight
    hybrid = HybridLM(ModelConfig.model_validate(MODEL | changes), dtype=torch.bfloat16, documents=True).cuda()
    hybrid.init_weights(1)
    hybrid.cast(torch.bfloat16)
    if compiled:
        compile_layers(hybrid)
    return CausalLM(hybrid, LossConfig())


def batch(seed: int, rows: int = 2, documents: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(512, (rows, 256), device="cuda")
    labels = ids.roll(-1, 1)
    labels[:, -1 - seed :] = -100
    found = {"input_ids": ids, "labels": labels}
    if documents:
        borders = torch.randint(0, 2, ids.shape, device="cuda")
        found["document_ids"] = borders.cumsum(1).div(40, rounding_mode="floor")
    return found


def graphed(of: CausalLM, microbatches: int, required: bool = False) -> GraphedLoss:
    return GraphedLoss(of, OBJECTIVE, microbatches, required)


def plain(of: CausalLM) -> Callable[[Batch], LossOutput]:
    return partial(compute_loss, of, OBJECTIVE)


def gradients(of: CausalLM) -> list[torch.Tensor]:
    return [p.grad.clone() for p in of.parameters() if p.grad is not None]


def step(of: CausalLM, loss_of, batches, graphs: GraphedLoss | None = None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of microbatches, and the sum of their gradients, each weighted as Composer does. graphs: by which loss_of computes
    them, if it is not graphs itself."""
    of.zero_grad(set_to_none=True)
    outputs: list[LossOutput] = []
    for number, each in enumerate(batches):
        output = loss_of(each)
        (output.loss * (number + 1) / 4).backward()
        outputs.append(output.each(torch.detach))
        del output
    if graphs := graphs or (loss_of if isinstance(loss_of, GraphedLoss) else None):
        graphs.hand_over()
    return [float(t) for each in outputs for t in (each.loss, *each.terms.values(), each.n_tokens)], gradients(of)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_loss_and_gradients_are_those_of_the_microbatch_as_it_is(microbatches: int, documents: bool):
    ours = model()
    graphs = graphed(ours, microbatches, required=True)
    for seed in range(3):  # the first step runs without graphs, the second makes them
        batches = [batch(10 * seed + i, documents=documents) for i in range(microbatches)]
        wanted, expected = step(ours, plain(ours), batches)
        found, got = step(ours, graphs, batches)
        assert found == wanted
        assert len(got) == len(expected) == len(list(ours.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert graphs.graph is not None


def test_other_shapes_and_validation_between_microbatches_do_not_disturb():
    ours = model()
    graphs = graphed(ours, 1, required=True)
    for _ in range(2):
        step(ours, graphs, [batch(0)])
    mixed = [batch(1), batch(2, rows=1), batch(3)]
    wanted, expected = step(ours, plain(ours), mixed)
    with torch.no_grad():
        validation = float(plain(ours)(batch(4)).loss)

    def interrupted(each):
        output = graphs(each)
        with torch.no_grad():
            assert float(graphs(batch(4)).loss) == validation
        return output

    found, got = step(ours, interrupted, mixed, graphs)
    assert found == wanted
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()  # bf16 sums in another order, of which some cancel


def test_weights_that_change_are_read_anew():
    ours = model()
    graphs = graphed(ours, 1, required=True)
    for seed in range(5):
        wanted, expected = step(ours, plain(ours), [batch(seed)])
        found, got = step(ours, graphs, [batch(seed)])
        assert found == wanted and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        with torch.no_grad():
            for p in ours.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)


def test_dropout_draws_what_it_would_without_graphs():
    ours = model(dropout=0.2)
    graphs = graphed(ours, 1, required=True)
    for seed in range(4):
        each = batch(seed)
        torch.manual_seed(100 + seed)
        wanted, _ = step(ours, plain(ours), [each, each])
        torch.manual_seed(100 + seed)
        found, _ = step(ours, graphs, [each, each])
        assert found == wanted
        assert found[0] != found[4]  # another draw


def test_a_backward_pass_belongs_to_the_newest_forward_pass():
    ours = model()
    graphs = graphed(ours, 1, required=True)
    for _ in range(2):
        step(ours, graphs, [batch(0)])
    first, second = graphs(batch(1)), graphs(batch(2))
    with pytest.raises(RuntimeError, match="follows that of its forward pass"):
        first.loss.backward()
    second.loss.backward()


def test_a_microbatch_in_which_the_host_waits_has_no_graph(caplog: pytest.LogCaptureFixture):
    ours = model(compiled=False)

    def waits(module: torch.nn.Module, args: object, out: torch.Tensor) -> None:
        out.sum().item()

    waiting = ours.hybrid.norm.register_forward_hook(waits)
    with pytest.raises(
        NoGraph, match=r"the host waits for the GPU within the microbatch \(.*test_cuda_graphs.py:\d+\)"
    ):
        MicrobatchGraph(ours, OBJECTIVE, batch(0))
    graphs = graphed(ours, 1)
    for seed in range(3):
        assert math.isfinite(step(ours, graphs, [batch(seed)])[0][0])
    assert graphs.graph is None
    waiting.remove()


def test_a_capture_that_fails_is_reported_and_training_goes_on():
    ours = model(compiled=False)

    def fails(module, args, out):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("as if it could not be recorded")

    hook = ours.hybrid.norm.register_forward_hook(fails)
    graphs = graphed(ours, 1)
    wanted = [step(ours, plain(ours), [batch(seed)]) for seed in range(3)]
    found = [step(ours, graphs, [batch(seed)]) for seed in range(3)]
    assert graphs.graph is None
    for (losses, expected), (got_losses, got) in zip(wanted, found, strict=True):
        assert got_losses == losses and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    hook.remove()


def test_losses_that_layers_attach_and_their_counts_are_those_of_the_microbatches():
    torch._dynamo.reset()
    hybrid = HybridLM(experts.config(balance={"weight": 0.3, "over": "model"}), dtype=torch.bfloat16).cuda()
    hybrid.init_weights(1)
    hybrid.cast(torch.bfloat16)
    ours = CausalLM(hybrid, LossConfig())
    graphs = graphed(ours, 2, required=True)
    batches = [{name: value % VOCAB for name, value in batch(seed).items()} for seed in range(2)]
    for _ in range(4):  # the first step runs without graphs, the second makes them
        seen = []
        for loss_of in (plain(ours), graphs):
            if hybrid.losses is not None:
                hybrid.losses.reset()
            sums = step_sums(hybrid)
            for total in sums:
                total.zero_()
            _, found = step(ours, loss_of, batches)
            seen.append([*found, *(t.clone() for t in (*sums, hybrid.losses.terms["balance"]))])  # type: ignore[union-attr]
        torch.testing.assert_close(*seen, atol=1e-5, rtol=1e-4)
    assert graphs.graph is not None and float(hybrid.losses.terms["balance"]) > 0.3  # type: ignore[union-attr]
