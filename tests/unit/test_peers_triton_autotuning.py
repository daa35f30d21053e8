"""`benchmarks.peers.triton_autotuning`: all variants are compiled before any is measured, and the choice stays the autotuner's."""

import pytest

pytest.importorskip("triton")

import triton
from triton.runtime.autotuner import Autotuner

from benchmarks.peers.triton_autotuning import compile_in_threads


def kernel(x, SIZE):  # only its name and its arguments are looked at
    raise AssertionError("is not run")


class Jitted:
    """Stands in for a jitted function: notes what is compiled and run. A variant of 3 cannot be compiled."""

    fn = staticmethod(kernel)

    def __init__(self):
        self.seen: list[tuple[int, bool]] = []

    def run(self, *args, SIZE, warmup, grid, **options):
        self.seen.append((SIZE, warmup))
        if SIZE == 3:
            raise RuntimeError("too large")


def test_every_variant_is_compiled_before_one_is_measured(monkeypatch):
    monkeypatch.setattr(Autotuner, "prune_configs", Autotuner.prune_configs)
    compile_in_threads(2)
    jitted = Jitted()
    configs = [triton.Config({"SIZE": size}) for size in (1, 2, 3)]

    def bench(call, quantiles):
        call()
        return [1.0 if jitted.seen[-1][0] == 1 else 0.5] * 3

    tuner = Autotuner(jitted, ["x", "SIZE"], configs, ["x"], None, None, do_bench=bench)
    with pytest.raises(RuntimeError, match="too large"):  # as without, where it is measured
        tuner.run(7, grid=(1,), warmup=False)
    assert sorted(jitted.seen[:3]) == [(1, True), (2, True), (3, True)]
    assert jitted.seen[3:] == [(1, False), (2, False), (3, False)]
    tuner.configs.pop()
    tuner.run(7, grid=(1,), warmup=False)
    assert tuner.best_config.kwargs == {"SIZE": 2}
