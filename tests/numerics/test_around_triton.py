"""The Triton kernels around the scan: through Triton's interpreter on a CPU, and compiled for GPUs that are not here.

Each in a process of its own: Triton reads TRITON_INTERPRET when it is imported. The cases are in interpreted_conv1d.py,
interpreted_gated_norm.py, interpreted_mixer.py and interpreted_rotary.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.kernels import registry
from llmtrain.kernels.conv1d import triton_launch as conv1d
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm import triton_launch as gated_norm
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform, shared_limit
from tests.support.interpreter import run_interpreted

HERE = Path(__file__)
ARCHES = ("sm80", "sm90", "gfx90a", "gfx942")
NO_BUFFER_OPS = {"AMDGCN_USE_BUFFER_OPS": "0"}
TARGETS = {arch: (arch, {}) for arch in ARCHES} | {f"{a}, no buffer ops": (a, NO_BUFFER_OPS) for a in ARCHES[2:]}


def conv(label: str, channels: int, width: int, packed: bool = False, dtype: str = "bfloat16") -> dict:
    spec = {"channels": channels, "width": width, "dtype": dtype}
    return {"label": label, "operation": "conv1d", "spec": spec, "packed": packed}


def norm(label: str, dim: int, n_groups: int = 1, first: bool = False, dtype: str = "bfloat16") -> dict:
    spec = {"dim": dim, "n_groups": n_groups, "eps": 1e-5, "norm_before_gate": first, "dtype": dtype}
    return {"label": label, "operation": "gated_norm", "spec": spec}


def rotation(label: str, head_dim: int, dtype: str = "bfloat16") -> dict:
    return {"label": label, "operation": "rotary", "spec": {"head_dim": head_dim, "dtype": dtype}}


# Of every row of the tables, the widest group that it takes.
SAMPLE = [conv("conv", 5376, 4), conv("conv, packed", 5376, 4, True), norm("6144", 6144), norm("8192", 8192)]
SAMPLE.append(rotation("rotary", 128))
ALL = [
    *SAMPLE,
    conv("conv, fp32", 5376, 4, dtype="float32"),
    conv("conv, 3 wide, odd", 4355, 3, True),
    conv("conv, 2 wide, few channels", 24, 2),
    norm("5120, norm first", 5120, first=True),
    norm("8192, norm first", 8192, first=True),
    norm("7168 in 2", 7168, 2),
    norm("8192 in 64", 8192, 64),
    norm("odd", 1001),
    norm("6144, fp32", 6144, dtype="float32"),
    norm("8192, fp32", 8192, first=True, dtype="float32"),
    *(rotation(f"rotary {head_dim}", head_dim) for head_dim in (32, 64, 80, 160, 256)),
    rotation("rotary, fp32", 128, "float32"),
]


@pytest.mark.parametrize("operation", ["conv1d", "gated_norm", "mixer", "rotary"])
def test_the_interpreted_kernels_agree_with_the_reference(operation):
    run_interpreted(operation)


@pytest.mark.parametrize("name", ["sm90", *(pytest.param(a, marks=pytest.mark.compile) for a in ARCHES if a != "sm90")])
def test_a_sample_fits(name, tmp_path):
    assert_fits(name, SAMPLE, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_every_kernel_fits(name, tmp_path):
    assert_fits(name, ALL, tmp_path)


def assert_fits(name: str, cases: list[dict], cache: Path) -> None:
    """No spills, no scratch, shared memory within its limit, and on NVIDIA 16 bytes at a time through the convolution."""
    arch, environment = TARGETS[name]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.offline_around", arch],
        input=json.dumps(cases),
        cwd=HERE.parents[2],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **environment},
        timeout=900,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == sum(2 if case["operation"] == "rotary" else 3 for case in cases)
    limit = shared_limit(arch)
    assert limit is not None
    bad = [k for k in kernels if k["spilled"] or k["shared"] > limit]
    wide = [k["wide"] for k in kernels if (k["case"], k["kernel"]) in (("conv", "_forward"), ("rotary", "_rotate"))]
    assert len(wide) == 3
    assert all(wide) or arch.startswith("gfx")
    assert not bad, "\n".join(map(json.dumps, bad))


@pytest.mark.parametrize(
    "vendor, arch, same_as",
    [("nvidia", "sm86", "sm80"), ("nvidia", "sm90", "sm90"), ("amd", "gfx950", "gfx942"), ("amd", "gfx90a", "gfx90a")],
)
def test_an_architecture_without_a_row_takes_the_nearest(vendor, arch, same_as):
    here = Platform(vendor, arch, "", 1 << 36)
    assert conv1d.default_launch(Conv1dSpec(5376, 4), here) == conv1d.LAUNCHES[same_as]
    wide = GatedNormSpec(8192, 1, 1e-5)
    assert gated_norm.default_launch(wide, here) == gated_norm.LAUNCHES[same_as][-1][1]


def test_launches_survive_their_dump():
    for launch in conv1d.LAUNCHES.values():
        assert conv1d.parsed(launch.dump()) == launch
    for rows in gated_norm.LAUNCHES.values():
        assert all(gated_norm.parsed(launch.dump()) == launch for _, launch in rows)


def test_small_problems_get_short_runs_and_narrow_tiles():
    walk = conv1d.Walk(256, 4, 64, 4, 4)
    assert conv1d.fitted(walk, 500, 8, 2048, 5376) == walk  # 8 * 8 * 21 programs
    assert conv1d.fitted(walk, 500, 1, 2048, 5376).run == 16
    assert conv1d.fitted(walk, 0, 1, 1, 40) == conv1d.Walk(64, 4, 4, 4, 4)
    tile = gated_norm.Tile(1024, 4, 32)
    assert gated_norm.fitted(tile, 500, 16384, 1) == tile
    assert gated_norm.fitted(tile, 500, 2048, 2).run == 8
    assert gated_norm.fitted(tile, 500, 1, 1).run == 1
    launch = gated_norm.default_launch(GatedNormSpec(8192, 64, 1e-5), Platform("nvidia", "sm90", "", 1 << 36))
    assert (launch.forward.columns, launch.forward.rows) == (128, 8)


def test_a_refusal_names_the_sizes_it_takes():
    reason = registry.refusal("conv1d", "triton", Conv1dSpec(64, 5), None)
    assert reason is not None
    assert "width up to 4, not 5" in reason
    reason = registry.refusal("gated_norm", "triton", GatedNormSpec(16384, 1, 1e-5), None)
    assert reason is not None
    assert "groups of up to 8192 channels, not 16384" in reason
    assert registry.refusal("gated_norm", "triton", GatedNormSpec(16384, 2, 1e-5), None) is None
