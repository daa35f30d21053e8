"""Nodes whose measurements choose different kernels are refused before training."""

from pathlib import Path

import pytest
import torch.distributed as dist

from llmtrain.distributed.world import World
from llmtrain.kernels.attention import measured
from llmtrain.kernels.attention.measured import Row
from llmtrain.kernels.platform import Platform
from llmtrain.models.backends import chosen
from llmtrain.schema.load import load_config
from llmtrain.train.build import require_same_kernels
from tests.support.ranks import RankFailed

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)


def ask(folders: list[Path], local_size: int = 1) -> None:
    """A job: each rank is a node with measurements of its own."""
    rank = dist.get_rank()
    measured.own_file = lambda arch: folders[rank] / f"{arch}.attention.csv"
    require_same_kernels(chosen(load_config("llama3-8b").model, H200, "bfloat16"), World(rank, 2, 0, local_size))


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    """One in which FlashAttention-2 is the fastest, and an empty one."""
    row = Row(
        dtype="bfloat16", n_heads=32, n_kv_heads=8, head_dim=128, alibi=False, softcap=False, documents=False, window=None,
        seq_len=8192, backend="sdpa:flash", forward_ms=0.1, backward_ms=0.1, device="H200", date="2026-11-24", commit="abc",
    )  # fmt: skip
    found = [tmp_path / "one", tmp_path / "other"]
    measured.save(found[0] / "sm90.attention.csv", [row])
    return found


def test_nodes_with_the_same_measurements_train(ranks, folders):
    ranks(2).run(ask, [folders[0]] * 2)


def test_nodes_with_other_measurements_are_reported_on_every_rank(ranks, folders):
    with pytest.raises(RankFailed) as error:
        ranks(2).run(ask, folders)
    told = "block attn: attention would run by sdpa:flash on rank 0 and by sdpa:cudnn on rank 1"
    assert str(error.value).count(told) == 2
    assert "copy ~/.config/llmtrain/tuning to all of them" in str(error.value)


def test_ranks_of_one_node_are_not_asked(ranks, folders):
    ranks(2).run(ask, folders, 2)
