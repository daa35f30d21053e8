"""Hashes of what Triton would compile for a task: by these the reviewed table of offline.py knows what has changed.

A task is run with tensors without memory, and each kernel that it launches is noted instead of compiled: the kernel's code with
all that it calls, the types and alignment of its arguments, its constants and the compiler's options. Comments, docstrings and
code of the host change nothing, as long as the same kernels are launched in the same way.
"""

import ast
import gc
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmtrain.bench.tune.compiling import StandIn, Task, platform_of
from llmtrain.bench.tune.processes import Worker, serve
from llmtrain.kernels.operation import search

TIMEOUT_S = 600.0  # of all tasks, some 15 ms each


def hashes(tasks: Sequence[Task]) -> list[str]:
    """A hash for each task, made by a process of its own: Triton keeps the driver that stands in for the GPU's."""
    process = Worker("tests.support.compile_requests", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    try:
        answer = process.ask({"tasks": [asdict(task) for task in tasks]}, TIMEOUT_S)
        assert answer is not None, process.last_words()
        return answer["hashes"]
    finally:
        process.kill()


class _Noted:
    """Stands for a kernel that was not compiled."""

    def __init__(self, request: str):
        self.request, self.metadata = request, None


def _hashes(tasks: list[dict[str, Any]]) -> list[str]:
    """In the process of its own."""
    import triton
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    noted: list[str] = []
    launch = JITFunction.run

    def note(
        self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, _: bool
    ) -> _Noted:
        chosen = {
            name: value for name, value in vars(options).items() if name != "extern_libs"
        }  # paths of this machine
        found = _Noted(json.dumps([_code(self), *map(str, (signature, constexprs, chosen, attrs))]))
        self.device_caches[device][0][key] = found
        return found

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found: Any = launch(self, *args, grid=grid, warmup=True, **options)
        noted.append(found.request)
        return found

    patched: Any = JITFunction
    patched._do_compile, patched.run = note, run
    found, arch = [], ""
    for task in tasks:
        if task["arch"] != arch:
            arch = task["arch"]
            driver.set_active(_driver(arch))
            for one in gc.get_objects():
                if issubclass(type(one), JITFunction):
                    one.device_caches.clear()
        one = search(task["operation"], task["case"], "meta", platform_of(arch))
        noted.clear()
        one.runner(task["part"], task["launch"])()
        assert noted, task
        about = [triton.__version__, json.dumps(task["environment"], sort_keys=True), *sorted(set(noted))]
        found.append(hashlib.sha256("\0".join(about).encode()).hexdigest()[:16])
    return found


def _driver(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return StandIn(GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[2:]), 32))


_CODES: dict[str, str] = {}


def _code(kernel: Any) -> str:
    """A hash of a device function, without comments and docstrings, and of the functions and constants that it names."""
    from triton.language import constexpr
    from triton.runtime.jit import JITCallable

    name = f"{kernel.__module__}.{kernel.__qualname__}"
    if name not in _CODES:
        _CODES[name] = name  # for a function that calls itself
        tree = kernel.parse().body[0]
        if ast.get_docstring(tree, clean=False):
            tree.body = tree.body[1:]
        scope = kernel.get_capture_scope()
        texts = [ast.dump(tree)]
        for named in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & scope.keys()):
            value = scope[named]
            if isinstance(value, JITCallable):
                texts.append(_code(value))
            elif isinstance(value, constexpr | int | float | str):
                texts.append(f"{named} = {value}")
        _CODES[name] = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    return _CODES[name]


if __name__ == "__main__":
    serve(lambda wanted: {"hashes": _hashes(wanted["tasks"])})
