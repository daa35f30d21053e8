"""The Triton attention kernels compile for GPUs that are not here: no spills, within their memory, with matrix units."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = {"80": 166912, "90": 232448, "gfx90a": 65536, "gfx942": 65536}
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
MORE = {"n_heads": 8, "n_kv_heads": 2, "alibi_max_bias": 8.0, "sliding_window": 512, "softcap": 30.0, "packed": True}
ALL = [
    *({"label": str(d), "head_dim": d} for d in HEAD_DIMS),
    *({"label": f"{d}, everything", "head_dim": d, **MORE} for d in (64, 128, 160, 256)),
    *({"label": f"{d}, everything, full", "head_dim": d, "causal": False, **MORE} for d in (64, 128)),
    {"label": "128, full, ragged", "head_dim": 128, "causal": False, "seq_len": 4097},
    {"label": "128, window", "head_dim": 128, "sliding_window": 1024},
    {"label": "64, packed", "head_dim": 64, "packed": True},
    {"label": "64, alibi", "head_dim": 64, "alibi_max_bias": 8.0},
    *({"label": f"{d}, fp32", "head_dim": d, "dtype": "float32"} for d in (64, 128, 160, 256)),
]
SAMPLE = {
    "sm80": ["128", "160"],
    "sm90": ["64", "128", "160", "128, everything"],
    "gfx90a": ["128"],
    "gfx942": ["64", "160"],
}
TARGETS = {
    "sm80": (("cuda", "80", "32"), {}),
    "sm90": (("cuda", "90", "32"), {}),
    "gfx90a": (("hip", "gfx90a", "64"), {}),
    "gfx942": (("hip", "gfx942", "64"), {}),
    "gfx942, no buffer ops": (("hip", "gfx942", "64"), {"AMDGCN_USE_BUFFER_OPS": "0"}),
    "gfx90a, no buffer ops": (("hip", "gfx90a", "64"), {"AMDGCN_USE_BUFFER_OPS": "0"}),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_fits(name, tmp_path):
    assert_fits(name, [case for case in ALL if case["label"] in SAMPLE[name]], tmp_path, 600)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_every_kernel_fits(name, tmp_path):
    assert_fits(name, ALL, tmp_path, 2400)


def assert_fits(name: str, cases: list[dict], cache: Path, seconds: int) -> None:
    target, environment = TARGETS[name]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.offline_attention", *target],
        input=json.dumps(cases),
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **environment},
        timeout=seconds,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 3 * len(cases)
    limit = SHARED_LIMIT[target[1]]
    bad = [k for k in kernels if "failed" in k or k["spilled"] or k["shared"] > limit or not k["matrix"]]
    assert not bad, "\n".join(map(json.dumps, bad))
