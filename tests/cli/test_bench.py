"""`llmtrain bench` and `llmtrain doctor` where there is no GPU."""

import json

import pytest
import torch

from llmtrain import cli
from llmtrain.bench.kernels.command import OPERATIONS
from llmtrain.doctor import report, selftest
from llmtrain.kernels import platform, registry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = cli.main(words)
    out, err = capsys.readouterr()
    return status, out, err


def test_doctor_says_what_serves_and_tests_it(capsys):
    status, out, _ = run(capsys, "doctor")
    assert status == 0, out
    lines = [line.split() for line in out.splitlines()]
    assert ["vendor", "cpu"] in lines and ["torch", torch.__version__.split("+")[0]] in [line[:2] for line in lines]
    assert "our Triton kernels need a GPU" in out
    passed = [line for line in lines if "pass," in line]
    assert {line[0] for line in passed} >= {"attention", "ssd", "conv1d"}
    assert "sdpa:cpu" in next(line for line in passed if "auto" in line)
    assert " 0 failed" in out


def test_doctor_fails_where_what_auto_chooses_computes_wrongly(capsys, monkeypatch):
    right = selftest._function

    def wrong(exam, backend, here):
        kernel = right(exam, backend, here)
        return (lambda *tensors: 1.5 * kernel(*tensors)) if backend == "sdpa:cpu" else kernel

    monkeypatch.setattr(selftest, "_function", wrong)
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "attention (causal): auto chooses sdpa:cpu, which fails here" in out
    assert "FAIL: error" in out


def test_doctor_goes_on_when_a_backend_that_nobody_chooses_raises(capsys, monkeypatch):
    right = selftest._function

    def broken(exam, backend, here):
        if backend == "reference" and exam.operation == "conv1d" and exam.spec.dtype == "bfloat16":
            raise RuntimeError("no such luck")
        return right(exam, backend, here)

    monkeypatch.setattr(selftest, "_function", broken)
    found = report.findings(platform.cpu(), "bfloat16", test=True)
    assert registry.resolve("conv1d", "auto", next(e for e in selftest.exams("bfloat16") if e.operation == "conv1d").spec,
                            platform.cpu()).name == "aten"  # fmt: skip
    # aten is compared with the reference, so it cannot pass here either.
    failed = {f.backend: f.failed for f in found if f.failed}
    assert failed.keys() == {"reference", "aten"} and failed["reference"] == "RuntimeError: no such luck"


def test_doctor_refuses_a_dtype_that_is_none(capsys):
    status, _, err = run(capsys, "doctor", "--dtype", "bf16")
    assert status == 2 and "--dtype takes bfloat16, float16, float32, not 'bf16'" in err


def test_bench_kernels_measures_the_cpus_backends(capsys, tmp_path):
    status, out, _ = run(capsys, "bench", "kernels", "--out", str(tmp_path / "out"))
    assert status == 0, out
    assert "No GPU here" in out and "Not measured: our kernels" in out
    facts = json.loads((tmp_path / "out/kernels.json").read_text())
    assert {one["operation"] for one in facts["results"]} == set(OPERATIONS)
    for one in facts["results"]:
        assert one["failed"] is None and one["error"] < 1e-4 and one["forward_ms"] > 0 and one["memory_mib"] is None
    rows = (tmp_path / "out/kernels.md").read_text().splitlines()
    assert "| attention head_dim 32 | 128 | sdpa:cpu |" in "\n".join(rows)
    assert len({row.count("|") for row in rows if row.startswith("|")}) == 1
    assert (tmp_path / "out/kernels.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, told",
    [
        (["kernels", "--only", "softmax"], "nothing to measure in 'softmax'; there is attention"),
        (["kernels", "--match", "xyz"], "no cell is left; there is:\n  attention head_dim 32 T=128"),
        (["kernels", "--peer-path", "/nowhere"], "--peer-path /nowhere is no folder"),
        (["tune", "--operation", "softmax"], "nothing to tune in 'softmax'; there is attention, ssd"),
        (["tune", "--shape", "head_dim"], "--shape takes NAME=SIZE, such as head_dim=128, not 'head_dim'"),
        (["tune", "--shape", "headdim=64"], "attention has no 'headdim'; its cases have head_dim"),
        (["tune", "--variant", "causal"], "no attention variant 'causal'; there is plain, alibi"),
        (["tune", "--kernels", "fwd"], "no kernel 'fwd'; there is forward, dq, dkdv"),
        (
            ["tune", "--operation", "gated_norm", "--shape", "width=4"],
            "gated_norm has no 'width'; its cases have group_size",
        ),
        (["tune", "--operation", "rotary", "--kernels", "forward"], "no kernel 'forward'; there is every"),
        (["tune", "--operation", "conv1d"], "bench tune times kernels on a GPU, and this machine has none"),
        (["tune"], "bench tune times kernels on a GPU, and this machine has none"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_compiled(capsys, words, told):
    status, _, err = run(capsys, "bench", *words)
    assert status == 2
    assert told in err
