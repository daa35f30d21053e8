"""The searcher of `bench tune` and the judgements of `bench kernels`, without a GPU."""

import argparse
import contextlib
import multiprocessing
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from llmtrain.bench.kernels import command as kernels_command
from llmtrain.bench.kernels import peers, report
from llmtrain.bench.kernels.cell import Bar, Cell
from llmtrain.bench.kernels.measure import Ceilings, Result, measure
from llmtrain.bench.kernels.peers import Contender
from llmtrain.bench.tune import command
from llmtrain.bench.tune import search as searching
from llmtrain.bench.tune.compiling import Compiled, Compilers, Task
from llmtrain.bench.tune.measuring import Measured, Measurer
from llmtrain.errors import UserError
from llmtrain.kernels import tuning
from llmtrain.kernels.attention.triton_launch import Launch
from llmtrain.kernels.operation import Shape, Work, leaves, operation, run_both, search, wide
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.row_tiles import Tile
from llmtrain.kernels.search import Attempt, Winner
from llmtrain.kernels.ssd.spec import SSDSpec
from tests.unit.test_bench_config import H200, arguments


@contextlib.contextmanager
def quiet(title: str, total: int):
    yield lambda: None


@pytest.fixture(scope="module")
def tried() -> dict[int, Attempt]:
    """Every launch of tests/support/toy_problem.py, those that break their process before the fastest."""
    attempts = [Attempt("forward", {"n": n}) for n in (1, 3, 4, 5, 8, 6, 7, 2)]
    spilled = Attempt("forward", {"n": 0}, problem="spills")
    with Measurer("tests.support.toy_problem", {}, "cpu", timeout_s=5) as measurer:
        ranked = searching.measure({"forward": [*attempts, spilled]}, measurer, quiet)
    assert [(one.launch["n"], one.ms) for one in ranked["forward"]] == [(2, 1.0), (1, 2.0)]
    assert spilled.problem == "spills"
    return {one.launch["n"]: one for one in attempts}


def test_what_fails_or_is_wrong_is_out_and_the_rest_is_ranked(tried):
    assert {n: tried[n].problem for n in (1, 2, 3, 4, 5)} == {
        **{1: None, 2: None, 3: "wrong by 5.0e-01", 4: "RuntimeError: out of resource", 5: "wrong by nan"}
    }


def test_a_launch_that_breaks_its_process_is_recorded_and_the_search_goes_on(tried):
    """The one that broke the GPU's context for its process does not spoil those after it."""
    assert tried[6].problem.startswith("its process crashed")
    assert tried[7].problem == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert tried[8].problem.startswith("its process crashed, or took more than 5 s")
    assert tried[2].ms == 1.0


@pytest.mark.slow
def test_a_problem_that_cannot_be_made_gives_the_reason():
    with Measurer("tests.support.toy_problem", {"size": 3}, "cpu") as measurer:
        assert "has no 'size'" in (measurer("forward", {"n": 1}).problem or "")


def test_the_row_has_its_provenance_and_lands_in_the_file_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLMTRAIN_TUNING", raising=False)
    made = search("attention", {"head_dim": 64}, "meta", H200)
    winner = Winner("attention.forward", Launch(64, 32, 4, 2), 0.5, 1234, 2e11, "tflops")
    row = searching.row(winner, made, H200, 4096, None)
    assert isinstance(row.provenance, dict)
    assert row.provenance["device"] == "NVIDIA H200" and row.provenance["tflops"] == 400.0
    file = command.write(argparse.Namespace(into_package=False, out=None), H200, [row])
    assert file == tmp_path / "llmtrain/tuning/sm90.yaml"
    chosen = tuning.select("attention.forward", "bfloat16", {"head_dim": 64}, H200, 4096, "plain")
    assert chosen.launch == Launch(64, 32, 4, 2) and chosen in tuning.own_rows("sm90")
    tuning.forget()


