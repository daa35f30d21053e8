"""Times of an attention backend at shapes that nobody measured, from those that were: a Gaussian process over the logarithm of its
seconds per floating-point operation (Rasmussen and Williams, 2006, equation 2.25), with a linear and a squared-exponential
covariance. No torch here.

Its error at shapes outside the fit, drawn ones and each tenth of the shipped cells, is stated by
tests/unit/kernels/test_attention_cost_model.py.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmtrain.kernels.attention.cells import Cell, Row

TOKENS = 16384
"""Tokens of a batch at which cells are measured; one sequence where they are longer."""
_TILE = 128
_NOISE = 0.05
"""Standard deviation of one measurement, in octaves."""
_CONSTANT, _LINEAR, _SMOOTH, _REACH = 1.0, 0.1, 0.3, 3.0
"""Variances of the three covariances in octaves, and the distance over which times are alike."""


def _width(backend: str, head_dim: int) -> int:
    """Width of the tiles that a backend covers a head with: ours with powers of two from 16 on, Flex with one power of two,
    FlashAttention with multiples of 32, others with multiples of 16."""
    if backend == "flex":
        return 1 << (head_dim - 1).bit_length()
    unit = 32 if backend in ("sdpa:flash", "varlen", "flash_attn") else 16
    return -(-head_dim // unit) * unit


def _work(backend: str, cell: Cell) -> float:
    """Multiplications of a batch, up to a constant factor; documents are not counted, as their number is not known."""
    length, reach = -(-cell.seq_len // _TILE) * _TILE, min(cell.window or cell.seq_len, cell.seq_len)
    pairs = length * reach - reach * (reach - 1) / 2
    return max(1, TOKENS // cell.seq_len) * cell.n_heads * pairs * _width(backend, cell.head_dim)


def _features(backend: str, cell: Cell) -> list[float]:
    width, reach = _width(backend, cell.head_dim), min(cell.window or cell.seq_len, cell.seq_len)
    sequences = max(1, TOKENS // cell.seq_len)
    return [
        math.log2(cell.seq_len) / 2,
        math.log2(reach) / 2,
        math.log2(cell.n_heads * sequences) / 2,
        math.log2(cell.group) / 2,
        2 * math.log2(width),
        math.log2(1 << (width - 1).bit_length()),
        width.bit_count(),
        cell.seq_len % _TILE > 0,
        *(3 * has for has in (cell.alibi, cell.softcap, cell.documents, cell.window is not None)),
    ]


class CostModel:
    """Times of one backend on one architecture. rows: at least one."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.backend = rows[0].backend
        self.measured = {replace(row.cell, dtype=rows[0].dtype): row for row in rows}
        points = np.array([_features(self.backend, row) for row in rows], dtype=np.float64)
        octaves = np.array([math.log2(row.ms / _work(self.backend, row)) for row in rows])
        self.center, self.mean = points.mean(0), octaves.mean()
        self.points = points - self.center
        covariance = self._covariance(self.points) + _NOISE**2 * np.eye(len(rows))
        self.weights = np.linalg.solve(covariance, octaves - self.mean)

    def _covariance(self, at: np.ndarray) -> np.ndarray:
        """[len(at), len(points)]."""
        squares = ((at[:, None] - self.points) ** 2).sum(-1)
        return _CONSTANT + _LINEAR * (at @ self.points.T) + _SMOOTH * np.exp(-squares / (2 * _REACH**2))

    def applies(self, cell: Cell) -> bool:
        """True if head_dim lies between measured ones, and features were measured, together or, of several, each alone."""
        sets, features = {row.features for row in self.rows}, cell.features
        each = len(features) > 1 and all(frozenset({name}) in sets for name in features)
        widths = [row.head_dim for row in self.rows]
        return (features in sets or each) and min(widths) <= cell.head_dim <= max(widths)

    def time(self, cell: Cell) -> tuple[float, Row, bool]:
        """(milliseconds of forward and backward of a batch of TOKENS, the most similar row, whether the time is predicted)."""
        if (row := self.measured.get(replace(cell, dtype=self.rows[0].dtype))) is not None:
            return row.ms, row, False
        at = np.array([_features(self.backend, cell)]) - self.center
        nearest = self.rows[int(((at - self.points) ** 2).sum(-1).argmin())]
        [octaves] = self.mean + self._covariance(at) @ self.weights
        return round(_work(self.backend, cell) * 2.0 ** float(octaves), 6), nearest, True
