"""The searcher of `bench tune` and the judgements of `bench kernels`, without a GPU."""

import argparse
import contextlib
import math
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmtrain.bench.kernels import command as kernels_command
from llmtrain.bench.kernels import report
from llmtrain.bench.kernels.cell import Bar, Cell, Contender, Work
from llmtrain.bench.kernels.measure import Result
from llmtrain.bench.tune import command, search
from llmtrain.bench.tune.compiling import Compiled, Compilers, Task
from llmtrain.bench.tune.operations import Attempt, Winner, problem
from llmtrain.kernels import tuning
from llmtrain.kernels.attention.triton_launch import Launch
from llmtrain.kernels.platform import Platform

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30, 132)


class Toy:
    """Launches are numbers: 1 is slow, 2 is fast, 3 is wrong, 4 raises."""

    parts = ("forward",)
    shape = {"head_dim": 64}
    tolerance = 0.01

    def error(self, part: str, launch: dict) -> float:
        if launch["n"] == 4:
            raise RuntimeError("out of resource")
        return 0.5 if launch["n"] == 3 else math.nan if launch["n"] == 5 else 1e-3

    def runner(self, part: str, launch: dict):
        return lambda: launch["n"]


@contextlib.contextmanager
def quiet(title: str, total: int):
    yield lambda: None


def test_what_fails_or_is_wrong_is_out_and_the_rest_is_ranked(monkeypatch):
    monkeypatch.setattr(search, "milliseconds", lambda run: {1: 2.0, 2: 1.0}[run()])
    attempts = [Attempt("forward", {"n": n}) for n in (1, 2, 3, 4, 5)]
    spilled = Attempt("forward", {"n": 0}, problem="spills")
    ranked = search.measure(Toy(), {"forward": [*attempts, spilled]}, quiet)  # type: ignore[arg-type]
    assert [(one.launch["n"], one.ms) for one in ranked["forward"]] == [(2, 1.0), (1, 2.0)]
    assert [one.problem for one in attempts] == [
        None,
        None,
        "wrong by 5.0e-01",
        "RuntimeError: out of resource",
        "wrong by nan",
    ]


def test_the_row_has_its_provenance_and_lands_in_the_file_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLMTRAIN_TUNING", raising=False)
    winner = Winner("attention.forward", Launch(64, 32, 4, 2), 0.5, 1234, 2e11, "tflops")
    row = search.row(winner, Toy(), H200, "bfloat16", 4096, None)  # type: ignore[arg-type]
    assert isinstance(row.provenance, dict)
    assert row.provenance["device"] == "NVIDIA H200" and row.provenance["tflops"] == 400.0
    file = command.write(argparse.Namespace(into_package=False, out=None), H200, [row])
    assert file == tmp_path / "llmtrain/tuning/sm90.yaml"
    chosen = tuning.select("attention.forward", "bfloat16", {"head_dim": 64}, H200, 4096, "plain")
    assert chosen.launch == Launch(64, 32, 4, 2) and chosen.own
    tuning.forget()


def test_rows_do_not_go_into_the_table_of_another_architecture():
    l40s = Platform("nvidia", "sm89", "L40S", 48 << 30)
    with pytest.raises(ValueError, match="no shipped table for sm89; its rows come from sm80's"):
        command.write(argparse.Namespace(into_package=True, out=None), l40s, [])


@pytest.mark.parametrize("operation, case", [("attention", {"head_dim": 96}), ("ssd", {}), ("ssd", {"d_state": 64})])
@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_candidates_are_many_distinct_and_buildable(operation, case, arch):
    where = Platform("amd" if arch.startswith("gfx") else "nvidia", arch, "", 1 << 36, 132)
    made = problem(operation, case, "meta", where)
    for part in made.parts:
        few, many = made.candidates(part, True), made.candidates(part, False)
        assert 4 <= len(few) <= len(many) <= 100, (part, len(few), len(many))
        assert all(one not in many[:i] for i, one in enumerate(many))
        made.runner(part, many[-1])


def test_a_candidate_compiles_without_a_gpu_and_a_bad_one_says_why():
    case = {"head_dim": 32, "heads": 2, "tokens": 256, "seq_len": 256}
    good = {"block_m": 64, "block_n": 32, "warps": 4, "stages": 2}
    tasks = [Task("attention", case, "forward", launch) for launch in (good, {**good, "block_m": 48})]
    with Compilers(1) as compilers:
        found = dict(compilers.results(tasks))
    assert found[0].problem(232_448) is None
    assert found[0].kernels[0]["kernel"] == "attention_forward" and found[0].kernels[0]["matrix"] > 0
    assert "bytes of shared memory, of 100" in (found[0].problem(100) or "")
    assert "power of 2" in (found[1].failed or "")


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


def test_what_failed_has_its_line_in_the_table_and_none_in_the_picture(tmp_path: Path):
    cell = Cell("ssd", "c", 2048, lambda: ([], torch.zeros(1)), list, lambda a, b: [], Work(1, 1), Work(1, 1))
    results = [result("triton", 1.0, 2.0), result("mamba_ssm 128", 0.0, 0.0, failed="OutOfMemory | x")]
    report.write(tmp_path, ["head"], {}, [(cell, results)])
    report.plot(tmp_path / "kernels.png", [(cell, results)])
    text = (tmp_path / "kernels.md").read_text(encoding="utf-8")
    assert text.startswith("head\n\n| cell |") and "OutOfMemory" in text
    assert (tmp_path / "kernels.png").stat().st_size > 1000


def test_the_best_kernels_of_a_scan_are_tried_together_and_what_was_not_searched_stays():
    """Times: 3 ms for the table's launch, 1 ms with the candidate's scan."""
    made = problem("ssd", {"heads": 4, "head_dim": 32, "d_state": 32, "tokens": 256, "seq_len": 256}, "meta", H200)
    own = made.launch
    made.error = lambda part, launch: 0.0
    made._whole = lambda launch: launch
    candidate = {"programs": 7, "stages": 1, "options": {"num_warps": 4}}
    best = {f"scan/{own.chunk}": [Attempt("scan", candidate)]}
    (winner,) = made.winners(best, lambda launch: 1.0 if launch.scan.programs == 7 else 3.0)
    assert winner.ms == 1.0 and winner.launch.scan.programs == 7
    assert (winner.launch.passing, winner.launch.pairs, winner.launch.chunk) == (own.passing, own.pairs, own.chunk)
    (winner,) = made.winners({f"scan/{own.chunk}": []}, lambda launch: 3.0)
    assert winner.launch == replace(own, processors=1)  # of the device, in no row


def test_compiling_beforehand_ends_with_its_time(capsys, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    cell = Cell("ssd", "c", 2048, lambda: ([], torch.zeros(1)), lambda: [Contender("triton", lambda: torch.sin)],
                lambda a, b: [], Work(1, 1), Work(1, 1))  # fmt: skip
    kernels_command.warm([cell], argparse.Namespace(workers=1, quick=True, peer_path=None, compile_seconds=0.0))
    assert "compiled 0 of 1 parts in 0 s" in capsys.readouterr().out
    assert not multiprocessing.active_children()
