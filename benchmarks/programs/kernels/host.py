"""Time of the host per call of our operators, without a GPU: what a small model's step is bound by.

    python -m benchmarks host [--calls N] [--only NAME …] [--profile] [--out FILE.json]

Operators are called through PyTorch's dispatcher with tensors of the host, as compiled layers call them. Kernels are launched by a
stand-in for Triton's driver, which takes the arguments and does nothing: what is measured is Python, allocation and dispatch. A
real launch adds some microseconds, of Triton's launcher and of the driver.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from benchmarks.harness.arguments import Parser, natural
from llmtrain.bench.tune.compiling import StandIn, platform_of
from llmtrain.errors import UserError

TARGET = GPUTarget("cuda", 90, 32)
NAMES = ("mamba_mixer", "attention", "norm", "rotary")
LEAST_CALLS = 11
"""Of fewer the fastest tenth is an extrapolation, below the fastest call."""
BATCH, SEQ_LEN = 1, 256  # small: the memory that is allocated here is the host's


class Compiled:
    """Replacement of a compiled kernel, which counts its launches."""

    launches = 0

    def __init__(self) -> None:
        self.function, self.packed_metadata = 0, ()
        self.metadata = SimpleNamespace(target=TARGET)

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        Compiled.launches += 1


def stand_in() -> None:
    """Replace Triton's driver and compiler in this process."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    active: Any = StandIn(TARGET)
    driver.set_active(active)

    def compiled(self: Any, key: str, signature: Any, device: int, *rest: Any) -> Any:
        kernel = Compiled()
        self.device_caches[device][0][key] = kernel
        return kernel

    JITFunction._do_compile = compiled  # pyright: ignore[reportAttributeAccessIssue]


def cases() -> dict[str, Callable[[], Tensor]]:
    """One of NAMES -> a call whose result has a gradient."""
    from llmtrain.kernels.attention import triton as attention
    from llmtrain.kernels.attention import triton_call
    from llmtrain.kernels.attention.spec import AttentionSpec
    from llmtrain.kernels.conv1d.spec import Conv1dSpec
    from llmtrain.kernels.gated_norm.spec import GatedNormSpec
    from llmtrain.kernels.mamba_mixer import triton as mamba_mixer
    from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
    from llmtrain.kernels.norm import triton as norm
    from llmtrain.kernels.norm.spec import NormSpec
    from llmtrain.kernels.rotary import triton as rotary
    from llmtrain.kernels.rotary.spec import RotarySpec
    from llmtrain.kernels.ssd.spec import SSDSpec

    platform = platform_of("sm90")
    triton_call._platform_of = lambda device: platform

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    def mixer() -> Callable[[], Tensor]:
        heads, head_dim, d_state = 24, 64, 128
        d_inner = heads * head_dim
        channels = d_inner + 2 * d_state
        spec = MambaMixerSpec(
            Conv1dSpec(channels, 4), SSDSpec(heads, head_dim, d_state, 1, 256), GatedNormSpec(d_inner, 1, 1e-5)
        )  # fmt: skip
        kernel = mamba_mixer.build(spec, platform, "")
        zxbcdt = tensor(BATCH, SEQ_LEN, d_inner + channels + heads)
        fp32 = [tensor(heads, dtype=torch.float32) for _ in range(3)]
        rest = (tensor(channels, 4), tensor(channels), *fp32, tensor(d_inner))
        w, b, A, D, dt_bias, norm_weight = rest
        return lambda: kernel(zxbcdt, w, b, A, D, dt_bias, norm_weight)

    def attend() -> Callable[[], Tensor]:
        kernel = attention.build(AttentionSpec(12, 12, 64, 0.125), platform, "")
        q, k, v = (tensor(BATCH, SEQ_LEN, 12, 64) for _ in range(3))
        context = kernel.prepare(SEQ_LEN, q.device)
        return lambda: kernel(q, k, v, context)

    def normed() -> Callable[[], Tensor]:
        kernel = norm.build(NormSpec(768), platform, "")
        x, delta, weight = tensor(BATCH, SEQ_LEN, 768), tensor(BATCH, SEQ_LEN, 768), tensor(768)
        return lambda: kernel(x, delta, weight)[1]

    def rotated() -> Callable[[], Tensor]:
        kernel = rotary.build(RotarySpec(64), platform, "")
        q, k = tensor(BATCH, SEQ_LEN, 12, 64), tensor(BATCH, SEQ_LEN, 12, 64)
        cos, sin = (torch.randn(SEQ_LEN, 1, 32) for _ in range(2))
        return lambda: kernel(q, k, cos, sin)[0]

    return dict(zip(NAMES, (mixer(), attend(), normed(), rotated()), strict=True))


class Recorder(TorchDispatchMode):
    """Our operators that are called meanwhile, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "llmtrain":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def operators(call: Callable[[], Tensor]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Operators of a forward and backward pass, as a compiled layer calls them."""
    with Recorder() as recorder:
        out = call()
        out.backward(torch.ones_like(out))
    return recorder.calls


@torch.no_grad()
def measure(op: Any, arguments: tuple[Any, ...], calls: int) -> dict[str, float]:
    """Microseconds of one call, and launches. Of all calls the tenth that was disturbed least: the rest is other programs'."""
    seconds: list[float] = []
    for number in range(calls):
        before, began = Compiled.launches, time.process_time()
        op(*arguments)
        if number >= calls // 5:  # what is cached is cached
            seconds.append(time.process_time() - began)
    return {"us": 1e6 * statistics.quantiles(seconds, n=10)[0], "launches": Compiled.launches - before}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("--calls", type=natural, default=500)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse(argv)
    if args.calls < LEAST_CALLS:
        raise UserError(f"--calls {args.calls}: expected at least {LEAST_CALLS}, whose fastest tenth is shown")
    for name in args.only or ():
        if name not in NAMES:
            raise UserError(f"--only {name}: there is {', '.join(NAMES)}")
    torch.set_num_threads(1)
    stand_in()
    found: dict[str, dict[str, float]] = {}
    print(f"{'operator':22} {'us':>6} {'launches':>9} {'us/launch':>10}")
    for name, call in cases().items():
        if args.only and name not in args.only:
            continue
        for number, (op, arguments) in enumerate(operators(call)):
            label = f"{op._opname}{' (backward)' if number and 'backward' not in op._opname else ''}"
            row = found[label] = measure(op, arguments, args.calls)
            print(f"{label:22} {row['us']:6.0f} {row['launches']:9.0f} {row['us'] / row['launches']:10.1f}")
            if args.profile:
                profiler = cProfile.Profile()
                profiler.runcall(measure, op, arguments, 100)
                pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0
