"""Public kernels that time their variants on the first call: compilation shared among processes, and shorter timing."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def compile_share(k: int, n: int) -> Iterator[None]:
    """Inside, an autotuned kernel compiles every n-th of its variants from the k-th on, and nothing is launched.

    Results computed meanwhile are meaningless. Kernels that are not autotuned are compiled too.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    tune, launch = Autotuner.run, JITFunction.run

    def share(self: Any, *args: Any, **options: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(options)
        self.best_config = configs[0]  # the callers of some kernels ask which variant ran
        for config in configs[k::n]:
            with contextlib.suppress(Exception):  # a variant that does not compile is not chosen either
                self.fn.run(*args, **{**options, **config.all_kwargs()})

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    Autotuner.run, JITFunction.run = share, compile_only
    try:
        yield
    finally:
        Autotuner.run, JITFunction.run = tune, launch


def hasten(warmup_ms: int = 3, rep_ms: int = 12) -> None:
    """Make all existing autotuners time their variants for a shorter while."""
    import triton
    from triton.runtime.autotuner import Autotuner

    def bench(call: Any, quantiles: Any) -> Any:
        return triton.testing.do_bench(call, warmup=warmup_ms, rep=rep_ms, quantiles=quantiles)

    for one in gc.get_objects():
        if issubclass(type(one), Autotuner):  # isinstance would look into dead weak references
            one._do_bench = bench
