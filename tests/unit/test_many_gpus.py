"""benchmarks many_gpus: programs are run once, cut off in time, and their figures become rows."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.harness import turns
from benchmarks.harness.turns import Program, groups, placed, run
from benchmarks.programs.training.many_gpus import PARTS, Host, estimated, programs_of, report
from llmtrain.bench.train.cases import cases
from llmtrain.bench.train.sweep import load_sweep


def result(model: str, gpus: int, precision: str = "bf16", rate: float = 10_000.0, mfu: float = 0.6) -> dict:
    settings = ["train.global_batch_size=64", "train.microbatch_size=1", "train.precision=amp_bf16"]
    return {
        "name": f"{model}-{gpus}-{precision}",
        "model": model,
        "gpus": gpus,
        "precision": precision,
        "gpu": "NVIDIA H200",
        "tokens_per_second_per_gpu": rate,
        "mfu": mfu,
        "peak_gib": 50.0,
        "microbatch_size": 1,
        "sharding": "grad_op",
        "date": "2026-11-25",
        "key": {"settings": settings},
    }


def kept(folder, *results: dict) -> None:
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in results))


@pytest.mark.parametrize("part", [part for part in PARTS if part not in ("context", "moving")])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_part_s_sweeps_are_what_bench_train_takes(tmp_path, part, gpus):
    for program in programs_of(Host(tmp_path, gpus), [part]):
        [case] = cases(load_sweep(tmp_path / program.name / "sweep.yaml"), tmp_path / program.name)
        assert case.gpus == program.gpus <= gpus


def test_the_parts_measure_on_all_gpus(tmp_path):
    host = Host(tmp_path, 8, torchtitan="python")
    commands = [" ".join(program.command) for program in programs_of(host, list(PARTS))]
    assert sum("llama3_torchtitan.py" in command for command in commands) == 2
    assert sum("train.parallel.context=8" in command for command in commands) == 2  # of the bars' lengths
    assert any("--legs 8a,4b,2a,1b" in command for command in commands)


def test_llama_and_torchtitan_have_the_same_batch_and_number_of_steps(tmp_path):
    host = Host(tmp_path, 2, torchtitan="python", timed=20, llama_microbatches=4)
    ours, theirs = programs_of(host, ["llama-float8"])
    [case] = cases(load_sweep(tmp_path / ours.name / "sweep.yaml"), tmp_path / ours.name)
    assert (case.config.train.global_batch_size, case.precision) == (8, "tensorwise")
    assert load_sweep(tmp_path / ours.name / "sweep.yaml").steps == 20
    assert {"--global-batch=8", "--steps=20", "--float8"} <= set(theirs.command)


def test_two_gpus_are_all_of_two(tmp_path):
    names = [program.name for program in programs_of(Host(tmp_path, 2), list(PARTS))]
    assert len(names) == len(set(names))


def test_shared_sequences_have_the_bar_s_length_and_its_tokens_for_each_gpu(tmp_path):
    names = [program.name for program in programs_of(Host(tmp_path, 4), ["context"])]
    assert names == [
        f"context-{name}"
        for name in ("llama3-8b-131072", "zamba2-2.7b-131072", "zamba2-2.7b-262144", "llama3-8b-65536")
    ]


def test_programs_of_few_gpus_run_beside_each_other(monkeypatch):
    two, one, other, four, report = (
        Program("two", [], 2),
        Program("one", [], 1),
        Program("other", [], 1),
        Program("four", [], 4),
        Program("report", [], last=True),
    )
    beside = Program("beside", [], 0)
    found = groups([four, two, one, other, report, four, beside], 4)
    assert found == [[four], [two, one, other], [four, beside], [report]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [gpus for _, gpus in placed(found[1], 4)] == ["4,5", "6", "7"]
    assert [gpus for _, gpus in placed(found[2], 4)] == [None, None]
    assert [gpus for _, gpus in placed([four, one, two, four], 4)] == [None, "7", "6,7", None]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [gpus for _, gpus in placed(found[1], 4)] == ["0,1", "2", "3"]


def program(folder: Path, code: str, **named) -> Program:
    name = named.pop("name", "one")
    script = folder / f"{name}.py"
    script.write_text("import os, pathlib, subprocess, sys\nhere = pathlib.Path(__file__).parent\n" + code)
    return Program(name, [sys.executable, str(script)], **named)


def ended(programs, folder: Path, seconds: float = 600.0) -> list[str]:
    return run(programs, folder, 4, time.monotonic() + seconds, lambda: None)


def test_a_program_is_run_until_it_has_its_result_and_not_again(tmp_path):
    """It fails the first time."""
    one = program(
        tmp_path, "(here / f'run-{len(list(here.glob(\"run-*\")))}').touch(); sys.exit(not (here / 'run-1').exists())"
    )
    assert [ended([[one]], tmp_path) for _ in range(3)] == [["one"], [], []]
    assert len(list(tmp_path.glob("run-*"))) == 2


@pytest.mark.parametrize(("seconds", "whole"), [(600, 1e6), (1e6, 600)])
def test_a_program_is_cut_off_when_its_time_or_all_is_over_with_all_that_it_has_started(
    tmp_path, monkeypatch, seconds, whole
):
    """By a clock that goes on by 1,000 s once the program has started another."""
    pid = tmp_path / "pid"
    passed = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * pid.exists(), sleep=time.sleep)
    monkeypatch.setattr(turns, "time", passed)
    code = "child = subprocess.Popen(['sleep', '100']); (here / 'new').write_text(str(child.pid))\n"
    code += "(here / 'new').rename(here / 'pid'); child.wait()"
    assert ended([[program(tmp_path, code, seconds=seconds)]], tmp_path, whole) == ["one"]
    child = Path("/proc", pid.read_text(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_program_is_not_begun_where_too_little_time_is_left(tmp_path):
    assert ended([[program(tmp_path, "(here / 'run').touch()")]], tmp_path, 5) == ["one"]
    assert not (tmp_path / "run").exists()


def test_a_rank_imports_while_the_turn_before_lasts_and_waits_for_its_own(tmp_path):
    """The first program ends once the second one's rank has begun to wait, which is in its last import."""
    (tmp_path / "imported.py").write_text("import pathlib; (pathlib.Path(__file__).parent / 'waits').touch()")
    wait = "import time\nfor _ in range(3000):\n    (here / 'waits').exists() or time.sleep(0.1)\n"
    first = program(tmp_path, wait + "(here / 'first').touch(); sys.exit(not (here / 'waits').exists())", name="first")
    rank = f"env = os.environ | {{'RANK': '0', 'PYTHONPATH': os.environ['PYTHONPATH'] + ':{tmp_path}'}}\n"
    code = "import pathlib, sys; sys.exit(not (pathlib.Path(sys.argv[1]) / 'first').exists())"
    start = f"sys.exit(subprocess.run([sys.executable, '-c', {code!r}, str(here)], env=env).returncode)"
    second = program(tmp_path, rank + start, name="second", imports="imported")
    assert ended([[first], [second]], tmp_path) == []


