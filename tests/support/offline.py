"""Compiles every row of the tuning tables for its architecture, without a GPU, and keeps what they take under review; and
the kernels of cached decoding and of evaluation, whose launches are in their code.

    python -m tests.support.offline --update [--arch sm90 ...] [--all] [--workers N]

tests/data/compiled.json says for each row and what it is asked to do: registers, shared memory, spills, occupancy, on
Hopper whether the compiler serialized its products, and a hash of what Triton was asked to compile (compile_requests.py).
--update compiles what is new or whose hash has changed (--all: everything), prints what does not fit, and writes the file
and each row's `shared`. AMD rows are compiled with buffer operations on and, at their own shape, off. Nothing here launches a
kernel: AMD's rows have not been run.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmtrain.bench.tune.compiling import TENSOR_MEMORY, Compiled, Compilers, Task, default_workers
from llmtrain.kernels import tuning, tuning_table
from llmtrain.kernels.attention.triton_select import GROUPED
from llmtrain.kernels.platform import shared_limit
from llmtrain.kernels.tuning_table import Row
from tests.support import offline_steps
from tests.support.compile_requests import hashes

ROOT = Path(__file__).parents[2]
REVIEWED = ROOT / "tests/data/compiled.json"
ARCHES = tuple(arch for arches in tuning.TABLES.values() for arch in arches)
COPIED = ("sm100", "gfx950")
"""Architectures whose rows are another's, and have run nowhere: each is compiled for the first of its cases alone."""
GROUP_SIZES = (64, 1001, 3584, 5120, 7168)
WIDTHS = (64, 1001, 2048, 3584, 5120, 7168)
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
TIMEOUT_S = 300.0  # of one compilation
MEASURED_SPILL = 64
"""Bytes a thread, of a row that was measured to be the fastest of its kind."""
COLUMNS = ("registers", "shared", "spilled", "occupancy")
WITHOUT_PRODUCTS = (
    "attention_delta",
    "chunk_decays_kernel",
    "_chunk_cumsum_fwd",
    "_chunk_cumsum_bwd",
    "_sum_head_blocks",
    "_reduce_partials",
    "_scale_to_fp16",
    "_prefix_tree_cumsum",
    "quantise_inputs",  # columns are not rotated
)
MEMORY_BOUND = (
    "conv1d", "gated_norm", "norm", "rotary", "attention_step", "ssd_step", "conv1d_step", "conv1d_prefix_tree",
)  # fmt: skip
"""Have no matrix instructions; rows that were not measured are held to loads and stores of 16 bytes a thread (`wide`,
counted on NVIDIA)."""


@dataclass(frozen=True)
class Check:
    """A row (None: a kernel of cached decoding) asked to do one thing. own: `shared` of the row is about it."""

    key: str
    task: Task
    row: Row | None
    own: bool

    @property
    def operation(self) -> str:
        return self.row.kernel.partition(".")[0] if self.row else self.task.case["operation"]


def checks(arches: Iterable[str] = ARCHES) -> list[Check]:
    found = []
    for arch in arches:
        found += [check for row in tuning.read_shipped(arch).rows for check in _of_row(arch, row)]
        found += _of_decoding(arch)
    return found


def _of_row(arch: str, row: Row) -> Iterator[Check]:
    operation, _, part = row.kernel.partition(".")
    for what, case, own in itertools.islice(_cases(arch, row), 1 if arch in COPIED else None):
        for off, environment in _environments(arch, own):
            task = Task(operation, case, part or "every", asdict(row.launch), arch, environment)
            yield Check(f"{arch} | {row.label} | {what}{off}", task, row, own)


def _of_decoding(arch: str) -> Iterator[Check]:
    for what, case in offline_steps.CASES.items():
        for off, environment in _environments(arch, True):
            task = Task(offline_steps.__name__, asdict(case), "every", None, arch, environment)
            yield Check(f"{arch} | {case.operation} | {what}{off}", task, None, False)


