"""The Triton kernels around the scan through Triton's interpreter on a CPU, and how they are launched.

In a process of their own: Triton reads TRITON_INTERPRET when it is imported. The cases are in interpreted_accumulate.py,
interpreted_conv1d.py, interpreted_documents.py (whole models), interpreted_experts.py, interpreted_float8_cast.py,
interpreted_gated_norm.py, interpreted_glu.py, interpreted_mixer.py, interpreted_norm.py, interpreted_rotary.py,
interpreted_segment_mixer.py, interpreted_weight_only.py and, of `bench tune`, in interpreted_tuning.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from llmtrain.kernels import tuning
from llmtrain.kernels.conv1d import triton as conv1d
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.conv1d.triton_launch import Tile
from llmtrain.kernels.gated_norm import triton as gated_norm
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.gated_norm.triton_launch import Tile as GatedTile
from llmtrain.kernels.mamba_mixer import triton as mixer
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.norm import triton as residual_norm
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary import triton as rotary
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.kernels.row_tiles import fitted
from tests.support import kernels as support
from tests.support.interpreter import run_interpreted
from tests.support.live_bytes import launches, peak_mib


def test_the_interpreted_kernels_agree_with_the_reference():
    parts = ("conv1d", "documents", "experts", "float8_cast", "gated_norm", "glu", "mixer", "norm", "rotary", "tuning")
    parts = (*parts, "segment_mixer", "weight_only")
    run_interpreted("accumulate", *parts)


@pytest.mark.slow
def test_all_of_their_cases():
    run_interpreted("documents", "segment_mixer", cases="slow")


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx90a", "gfx942"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_launches_come_from_the_tables_and_survive_their_dump(arch, dtype):
    here = Platform("amd" if arch.startswith("gfx") else "nvidia", arch, "", 1 << 36, 100)

    def row(kernel: str, **shape: int) -> Any:
        return tuning.select(kernel, dtype, shape, here).launch

    conv = conv1d.default_launch(Conv1dSpec(5376, 3, dtype), here)
    assert (conv.forward, conv.backward) == (row("conv1d.forward", width=3), row("conv1d.backward", width=3))
    norm = gated_norm.default_launch(GatedNormSpec(14336, 2, 1e-5, dtype=dtype), here)
    sizes = {"group_size": 7168}
    assert (norm.forward, norm.backward) == (row("gated_norm.forward", **sizes), row("gated_norm.backward", **sizes))
    residual = residual_norm.default_launch(NormSpec(1600, dtype=dtype), here)
    assert (residual.forward, residual.backward) == (row("norm.forward", dim=1600), row("norm.backward", dim=1600))
    turned = rotary.default_launch(RotarySpec(80, dtype), here)
    assert turned == row("rotary", head_dim=80)
    assert (conv.min_programs, norm.num_sms) == (400, 100)
    for launch in (conv, norm, residual, turned):
        assert launch.parse(launch.dump()) == launch


def test_small_problems_get_short_runs_and_narrow_tiles():
    tile = Tile(256, 4, 64, 4, 4)
    assert conv1d.fitted(tile, 500, 8, 2048, 5376) == tile  # 8 * 8 * 21 programs
    assert conv1d.fitted(tile, 500, 1, 2048, 5376).run_tokens == 16
    assert conv1d.fitted(tile, None, 1, 1, 5376).run_tokens == 4
    few = conv1d.default_launch(Conv1dSpec(40, 4), Platform("nvidia", "sm90", "", 1 << 36))
    assert few.forward.block_channels == few.backward.block_channels == 64
    tile = GatedTile(1024, 4, 32)
    assert fitted(tile, 83, 16384) == tile
    assert fitted(tile, 83, 2048, 2).max_tiles == 9  # 456 programs, as equal as can be
    assert fitted(tile, 83, 1).max_tiles == 1
    assert fitted(replace(tile, max_tiles=512, programs_per_sm=2), 132, 16384).max_tiles == 63  # 261 of the 264 at once
    launch = gated_norm.default_launch(GatedNormSpec(8192, 64, 1e-5), Platform("nvidia", "sm90", "", 1 << 36))
    assert (launch.forward.block_columns, launch.forward.block_rows) == (128, 16)


H200 = Platform("nvidia", "sm90", "", 1 << 36, 132)
ZAMBA = support.mixer_spec(80, 64, 128, dtype=torch.bfloat16)


def whole_mixer(spec: MambaMixerSpec, seq_len: int, keep: mixer.Keep = "all") -> Callable[[], Any]:
    """Forward and backward of 16,384 tokens, as launched on an H200, of tensors without memory."""
    token, *rest = support.mixer_inputs(spec, 1, 1, device="meta")[:7]
    tensors = [token.new_empty(16384 // seq_len, seq_len, token.shape[2]), *rest]
    options = replace(mixer.default_launch(spec, H200), keep=keep).dump()

    def run() -> Any:
        given: list[Any] = [*tensors, None, None, 1, None, None, 1, 1e-5, False, options]
        out, *kept = mixer.launch_forward(*given)
        given = [out, *tensors, None, None, *kept, 1, None, None, False, options]
        return out, mixer.launch_backward(*given)

    return run


PEAKS = {
    (80, 64, 128): (1341, {"all": 1336, "scan": 1328, "nothing": 1168}),
    (80, 64, 64): (1176, {"all": 1164, "scan": 1160, "nothing": 1000}),
    (64, 64, 128): (1078, {"all": 1075, "scan": 1067, "nothing": 939}),
}
"""Of a mixer, in MiB, by heads, head_dim and d_state: of the public kernels, the least on an H200; and by what is kept. As in
docs/kernels.md."""


@pytest.mark.parametrize("seq_len", [2048, 4096, 8192])
@pytest.mark.parametrize("keep", get_args(mixer.Keep))
@pytest.mark.parametrize("shape", PEAKS)
def test_a_mixers_forward_and_backward_take_no_more_memory_than_public_kernels(shape, keep, seq_len):
    public, ours = PEAKS[shape]
    found = round(peak_mib(whole_mixer(support.mixer_spec(*shape, dtype=torch.bfloat16), seq_len, keep)))
    assert found == ours[keep]
    assert found <= public


def test_a_mixer_launches_what_it_needs():
    """And nothing of PyTorch's: no fill, no cast, no copy."""
    run = whole_mixer(ZAMBA, 2048)
    with launches() as found:
        run()
    assert found == [
        *("conv1d._forward", "ssd._chunk_cumsum_fwd", "ssd._sequential_chunk_scan", "gated_norm._forward"),
        *("gated_norm._backward", "reduce_partials._reduce_partials"),
        *(
            "ssd._chunk_cumsum_fwd",
            "ssd._scale_to_fp16",
            "ssd._state_passing",
            "ssd._intra_chunk_bwd",
            "ssd._intra_chunk_halves_bwd",
        ),
        *(
            "ssd._inter_chunk_bwd",
            "ssd._inter_chunk_bwd",
            "ssd._chunk_cumsum_bwd",
            "conv1d._backward",
            *["reduce_partials._reduce_partials"] * 2,
        ),
    ]