def test_results_become_rows(tmp_path):
    kept(tmp_path / "mpt-7b", result("mpt-7b", 8, mfu=0.61), {"name": "mpt-1b", "key": {}, "error": "out of memory"})
    kept(tmp_path / "llama3-8b", result("llama3-8b", 8, rate=10_500))
    peer = {"tokens_per_second_per_gpu": 10_000, "peak_gib": 90.0}
    (tmp_path / "torchtitan-bf16.json").write_text(json.dumps(peer))
    shared = {"what": "8 tokens", "tokens_per_s": 5e3, "mfu_causal_percent": 40.0}
    (tmp_path / "context-llama3-8b-8.json").write_text(json.dumps({"rows": [shared]}))
    rows = {row.pop("what"): row for row in report(tmp_path)}
    assert list(rows) == ["llama3-8b, 8 GPUs, bf16", "mpt-7b, 8 GPUs, bf16", "context-llama3-8b-8: 8 tokens"]
    assert rows["llama3-8b, 8 GPUs, bf16"]["torchtitan_x"] == 1.05
    trained = rows["mpt-7b, 8 GPUs, bf16"]
    assert (trained["tokens_per_s"], trained["mfu_percent"], trained["peak_gib"]) == (10_000, 61, 50)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][1]["what"] == "mpt-7b, 8 GPUs, bf16"


def test_memory_is_estimated_beside_the_peak():
    estimate = estimated(result("mpt-1b", 8))
    assert estimate and 4 < estimate < 40  # 1.3e9 parameters, of which 8 GPUs hold an eighth, and those gathered
    assert estimated(result("mpt-1b", 8) | {"gpu": "an unknown one"}) is None
