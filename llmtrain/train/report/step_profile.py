"""Time of profiled steps by what it went into, from the spans that PyTorch's profiler recorded. No torch here."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

_KINDS = {
    "communication": r"nccl|rccl|gloo|c10d",
    "attention": r"attention|attn|flash|fmha|sdpa",
    "scan": r"chunk(?!_cat)|scan|state_passing|sum_head_blocks|scale_to_fp16|delta_rule",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|cijk|splitk|matmul|mkldnn|aten::(mm|bmm|addmm|baddbmm|_scaled_mm)$",
    "copies": r"memcpy|memset|chunk_cat|split_with_sizes_copy|aten::copy_$",
}
"""Kinds of kernels (or, without a GPU, of PyTorch's operators) by what is in their names, in lower case; the first that fits."""

ELEMENTWISE, OPTIMIZER = "elementwise and norms", "optimizer"
EXPOSED, DATA_WAIT, GAPS = "exposed communication", "data wait", "gaps"
PARTS = ("products", "attention", "scan", ELEMENTWISE, "copies", OPTIMIZER, EXPOSED, DATA_WAIT, GAPS)
"""exposed communication: while nothing else runs. data wait: nothing runs, and the host waits for a batch. gaps: nothing runs, for
another reason: the host has not launched it yet, or waits."""


@dataclass(frozen=True)
class Span:
    """start, end: nanoseconds of one clock. launched: of a GPU's kernel, when the host asked for it; None: at `start`."""

    name: str
    start: int
    end: int
    launched: int | None = None

    @property
    def cause(self) -> int:
        return self.start if self.launched is None else self.launched


@dataclass(frozen=True)
class StepProfile:
    """Seconds of one step, on average. parts: by PARTS, together `seconds`. hidden: communication beside something else."""

    steps: int
    seconds: float
    parts: dict[str, float]
    hidden: float

    @property
    def working(self) -> float:
        """Seconds that neither wait nor communicate: the largest of all ranks is what the others wait for."""
        return self.seconds - sum(self.parts[name] for name in (EXPOSED, DATA_WAIT, GAPS))


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, lower)), ELEMENTWISE)


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Spans of one thread, which call each other, without overlap: each keeps the time that none of those it calls takes."""
    kept: list[Span] = []
    open_: list[Span] = []
    now = 0

    def advance(until: int) -> None:
        nonlocal now
        while open_:
            current = open_[-1]
            end = min(current.end, until)
            if now < end:
                kept.append(replace(current, start=now, end=end))
                now = end
            if current.end > until:
                return
            open_.pop()

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        advance(span.start)
        now = span.start
        open_.append(span)
    advance(max((span.end for span in open_), default=0))
    return kept


def step_profile(
    kernels: Sequence[Span], window: Span, steps: int, data: Sequence[Span], optimizer: Sequence[Span]
) -> StepProfile:
    """Parts of `window`, which holds `steps` steps. kernels: of all streams; where two overlap, time counts for the first.

    data, optimizer: when the host waits for a batch, and when it is in the optimizer, whose kernels it launches then.
    """
    inside = [replace(k, start=max(k.start, window.start), end=min(k.end, window.end)) for k in kernels]
    inside = sorted((k for k in inside if k.start < k.end), key=lambda k: k.start)
    computing = [k for k in inside if kind_of(k.name) != "communication"]
    sending = [k for k in inside if kind_of(k.name) == "communication"]
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    busy_until = window.start
    for kernel in computing:
        part = OPTIMIZER if any(o.start <= kernel.cause < o.end for o in optimizer) else kind_of(kernel.name)
        parts[part] += max(0, kernel.end - max(kernel.start, busy_until))
        busy_until = max(busy_until, kernel.end)
    busy, sent = _union(computing), _union(sending)
    everything = _union([Span("", *interval) for interval in busy + sent])
    parts[EXPOSED] = _length(everything) - _length(busy)
    idle = _gaps(everything, window)
    parts[DATA_WAIT] = sum(_overlap(gap, (wait.start, wait.end)) for gap in idle for wait in data)
    parts[GAPS] = _length(idle) - parts[DATA_WAIT]
    second = 1e9 * steps
    return StepProfile(
        steps,
        seconds=(window.end - window.start) / second,
        parts={name: time / second for name, time in parts.items()},
        hidden=(_length(sent) - parts[EXPOSED]) / second,
    )


def table(profiles: dict[str, StepProfile]) -> list[str]:
    """Lines of a table with a column for each profile, by its name: milliseconds of a step, and its share."""
    width = max(14, *(len(name) + 2 for name in profiles))
    lines = [f"{'milliseconds a step':<24}" + "".join(f"{name:>{width + 7}}" for name in profiles)]
    rows = {part: [profile.parts[part] for profile in profiles.values()] for part in PARTS}
    rows["together"] = steps = [profile.seconds for profile in profiles.values()]
    rows["hidden communication"] = [profile.hidden for profile in profiles.values()]
    for name, row in rows.items():
        if any(row):
            cells = [
                f"{1000 * seconds:>{width}.2f}{seconds / of:>7.1%}" for seconds, of in zip(row, steps, strict=True)
            ]
            lines.append(f"{name:<24}{''.join(cells)}")
    return lines


def _union(spans: Sequence[Span]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _gaps(busy: list[tuple[int, int]], window: Span) -> list[tuple[int, int]]:
    edges = [window.start, *(edge for interval in busy for edge in interval), window.end]
    return [(end, start) for end, start in zip(edges[::2], edges[1::2], strict=True) if end < start]


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in intervals)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
