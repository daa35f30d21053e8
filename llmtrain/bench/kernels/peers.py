"""Contenders of a cell: backends of the registry, and public kernels that are no backend or are called otherwise here."""

import contextlib
import functools
import gc
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels import operation as operations
from llmtrain.kernels import platform
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.operation import Function, Operation, Shape, leaves, run_both


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


def hasten() -> None:
    """Make all existing autotuners time their variants for a shorter while."""
    import triton
    from triton.runtime.autotuner import Autotuner

    def bench(call: Any, quantiles: Any) -> Any:
        return triton.testing.do_bench(call, warmup=3, rep=12, quantiles=quantiles)

    for one in gc.get_objects():
        if issubclass(type(one), Autotuner):  # isinstance would look into dead weak references
            one._do_bench = bench


OURS = "triton"


@dataclass(frozen=True)
class Contender:
    """public: its speed is what ours is compared with. make: builds the function of the cell's leaves that gives the output;
    called once, on the machine. warm: (k, n) -> compiles the k-th of n parts of what a public autotuner would compile
    one by one, where there is such a thing.
    """

    name: str
    make: Callable[[], Function]
    public: bool = False
    warm: Callable[[int, int], None] | None = None


def contenders(
    one: Operation, shape: Shape, device: str, chunks: tuple[int, ...] = (), backends: Sequence[str] | None = None
) -> list[Contender]:
    """backends: None: all that serve and are worth measuring; on a GPU beside them what is here, at these chunks."""
    names = one.backends(shape, platform.detect()) if backends is None else backends
    found = [Contender(name, functools.partial(built, one, name, shape, device), one.is_public(name)) for name in names]
    if device == "cpu" or backends is not None or one.name not in _PEERS:
        return found
    instead, peers = _PEERS[one.name]
    return [*(c for c in found if c.name != instead), *peers(one, shape, chunks)]


def built(one: Operation, name: str, shape: Shape, device: str) -> Function:
    """Function of the leaves as the model runs it: PyTorch backends are compiled, on a GPU."""
    here = platform.detect()
    function = one.bind(one.kernel(name, shape.spec, here), shape, device)
    compiled = here.vendor != "cpu" and name in ("reference", "aten")
    return torch.compile(function, dynamic=False) if compiled else function


def _warmed(one: Operation, shape: Shape, make: Callable[[], Function]) -> Callable[[int, int], None]:
    def warm(k: int, n: int) -> None:
        tensors, up = one.draw(shape, "cuda")
        with compile_share(k, n):
            run_both(make(), leaves(tensors), up)

    return warm


def _scans(one: Operation, shape: Shape, chunks: tuple[int, ...]) -> list[Contender]:
    found = []
    if importlib.util.find_spec("mamba_ssm") is not None:
        for chunk in chunks:
            make = functools.partial(mamba_scan, chunk)
            found.append(Contender(f"mamba_ssm {chunk}", make, True, _warmed(one, shape, make)))
    if importlib.util.find_spec("fla") is not None:
        found.append(Contender("fla", gated_linear_attention, True))
    return found


def _mamba3(one: Operation, shape: Shape, _: tuple[int, ...]) -> list[Contender]:
    """The authors' kernels, which are written for chunks of 64."""
    name = "mamba_ssm.ops.triton.mamba3"
    if importlib.util.find_spec("mamba_ssm") is None or importlib.util.find_spec(name) is None:
        return []
    return [Contender("mamba_ssm", mamba3_siso, True, _warmed(one, shape, mamba3_siso))]


def _delta_rules(one: Operation, shape: Shape, _: tuple[int, ...]) -> list[Contender]:
    if importlib.util.find_spec("fla") is None:
        return []
    make = functools.partial(_fla_delta_rule, one.name, shape.spec)
    return [Contender("fla", make, True, _warmed(one, shape, make))]


