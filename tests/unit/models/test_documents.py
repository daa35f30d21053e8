"""Documents packed into one sequence do not see each other: loss and gradients are those of the documents one by one."""

import pytest
import torch

from llmtrain.kernels import platform
from llmtrain.schema.training import ActivationCheckpointing
from llmtrain.train.parallel import checkpoint_activations
from tests.support.models import MODELS, build
from tests.support.packing import apart, assert_same, packed_batch, together

CPU = platform.cpu()


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_batch_equals_its_documents_apart(name):
    batch = packed_batch()
    expected = apart(build(name, CPU), batch)
    assert_same(together(build(name, CPU, documents=True), batch), expected)


@pytest.mark.parametrize("name", MODELS)
def test_documents_that_see_each_other_would_be_noticed(name):
    """Without the ids, and with the same labels, the loss is another."""
    batch, model = packed_batch(), build(name, CPU, documents=True)
    masked = together(model, batch)["loss"]
    assert abs(model.loss(batch["input_ids"], batch["labels"]).loss - masked) > 1e-3


@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param("zamba2 as the 1.2B", "selective", marks=pytest.mark.ci),
        pytest.param("a window and soft caps", "none", marks=pytest.mark.slow),
        pytest.param("zamba2 as the 2.7B", "full", marks=pytest.mark.slow),
    ],
)
def test_compiled_and_recomputed_layers_keep_documents_apart(name, kind):
    batch, model = packed_batch(), build(name, CPU, documents=True)
    expected = together(model, batch)
    torch._dynamo.reset()
    checkpoint_activations(model.hybrid, ActivationCheckpointing(type=kind))
    for block in model.hybrid.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager", dynamic=False)
    ours = {name.replace("_checkpoint_wrapped_module.", ""): t for name, t in together(model, batch).items()}
    assert_same(ours, expected)


def test_other_documents_of_the_same_shape_do_not_compile_anew():
    model = build("zamba2 as the 1.2B", CPU, documents=True, layers="m s+m")
    torch._dynamo.reset()
    for block in model.hybrid.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager", dynamic=False)
    batch = packed_batch()
    together(model, batch)
    batch["document_ids"] = batch["document_ids"].flip(0)
    with torch.compiler.set_stance("fail_on_recompile"):
        together(model, batch)


def test_sequences_of_one_document_are_those_without_ids():
    batch = packed_batch()
    for name in MODELS:
        model = build(name, CPU, documents=True)
        out = model.logits(batch["input_ids"], torch.zeros_like(batch["document_ids"]))
        torch.testing.assert_close(out, model.logits(batch["input_ids"]), msg=name)
