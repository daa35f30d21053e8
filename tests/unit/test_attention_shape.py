"""The attention that `bench tune FILE` and the grid measure: its exact result, made in parts, and its name."""

import pytest
import torch

from llmtrain.bench import attention_shape
from llmtrain.bench.attention_shape import AttentionShape
from llmtrain.kernels.attention.reference import ReferenceAttention
from llmtrain.kernels.attention.spec import AttentionSpec


@pytest.mark.parametrize(
    "features, label",
    [
        ({}, "plain"),
        ({"alibi_max_bias": 8.0}, "ALiBi"),
        ({"sliding_window": 33, "softcap": 5.0}, "softcap 5, window 33"),
        ({"documents": True, "sliding_window": 40}, "documents, window 40"),
    ],
)
def test_the_exact_result_in_parts_is_the_references(monkeypatch, features, label):
    monkeypatch.setattr(attention_shape, "_BLOCK", 50)
    monkeypatch.setattr(attention_shape, "DOCUMENT", 60)
    shape = AttentionShape(AttentionSpec(4, 2, 16, 0.25, dtype="float32", **features), 130, 2)
    assert shape.label == f"4 on 2 x 16 {label}"
    qkv, dout = shape.tensors("cpu")
    q, k, v = leaves = [t.detach().double().requires_grad_() for t in qkv]
    reference = ReferenceAttention(shape.spec)
    out = reference(q, k, v, reference.prepare(130, torch.device("cpu"), shape.ids("cpu")))
    wanted = [out, *torch.autograd.grad(out, leaves, dout.double())]
    for found, exact in zip(shape.exact(qkv, dout), wanted, strict=True):
        torch.testing.assert_close(found, shape.first_group(exact), atol=1e-12, rtol=1e-12)
