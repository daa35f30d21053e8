"""`llmtrain bench` and `llmtrain doctor` where there is no GPU."""

import json
import re
from pathlib import Path

import pytest
import torch

from llmtrain import cli
from llmtrain.bench.kernels.command import OPERATIONS
from llmtrain.doctor import report, selftest
from llmtrain.kernels import operation as operations
from llmtrain.kernels import platform, registry, tuning
from tests.cli.test_bench_train import write_sweep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")


@pytest.fixture(autouse=True)
def fresh(tmp_path_factory, monkeypatch):
    """No rows of this machine's user."""
    monkeypatch.delenv("LLMTRAIN_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    tuning.forget()
    yield
    tuning.forget()


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = cli.main(words)
    out, err = capsys.readouterr()
    return status, out, err


def test_doctor_explains_what_serves_and_tests_it(capsys):
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
    right = selftest.function

    def wrong(one, shape, backend, here):
        kernel = right(one, shape, backend, here)
        return (lambda *tensors: 1.5 * kernel(*tensors)) if backend == "sdpa:cpu" else kernel  # type: ignore[operator]

    monkeypatch.setattr(selftest, "function", wrong)
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "attention (causal): auto chooses sdpa:cpu, which fails here" in out
    assert "FAIL: error" in out


def test_doctor_goes_on_when_a_backend_that_nobody_chooses_raises(capsys, monkeypatch):
    right = selftest.function

    def broken(one, shape, backend, here):
        if backend == "reference" and one.name == "conv1d" and shape.spec.dtype == "bfloat16":
            raise RuntimeError("no such luck")
        return right(one, shape, backend, here)

    monkeypatch.setattr(selftest, "function", broken)
    found = report.findings(platform.cpu(), "bfloat16", test=True)
    [(_, shape)] = operations.operation("conv1d").selftests("bfloat16")
    assert registry.resolve("conv1d", "auto", shape.spec, platform.cpu()).name == "aten"
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


TABLES = Path(tuning.__file__).with_name("tables")
NO_GPU = "bench tune times kernels on a GPU, and this machine has none; run it where the kernels will run"
ATTENTION = "--operation attention --shape"
SIZE = "a size is a whole number above 0, at most 4194304"


@pytest.mark.parametrize(
    "words, told",
    [
        ("tune --seq-len 0", f"--seq-len 0: {SIZE}"),
        ("tune --seq-len -5", f"--seq-len -5: {SIZE}"),
        ("tune --seq-len 99999999999999999999", f"--seq-len 99999999999999999999: {SIZE}"),
        ("tune --shape head_dim=99999999999999999999", f"--shape head_dim=99999999999999999999: {SIZE}"),
        ("tune --shape seq_len=0", f"--shape seq_len=0: {SIZE}"),
        ("tune --shape head_dim=-8", f"--shape head_dim=-8: {SIZE}"),
        ("tune --shape head_dim=²", f"--shape head_dim=²: {SIZE}"),
        ("tune --shape dtype=3", "--shape dtype=3: dtype is no size; give it by --dtype"),
        (
            "tune --shape heads=4 kv_heads=3",
            f"{ATTENTION} heads=4 kv_heads=3: heads must be a multiple of kv_heads, and 4 is no multiple of 3",
        ),
        (
            "tune --shape head_dim=264",
            f"{ATTENTION} head_dim=264: the Triton kernel takes a head_dim that is a multiple of 8 up to 256, not 264",
        ),
        (
            "tune --operation ssd --shape heads=80 groups=3",
            ": heads must be a multiple of groups, and 80 is no multiple of 3",
        ),
        ("tune --operation ssd --shape head_dim=256", ": our Triton scan takes a head_dim up to 128, not 256"),
        (
            "tune --operation rotary --shape head_dim=7",
            ": rotary positions turn channels in pairs: head_dim must be even, not 7",
        ),
        (
            "tune --operation rotary --shape head_dim=512",
            ": larger than what our kernels serve on sm90 in bfloat16: a search begins at a row of the tuning table, which has "
            "none as large; take smaller sizes",
        ),
        ("tune --operation norm --shape centred=2", ": centred is 1, or left out"),
        ("tune --operation norm --shape centred=1", NO_GPU),
        ("tune --operation gated_norm --shape group_size=4194304 groups=4194304 tokens=4194304", None),
        ("tune --shape heads=4194304 tokens=4194304 head_dim=256", NO_GPU),
        ("kernels --only softmax", "nothing to measure in 'softmax'; there is attention…"),
        ("kernels --match xyz", "no cell is left; there is:\n  attention head_dim 32 T=128…"),
        ("kernels --peer-path /nowhere", "--peer-path /nowhere is no folder…"),
        ("tune --operation softmax", "nothing to tune in 'softmax'; there is attention, rotary, norm, ssd…"),
        ("tune --shape head_dim", "--shape takes NAME=SIZE, such as head_dim=128, not 'head_dim'…"),
        (
            "tune --shape headdim=64",
            "attention has no 'headdim'; its cases have head_dim, seq_len, tokens, heads, kv_heads, doc…",
        ),
        ("tune --variant causal", "no attention variant 'causal'; there is plain, alibi…"),
        ("tune --kernels fwd", "no kernel 'fwd'; there is forward, dq, dkdv…"),
        ("tune --operation gated_norm --shape width=4", "gated_norm has no 'width'; its cases have group_size…"),
        ("tune --operation rotary --kernels forward", "no kernel 'forward'; there is every…"),
        ("tune --operation conv1d", NO_GPU),
        ("tune", NO_GPU),
        ("tune --top -1", "--top -1: expected at least 1"),
        ("tune --workers 0", "--workers 0: expected at least 1"),
        ("tune pretrain/mpt-1b --workers 0", "--workers 0: expected at least 1"),
        ("kernels --only norm --workers 0", "--workers 0: expected at least 1"),
        ("kernels --only norm --workers -3", "--workers -3: expected at least 1"),
        ("kernels --only norm --draws 0", "--draws 0: expected at least 1"),
        ("kernels --only norm --draws 99999999999999999999", "--draws 99999999999999999999: expected at most 10000"),
        ("kernels --only norm --workers 99999", "--workers 99999: expected at most 1024"),
        ("tune --workers 99999", "--workers 99999: expected at most 1024"),
        ("kernels --only norm --compile-seconds inf", "--compile-seconds inf: expected at most 1000000"),
        ("kernels --only norm --compile-seconds -1", "--compile-seconds -1.0: expected at least 0"),
        ("kernels --only norm --compile-seconds nan", "--compile-seconds nan: expected at least 0"),
    ],
)
def test_rejects_in_one_line_what_cannot_be_before_anything_is_compiled(capsys, monkeypatch, tmp_path, words, told):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "bench", *words.split())
    assert status == 2 and ((out == "" and err.count("\n") == 1) or "--match" in words)
    told = f"{words.removeprefix('tune ')}{told}" if told and told[0] == ":" else told  # begins with what was given
    assert told is None or err == f"{told}\n" or (told[-1] == "…" and told[:-1] in err)
    assert list(tmp_path.iterdir()) == []


