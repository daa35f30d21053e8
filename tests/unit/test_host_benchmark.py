"""The host's time per operation, of launches that a stand-in for Triton's driver takes."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.processes import output_of


@pytest.mark.ci
def test_without_a_gpu_it_counts_the_launches_of_a_forward_and_backward(tmp_path: Path):
    options = ("--only", "norm", "rotary", "attention 8 on 2", "--calls", "50", "--out", str(tmp_path / "host.json"))
    output_of(sys.executable, "-m", "benchmarks", "host", *options)
    rows = {row["what"]: row for row in json.loads((tmp_path / "host.json").read_text())["rows"]}
    counts = {what: row["launches_count"] for what, row in rows.items()}
    # With the sums over programs: of the norm's gradients, and of those of keys that heads share.
    assert counts == {"attention 8 on 2 x 128": 4, "rotary": 2, "norm": 3}
    assert all(0 < row["forward_us"] < row["host_us"] for row in rows.values())
