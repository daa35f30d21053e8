"""Schedule of Mamba-2's scan over packed requests that share prefixes: a shared prefix is in the sequence, and is scanned, once.

A segment is a run of tokens that continues earlier segments (kernels/attention/prefix_tree.py). A program scans a segment in
chunks with the state in registers. Short segments without continuations (the choices after a question) follow the segment that
they continue: as many of them as fit make one more chunk of that program, in which each depends on itself and the state alone.
Other continuations of a segment start from its state in memory, in a later launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmtrain.kernels.async_copy import copy_async

MAX_SHORT_CHUNKS = 4
"""Most chunks of short segments per program."""


@dataclass(frozen=True)
class ScanSchedule:
    """Work of the programs, all in int32.

    rounds: one tensor [programs, 5] per launch, which needs states of earlier launches only. Columns: the first of `steps` and
        their end; the number of these steps that update the state (the others are of short segments); the slot of the state
        it starts from, and of the one it stores (-1: none).
    steps: [n, 2], first token and end of each chunk.
    segment_start: [n, chunk], for each token of a step the position in the step at which its segment begins (0 if earlier).
    state_slots: number of states kept in memory.
    """

    rounds: list[Tensor]
    steps: Tensor
    segment_start: Tensor
    state_slots: int

    def to(self, device: torch.device) -> ScanSchedule:
        rounds = [copy_async(programs, device) for programs in self.rounds]
        return ScanSchedule(
            rounds, copy_async(self.steps, device), copy_async(self.segment_start, device), self.state_slots
        )


def scan_schedule(lengths: Sequence[int], ancestors: Sequence[Sequence[int]], chunk: int) -> ScanSchedule:
    """The schedule, on the CPU. lengths: tokens of each segment, in order; ancestors: the earlier segments that it continues, the
    outermost first; chunk: most tokens of a step.
    """
    made = _Scheduler(lengths, ancestors, chunk)
    # The longest first, so that the GPU does not wait for them at the end.
    rounds = [_table(sorted(programs, key=lambda row: row[0] - row[1])) for programs in made.rounds if programs]
    steps = _table(made.steps)
    token = steps[:, :1] + np.arange(chunk, dtype=np.int32)
    start = np.repeat(np.array(made.starts, dtype=np.int32), lengths)
    segment_start = np.maximum(start[np.minimum(token, len(start) - 1)] - steps[:, :1], 0)
    return ScanSchedule(
        [torch.from_numpy(table) for table in rounds],
        torch.from_numpy(steps),
        torch.from_numpy(segment_start),
        made.state_slots,
    )


class _Scheduler:
    def __init__(self, lengths: Sequence[int], ancestors: Sequence[Sequence[int]], chunk: int):
        self.chunk = chunk
        self.ends = np.cumsum(lengths).tolist()
        self.starts = [end - length for end, length in zip(self.ends, lengths, strict=True)]
        self.steps: list[tuple[int, int]] = []
        self.rounds: list[list[tuple[int, ...]]] = [[] for _ in range(2 + max(map(len, ancestors), default=0))]
        self.state_slots = 0
        behind: list[list[int]] = [[] for _ in lengths]
        roots: list[int] = []
        for segment, chain in enumerate(ancestors):
            (behind[chain[-1]] if chain else roots).append(segment)
        short = [not after and length <= chunk for after, length in zip(behind, lengths, strict=True)]
        self._add_beside(0, self._beside([one for one in roots if short[one]]), -1)
        place = [-1] * len(lengths)
        for segment, chain in enumerate(ancestors):
            if short[segment]:
                continue
            beside = self._beside([one for one in behind[segment] if short[one]])
            if len(beside) > MAX_SHORT_CHUNKS or not all(short[one] for one in behind[segment]):
                place[segment], self.state_slots = self.state_slots, self.state_slots + 1
            own = range(self.starts[segment], self.ends[segment], chunk)
            steps = [(first, min(first + chunk, self.ends[segment])) for first in own]
            here = beside if len(beside) <= MAX_SHORT_CHUNKS else []
            begin = place[chain[-1]] if chain else -1
            self._add(len(chain), [*steps, *here], len(steps), begin, place[segment])
            if not here:
                self._add_beside(len(chain) + 1, beside, place[segment])

    def _beside(self, segments: Sequence[int]) -> list[tuple[int, int]]:
        """Adjacent short segments grouped into chunks: (first token, end)."""
        found: list[tuple[int, int]] = []
        for one in segments:
            first, end = found[-1] if found else (0, -1)
            if end == self.starts[one] and self.ends[one] - first <= self.chunk:
                found[-1] = (first, self.ends[one])
            else:
                found.append((self.starts[one], self.ends[one]))
        return found

    def _add_beside(self, turn: int, beside: Sequence[tuple[int, int]], begin: int) -> None:
        for at in range(0, len(beside), MAX_SHORT_CHUNKS):
            self._add(turn, beside[at : at + MAX_SHORT_CHUNKS], 0, begin, -1)

    def _add(self, turn: int, steps: Sequence[tuple[int, int]], carried: int, begin: int, after: int) -> None:
        first = len(self.steps)
        self.steps += steps
        self.rounds[turn].append((first, len(self.steps), carried, begin, after))


def _table(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)
