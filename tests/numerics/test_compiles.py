"""Every row of the tuning tables, and every kernel of cached decoding, compiles for its architecture: no spills, within its
memory, with matrix units or, where it is bound by memory, with 16 bytes a thread.

The default run holds tests/data/compiled.json to the limits. `pytest -m compile` compiles all whose hash is another than in that
file, and one row of each kernel for a GPU of each vendor, which must take what the file says; `pytest -m "compile and slow"`
every case of every row.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from llmtrain.bench.tune.compiling import Compilers, Task
from llmtrain.kernels import tuning
from llmtrain.kernels.platform import shared_limit
from tests.support import offline

SHARES = 8
"""Tests of all cases of an architecture: enough that two processes end at about the same time."""


@pytest.fixture(scope="module")
def checks() -> list[offline.Check]:
    return offline.checks()


@pytest.fixture(scope="module")
def compilers() -> Iterator[Compilers]:
    """One process for each architecture, for all tests: starting it takes seconds, and it remembers what it has compiled."""
    with Compilers(1, offline.TIMEOUT_S) as made:
        yield made


def test_the_reviewed_table_holds_every_row_and_each_fits(checks):
    known = offline.reviewed()
    missing = [check.key for check in checks if check.key not in known]
    assert not missing, (
        f"{len(missing)} rows are not in {offline.REVIEWED}; run python -m tests.support.offline --update"
    )
    assert not known.keys() - {check.key for check in checks}
    assert not [line for check in checks for line in offline.faults(check, known[check.key])]


def assert_all_compile(wanted: list[offline.Check], compilers: Compilers) -> None:
    """And take what the reviewed table says, but for what has changed since."""
    found, known, changed = list(offline.compile_all(wanted, compilers)), offline.reviewed(), offline.stale(wanted)
    wrong = [line for check, entry in found for line in offline.faults(check, entry)]
    assert not wrong, "\n".join(wrong)
    assert [check.key for check, entry in found if check not in changed and entry != known[check.key]] == []


def cases_of_rows(arch: str, share: int) -> list[list[offline.Check]]:
    """The cases of each row of one share: they have kernels in common."""
    by_row = itertools.groupby(offline.checks([arch]), key=lambda check: check.key.split(" | ")[:2])
    return [list(cases) for number, (_, cases) in enumerate(by_row) if number % SHARES == share]


@pytest.mark.compile
@pytest.mark.parametrize("vendor", tuning.TABLES)
def test_all_that_has_changed_and_a_row_of_each_kernel_compile(vendor, compilers):
    """What has another hash than at the review, and of each kernel, also of decoding, the first row at its own shape for one
    architecture, a kernel's each in turn."""
    checks = offline.checks(tuning.TABLES[vendor])
    changed = {check.key for check in offline.stale(checks)}
    firsts: dict[str, dict[str, str]] = {}
    for check in checks:
        by_arch = firsts.setdefault(check.row.kernel if check.row else check.operation, {})
        by_arch.setdefault(check.task.arch, check.key)
    taken = {[*keys.values()][turn % len(keys)] for turn, keys in enumerate(firsts.values())}
    assert_all_compile([check for check in checks if check.key in changed | taken], compilers)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("arch", offline.ARCHES)
def test_every_case_of_every_row_compiles(arch, share, compilers):
    assert_all_compile([check for cases in cases_of_rows(arch, share) for check in cases], compilers)


FURTHER: dict[str, dict[str, Any]] = {
    "sinks of gpt-oss": {"n_heads": 64, "n_kv_heads": 8, "head_dim": 64, "sinks": True},
    "sinks behind a window": {"n_heads": 64, "n_kv_heads": 8, "head_dim": 64, "sliding_window": 128, "sinks": True},
    "latent attention": {"n_heads": 16, "n_kv_heads": 16, "head_dim": 192, "value_dim": 128},
}
"""Attention by rows for other shapes: sinks change nothing in a loop, and values that are less wide than keys take less."""


