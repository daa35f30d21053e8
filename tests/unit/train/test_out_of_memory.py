"""What a user reads when a GPU's memory is not enough."""

from pathlib import Path

import pytest
import torch

from llmtrain.errors import RunError
from llmtrain.schema.load import load_config
from llmtrain.train import out_of_memory, worker

LLAMA = Path(__file__).parents[3] / "yamls" / "pretrain" / "llama3-1b.yaml"
FOUND = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.38 GiB of which 1.38 GiB is free. "
    "Including non-PyTorch memory, this process has 37.99 GiB memory in use."
)


def explained(*overrides: str, gibibytes: float = 39.38, ranks: int = 1) -> str:
    config = load_config(LLAMA, overrides)
    return out_of_memory.explain(torch.OutOfMemoryError(FOUND), config, ranks, int(gibibytes * 2**30))


def test_it_names_what_was_asked_what_takes_the_memory_and_what_would_fit():
    text = explained("train.microbatch_size=4", "train.global_batch_size=64")
    assert text.startswith("CUDA out of memory. Tried to allocate 2.00 GiB: the GPU has 39.38 GiB")
    for part in ("weights", "gradients", "optimizer", "activations", "loss", "together"):
        assert part in text
    assert "Settings that would fit" in text and "train.activation_checkpointing.type=full" in text


def test_it_names_the_moving_average_where_there_is_one():
    assert "average" not in explained() and "average" in explained("train.ema={}")


def test_where_the_estimate_says_that_it_fits_less_is_asked_for_all_the_same():
    text = explained("train.microbatch_size=4", "train.global_batch_size=64", gibibytes=400)
    assert "the estimate is too low here" in text and "train.microbatch_size=2" in text


def test_where_no_setting_is_enough_it_says_how_many_gpus_are():
    text = explained("train.microbatch_size=1", "train.global_batch_size=64", gibibytes=16)
    assert "makes it fit on 1 GPU(s).\n4 GPUs would be enough, with train" in text


def test_a_run_ends_with_it(monkeypatch):
    from llmtrain.train import run

    def train(*args):
        raise torch.OutOfMemoryError(FOUND)

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**34))
    with pytest.raises(RunError, match="4 GPUs would be enough, with train"):
        worker._train(load_config(LLAMA), None, "llama.yaml", [])
