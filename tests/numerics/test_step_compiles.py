"""The Triton kernels of cached decoding compile for GPUs that are not here, within their limits and without spills."""

import pytest

from llmtrain.bench.tune.compiling import Compilers, Task
from llmtrain.kernels.platform import shared_limit


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


TARGETS: list[tuple[str, dict[str, str]]] = [
    ("sm90", {}),
    ("gfx90a", {}),
    ("gfx942", {}),
    ("gfx942", {"AMDGCN_USE_BUFFER_OPS": "0"}),
]


@pytest.mark.compile
@pytest.mark.parametrize("arch, environment", TARGETS, ids=["sm90", "gfx90a", "gfx942", "gfx942, no buffer ops"])
def test_every_kernel_fits(arch, environment, tmp_path):
    environment = {**environment, "TRITON_CACHE_DIR": str(tmp_path)}
    names = ("operation", "fields", "batch", "capacity")
    tasks = [
        Task("tests.support.offline_steps", dict(zip(names, case[1:], strict=True)), "step", None, arch, environment)
        for case in CASES
    ]
    with Compilers(1) as compilers:
        found = dict(compilers.results(tasks))
    assert len(found) == len(CASES)
    assert {kernel["kernel"] for one in found.values() for kernel in one.kernels} == {
        *("_one_head", "_grouped", "_merge", "_step"),
    }
    problems = {CASES[i][0]: one.problem(shared_limit(arch)) for i, one in found.items()}
    assert not [f"{label}: {problem}" for label, problem in problems.items() if problem]