@pytest.mark.slow
def test_the_whole_command_from_its_arguments_to_the_row(tmp_path, monkeypatch, capsys):
    """With a problem whose launches fail in every way, on no GPU."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLMTRAIN_TUNING", raising=False)
    monkeypatch.setattr(command.platform, "detect", lambda: H200)
    monkeypatch.setattr(command, "Measurer", lambda operation, case: Measurer(operation, case, "cpu"))
    args = arguments("--operation", "tests.support.toy_problem", "--workers", "1")
    assert args.func(args) == 0
    out = capsys.readouterr().out
    assert "5 dropped, such as: wrong by 5.0e-01" in out
    assert "7 candidates in" in out
    chosen = tuning.select("attention.forward", "bfloat16", {"head_dim": 64}, H200)
    assert chosen in tuning.own_rows("sm90") and chosen.launch == Launch(64, 32, 4, 1)
    assert isinstance(chosen.provenance, dict) and chosen.provenance["tflops"] == 1000.0
    tuning.forget()


def test_rows_do_not_go_into_the_table_of_another_architecture():
    l40s = Platform("nvidia", "sm89", "L40S", 48 << 30)
    with pytest.raises(ValueError, match="no shipped table for sm89; its rows come from sm80's"):
        command.write(argparse.Namespace(into_package=True, out=None), l40s, [])


def test_rejects_a_file_that_cannot_hold_the_rows_before_the_search(monkeypatch):
    monkeypatch.setattr(command.platform, "detect", lambda: H200)
    monkeypatch.setattr(command, "tuned", lambda *_: pytest.fail("the search began"))
    args = arguments("--operation", "norm", "--out", str(tuning.FOLDER / "gfx942.yaml"))
    with pytest.raises(UserError, match="holds rows for gfx942, where rows for sm90 are needed"):
        args.func(args)


def test_a_shape_without_a_row_that_fits_the_gpu_is_no_reason_to_run_the_same_command(monkeypatch):
    mi300x = Platform("amd", "gfx942", "MI300X", 192 << 30, 304)
    monkeypatch.setattr(command.platform, "detect", lambda: mi300x)
    monkeypatch.setattr(command, "tuned", lambda *_: pytest.fail("the search began"))
    args = arguments("--operation", "ssd", "--shape", "d_state=256", "--dtype", "float32", "--dry-run")
    with pytest.raises(
        UserError, match="d_state=256: larger than what our kernels serve on gfx942 in float32"
    ) as caught:
        args.func(args)
    assert "bench tune" not in str(caught.value)


CASES = [
    ("attention", {"head_dim": 96}),
    ("ssd", {}),
    ("ssd", {"d_state": 64}),
    ("conv1d", {}),
    ("conv1d", {"width": 3, "channels": 768}),
    ("gated_norm", {}),
    ("gated_norm", {"group_size": 64, "groups": 64}),
    ("norm", {}),
    ("norm", {"dim": 768, "centred": True, "biased": True}),
    ("rotary", {}),
    ("rotary", {"head_dim": 64}),
]


@pytest.mark.parametrize("operation, case", CASES)
@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_candidates_are_many_distinct_and_buildable(operation, case, arch):
    where = Platform("amd" if arch.startswith("gfx") else "nvidia", arch, "", 1 << 36, 132)
    made = search(operation, case, "meta", where)
    for part in made.parts:
        few, many = made.candidates(part, True), made.candidates(part, False)
        assert 4 <= len(few) <= len(many) <= 100, (part, len(few), len(many))
        assert all(one not in many[:i] for i, one in enumerate(many))
        made.runner(part, many[-1])


@pytest.mark.parametrize("operation, case", [case for case in CASES if case[0] in ("conv1d", "rotary")])
def test_what_is_timed_is_what_a_row_makes_run(operation, case):
    """A row's launch is fitted to the problem: candidates are fitted already, the table's own first."""
    made = search(operation, case, "meta", H200)
    for part in made.parts:
        first, *rest = made.candidates(part, False)
        if operation == "rotary":
            assert first == asdict(made.table)
        else:
            assert all(made._fitted(made.launch(**one)) == made.launch(**one) for one in (first, *rest))
            assert first == asdict(made._fitted(getattr(made.table, part)))


@pytest.mark.parametrize("operation, case", [case for case in CASES if case[0].endswith("norm")])
def test_norms_are_timed_fitted_and_their_rows_run_as_long_as_other_numbers_of_tokens_need(
    operation, case, monkeypatch
):
    launched: list[Any] = []

    class Launched(Exception):
        pass

    def launch(*given: Any) -> None:
        launched.append(next(each for each in given if isinstance(each, Tile)))
        raise Launched

    made = search(operation, case, "meta", H200)
    for part in made.parts:
        monkeypatch.setattr(sys.modules[type(made).__module__].kernels, part, launch)
        candidates = made.candidates(part, False)
        assert candidates[0] == asdict(getattr(made.table, part))
        for one in candidates:
            with pytest.raises(Launched):
                made.run(part, made.launch(**one))
        assert launched == [made._fitted(made.launch(**one)) for one in candidates]
        assert all(tile.max_tiles < 512 for tile in launched)  # which is without bound, in a row
        launched.clear()


@pytest.mark.parametrize(
    "operation, part, launch, kernel, shape",
    [
        (
            "conv1d",
            "backward",
            {"block_channels": 64, "parallel_runs": 2, "run_tokens": 8, "step_tokens": 4, "num_warps": 4},
            None,
            {"width": 4},
        ),
        ("gated_norm", "forward", {"block_columns": 512, "num_warps": 2, "max_tiles": 4}, None, {"group_size": 5120}),
        (
            "norm",
            "backward",
            {"block_columns": 1024, "num_warps": 4, "max_tiles": 63, "programs_per_sm": 2},
            None,
            {"dim": 2560},
        ),
        ("rotary", "every", {"block_tokens": 16, "block_heads": 4, "num_warps": 2}, "rotary", {"head_dim": 128}),
    ],
)
def test_the_fastest_becomes_a_row_in_gigabytes_a_second_that_is_then_chosen(
    tmp_path, monkeypatch, operation, part, launch, kernel, shape
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLMTRAIN_TUNING", raising=False)
    made, kernel = search(operation, {}, "meta", H200), kernel or f"{operation}.{part}"
    slower = made.candidates(part, True)[0]
    best = {part: [Attempt(part, launch, 64, ms=0.5), Attempt(part, slower, ms=0.6)]}
    (winner,) = made.winners(best, lambda part, launch: Measured())
    row = searching.row(winner, made, H200, None, None)
    assert isinstance(row.provenance, dict)
    assert row.provenance["gbps"] == round(made.work(part) / 0.5e-3 / 1e9, 1)
    command.write(argparse.Namespace(into_package=False, out=None), H200, [row])
    chosen = tuning.select(kernel, "bfloat16", shape, H200)
    assert chosen in tuning.own_rows("sm90") and chosen.launch == made.launch(**launch)
    tuning.forget()


@pytest.mark.slow
def test_a_candidate_compiles_without_a_gpu_and_a_bad_one_gives_the_reason():
    case = {"head_dim": 32, "heads": 2, "tokens": 256, "seq_len": 256}
    good = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
    tasks = [Task("attention", case, "forward", launch) for launch in (good, {**good, "block_m": 48})]
    with Compilers(1) as compilers:
        found = dict(compilers.results(tasks))
    assert found[0].problem(232_448) is None
    assert found[0].kernels[0]["kernel"] == "attention_forward" and found[0].kernels[0]["matrix"] > 0
    assert "bytes of shared memory, of 100" in (found[0].problem(100) or "")
    assert "power of 2" in (found[1].failed or "")


@pytest.mark.slow
def test_candidates_around_the_scan_compile_without_a_gpu():
    tokens = {"tokens": 64, "seq_len": 64}
    cases = [
        ("conv1d", {"channels": 64, **tokens}),
        ("gated_norm", {"group_size": 64, "tokens": 64}),
        ("norm", {"dim": 768, "tokens": 64}),
        ("rotary", tokens),
    ]
    tasks = []
    for name, case in cases:
        made = search(name, case, "meta", H200)
        tasks += [Task(name, case, part, made.candidates(part, True)[-1]) for part in made.parts]
    with Compilers(1) as compilers:
        found = dict(compilers.results(tasks))
    assert [found[i].problem(232_448) for i in range(len(tasks))] == [None] * 7
    kernels = [[kernel["kernel"] for kernel in found[i].kernels] for i in range(len(tasks))]
    assert kernels == [*[["_forward"], ["_backward", "_reduce_partials"]] * 3, ["_rotate", "_rotate"]]


def test_spills_are_a_problem():
    assert Compiled([{"kernel": "k", "shared": 1, "spilled": 8}]).problem(None) == "k spills registers"


def result(name: str, forward: float, backward: float, memory: float = 100.0, **more) -> Result:
    return Result("ssd", "c", 2048, name, not name.startswith("triton"), forward, backward, memory, **more)


def test_bars_compare_with_the_best_of_a_peer():
    results = [result("triton", 1.0, 2.0, 50.0), result("mamba_ssm 128", 3.0, 4.0), result("mamba_ssm 256", 2.0, 5.5)]
    assert report.verdict(results, Bar("mamba_ssm", "sum", 2.0)) == "sum 2.33 × mamba_ssm (asked 2): met"
    assert report.verdict(results, Bar("mamba_ssm", "forward", 2.1)) == "forward 2.00 × mamba_ssm (asked 2.1): NOT MET"
    assert report.verdict(results, Bar("mamba_ssm", "memory", 1.0)) == "memory 2.00 × mamba_ssm (asked 1): met"
    assert report.verdict(results, Bar("flex", "sum", 1.0)) == "sum ? × flex (asked 1): not measured"
    assert report.ratio(results, results[0]) == pytest.approx(7 / 3)
    failed = [result("triton", 0.0, 0.0, failed="boom"), results[1]]
    assert "not measured" in report.verdict(failed, Bar("mamba_ssm", "sum", 2.0))


def test_no_tensor_of_ours_is_less_exact_than_the_best_public_one():
    ours = result("triton", 1.0, 2.0, errors={"y": 2e-3, "dB": 3e-3, "dD": 3e-7})
    public = [
        result("mamba_ssm 128", 3.0, 4.0, errors={"y": 1.9e-3, "dB": 6e-3, "dD": 1e-7}),
        result("mamba_ssm 256", 3.0, 4.0, errors={"y": 4e-3, "dB": 2e-3, "dD": 1e-7}),
    ]
    assert report.numerics([ours, *public]) == "error 1.50 × the best public in dB (asked at most 1.1): NOT MET"
    assert report.numerics([ours, public[0]]) == "error 1.05 × the best public in y (asked at most 1.1): met"
    assert report.numerics([ours]) is None


def test_errors_are_root_mean_squares_over_draws_of_the_inputs():
    """Contenders that round, one neither ours nor public, of which the first draw counts; two that fail, one on a later draw."""

    def cell(first: int, draws: int = 1) -> Cell:
        def inputs(seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
            g = torch.Generator().manual_seed(first + seed)
            return leaves([torch.randn(64, generator=g)]), torch.randn(64, generator=g)

        def exact(given: list[torch.Tensor], up: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return run_both(lambda x: 3 * x, wide(given), up.double())

        return Cell("ssd", "c", 64, ("y", "dx"), inputs, list, exact, Work(1, 1), Work(1, 1), draws=draws)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")

    def rounds(x: torch.Tensor) -> torch.Tensor:
        return (3 * x).bfloat16().float()

    def fails_later(x: torch.Tensor) -> torch.Tensor:
        if not torch.equal(x, cell(0).inputs(0)[0][0]):
            raise RuntimeError("later")
        return 3 * x

    names = ("triton", "mamba_ssm", "reference")
    contenders = [Contender(name, lambda: rounds, name == "mamba_ssm") for name in names]
    contenders += [Contender("triton", lambda: fails), Contender("mamba_ssm", lambda: fails_later, True)]
    most = Ceilings(1.0, 1.0)
    apart = [measure(cell(seed), contenders[:1], most)[0].errors["y"] for seed in range(3)]
    *found, failed, later = measure(cell(0), contenders, most, draws=3)
    mean = pytest.approx((sum(error**2 for error in apart) / 3) ** 0.5)
    assert [one.errors["y"] for one in found] == [mean, mean, apart[0]]
    assert measure(cell(0, draws=3), contenders[:1], most)[0].errors["y"] == mean
    assert failed.failed == "RuntimeError: boom" and not failed.errors
    assert later.failed == "RuntimeError: later"


def test_what_failed_has_its_line_in_the_table_and_none_in_the_picture(tmp_path: Path):
    cell = Cell(
        "ssd", "c", 2048, ("y",), lambda seed: ([], torch.zeros(1)), list, lambda a, b: [], Work(1, 1), Work(1, 1)
    )
    results = [result("triton", 1.0, 2.0), result("mamba_ssm 128", 0.0, 0.0, failed="OutOfMemory | x")]
    report.write(tmp_path, ["head"], {}, [(cell, results)])
    report.plot(tmp_path / "kernels.png", [(cell, results)])
    text = (tmp_path / "kernels.md").read_text(encoding="utf-8")
    assert text.startswith("head\n\n| cell |") and "OutOfMemory" in text
    assert (tmp_path / "kernels.png").stat().st_size > 1000


def test_exact_gradients_are_those_of_all_sequences_together():
    ssd, shape = operation("ssd"), Shape(SSDSpec(2, 8, 8, 1, 256, dtype="float32"), 3, 32)
    tensors, dy = ssd.draw(shape)
    whole = run_both(ssd.reference(shape, "cpu"), wide(tensors), dy.double())
    torch.testing.assert_close(ssd.exact(shape, tensors, dy), ssd.pieces(shape, whole))


def test_a_form_of_the_forward_is_checked_by_running_it():
    """One sequence of 60 heads fills no H200, where the sequential scan would go unchecked for the other form."""
    made = search("ssd", {"heads": 60}, "meta", H200)
    assert made._forward_form(made.base, 1) is None
    for part in made.parts:
        launch = made.candidates(part, True)[0]
        found = made.checked(part, launch)
        if part.startswith(("sequential_scan", "chunk_scan")):
            assert made._forward_form(found, 1) == (
                found.sequential_scan if part.startswith("sequential_scan") else None
            )
        assert launch == asdict(getattr(found, part.split("/")[0]))
    ways = []
    for num_sms in (110, 240, 132):  # 4 sequences: 2.2 waves; one; nearly one of two programs to a processor
        whole = replace(made.base, num_sms=num_sms)
        ways.append(made._forward_form(made.checked("whole", asdict(whole)), 1))
        assert ways[-1] == made._forward_form(whole, 4)
    assert ways == [None, made.base.sequential_scan, made.base.sequential_scan_shared_sm]


def test_the_best_kernels_of_a_scan_are_tried_together_and_what_was_not_searched_stays():
    """Times: 3 ms for the table's launch, 1 ms with the candidate's scan."""
    made = search("ssd", {"heads": 4, "head_dim": 32, "d_state": 32, "tokens": 256, "seq_len": 256}, "meta", H200)
    own = made.base

    def measurer(part: str, launch: dict) -> Measured:
        assert part == "whole"
        return Measured(1.0 if launch["chunk_scan"]["programs_per_sm"] == 7 else 3.0)

    candidate = {"programs_per_sm": 7, "num_stages": 1, "options": {"num_warps": 4}}
    best = {f"chunk_scan/{own.chunk_size}": [Attempt("chunk_scan", candidate)]}
    (winner,) = made.winners(best, measurer)
    assert winner.ms == 1.0 and winner.launch.chunk_scan.programs_per_sm == 7
    assert replace(winner.launch, chunk_scan=own.chunk_scan) == replace(own, num_sms=1)
    (winner,) = made.winners({f"chunk_scan/{own.chunk_size}": []}, measurer)
    assert winner.launch == replace(own, num_sms=1)  # of the device, in no row
    assert made.winners(best, lambda part, launch: Measured(problem="wrong by 1.0e+00")) == []


def test_compiling_beforehand_ends_with_its_time(capsys, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    cell = Cell("ssd", "c", 2048, ("y",), lambda seed: ([], torch.zeros(1)), lambda: [Contender("triton", lambda: torch.sin)],
                lambda a, b: [], Work(1, 1), Work(1, 1))  # fmt: skip
    before = set(multiprocessing.active_children())
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    other.start()
    try:
        kernels_command.warm([cell], argparse.Namespace(workers=1, quick=True, peer_path=None, compile_seconds=0.0))
        assert "compiled 0 of 1 parts in 0 s" in capsys.readouterr().out
        assert other.is_alive() and set(multiprocessing.active_children()) == before | {other}
    finally:
        other.kill()


def _scale(x, BLOCK):
    pass


def test_of_a_kernel_that_times_its_variants_a_share_is_compiled_and_one_counts_as_chosen(monkeypatch):
    """mamba_ssm asks its kernels for the variant that ran, and then for its block's size."""
    compiled = []
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, grid, warmup, **o: compiled.append((warmup, o["BLOCK"]))
    )
    kernel = triton.autotune([triton.Config({"BLOCK": size}) for size in (16, 32, 64)], key=[])(triton.jit(_scale))
    with peers.compile_share(1, 2):
        kernel[(1,)](1)
    assert compiled == [(True, 32)]
    assert kernel.best_config.kwargs["BLOCK"] == 16
