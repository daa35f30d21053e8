"""What a user reads when a GPU's memory is not enough."""

from pathlib import Path

import pytest
import torch

from llmtrain.errors import RunError
from llmtrain.schema.load import load_config
from llmtrain.train import worker
from llmtrain.train.faults import out_of_memory
from llmtrain.train.graphs import cuda_graphs

LLAMA = Path(__file__).parents[4] / "yamls" / "pretrain" / "llama3-1b.yaml"
FOUND = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.38 GiB of which 1.38 GiB is free. "
    "Including non-PyTorch memory, this process has 37.99 GiB memory in use."
)


def explained(*overrides: str, gibibytes: float = 39.38, ranks: int = 1, graphs: int = 0) -> str:
    config, error = load_config(LLAMA, overrides), torch.OutOfMemoryError(FOUND)
    return out_of_memory.explain(error, config, ranks, int(gibibytes * 2**30), graphs=graphs)


def test_it_names_what_was_asked_what_takes_the_memory_and_what_would_fit():
    text = explained("train.microbatch_size=4", "train.global_batch_size=64")
    assert text.startswith("CUDA out of memory. Tried to allocate 2.00 GiB: the GPU has 39.38 GiB")
    for part in ("weights", "gradients", "optimizer", "activations", "loss", "together"):
        assert part in text
    assert "Settings that would fit" in text and "train.activation_checkpointing.type=full" in text


def test_it_names_the_moving_average_where_there_is_one():
    assert "average" not in explained() and "average" in explained("train.ema={}")


def test_it_explains_how_to_get_back_what_cuda_graphs_hold():
    assert "cuda_graphs" not in explained()
    text = explained(graphs=3 * 2**30)
    assert "CUDA graphs hold 3.000 GiB" in text and "train.cuda_graphs=off" in text


def test_memory_of_graphs_is_that_of_other_pools_than_the_common_one(monkeypatch):
    segments = [{"total_size": size, "segment_pool_id": pool} for size, pool in ((5, (0, 0)), (7, (0, 1)), (2, (1, 0)))]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert cuda_graphs.graph_memory() == 9


def test_where_the_estimate_states_that_it_fits_less_is_asked_for_all_the_same():
    text = explained("train.microbatch_size=4", "train.global_batch_size=64", gibibytes=400)
    assert "the estimate is too low here" in text and "train.microbatch_size=2" in text


def test_where_no_setting_is_enough_it_explains_how_many_gpus_are():
    text = explained("train.microbatch_size=1", "train.global_batch_size=64", gibibytes=16)
    assert "makes it fit on 1 GPU(s).\n2 GPUs would be enough, with train" in text


def test_a_run_ends_with_it(monkeypatch):
    from llmtrain.train import run

    def train(*args):
        raise torch.OutOfMemoryError(FOUND)

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**34))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    with pytest.raises(RunError, match="2 GPUs would be enough, with train"):
        worker._train(load_config(LLAMA), None, "llama.yaml", [])
