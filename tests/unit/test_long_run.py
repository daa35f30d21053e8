"""benchmarks long_run: roles of processes, the summary and the picture of a long run."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks.programs.training import long_run

TOKENS = 1000


def steps(count: int) -> list[dict]:
    """The second half of the steps take a second each, the first half of them half a second."""
    return [
        {"step": i + 2, long_run.STEP: 0.5 if i < count // 2 else 1.0, "memory/allocated_gib": 3.0 + i}
        for i in range(count)
    ]


def look(seconds: float, step: int) -> dict:
    gpu = dict.fromkeys(long_run.GPU, 50.0) | {"index": 0.0, "memory.used": float(step)}
    return {"seconds": seconds, "step": step, "gpus": [gpu], "rss_mib": {"compiler": 50.0, "rank 0": 900.0 + step}}


def test_processes_have_roles():
    found = {
        10: (1, 50.0, "python -m llmtrain.cli train"),
        11: (10, 900.0, "python -m llmtrain.cli train"),
        12: (10, 901.0, "python -m llmtrain.cli train"),
        13: (12, 300.0, "python -m llmtrain.cli train"),
        14: (11, 200.0, "python .../compile_worker/__main__.py"),
        15: (14, 201.0, "python .../compile_worker/__main__.py"),
    }
    assert long_run.by_role(10, found) == {
        "compiler": 401.0,
        "launcher": 50.0,
        "of rank 1": 300.0,
        "rank 0": 900.0,
        "rank 1": 901.0,
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_session_s_processes_and_their_memory():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        while (
            "60" not in (found := next(iter(long_run.processes_of(process.pid).values()), (0, 0, "")))[2]
            or not found[1]
        ):
            time.sleep(0.01)  # it has begun, and is not `sleep` yet
        [(pid, (_, mib, command))] = long_run.processes_of(process.pid).items()
        assert pid == process.pid and 0 < mib < 100 and "60" in command
    finally:
        process.kill()
        process.wait()


def test_the_summary_compares_quarters_and_reports_memory_at_its_times():
    looks = [look(5.0, 0), *(look(20.0 + 15 * i, 2 + 20 * i) for i in range(12))]
    found = long_run.summary(steps(240), looks, TOKENS)
    assert found["quarters"] == [2000, 1500, 1000, 1000] and found["last_over_first_quarter"] == 0.5
    assert found["memory"] == {
        "minute 2": {"allocated_gib": 163.0, "gpu_used_mib": [162.0], "rss_mib": {"rank 0": 1062.0}},
        "end": {"allocated_gib": 223.0, "gpu_used_mib": [222.0], "rss_mib": {"rank 0": 1122.0}},
    }


@pytest.mark.parametrize("looks", [[], [look(5.0, 0), look(20.0, 2), look(35.0, 8)]])
def test_the_report_is_made_of_what_was_logged(tmp_path, looks):
    (tmp_path / "run").mkdir()
    for name, rows in (("run/metrics.jsonl", steps(20)), ("looks.jsonl", looks)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    long_run.report(tmp_path, TOKENS)
    assert json.loads((tmp_path / "long-run.json").read_text())["steps"] == 20
    assert (tmp_path / "long-run.png").read_bytes().startswith(b"\x89PNG")
