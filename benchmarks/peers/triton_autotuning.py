"""Triton's autotuners, whose variants are compiled one after another, made to compile them beside each other.

It changes no choice: every variant is measured as before, once all are compiled. vLLM's scan has about a hundred for each model.
"""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def compile_in_threads(threads: int | None = None) -> None:
    """Make every autotuner of this process do so from here on. threads: default, one per CPU, at most 16."""
    from triton.runtime.autotuner import Autotuner

    workers = threads or min(16, os.cpu_count() or 1)
    pruned: Callable[..., list[Any]] = Autotuner.prune_configs

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs = pruned(self, kwargs)

        def compile_one(config: Any) -> None:
            # One that cannot be compiled is refused again, and passed over, where it is measured.
            with contextlib.suppress(Exception):
                self.fn.run(**self.nargs, **{**kwargs, **config.all_kwargs(), "warmup": True})

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(compile_one, configs))
        return configs

    Autotuner.prune_configs = prune_configs
