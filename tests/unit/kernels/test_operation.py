"""Operations as tests, doctor, bench and tuning see them."""

import pytest
import torch

from llmtrain.kernels.attention import operation as attention
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.operation import Shape, operations, run_both, wide


@pytest.mark.parametrize(
    "features, label",
    [
        ({}, "plain"),
        ({"alibi_max_bias": 8.0}, "ALiBi"),
        ({"sliding_window": 33, "softcap": 5.0}, "softcap 5, window 33"),
        ({"documents": True, "sliding_window": 40}, "documents, window 40"),
    ],
)
def test_the_exact_result_of_attention_in_parts_is_the_references(monkeypatch, features, label):
    monkeypatch.setattr(attention, "_BLOCK", 50)
    one = attention.OPERATION
    spec = AttentionSpec(4, 2, 16, 0.25, dtype="float32", **features)
    shape = Shape(spec, 2, 130, None, (("document", 60),))
    assert one.label(shape) == f"4 on 2 x 16 {label}"
    tensors, up = one.draw(shape)
    wanted = run_both(one.reference(shape, "cpu"), wide(tensors), up.double())
    for found, exact in zip(one.exact(shape, tensors, up), one.pieces(shape, wanted), strict=True):
        torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-12)


def operations_and_shapes():
    return [pytest.param(one, shape, id=one.name) for one in operations() for shape in list(one.shapes(True))[:1]]


@pytest.mark.parametrize("one, shape", operations_and_shapes())
def test_an_operation_draws_the_same_numbers_every_time_and_of_another_seed_others(one, shape):
    (first, up), (again, _), (other, _) = one.draw(shape), one.draw(shape), one.draw(shape, seed=1)
    for a, b, c in zip(first, again, other, strict=True):
        assert (a is None) == (b is None) or torch.equal(a, b)
        assert a is None or not torch.equal(a, c)
    meta, _ = one.draw(shape, "meta")
    strides = [[None if t is None else (t.shape, t.stride(), t.dtype) for t in each] for each in (first, meta)]
    assert strides[0] == strides[1]
    names = one.names(first)
    found = one.exact(shape, first, up)
    assert len(names) == len(found) == len(set(names)) and all(t.isfinite().all() for t in found)


@pytest.mark.parametrize("one", [one for one in operations() if one.tuned], ids=lambda one: one.name)
def test_a_shape_survives_its_fields(one):
    import json

    for shape in (one.sized(), one.of_model(one.sized().spec, 2, 64, documents=True)):
        assert one.shape(json.loads(json.dumps(shape.fields()))) == shape
