"""Tuning space of the scan: every kernel alone at every chunk size, then the best of them together."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.operation import device_of, relative_error, run_both, wide
from llmtrain.kernels.options import decode
from llmtrain.kernels.search import Attempt, Search, Winner
from llmtrain.kernels.ssd import block_scaled_fp16, chunk_cumsum, segments, state_passing
from llmtrain.kernels.ssd import inter_chunk_bwd as inter_chunk
from llmtrain.kernels.ssd import intra_chunk_bwd as intra_chunk
from llmtrain.kernels.ssd import intra_chunk_halves_bwd as intra_chunk_halves
from llmtrain.kernels.ssd import triton as scans
from llmtrain.kernels.ssd import triton_forward as forward
from llmtrain.kernels.ssd.triton import default_launch
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch, Launch, SequentialScanLaunch, StatePassingLaunch

FORWARD, BACKWARD = (
    ("sequential_scan", "state_passing", "chunk_scan"),
    ("state_passing_bwd", "intra_chunk_bwd", "intra_chunk_halves_bwd", "inter_chunk_bwd"),
)
_KINDS = dict.fromkeys((*FORWARD, *BACKWARD), HeadLoopLaunch) | {
    "sequential_scan": SequentialScanLaunch,
    "state_passing": StatePassingLaunch,
    "state_passing_bwd": StatePassingLaunch,
}
_OTHERS = {"sequential_scan": "sequential_scan_shared_sm", "state_passing_bwd": "state_passing_bwd_wide"}
"""Launches of the same kernels, for other numbers of programs."""


class SSDSearch(Search):
    """A part is KERNEL/CHUNK, or KERNEL/CHUNK/TILE where a tile is half a chunk; `whole`: a Launch,
    forward and backward, as it would run here; or `every`: the same with both forms of the forward, to be compiled.
    """

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.packed = dict(self.shape.options).get("packed", False)
        self.table = default_launch(self.spec, self.where)
        self.base = replace(self.table, split_headdim=None)  # kernels are searched with whole heads
        fwd = ("64", "128") if self.where.vendor == "nvidia" else ("32", "64")
        self.chunks = {"forward": fwd, "backward": ("32", "64", "128/64")}
        self.parts = [f"{kernel}/{chunk}" for kernel in FORWARD for chunk in self.chunks["forward"]]
        backward = ((kernel, chunk) for kernel in BACKWARD for chunk in self.chunks["backward"])
        self.parts += [
            f"{kernel}/{chunk}" for kernel, chunk in backward if kernel != "intra_chunk_halves_bwd" or "/" in chunk
        ]
        self._cached: dict[tuple[int, int], dict[str, Any]] = {}

    def launches(self, part: str, quick: bool) -> Iterator[Any]:
        kernel, chunk, tile = sizes(part)
        amd = self.where.vendor == "amd"
        more = {"matrix_instr_nonkdim": 16} if amd else {}
        depths = (1, 2) if amd or quick else (1, 2, 3)
        own = getattr(self.base, kernel)
        if (chunk, tile) == self._table_tiles(kernel) and self.table == self.base and own is not None:
            yield own
        use_tma = (False, True) if self.where.arch == "sm90" else (False,)
        if kernel in ("state_passing", "state_passing_bwd"):
            for rows, columns, num_warps, num_stages in itertools.product(
                (64, 128), (32, 64), (4, 8), (1, 2) if amd else (2, 3)
            ):
                made = StatePassingLaunch(rows, columns, num_stages, {"num_warps": num_warps, **more})
                yield from (replace(made, use_tma=tma) for tma in (use_tma if self.spec.d_state > 128 else (False,)))
        elif kernel == "sequential_scan":
            for columns, num_warps, num_stages, tma in itertools.product((32, 64), (4, 8), depths, use_tma):
                if chunk < 128 or num_warps > 4:
                    yield SequentialScanLaunch(columns, num_stages, {"num_warps": num_warps, **more}, tma)
        else:
            for programs, num_warps, num_stages, tma in itertools.product((2, 4), (4, 8), depths, use_tma):
                if tile < 128 or num_warps > 4:
                    made = HeadLoopLaunch(programs, num_stages, {"num_warps": num_warps, **more}, tma)
                    yield from (replace(made, **change) for change in self._changes(kernel))

    def candidates(self, part: str, quick: bool) -> list[dict[str, Any]]:
        plain = [asdict(launch) for launch in self.launches(part, quick)]  # their dictionaries have no hash
        return [launch for i, launch in enumerate(plain) if launch not in plain[:i]]

    def _changes(self, kernel: str) -> list[dict[str, Any]]:
        """More parameters of a loop over heads that are worth a try, each beside none."""
        large = {
            "chunk_scan": {"keep_cb": True},
            "intra_chunk_bwd": {"keep_cb": True},
            "inter_chunk_bwd": {"dstate_blocks": 2},
        }
        return [{}, large[kernel]] if kernel in large and self.spec.d_state > 128 else [{}]

    def _table_tiles(self, kernel: str) -> tuple[int, int]:
        """The chunk and the tile of the table's launch."""
        launch = self.base
        return (launch.chunk_size, launch.chunk_size) if kernel in FORWARD else (launch.chunk_size_bwd, launch.tile)

    def _intermediates(self, chunk: int, tile: int) -> dict[str, Any]:
        """Tensors that the kernels pass to one another, for this chunk."""
        if (chunk, tile) in self._cached:
            return self._cached[chunk, tile]
        x, dt, A, B, C, _, dt_bias = self.tensors
        batch, seq_len, spec = self.shape.batch, self.shape.seq_len, self.spec
        count, tiles = -(-seq_len // chunk), -(-seq_len // tile)
        shapes = {
            "dA_cumsum": (batch, spec.n_heads, count, 2, chunk),
            "largest_dt": (batch, spec.n_heads, count),
            "states_fwd": (batch, count, spec.n_heads, spec.d_state, spec.head_dim),
            "ddA_terms": (batch, spec.n_heads, count, 3, chunk),
            "dCB": (4, batch, tiles, spec.n_groups, tile, tile),
            "dCB_halves": (4, batch, count, spec.n_groups, tile, tile),
            "dx": tuple(x.shape),
        }
        narrow = ("states_fwd", "dCB", "dCB_halves", "dx")
        made: dict[str, Any] = {
            name: torch.zeros(shape, device=self.device, dtype=x.dtype if name in narrow else torch.float32)
            for name, shape in shapes.items()
        }
        made["bc"] = block_scaled_fp16.empty_scaled_bc(B, C, tile, self.base.fp16_states)
        made["states"] = state_passing.empty_states(x, made["bc"], chunk, tile, self.base.state_passing_bwd)
        if self.device != "meta":
            few, precision = replace(self.base.state_passing_bwd, num_stages=1), self.base.input_precision
            made["dA_cumsum"], made["largest_dt"], _ = chunk_cumsum.chunk_cumsum_fwd(
                dt, A, dt_bias, None, (None, None), chunk, True
            )
            made["states_fwd"] = state_passing.state_passing_fwd(
                x, B, made["dA_cumsum"], None, None, chunk, precision, few
            )
            made["bc"] = block_scaled_fp16.scale_bc(B, C, tile, self.base.fp16_states)
            tensors = (x, self.up, made["bc"], made["dA_cumsum"], made["largest_dt"])
            made["states"] = state_passing.state_passing_bwd(
                *tensors, None, None, None, None, chunk, tile, precision, few
            )
        self._cached[chunk, tile] = made
        return made

    def run(self, part: str, launch: Any) -> Any:
        return self.runner(part, launch)()

    def runner(self, part: str, launch: dict[str, Any] | None) -> Callable[[], Any]:
        if part in ("whole", "every"):
            run = self._whole if part == "whole" else self._every
            return run(self.table if launch is None else decode(Launch, launch, "launch"))
        assert launch is not None
        kernel, chunk, tile = sizes(part)
        how: Any = _KINDS[kernel](**launch)
        m, precision, num_sms = self._intermediates(chunk, tile), self.base.input_precision, self.where.num_sms
        x, _, _, B, C, D, _ = self.tensors
        dy, dA_cumsum, ddA_terms = self.up, m["dA_cumsum"], m["ddA_terms"]
        if kernel == "sequential_scan":
            return lambda: forward.sequential_chunk_scan(x, B, C, D, dA_cumsum, None, None, chunk, precision, how)
        if kernel == "chunk_scan":
            return lambda: forward.chunk_scan(
                x, B, C, D, dA_cumsum, None, m["states_fwd"], chunk, precision, how, num_sms
            )
        if kernel == "state_passing":
            return lambda: state_passing.state_passing_fwd(x, B, dA_cumsum, None, None, chunk, precision, how)
        if kernel == "state_passing_bwd":
            both = (x, dy, m["bc"], dA_cumsum, m["largest_dt"], None, None, None, None, chunk, tile, precision, how)
            return lambda: state_passing.state_passing_bwd(*both)
        if kernel == "intra_chunk_bwd":
            inputs = (dy, x, m["bc"], D, dA_cumsum, None, m["states"], ddA_terms, chunk, tile, precision, how, num_sms)
            return lambda: intra_chunk.intra_chunk_bwd(*inputs)
        if kernel == "intra_chunk_halves_bwd":
            inputs = (dy, x, B, C, dA_cumsum, None, ddA_terms, m["dx"], chunk, precision, how, num_sms)
            return lambda: intra_chunk_halves.intra_chunk_halves_bwd(*inputs)
        dCB = (m["dCB"], m["dCB_halves"] if tile < chunk else None)
        inputs = (dy, x, B, C, dA_cumsum.clone(), None, *dCB, m["states"])  # cloned: the kernel writes into dA_cumsum
        return lambda: inter_chunk.inter_chunk_bwd(*inputs, ddA_terms, chunk, tile, precision, how, num_sms)

    def _whole(self, launch: Launch, slices: bool = False) -> Callable[[], tuple[Tensor, ...]]:
        """y and every gradient. slices: of the first sequence alone."""
        tensors = [t[:1] if slices and t.ndim >= 3 else t for t in self.tensors]
        dy = self.up[:1] if slices else self.up
        ids, state = None, None
        if self.packed:
            ids = torch.zeros(dy.shape[:2], dtype=torch.int32, device=self.device)
            spec = self.spec
            state = torch.zeros((dy.shape[0], spec.n_heads, spec.head_dim, spec.d_state), device=self.device)
        settings = (None, None, launch.dump())

        def run() -> tuple[Tensor, ...]:
            y, _ = scans.launch_forward(*tensors, state, ids, *settings)
            found = scans.launch_backward(dy, None, *tensors, state, ids, *settings)
            return (y, *found[:7])

        return run

    def _every(self, launch: Launch) -> Callable[[], None]:
        """The whole scan in every form of the forward, at numbers of multiprocessors near this device's that lead to each; and over
        segments."""
        own = self.where.num_sms
        near = [replace(launch, num_sms=n) for n in sorted(range(1, 64 * own), key=lambda n: abs(n - own))]
        ways: list[SequentialScanLaunch | None] = [None]
        ways += [scan for scan in (launch.sequential_scan, launch.sequential_scan_shared_sm) if scan is not None]
        forms: list[Callable[[], Any]] = [
            self._whole(next(n for n in near if self._forward_form(n, self.shape.batch) == way)) for way in ways
        ]
        forms.append(self._segment(launch))

        def run() -> None:
            for form in forms:
                form()

        return run

    def _segment(self, launch: Launch) -> Callable[[], None]:
        """Terms that a segment of a sequence that ranks share adds to the state, and to the gradient of the state before it."""
        (x, dt, A, B, C, _, dt_bias), dy = self.tensors, self.up
        ids = torch.zeros(dy.shape[:2], dtype=torch.int32, device=self.device) if self.packed else None
        how = (dt_bias, ids, (None, None), launch)

        def run() -> None:
            segments.added_state(x, dt, A, B, *how)
            segments.initial_gradient(dy, dt, A, C, *how)

        return run

    def error(self, part: str, launch: dict[str, Any]) -> float:
        """Relative error of the whole scan with this part in it, on the first sequence."""
        if not self._exact:
            self._exact = self.in_float64()
        found = self._whole(self.checked(part, launch), slices=True)()
        return max(relative_error(a, b) for a, b in zip(found, self._exact["whole"], strict=True))

    def checked(self, part: str, launch: dict[str, Any]) -> Launch:
        """The whole scan for one sequence, which takes the form of the forward that `part` is of, or that all take."""
        if part == "whole":
            made = decode(Launch, launch, "launch")
            form = self._forward_form(made, self.shape.batch)
        else:
            kernel, chunk, tile = sizes(part)
            how: Any = _KINDS[kernel](**launch)
            cut: Any = {"chunk_size": chunk}
            if kernel in BACKWARD:
                halves = (self.base.intra_chunk_halves_bwd or self.base.intra_chunk_bwd) if tile < chunk else None
                cut = {"chunk_size_bwd": chunk, "intra_chunk_halves_bwd": halves, "state_passing_bwd_wide": None}
            made = replace(self.base, **(cut | {kernel: how}))
            form = None if kernel in FORWARD else self._forward_form(made, 1)
            if kernel == "sequential_scan":
                form = made.sequential_scan
        if self._forward_form(made, 1) == form:
            return made
        if form is None:
            return replace(made, num_sms=4 * self.spec.n_heads * self.spec.head_dim)
        shared_sm = None if form == made.sequential_scan else made.sequential_scan_shared_sm
        return replace(made, num_sms=1, sequential_scan_shared_sm=shared_sm)

    def _forward_form(self, launch: Launch, batch: int) -> SequentialScanLaunch | None:
        return launch.sequential_scan_for(batch * self.spec.n_heads, self.spec.head_dim)

    def in_float64(self) -> dict[str, Any]:
        """Result of the first sequence alone."""
        pieces, shape = [t[:1] if t.ndim >= 3 else t for t in self.tensors], replace(self.shape, batch=1)
        reference = self.operation.reference(shape, device_of(pieces))
        return {"whole": run_both(reference, wide(pieces), self.up[:1].double())}

    def work(self, part: str) -> float:
        forward, backward = self.operation.work(self.shape)
        return forward.flops + backward.flops

    def winners(self, best: dict[str, list[Attempt]], measurer: Callable[[str, dict[str, Any]], Any]) -> list[Winner]:
        """The fastest whole scan over pairs of chunk sizes, each with the best launch of each kernel; and the table's launch."""
        tried = [self.table]
        for fwd, bwd in itertools.product(self.chunks["forward"], self.chunks["backward"]):
            launches: Any = {kernel: self._best(best, f"{kernel}/{fwd}") for kernel in FORWARD}
            kernels = [kernel for kernel in BACKWARD if kernel != "intra_chunk_halves_bwd" or "/" in bwd]
            launches |= {kernel: self._best(best, f"{kernel}/{bwd}") for kernel in kernels}
            if None in launches.values():
                continue
            cut: Any = {"chunk_size": int(fwd), "chunk_size_bwd": sizes(f"intra_chunk_bwd/{bwd}")[1]}
            # What is searched serves all numbers of programs.
            cut |= {other: None for kernel, other in _OTHERS.items() if self._searched(best, kernel)}
            launches = {"intra_chunk_halves_bwd": None} | launches
            tried.append(replace(self.base, **cut, **launches))
        found = []
        for launch in tried:
            measured = measurer("whole", asdict(launch))
            if measured.problem is None:
                found.append(Winner("ssd", replace(launch, num_sms=1), measured.ms, 0, self.work("whole"), "tflops"))
        return sorted(found, key=lambda winner: winner.ms)[:1]

    def _best(self, best: dict[str, list[Attempt]], part: str) -> Any:
        """The fastest launch; for a kernel that was not searched, the table's, at its own chunk."""
        kernel, *cut = sizes(part)
        attempts = best.get(part)
        if attempts:
            return _KINDS[kernel](**attempts[0].launch)
        others = self._searched(best, kernel) or tuple(cut) != self._table_tiles(kernel)
        return None if others else getattr(self.base, kernel)

    @staticmethod
    def _searched(best: dict[str, list[Attempt]], kernel: str) -> bool:
        return any(part.startswith(f"{kernel}/") for part in best)


def sizes(part: str) -> tuple[str, int, int]:
    """Kernel, chunk and tile of a part."""
    kernel, chunk, *tile = part.split("/")
    return kernel, int(chunk), int(tile[0] if tile else chunk)