def test_rejects_an_unknown_variant_and_names_those_that_help_lists(capsys):
    _, _, err = run(capsys, "bench", "tune", "--variant", "foo")
    told = err.strip().partition("; there is ")[2].split(", ")
    with pytest.raises(SystemExit):
        cli.main(["bench", "tune", "--help"])
    _, _, listed = " ".join(capsys.readouterr().out.split()).partition("attention: ")
    names = re.split(r", | or ", listed.partition(";")[0])
    assert told == [name.removesuffix(" (default)") for name in names]
    status, _, err = run(capsys, "bench", "tune", "--variant", "plain, full")
    assert status == 2
    assert (
        err
        == "--operation attention --variant 'plain, full': only causal attention is checked, so only that is tuned\n"
    )


@pytest.mark.parametrize("words", ["kernels --only norm", "train SWEEP"])
@pytest.mark.parametrize("place", ["file", "/proc/x"])
def test_rejects_a_folder_that_cannot_be_written_before_anything_runs(capsys, tmp_path, words, place):
    write_sweep(tmp_path, {"precisions": ["fp32"]})
    (tmp_path / "file").touch()
    out = str(tmp_path / place)
    words = words.replace("SWEEP", str(tmp_path / "sweep.yaml"))
    status, printed, err = run(capsys, "bench", *words.split(), "--out", out)
    assert status == 2 and printed == ""
    assert err.startswith(f"--out {out}: ") and err.endswith("; choose another\n") and err.count("\n") == 1


def test_rejects_a_place_for_rows_that_cannot_be_written_before_anything_runs(capsys, tmp_path):
    for out, told in (
        (tmp_path, f"{tmp_path} is a folder, where rows need a file; name one, such as --out {tmp_path}/tuning.yaml\n"),
        ("/proc/x.yaml", "no row can be written to /proc/x.yaml: /proc cannot be written to"),
        ("/dev/null", "cannot read the tuning table /dev/null: [Errno 22] not a regular file: '/dev/null'\n"),
    ):
        status, _, err = run(capsys, "bench", "tune", "--out", str(out))
        assert status == 2 and err.startswith(told)
    status, _, err = run(capsys, "bench", "tune", "--out", str(TABLES / "gfx942.yaml"))
    assert err == f"{NO_GPU}\n"


@pytest.mark.parametrize(
    "words, goes_on",
    [
        ("--out ./none.yaml", True),
        ("", True),
        ("--out other.yaml", False),
        ("--dry-run", False),
        ("--into-package", False),
    ],
)
def test_the_file_that_the_command_makes_may_be_named_before_it_exists(capsys, monkeypatch, tmp_path, words, goes_on):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMTRAIN_TUNING", str(tmp_path / "none.yaml"))
    tuning.forget()
    for operation in ("norm", "attention"):
        status, _, err = run(capsys, "bench", "tune", "--operation", operation, *words.split())
        missing = (
            f"LLMTRAIN_TUNING names {tmp_path}/none.yaml, which does not exist: unset it, or make the file by `llmtrain"
        )
        assert status == 2 and err.startswith(NO_GPU if goes_on else missing)
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_a_table_of_any_architecture_is_checked(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LLMTRAIN_TUNING", str(TABLES / "gfx942.yaml"))
    tuning.forget()
    for operation in ("norm", "attention", "ssd"):
        assert run(capsys, "bench", "tune", "--operation", operation) == (2, "", f"{NO_GPU}\n")
    wrong = tmp_path / "wrong.yaml"
    text = (TABLES / "gfx942.yaml").read_text(encoding="utf-8")
    wrong.write_text(text.replace("num_warps: 4", "num_warps: 3", 1), encoding="utf-8")
    monkeypatch.setenv("LLMTRAIN_TUNING", str(wrong))
    status, _, err = run(capsys, "bench", "tune")
    assert status == 2 and err.startswith(f"{wrong}: row ")
    assert err.endswith("num_warps must be a power of two from 1 to 32, not 3\n") and err.count("\n") == 1
