"""A process that saves without end until it is killed: the victim of tests/distributed/test_kill.py."""

import os
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.collective import newest_checkpoint
from llmtrain.distributed.world import free_port, initialize, rank_environment
from tests.support.sharded import write


def victim(root: Path, pipe: Connection) -> None:
    """Continues from the newest good checkpoint and tells (step, whether its tensors are that step's, warnings); then saves
    every step twice, as after a resume, and tells each step once it is saved."""
    os.environ.update(rank_environment(0, 1, free_port()))
    torch.set_num_threads(1)
    initialize()
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    fill(model, optimizer, 0)
    warnings: list[str] = []
    found = newest_checkpoint(root, verify=True, warn=warnings.append)
    step = 0
    if found is not None:
        save_load.load(found.folder, model, optimizer)
        step = found.step
    pipe.send((step, is_of(model, optimizer, step), warnings))
    while True:
        step += 1
        fill(model, optimizer, step)
        for _ in range(2):
            write(root, model, optimizer, step, keep_last=2, keep_every=50)
            pipe.send(step)


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Fill every number of a state with that of its step."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for tensor in tensors(model, optimizer):
        tensor.data.fill_(step)


def is_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> bool:
    return all(tensor.eq(step).all() for tensor in tensors(model, optimizer))


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
