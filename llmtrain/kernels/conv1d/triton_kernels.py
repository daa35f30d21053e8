"""The causal depthwise convolution with SiLU in Triton, forward and backward, and the launches of both.

A program has a tile of channels and several runs of tokens side by side. It loops over each run from the last token to the
first, `step_tokens` at a time, and keeps in registers what the next step needs: the tokens before a step are read for its taps
and are the next step. So every element is read once, except for one step at either end of a run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.conv1d.triton_launch import Tile
from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.reduce_partials import reduce_partials
from llmtrain.kernels.sigmoid import sigmoid


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None, tile: Tile, y: Tensor | None = None
) -> Tensor:
    """y like x, contiguous, or put into y, if given, whose channels lie side by side. document_ids: int32, contiguous;
    weight: contiguous.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if y is None else y
    assert y.stride(2) == 1 and x.shape[1] * y.stride(1) < 1 << 31
    _forward[_grid(x, tile)](
        *(x, weight, bias, document_ids, y, x.shape[1], x.shape[2], *x.stride()[:2], *y.stride()[:2]),
        **_constants(weight, tile),
    )
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None, tile: Tile,
    dx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of x (written into dx, if given, whose channels are contiguous), and partial sums of the gradients of the
    weight and then, if there is one, the bias: [programs, columns] in fp32.
    """
    _, seq_len, channels = x.shape
    width = weight.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
    assert dx.stride(2) == 1 and seq_len * dx.stride(1) < 1 << 31
    strides = (s for t in (dy, x, dx) for s in t.stride()[:2])
    grid = _grid(x, tile)
    # Per program and channel: the gradient of every tap, and then of the bias.
    columns = channels * (width + (bias is not None))
    partials = torch.empty((grid[1] * grid[2], columns), dtype=torch.float32, device=x.device)
    _backward[grid](
        *(dy, x, weight, bias, document_ids, dx, partials, seq_len, channels, *strides), **_constants(weight, tile)
    )
    return dx, partials


def parameter_gradients(partials: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of the weight, and of the bias (empty where there is none), from the partial sums, [any number, columns]."""
    d_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    d_bias = weight.new_empty(0) if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    reduce_partials(partials, d_weight, None if bias is None else d_bias)
    return d_weight, d_bias


def _grid(x: Tensor, tile: Tile) -> tuple[int, int, int]:
    batch, seq_len, channels = x.shape
    return cdiv(channels, tile.block_channels), cdiv(seq_len, tile.parallel_runs * tile.run_tokens), batch


def _constants(weight: Tensor, tile: Tile) -> dict[str, int]:
    assert tile.step_tokens >= weight.shape[1] - 1, "a step is shorter than the taps reach back"
    return {
        "WIDTH": weight.shape[1],
        "BLOCK_CHANNELS": tile.block_channels,
        "PARALLEL_RUNS": tile.parallel_runs,
        "RUN_TOKENS": tile.run_tokens,
        "STEP_TOKENS": tile.step_tokens,
        "NUM_STAGES": tile.num_stages,
        "PREFETCH": tile.prefetch,
        "num_warps": tile.num_warps,
    }


@triton.jit
def _load_step(base, t, token_stride, seq_len, valid, STEP_TOKENS: tl.constexpr):
    """The tokens t, t + 1, ... of every run, each [runs, channels]; zeros outside the sequence."""
    found = ()
    for j in tl.static_range(STEP_TOKENS):
        inside = ((t + j >= 0) & (t + j < seq_len))[:, None] & valid
        found = found + (tl.load(base + (t + j)[:, None] * token_stride, mask=inside, other=0.0),)
    return found


@triton.jit
def _in_fp32(group):
    """The same in fp32, converted once: a step's tokens are used in two iterations of the loop."""
    found = ()
    for j in tl.static_range(len(group)):
        found = found + (group[j].to(tl.float32),)
    return found


@triton.jit
def _load_weights(weight, bias, channel, channels, WIDTH: tl.constexpr):
    """Weights, ordered by the distance they reach back, and the bias, each [1, channels] in fp32."""
    valid = channel < channels
    found = ()
    for k in tl.static_range(WIDTH):
        found = found + (
            tl.load(weight + channel * WIDTH + (WIDTH - 1 - k), mask=valid, other=0.0).to(tl.float32)[None, :],
        )
    bias_row = tl.zeros_like(found[0])
    if bias is not None:
        bias_row = tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)[None, :]
    return found, bias_row


