"""The Triton kernels of cached decoding compile for GPUs that are not here, within their limits and without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = {"90": 232448, "gfx90a": 65536, "gfx942": 65536}


def attention(head_dim: int, group: int = 1, **more) -> dict:
    return {"n_heads": 8 * group, "n_kv_heads": 8, "head_dim": head_dim, "scale": 0.1, **more}


def ssd(head_dim: int, d_state: int) -> dict:
    return {"n_heads": 64, "head_dim": head_dim, "d_state": d_state, "n_groups": 1, "chunk_size": 256}


MORE = {"alibi_max_bias": 8.0, "sliding_window": 512, "softcap": 30.0}
# label, operation, spec, batch, capacity. Batch 600 needs no splits, batch 1 the most.
CASES = [
    ["64", "attention_step", attention(64), 64, 1920],
    ["128", "attention_step", attention(128), 64, 1920],
    ["128, no splits", "attention_step", attention(128), 600, 1920],
    ["160", "attention_step", attention(160), 1, 1920],
    ["224, fp32", "attention_step", attention(224, dtype="float32"), 1, 1920],
    ["everything, 256", "attention_step", attention(256, **MORE), 1, 1920],
    ["gqa, 64", "attention_step", attention(64, 4), 64, 16384],
    ["gqa, 128", "attention_step", attention(128, 4), 64, 16384],
    ["gqa, 160", "attention_step", attention(160, 4), 1, 1920],
    ["gqa, 256, fp32", "attention_step", attention(256, 4, dtype="float32"), 1, 1920],
    ["everything, 5 heads to one, 224", "attention_step", attention(224, 5, **MORE), 1, 1920],
    ["everything, 40 heads to one, 256", "attention_step", attention(256, 40, **MORE), 1, 1920],
    ["64 x 128", "ssd_step", ssd(64, 128), 64, 0],
    ["64 x 64", "ssd_step", ssd(64, 64), 1, 0],
    ["conv", "conv1d_step", {"channels": 4352, "width": 4}, 64, 0],
]


@pytest.mark.parametrize(
    "target, environment",
    [
        (("cuda", "90", "32"), {}),
        (("hip", "gfx90a", "64"), {}),
        (("hip", "gfx942", "64"), {}),
        (("hip", "gfx942", "64"), {"AMDGCN_USE_BUFFER_OPS": "0"}),
    ],
    ids=["sm90", "gfx90a", "gfx942", "gfx942, no buffer ops"],
)
def test_every_kernel_fits(target, environment, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.offline", *target],
        input=json.dumps(CASES),
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", **environment},
        timeout=180,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {k["case"] for k in kernels} == {case[0] for case in CASES}
    assert {k["kernel"] for k in kernels} == {"_one_head", "_grouped", "_merge", "_step"}
    assert not [k for k in kernels if k["spilled"] or k["shared"] > SHARED_LIMIT[target[1]]]