@pytest.mark.compile
@pytest.mark.parametrize(
    "arch", ["sm90", "gfx942", *(pytest.param(a, marks=pytest.mark.slow) for a in ("gfx90a", "gfx950"))]
)
@pytest.mark.parametrize("name", FURTHER)
def test_sinks_and_values_of_another_width_compile_by_the_rows_of_others(arch, name, compilers):
    spec = {"scale": 0.1, "dtype": "bfloat16", **FURTHER[name]}
    variant = "window" if "sliding_window" in spec else "plain"
    case = {"spec": spec, "batch": 1, "seq_len": 4096, "variant": variant, "options": []}
    tasks = [Task("attention", case, part, None, arch) for part in ("forward", "dq", "dkdv")]
    for at, compiled in compilers.results(tasks):
        assert compiled.failed is None, (tasks[at].part, compiled.failed)
        spilled = max(kernel["spilled"] for kernel in compiled.kernels)
        limit = shared_limit(arch)
        assert limit is not None and compiled.shared <= limit and spilled <= offline.MEASURED_SPILL, compiled.kernels


def test_rows_say_that_they_have_not_run():
    for arch in (*tuning.TABLES["amd"], "sm100"):
        assert all(row.provenance == "compiled only" for row in tuning.read_shipped(arch).rows)


def test_the_reviewed_table_holds_every_kernel_that_is_bound_by_memory(checks):
    """On every architecture: a case that launched nothing would otherwise pass unseen."""
    known = offline.reviewed()
    for arch in offline.ARCHES:
        found = {(c.operation, k) for c in checks if c.task.arch == arch for k in known[c.key]["kernels"]}
        assert {pair for pair in found if pair[0] in offline.MEMORY_BOUND} == {
            *(("conv1d", "_forward"), ("conv1d", "_backward"), ("conv1d", "_reduce_partials")),
            *(("gated_norm", "_forward"), ("gated_norm", "_backward"), ("gated_norm", "_reduce_partials")),
            *(("norm", "_forward"), ("norm", "_backward"), ("norm", "_reduce_partials")),
            *(
                ("rotary", "_rotate"),
                ("ssd_step", "_step"),
                ("conv1d_step", "_step"),
                ("conv1d_prefix_tree", "_convolve"),
            ),
            *(("attention_step", name) for name in ("_one_head", "_grouped", "_merge")),
        }


def test_a_row_that_spills_or_does_not_fit_is_a_fault(checks):
    """The check itself."""
    check = checks[0]
    assert check.operation == "attention"
    good = {"registers": 1, "shared": 0, "spilled": 0, "occupancy": 1}

    def said(check=check, kernel="k", matrix=1, **change: int) -> list[str]:
        how = {"wide": change.pop("wide")} if "wide" in change else {"matrix": matrix}
        return offline.faults(check, {"failed": None, "kernels": {kernel: {**good, **how, **change}}})

    assert said() == []
    assert "spills 8" in said(spilled=8)[0]
    assert "eight columns at a time" in said(narrow=1)[0]
    assert said(tensor_memory=512) == []
    assert "takes 1024 columns of tensor memory, of 512" in said(tensor_memory=1024)[0]
    conv, measured = (
        next(c for c in checks if c.key == f"{arch} | conv1d.forward bfloat16 width=4 | plain")
        for arch in ("sm80", "sm90")
    )
    decoding = next(c for c in checks if c.key == "sm90 | ssd_step | 64 x 64")
    assert said(conv, wide=1) == said(decoding, wide=0) == []
    assert "no 16 bytes at a time" in said(conv, "_forward", wide=0)[0]
    assert said(measured, "_forward", wide=0) == []
    assert "spills 8" in said(decoding, spilled=8)[0]
    single = next(c for c in checks if c.key == "sm90 | conv1d.forward float32 width=4 | plain")
    assert "spills 8" in said(single, wide=1, spilled=8)[0]
    assert "no matrix instructions" in said(matrix=0)[0]
    assert "the row says" in said(shared=check.row.shared + 1)[0]
    assert "of shared memory, of" in said(shared=1 << 20)[0]
    assert offline.faults(check, {"failed": "E", "kernels": {}}) == [f"{check.key}: E"]