@triton.jit
def _taps_in_document(ids, t, seq_len, WIDTH: tl.constexpr):
    """Number of tokens before t in its document, at most width - 1. Not used without documents."""
    taps = t
    if ids is not None:
        taps = tl.zeros_like(t)
        joined = t >= 0
        for k in tl.static_range(1, WIDTH):
            known = (t - k >= 0) & (t - k + 1 < seq_len)
            this, last = tl.load(ids + (t - k + 1), mask=known, other=0), tl.load(ids + (t - k), mask=known, other=0)
            joined = joined & known & (this == last)
            taps += joined.to(tl.int32)
    return taps


@triton.jit
def _taps_in_documents(ids, t, seq_len, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """_taps_in_document of the tokens t, t + 1, ..."""
    found = ()
    for j in tl.static_range(COUNT):
        found = found + (_taps_in_document(ids, t + j, seq_len, WIDTH),)
    return found


@triton.jit
def _mask_document(value, taps, distance: tl.constexpr, ids):
    """The value, or zero where it is further away than the document reaches."""
    if ids is not None and distance > 0:
        value = tl.where((taps >= distance)[:, None], value, 0.0)
    return value


@jit
def _forward(
    x, weight, bias, ids, y, seq_len, channels, x_row, x_token, y_row, y_token, WIDTH: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, PARALLEL_RUNS: tl.constexpr, RUN_TOKENS: tl.constexpr, STEP_TOKENS: tl.constexpr,
    NUM_STAGES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Program (tile of channels, block of tokens, row of the batch)."""
    channel, row = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS), tl.program_id(2).to(tl.int64)
    end = (tl.program_id(1) * PARALLEL_RUNS + tl.arange(0, PARALLEL_RUNS) + 1) * RUN_TOKENS
    valid = (channel < channels)[None, :]
    weights, bias_row = _load_weights(weight, bias, channel, channels, WIDTH)
    x += row * x_row + channel[None, :]
    y += row * y_row + channel[None, :]
    if ids is not None:
        ids += row * seq_len

    now = _in_fp32(_load_step(x, end - STEP_TOKENS, x_token, seq_len, valid, STEP_TOKENS))
    if PREFETCH:
        prefetched = _load_step(x, end - 2 * STEP_TOKENS, x_token, seq_len, valid, STEP_TOKENS)
    for i in tl.range(0, RUN_TOKENS // STEP_TOKENS, num_stages=NUM_STAGES):
        t = end - STEP_TOKENS * (i + 1)
        if PREFETCH:
            before = _in_fp32(prefetched)
            more = valid & (i + 1 < RUN_TOKENS // STEP_TOKENS)
            prefetched = _load_step(x, t - 2 * STEP_TOKENS, x_token, seq_len, more, STEP_TOKENS)
        else:
            before = _in_fp32(_load_step(x, t - STEP_TOKENS, x_token, seq_len, valid, STEP_TOKENS))
        window = before + now
        for j in tl.static_range(STEP_TOKENS):
            taps = _taps_in_document(ids, t + j, seq_len, WIDTH)
            total = bias_row
            for k in tl.static_range(WIDTH):
                total += weights[k] * _mask_document(window[STEP_TOKENS + j - k], taps, k, ids)
            silu = total * sigmoid(total)
            inside = (t + j < seq_len)[:, None] & valid
            tl.store(y + (t + j)[:, None] * y_token, silu.to(y.dtype.element_ty), mask=inside)
        now = before


@jit
def _backward(
    dy, x, weight, bias, ids, dx, partials, seq_len, channels, dy_row, dy_token, x_row, x_token, dx_row, dx_token,
    WIDTH: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, PARALLEL_RUNS: tl.constexpr, RUN_TOKENS: tl.constexpr,
    STEP_TOKENS: tl.constexpr, NUM_STAGES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Program (tile of channels, block of tokens, row of the batch). u: before SiLU."""
    block, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    end = (block * PARALLEL_RUNS + tl.arange(0, PARALLEL_RUNS) + 1) * RUN_TOKENS
    valid = (channel < channels)[None, :]
    weights, bias_row = _load_weights(weight, bias, channel, channels, WIDTH)
    x += row * x_row + channel[None, :]
    dy += row * dy_row + channel[None, :]
    dx += row * dx_row + channel[None, :]
    if ids is not None:
        ids += row * seq_len

    now = _in_fp32(_load_step(x, end - STEP_TOKENS, x_token, seq_len, valid, STEP_TOKENS))
    later = _after(dy, x, now, weights, bias_row, ids, end, seq_len, dy_token, x_token, valid, WIDTH, STEP_TOKENS)
    sums = (tl.zeros((PARALLEL_RUNS, BLOCK_CHANNELS), tl.float32),) * (WIDTH + 1)
    if PREFETCH:
        next_dy = _load_step(dy, end - STEP_TOKENS, dy_token, seq_len, valid, STEP_TOKENS)
        next_x = _load_step(x, end - 2 * STEP_TOKENS, x_token, seq_len, valid, STEP_TOKENS)
    for i in tl.range(0, RUN_TOKENS // STEP_TOKENS, num_stages=NUM_STAGES):
        t = end - STEP_TOKENS * (i + 1)
        if PREFETCH:
            upstream, before = next_dy, _in_fp32(next_x)
            more = valid & (i + 1 < RUN_TOKENS // STEP_TOKENS)
            next_dy = _load_step(dy, t - STEP_TOKENS, dy_token, seq_len, more, STEP_TOKENS)
            next_x = _load_step(x, t - 2 * STEP_TOKENS, x_token, seq_len, more, STEP_TOKENS)
        else:
            upstream = _load_step(dy, t, dy_token, seq_len, valid, STEP_TOKENS)
            before = _in_fp32(_load_step(x, t - STEP_TOKENS, x_token, seq_len, valid, STEP_TOKENS))
        window = before + now
        reaches = _taps_in_documents(ids, t, seq_len, STEP_TOKENS + WIDTH - 1, WIDTH)
        du = ()
        for j in tl.static_range(STEP_TOKENS):
            du = du + (
                _d_preactivation(upstream[j], window, STEP_TOKENS + j, weights, bias_row, reaches[j], ids, WIDTH),
            )

        added = ()
        for k in tl.static_range(WIDTH):
            found = sums[k]
            for j in tl.static_range(STEP_TOKENS):
                found += du[j] * _mask_document(window[STEP_TOKENS + j - k], reaches[j], k, ids)
            added = added + (found,)
        total = sums[WIDTH]
        for j in tl.static_range(STEP_TOKENS):
            total += du[j]
        sums = added + (total,)

        onward = du + later
        for j in tl.static_range(STEP_TOKENS):
            found = weights[0] * onward[j]
            for k in tl.static_range(1, WIDTH):
                found += weights[k] * _mask_document(onward[j + k], reaches[j + k], k, ids)
            inside = (t + j < seq_len)[:, None] & valid
            tl.store(dx + (t + j)[:, None] * dx_token, found.to(dx.dtype.element_ty), mask=inside)
        now = before
        later = onward[: WIDTH - 1]

    columns = channels * WIDTH
    if bias is not None:
        columns += channels
    partials += (row * tl.num_programs(1) + block) * columns
    for k in tl.static_range(WIDTH):
        tl.store(partials + channel * WIDTH + (WIDTH - 1 - k), tl.sum(sums[k], 0), mask=channel < channels)
    if bias is not None:
        tl.store(partials + channels * WIDTH + channel, tl.sum(sums[WIDTH], 0), mask=channel < channels)


@triton.jit
def _after(
    dy, x, now, weights, bias_row, ids, end, seq_len, dy_token, x_token, valid, WIDTH: tl.constexpr,
    STEP_TOKENS: tl.constexpr,
):  # fmt: skip
    """du of the tokens after a run that reach back into it. now: the run's last group."""
    tokens = now + _in_fp32(_load_step(x, end, x_token, seq_len, valid, WIDTH - 1))
    upstream = _load_step(dy, end, dy_token, seq_len, valid, WIDTH - 1)
    reaches = _taps_in_documents(ids, end, seq_len, WIDTH - 1, WIDTH)
    found = ()
    for j in tl.static_range(WIDTH - 1):
        found = found + (
            _d_preactivation(upstream[j], tokens, STEP_TOKENS + j, weights, bias_row, reaches[j], ids, WIDTH),
        )
    return found


@triton.jit
def _d_preactivation(upstream, tokens, at: tl.constexpr, weights, bias_row, taps, ids, WIDTH: tl.constexpr):
    """dy SiLU'(u) of the token at place `at` of those at hand."""
    total = bias_row
    for k in tl.static_range(WIDTH):
        total += weights[k] * _mask_document(tokens[at - k], taps, k, ids)
    gate = sigmoid(total)
    silu = total * gate
    return upstream.to(tl.float32) * (gate + (silu - silu * gate))
