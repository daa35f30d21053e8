"""benchmarks long_run: roles of processes, the summary and the picture of a long run."""

import csv
import json
import subprocess
import sys
import time

import pytest

from benchmarks.programs.training import long_run

TOKENS = 1000


def steps(count: int) -> list[dict]:
    """A step a second, and the second half of the run at half of the first one's speed."""
    slow = count // 2
    return [
        {
            "seconds": 50.0 + i,
            "step": i + 2,
            "step_seconds": 0.5 if i < slow else 1.0,
            "allocated_gib": 3.0 + i,
            "loss": 2.0,
        }
        for i in range(count)
    ]


def test_processes_have_roles():
    found = {
        10: (1, 50.0, "python -m llmtrain.cli train"),
        11: (10, 900.0, "python -m llmtrain.cli train"),
        12: (10, 901.0, "python -m llmtrain.cli train"),
        13: (12, 300.0, "python -m llmtrain.cli train"),
        14: (11, 200.0, "python .../compile_worker/__main__.py"),
        15: (14, 200.0, "python .../compile_worker/__main__.py"),
    }
    named = {pid: what for what, pid, _ in long_run.roles(10, found)}
    assert named == {10: "launcher", 11: "rank 0", 12: "rank 1", 13: "of rank 1", 14: "compiler", 15: "compiler"}


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
    gpus = [
        {"seconds": 50.0 + 15 * i, "index": 0.0, "memory.used": 100.0 + i, "utilization.gpu": 99.0} for i in range(20)
    ]
    processes = [{"seconds": 50.0 + 15 * i, "what": "rank 0", "pid": 11.0, "rss_mib": 900.0} for i in range(20)]
    found = long_run.summary(steps(240), gpus, processes, TOKENS)
    assert found["quarters"] == [2000, 2000, 1000, 1000] and found["last_over_first_quarter"] == 0.5
    assert set(found["memory"]) == {"minute 2", "end"}
    assert found["memory"]["minute 2"] == {
        "allocated_gib": 123.0,
        "gpu_used_mib": [108.0],
        "rss_mib": {"rank 0": 900.0},
    }


def test_the_report_is_made_of_the_sheets_alone(tmp_path):
    with long_run.Sheets(tmp_path) as sheets:
        for row in steps(20):
            sheets.steps.writerow(
                [row["seconds"], row["step"], row["step_seconds"], "", 3.0, 3.5, 3.2, "", "", "", 2.0]
            )
        sheets.gpus.writerow([50.0, 0, 4000, "[N/A]", 1980, 700.1, 50])
        sheets.gpus.writerow([60.0, 0, 4000, 99, 1980, 700.1, 50])
        sheets.processes.writerow([50.0, "rank 0", 11, 900])
    (tmp_path / "what.json").write_text(json.dumps({"tokens_per_step": TOKENS, "settings": []}))
    with (tmp_path / "gpus.csv").open(newline="") as file:
        assert next(csv.reader(file))[:2] == ["seconds", "index"]
    assert long_run.report(tmp_path) == 0
    assert json.loads((tmp_path / "long-run.json").read_text())["steps"] == 20
    assert (tmp_path / "long-run.png").read_bytes().startswith(b"\x89PNG")
