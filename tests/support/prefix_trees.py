"""Packed requests that share prefixes, for the kernels of the convolution and the scan; expected results, request by request."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.kernels.conv1d.reference import causal_conv1d_silu
from llmtrain.kernels.ssd.reference import ReferenceSSD
from llmtrain.kernels.ssd.spec import SSDSpec


@dataclass(frozen=True)
class Shape:
    """lengths, above: as of kernels.attention.tree.tree."""

    lengths: list[int]
    ancestors: list[tuple[int, ...]]


def prompts(seed: int, longest: int, *, documents: int = 4, choices: int = 4) -> Shape:
    """Few-shot prompts, some with questions behind them and short or long answers behind those, and texts alone."""
    rng = random.Random(seed)
    made = Shape([], [])

    def add(longest: int, ancestors: tuple[int, ...] = ()) -> tuple[int, ...]:
        made.lengths.append(rng.randint(1, longest))
        made.ancestors.append(ancestors)
        return (*ancestors, len(made.lengths) - 1)

    for shots in (False, True):
        trunk = add(longest) if shots else ()
        questions = [add(longest, trunk) for _ in range(documents)]
        for question in questions:
            for _ in range(rng.randint(0, choices)):
                add(longest if rng.random() < 0.1 else 8, question)
        for _ in range(3):
            add(8, trunk)
    return made


def crowd(tails: int, length: int) -> Shape:
    """One segment, and more behind it than one program takes."""
    return Shape([5, *[length] * tails], [(), *[(0,)] * tails])


def one_by_one(shape: Shape, work: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """work: of the tokens of one text, in order -> [tokens, ...]. Returns what it says of each, [T, ...] like `like`."""
    ends = torch.tensor(shape.lengths).cumsum(0).tolist()
    spans = [torch.arange(end - length, end) for end, length in zip(ends, shape.lengths, strict=True)]
    found = torch.full_like(like, float("nan"))
    for segment, ancestors in enumerate(shape.ancestors):
        text = torch.cat([spans[one] for one in (*ancestors, segment)])
        found[spans[segment]] = work(text)[-shape.lengths[segment] :]
    assert not found.isnan().any()
    return found


def scan_inputs(spec: SSDSpec, tokens: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """x, B and C lie side by side, as behind the convolution."""
    rng = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=rng)).to(device)

    inner, shared = spec.n_heads * spec.head_dim, spec.n_groups * spec.d_state
    x, B, C = normal(1, tokens, inner + 2 * shared).to(dtype).split([inner, shared, shared], dim=-1)
    B, C = (t.unflatten(-1, (spec.n_groups, spec.d_state)) for t in (B, C))
    dt = normal(1, tokens, spec.n_heads + 3).to(dtype)[..., 3:]
    A, bias = -torch.exp(normal(spec.n_heads)), normal(spec.n_heads, scale=0.5) - 2
    x = x.unflatten(-1, (spec.n_heads, spec.head_dim))
    return {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": normal(spec.n_heads), "dt_bias": bias}


def expected_scan(spec: SSDSpec, shape: Shape, inputs: dict[str, Tensor]) -> Tensor:
    """The scan in fp64, [T, heads, head_dim]."""
    wide = {name: t.double().cpu() for name, t in inputs.items()}
    scan = ReferenceSSD(spec)

    def of(text: Tensor) -> Tensor:
        tokens = {name: t[:, text] if t.ndim > 1 else t for name, t in wide.items()}
        return scan(*tokens.values())[0][0]

    return one_by_one(shape, of, wide["x"][0])


def expected_convolution(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [1, T, channels]; in fp64. [T, channels]."""
    x, weight, bias = x.double().cpu(), weight.double().cpu(), None if bias is None else bias.double().cpu()
    return one_by_one(shape, lambda text: causal_conv1d_silu(x[:, text], weight, bias)[0], x[0])