def _environments(arch: str, both: bool) -> list[tuple[str, dict[str, str]]]:
    """(what it adds to a key, of the compiler). both: on AMD without buffer operations too."""
    without = [(" | no buffer ops", {"AMDGCN_USE_BUFFER_OPS": "0"})]
    return [("", {}), *without * (both and arch.startswith("gfx") and arch not in COPIED)]


def _cases(arch: str, row: Row) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Cases that a row must serve: its own shape, the other shapes that come to it, and every option.

    In float32, its own shape alone; and of attention one in parts, the last of which is narrow.
    """
    if row.kernel == "ssd":
        head_dim, d_state = row.shape
        base = {"head_dim": head_dim, "d_state": d_state, "dtype": row.dtype, "heads": 80}
        yield "plain", base, True
        yield "documents", {**base, "packed": True}, True
        rivals = [r.shape for r in tuning.read_shipped(arch).rows if _rival(r, row)]
        scan = row.launch
        parts = (scan.sequential_scan, scan.chunk_scan, scan.intra_chunk_bwd, scan.inter_chunk_bwd)
        if any(part is not None and part.use_tma for part in parts):
            yield "ragged, documents", {**base, "packed": True, "seq_len": 4097}, False
        if row.dtype != "float32" and d_state >= 128 and (head_dim, d_state // 2) not in rivals:
            yield "half the state", {**base, "d_state": d_state // 2}, False
        return
    if row.kernel == "kimi_delta":
        (size,) = row.shape
        base = {"key_head_dim": size, "value_head_dim": size, "dtype": row.dtype, "heads": 4, "tokens": 4096}
        yield "documents", {**base, "packed": True}, True
        return
    if row.kernel.startswith(MEMORY_BOUND):
        yield from _memory_bound_cases(arch, row)
        return
    (head_dim,) = row.shape
    base = {"head_dim": head_dim, "dtype": row.dtype, "heads": 8, "seq_len": 4096}
    grouped = {"kv_heads": 2, "seq_len": 4097}
    if row.kernel.startswith("attention.float8"):
        yield "plain", base, True
        yield "alibi", {**base, "variant": "alibi"}, True
        yield "window, ragged", {**base, "seq_len": 4097, "variant": "window"}, True
        yield "documents, ragged, grouped", {**base, **grouped, "variant": "documents"}, True
        return
    if row.variant == "mixed":
        yield "mixed", {**base, **grouped, "variant": "mixed"}, True
        yield "mixed, full", {**base, **grouped, "variant": "mixed, full"}, True
        return
    if row.variant is not None:  # fetched as the row says; see Call._choose_launch
        variant = row.variant.removesuffix(f", {GROUPED}")
        variant, _, values = variant.partition(", values ")
        base["variant"] = variant
        if values:  # for these widths alone
            yield row.variant, {**base, "heads": 16, "value_dim": int(values)}, True
            return
        if variant == row.variant:
            yield variant, base, True
        if row.kernel == "attention.dscores":  # for its head_dim alone
            yield f"{variant}, grouped", {**base, "kv_heads": 2}, False
            return
        # Of dkdv alone: in the others causality hides what is beyond a sequence.
        if row.kernel == "attention.dkdv" and row.launch.use_tma:
            yield "ragged", {**base, "seq_len": 4097, "kv_heads": 8 if variant == row.variant else 2}, True
        if row.launch.part == head_dim == 64:
            yield "head_dim 48", {**base, "head_dim": 48}, False
        if row.kernel == "attention.dkdv" and f"{variant}, {GROUPED}" not in _variants(arch, row) - {row.variant}:
            yield f"{variant}, grouped", {**base, "kv_heads": 2}, variant != row.variant
        if variant == "documents":
            yield "documents and a window", {**base, "variant": "documents+window"}, False
        if variant != row.variant:
            return
        for other in _others(arch, row, (row.variant, None)):
            if not row.launch.use_tma or row.launch.part is not None or other & (other - 1) == 0:
                yield f"head_dim {other}", {**base, "head_dim": other}, False
        return
    yield "plain", base, True
    if row.dtype == "float32":
        yield f"head_dim {head_dim * 3 // 4}", {**base, "head_dim": head_dim * 3 // 4}, False
        return
    for other in _others(arch, row, (None,)):
        yield f"head_dim {other}", {**base, "head_dim": other}, False
    yield "alibi", {**base, "variant": "alibi"}, True
    yield "softcap", {**base, "variant": "softcap"}, True
    yield "window, ragged, grouped", {**base, **grouped, "variant": "window"}, True
    yield "documents, ragged, grouped", {**base, **grouped, "variant": "documents"}, True


def _memory_bound_cases(arch: str, row: Row) -> Iterator[tuple[str, dict[str, Any], bool]]:
    (size,) = row.shape
    base: dict[str, Any] = {"dtype": row.dtype}
    options = row.dtype != "float32"
    if row.kernel.startswith("conv1d"):
        base["width"] = size
        yield "plain", base, True
        if options:
            yield "documents", {**base, "packed": True}, True
            yield "odd channels", {**base, "channels": 4355, "packed": True}, False
            yield "few channels", {**base, "channels": 24}, False
            for width in range(1, size):
                yield f"width {width}", {**base, "width": width}, False
    elif row.kernel.startswith("gated_norm"):
        base["group_size"] = size
        yield "plain", base, True
        yield "norm first", {**base, "norm_first": True}, True
        if options:
            for other in _others(arch, row, (None,), GROUP_SIZES):
                case = {**base, "group_size": other, "groups": max(1, 8192 // other)}
                yield f"group_size {other}", case, False
    elif row.kernel.startswith("norm"):
        base["dim"] = size
        yield "sum, rms", base, True
        yield "sum, layer, bias", {**base, "centred": True, "biased": True}, True
        if options:
            yield "rms", {**base, "summed": False}, True
            yield "layer, bias", {**base, "centred": True, "biased": True, "summed": False}, True
            for other in _others(arch, row, (None,), WIDTHS):
                yield f"dim {other}", {**base, "dim": other, "centred": True, "biased": True}, False
    else:
        yield "plain", {**base, "head_dim": size, "kv_heads": 2}, True
        if options:
            for other in _others(arch, row, (None,)):
                yield f"head_dim {other}", {**base, "head_dim": other}, False


def _others(arch: str, row: Row, variants: tuple[str | None, ...], wanted: tuple[int, ...] = HEAD_DIMS) -> list[int]:
    """Sizes (head dims) without a row of their own that come to this one."""
    rows = tuning.read_shipped(arch).rows
    sizes = [r.shape[0] for r in rows if (r.kernel, r.dtype) == (row.kernel, row.dtype) and r.variant in variants]
    near = {other: min(size for size in sizes if size >= other) for other in wanted}
    return [other for other, size in near.items() if size == row.shape[0] != other]


def _variants(arch: str, row: Row) -> set[str | None]:
    """Variants with a row of this kernel at this shape."""
    key = (row.kernel, row.dtype, row.shape)
    return {r.variant for r in tuning.read_shipped(arch).rows if (r.kernel, r.dtype, r.shape) == key}


def _rival(other: Row, row: Row) -> bool:
    return (other.kernel, other.dtype, other.variant) == (row.kernel, row.dtype, row.variant)


def entry(check: Check, compiled: Compiled) -> dict[str, Any]:
    """A line of the reviewed table. A kernel compiled more than once, for several arguments: the worst of each."""
    kernels: dict[str, dict[str, int]] = {}
    columns = (*COLUMNS, "wide" if check.operation in MEMORY_BOUND else "matrix")
    for kernel in compiled.kernels:
        known = kernels.setdefault(kernel["kernel"], {name: kernel[name] for name in columns})
        for name in columns:
            best = min if name in ("occupancy", "matrix", "wide") else max
            known[name] = best(known[name], kernel[name])
        known.update({flag: 1 for flag in ("serialized", "narrow") if kernel.get(flag)})
        if taken := max(known.get("tensor_memory", 0), kernel.get("tensor_memory", 0)):
            known["tensor_memory"] = taken
    return {"hash": hashed([check])[0], "failed": compiled.failed, "kernels": kernels}


def faults(check: Check, found: dict[str, Any]) -> list[str]:
    """Describe the faults of an entry."""
    if found["failed"]:
        return [f"{check.key}: {found['failed']}"]
    limit = shared_limit(check.task.arch)
    assert limit is not None and found["kernels"]
    wrong = []
    for name, taken in found["kernels"].items():
        if taken["spilled"] > may_spill(check):
            wrong.append(f"{check.key}: {name} spills {taken['spilled']}")
        if taken["shared"] > limit:
            wrong.append(f"{check.key}: {name} takes {taken['shared']} bytes of shared memory, of {limit}")
        if taken.get("serialized") and not may_serialize(check):
            wrong.append(f"{check.key}: {name} waits for every product in turn, which was not measured to be better")
        if taken.get("narrow"):
            wrong.append(f"{check.key}: {name} multiplies in TF32 eight columns at a time, which gives wrong results")
        if taken.get("tensor_memory", 0) > TENSOR_MEMORY:
            columns = taken["tensor_memory"]
            wrong.append(f"{check.key}: {name} takes {columns} columns of tensor memory, of {TENSOR_MEMORY}")
        if not taken.get("wide", 1) and must_be_wide(check, name):
            wrong.append(f"{check.key}: {name} loads and stores no 16 bytes at a time")
        if not taken.get("matrix", 1) and name not in WITHOUT_PRODUCTS:
            wrong.append(f"{check.key}: {name} has no matrix instructions")
        if check.row and check.own and taken["shared"] > check.row.shared:
            wrong.append(f"{check.key}: {name} takes {taken['shared']} bytes; the row says {check.row.shared}")
    return wrong


def may_spill(check: Check) -> float:
    """Bytes that a thread may spill.

    A few registers, where the row was measured and was the fastest nevertheless. All that it takes where no launch without
    spills was found: float32 on NVIDIA multiplies three times in TF32, whose operands no tile leaves room for; it serves
    comparisons. And dkdv at head_dim 224, three parts, in the row without a variant, on NVIDIA. A scan whose row loads tiles
    through TMA spills where it cannot, in sequences that are not whole chunks: a prompt, not training. Attention's dkdv of
    sequences that are not whole tiles has one more loop.
    """
    if check.operation == "ssd_prefix_tree":
        return math.inf if check.key.endswith("fp32") and check.task.arch.startswith("sm") else 0
    if check.row is None or check.operation in MEMORY_BOUND:
        return 0
    if check.key.endswith("ragged, documents"):
        return math.inf
    if check.key.endswith("| ragged"):
        return 2 * MEASURED_SPILL
    single = check.row.dtype == "float32" and check.task.arch.startswith("sm")
    three_parts = check.task.arch.startswith("sm") and (check.row.kernel, check.row.shape) == ("attention.dkdv", (224,))
    if single or (three_parts and check.row.variant is None):
        return math.inf
    return (
        MEASURED_SPILL if check.operation in ("attention", "ssd") and not isinstance(check.row.provenance, str) else 0
    )


def may_serialize(check: Check) -> bool:
    """Cases in which it was the fastest nevertheless; and in float32, as in may_spill."""
    return check.row is not None and (check.row.dtype == "float32" or not isinstance(check.row.provenance, str))


def must_be_wide(check: Check, kernel: str) -> bool:
    """Forward, at a row's own shape in two-byte numbers, unless it was measured; not counted on AMD."""
    nvidia, forward = check.task.arch.startswith("sm"), kernel in ("_forward", "_rotate")
    own = check.own and check.row is not None and check.row.dtype != "float32" and isinstance(check.row.provenance, str)
    return nvidia and forward and own


