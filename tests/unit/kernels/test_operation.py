"""Operations as tests, doctor, bench and tuning see them."""

import argparse
import sys
from types import SimpleNamespace

import pytest
import torch

from llmtrain.bench.kernels import command
from llmtrain.bench.kernels.measure import Ceilings, measure
from llmtrain.doctor import report
from llmtrain.kernels import operation as base
from llmtrain.kernels import platform, registry
from llmtrain.kernels.attention import operation as attention
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.operation import Draw, Operation, Shape, Work, operations, run_both, wide
from llmtrain.kernels.rotary.spec import RotarySpec


@pytest.mark.parametrize(
    "features, label",
    [
        ({}, "plain"),
        ({"alibi_max_bias": 8.0}, "ALiBi"),
        ({"sliding_window": 33, "softcap": 5.0}, "softcap 5, window 33"),
        ({"documents": True, "sliding_window": 40}, "documents, window 40"),
        ({"sinks": True, "sliding_window": 40}, "sinks, window 40"),
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


class Scale(Operation):
    """An operation of one's own: y = scale x."""

    name, spec, leaves, tuned = "scale", RotarySpec, ("x", "scale"), False  # type: ignore[assignment]

    def inputs(self, spec, batch, seq_len, device="cpu", seed=0, **options):
        draw = Draw(device, spec.dtype, seed)
        return [draw(batch, seq_len, spec.head_dim), draw.wide(spec.head_dim)], draw(batch, seq_len, spec.head_dim)

    def work(self, shape):
        return (Work(1.0, 1.0),) * 2

    def label(self, shape):
        return "small"

    def shapes(self, tiny):
        yield Shape(RotarySpec(8, "float32"), 2, 4)

    def selftests(self, dtype):
        yield "product", Shape(RotarySpec(8, dtype), 2, 4)


def test_doctor_and_bench_take_a_new_operation_from_its_own_file_and_the_registry(monkeypatch):
    """Its backends too: one is right, one wrong by a hundredth."""

    def build(spec, platform, variant):
        return lambda x, scale: ((1.01 if variant == "wrong" else 1.0) * x * scale).to(x.dtype)

    folder = "llmtrain.kernels.scale"
    monkeypatch.setitem(sys.modules, f"{folder}.reference", SimpleNamespace(build=build))
    monkeypatch.setitem(sys.modules, f"{folder}.operation", SimpleNamespace(OPERATION=Scale()))
    backends = tuple(registry.Backend(name, "scale.reference") for name in ("reference", "ours:wrong"))
    monkeypatch.setitem(registry._BACKENDS, "scale", backends)
    monkeypatch.setitem(registry._PREFERENCE, "scale", lambda spec, platform: ("reference",))
    monkeypatch.setattr(base, "NAMES", ("scale",))
    found = report.findings(platform.cpu(), "float32", test=True)
    assert [(one.operation, one.what, one.backend, one.chosen) for one in found] == [
        ("scale", "product", "reference", True),
        ("scale", "product", "ours:wrong", False),
    ]
    assert found[0].failed is None and found[1].failed == "error 1.0e-02, allowed 2e-04"
    monkeypatch.setattr(command, "OPERATIONS", ("scale",))
    request = argparse.Namespace(only=["scale"], quick=False, seq_len=None, match=None)
    [cell] = command.chosen(request, tiny=True)
    assert cell.label == "scale small T=4" and cell.names == ("y", "dx", "dscale")
    right, wrong = measure(cell, cell.contenders(), Ceilings(1.0, 1.0), rep_ms=1.0)
    assert right.error < 1e-6 < 5e-3 < wrong.error
