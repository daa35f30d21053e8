"""The geometry of sequences that ranks share, without ranks."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import platform
from llmtrain.kernels.ssd.reference import ReferenceSSD
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.models import segments as module
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.mixers.mamba2_segments import running_sum
from llmtrain.models.segments import ContextParallelRanks


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_ranks_hold_every_token_once_and_equal_shares_of_causal_attention(size):
    ranks = [ContextParallelRanks(rank, size) for rank in range(size)]
    length = 4 * ranks[0].count
    held = [segments.positions(length, torch.device("cpu")) for segments in ranks]
    assert torch.cat(held).sort().values.tolist() == list(range(length))
    keys_seen = [int((positions + 1).sum()) for positions in held]
    assert len(set(keys_seen)) == 1


def test_folded_segments_are_rows_of_a_batch():
    segments, local = ContextParallelRanks(0, 2), torch.arange(24).reshape(2, 6, 2)
    folded = segments.fold(local)
    assert folded.shape == (4, 3, 2) and folded.data_ptr() == local.data_ptr()  # a view
    assert torch.equal(folded[1], local[0, 3:]) and torch.equal(segments.unfold(folded), local)


@pytest.mark.parametrize("reach", [0, 1, 2, 3, 5, 100])
def test_what_comes_before_a_segment_is_the_sequence(reach):
    """A group of three ranks in one process: the all-gather is given what each of them would send."""
    whole = torch.arange(2 * 12).reshape(2, 12).double()
    ranks = [ContextParallelRanks(rank, 3) for rank in range(3)]

    def ends(segments: ContextParallelRanks, n: int) -> Tensor:
        return segments.take(whole).unflatten(1, (2, -1))[:, :, -n:]

    for segments in ranks:
        with patch.object(module, "all_gather_tensor_autograd") as gather:
            gather.side_effect = lambda own, dim, group: torch.cat([ends(one, own.shape[2]) for one in ranks])
            found = segments.with_before(segments.take(whole), reach)
        assert gather.called == (reach > 0)
        for at, part in zip(segments.own, found, strict=True):
            assert torch.equal(part, whole[:, max(2 * at - reach, 0) : 2 * at + 2])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_neighbours_are_found_among_what_all_ranks_hold(size):
    count = 2 * size
    for segments in (ContextParallelRanks(rank, size) for rank in range(size)):
        assert sorted(segments.slots) == list(range(count))
        assert segments.slots[segments.own_slots] == list(segments.own)
        of_slots = 1 + torch.tensor([segments.slots, segments.slots])  # place + 1, of two sequences
        assert segments.from_before(of_slots).tolist() == list(segments.own) * 2
        assert segments.from_behind(of_slots).tolist() == [(at + 2) % (count + 1) for at in segments.own] * 2


@pytest.mark.parametrize("n", [1, 127, 128, 129, 400])
def test_running_sums_are_cumulative(n):
    t = torch.randn(2, n, 3, dtype=torch.float64)
    torch.testing.assert_close(running_sum(t), t.cumsum(1))


def test_the_last_state_of_a_scan_has_a_gradient_in_the_reference():
    """What the scan over segments needs of a backend."""
    spec = SSDSpec(n_heads=2, head_dim=4, d_state=3, n_groups=1, chunk_size=4)
    x, dt = torch.randn(1, 6, 2, 4, requires_grad=True), torch.randn(1, 6, 2)
    B, C = (torch.randn(1, 6, 1, 3) for _ in "BC")
    _, last = ReferenceSSD(spec)(x, dt, -torch.ones(2), B, C, torch.ones(2), torch.zeros(2))
    last.sum().backward()
    assert x.grad is not None and float(x.grad.abs().min()) > 0


@torch.no_grad()
def test_a_model_that_shares_sequences_still_reads_whole_ones_and_decodes():
    """In-context evaluation and the sample at a run's end."""
    block = {"type": "gated_deltanet", "n_heads": 4, "n_key_heads": 2, "key_head_dim": 6, "value_head_dim": 10}
    settings = {"vocab_size": 50, "d_model": 16, "blocks": {"g": block}, "layers": "g*2"}
    hybrid = HybridLM(ModelConfig.model_validate(settings), platform.cpu())
    hybrid.init_weights(1)
    model = CausalLM(hybrid).eval()
    ids = torch.randint(50, (2, 23))
    before = model.logits(ids)
    hybrid.enable_segments()
    assert torch.equal(model.logits(ids), before)
    cache = model.empty_cache(2, 23)
    model.fill(ids[:, :9], cache)
    steps = [model.next_logits(ids[:, t : t + 1], cache) for t in range(9, 23)]
    torch.testing.assert_close(torch.stack(steps, dim=1), before[:, 9:], atol=1e-5, rtol=1e-4)