def reviewed() -> dict[str, Any]:
    return json.loads(REVIEWED.read_text(encoding="utf-8")) if REVIEWED.exists() else {}


def stale(wanted: Sequence[Check]) -> list[Check]:
    """Entries that differ from the reviewed table, or that did not compile."""
    known = {key: found["hash"] for key, found in reviewed().items() if not found["failed"]}
    return [check for check, found in zip(wanted, hashed(wanted), strict=True) if known.get(check.key) != found]


_HASHES: dict[str, str] = {}


def hashed(wanted: Sequence[Check]) -> list[str]:
    """Hashes of what each asks to be compiled; kept, as a process of its own makes them."""
    if new := [check for check in wanted if check.key not in _HASHES]:
        _HASHES.update(zip((check.key for check in new), hashes([check.task for check in new]), strict=True))
    return [_HASHES[check.key] for check in wanted]


def compile_all(wanted: list[Check], compilers: Compilers) -> Iterator[tuple[Check, dict[str, Any]]]:
    hashed(wanted)  # all at once
    for i, compiled in compilers.results([check.task for check in wanted]):
        yield wanted[i], entry(wanted[i], compiled)


def write(entries: dict[str, Any]) -> None:
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(entries.items())]
    REVIEWED.parent.mkdir(exist_ok=True)
    REVIEWED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", required=True)
    parser.add_argument("--arch", nargs="+", default=list(ARCHES), choices=ARCHES)
    parser.add_argument("--match", default="", help="only keys that contain this")
    parser.add_argument("--all", action="store_true", help="what has not changed too")
    parser.add_argument("--workers", type=int, default=default_workers())
    options = parser.parse_args()
    began, everything = time.monotonic(), checks()
    wanted = [c for c in everything if c.task.arch in options.arch and options.match in c.key]
    wanted = wanted if options.all else stale(wanted)
    entries = {c.key: reviewed()[c.key] for c in everything if c.key in reviewed()}
    with Compilers(options.workers, TIMEOUT_S) as compilers:
        for number, (check, found) in enumerate(compile_all(wanted, compilers), 1):
            entries[check.key] = found
            left = (time.monotonic() - began) / number * (len(wanted) - number)
            spilled = max((kernel["spilled"] for kernel in found["kernels"].values()), default=0)
            what = found["failed"] or spilled or ""
            print(f"{number}/{len(wanted)} {left:4.0f} s left  {check.key}  {what}", flush=True)
            if number % 10 == 0:
                write(entries)
    write(entries)
    _update_shared(everything, entries)
    wrong = [line for c in checks() if c.key in entries for line in faults(c, entries[c.key])]
    print("\n".join(wrong))
    print(f"{len(wanted)} compiled in {time.monotonic() - began:.0f} s, {len(wrong)} faults")
    return 1 if wrong else 0


def _update_shared(everything: list[Check], entries: dict[str, Any]) -> None:
    """Write the shared memory of each row at its own shape into the tables."""
    taken: dict[tuple[str, Any], int] = {}
    for check in everything:
        if check.row and check.own and check.key in entries:
            shared = [kernel["shared"] for kernel in entries[check.key]["kernels"].values()]
            key = (check.task.arch, check.row.key)
            taken[key] = max([taken.get(key, 0), *shared])
    for arch in ARCHES:
        rows = tuning.read_shipped(arch).rows
        now = [replace(row, shared=taken.get((arch, row.key), row.shared)) for row in rows]
        if now != list(rows):
            tuning_table.save(tuning.FOLDER / f"{arch}.yaml", arch, now, tuning.read_shipped(arch).l2_budget)
    tuning.forget()


if __name__ == "__main__":
    sys.exit(main())