def _mixers(one: Any, shape: Shape, chunks: tuple[int, ...]) -> list[Contender]:
    """`parts`: our kernels, as three operators. Public scans have the variants of the scan's own cells."""
    spec = shape.spec

    def part(name: str, backend: str) -> Function:
        of_part = operations.operation(name)
        return built(of_part, backend, Shape(getattr(spec, name), shape.batch, shape.seq_len), "cuda")

    def of_parts(conv: str, scan: Function, norm: str) -> Function:
        return one.of_parts(spec, part("conv1d", conv), scan, part("gated_norm", norm))

    def public(chunk: int) -> Function:
        conv1d = operations.operation("conv1d")
        able = conv1d.backends(Shape(spec.conv1d, shape.batch, shape.seq_len), platform.detect())
        return of_parts("causal_conv1d" if "causal_conv1d" in able else "reference", mamba_scan(chunk), "mamba_ssm")

    found = []
    if OURS in one.backends(shape, platform.detect()):
        found.append(Contender("parts", lambda: of_parts(OURS, part("ssd", OURS), OURS)))
    if importlib.util.find_spec("mamba_ssm") is not None:
        found += [Contender(f"public {chunk}", functools.partial(public, chunk), True) for chunk in chunks]
    return found


_PEERS: dict[str, tuple[str | None, Callable[[Any, Shape, tuple[int, ...]], list[Contender]]]] = {
    "ssd": ("mamba_ssm", _scans),
    "gated_delta": ("fla", _delta_rules),
    "kimi_delta": ("fla", _delta_rules),
    "mamba_mixer": (None, _mixers),
    "mamba3": (None, _mamba3),
}
"""By operation, the backend that they stand for, and the contenders beside those of the registry."""


def mamba_scan(chunk: int) -> Callable[..., Tensor]:
    """mamba_ssm's scan, which times its variants on its first call."""
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    hasten()

    def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        return scan(x, dt, A, B, C, chunk, D=D, dt_bias=dt_bias, dt_softplus=True)

    return run


def mamba3_siso() -> Callable[..., Tensor]:
    """mamba_ssm's scan of Mamba-3, which times its variants on its first call. It has heads before tokens in what is per token and
    head, and takes weights and angles before their sigmoid and tanh."""
    scan = importlib.import_module("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined").mamba3_siso_combined
    hasten()

    @torch.compile(dynamic=False)
    def before(log_decay: Tensor, dt: Tensor, later: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
        gates = (t.mT.contiguous() for t in (log_decay, dt, later.logit()))
        return *gates, (rate / math.pi).atanh()

    def run(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, dt: Tensor, later: Tensor, rate: Tensor, q_bias: Tensor,
        k_bias: Tensor, D: Tensor,
    ) -> Tensor:  # fmt: skip
        *gates, angles = before(log_decay, dt, later, rate)
        angles = angles[:, :, None].expand(-1, -1, v.shape[2], -1)
        return scan(q, k, v, *gates, q_bias, k_bias, angles, D=D, chunk_size=64)

    return run


def gated_linear_attention() -> Callable[..., Tensor]:
    """flash-linear-attention's gated linear attention with a scalar gate per head, of which Mamba-2's scan is a case: q, k, v
    and the logarithm of the gate are C, B, dt x and dt A. It has no groups: B and C are repeated for each head.
    """
    attend = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla

    @torch.compile(dynamic=False)
    def before(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor) -> tuple[Tensor, ...]:
        dt = torch.nn.functional.softplus(dt.float() + dt_bias)
        repeats = x.shape[2] // B.shape[2]
        B, C = (t.repeat_interleave(repeats, dim=2) for t in (B, C))
        return C, B, (x * dt[..., None]).to(x.dtype), dt * A

    @torch.compile(dynamic=False)
    def behind(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
        return (y + D[:, None] * x).to(x.dtype)

    def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        q, k, v, gate = before(x, dt, A, B, C, dt_bias)
        return behind(attend(q, k, v, gate, scale=1.0)[0], x, D)

    return run


def _fla_delta_rule(name: str, spec: GatedDeltaSpec) -> Callable[..., Tensor]:
    """fla-core's kernels, which time their variants on their first call. On Hopper with Triton 3.4 to 3.7.0 it refuses its
    backward pass (its issue 640); here it is let through, and the errors beside the times say what comes of it."""
    chunk_o: Any = importlib.import_module("fla.ops.common.chunk_o")
    chunk_o.TRITON_ABOVE_3_7_1 = True
    hasten()
    kernel = importlib.import_module(f"llmtrain.kernels.{name}.fla").build(spec, platform.detect(), "")
    return lambda *tensors: kernel(*tensors)[0]
