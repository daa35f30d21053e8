"""A save beside training on a GPU: through pinned memory, of the state at that moment, readable without one."""

import pytest
import torch
from torch import nn

from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.save_load import RunState
from llmtrain.checkpoint.saver import Saver
from llmtrain.distributed.world import gloo_group, initialize
from tests.support.runs import read_tensors

pytestmark = pytest.mark.gpu


def test_weights_that_change_at_once_do_not_change_what_is_saved(tmp_path):
    device = initialize()
    model = nn.Sequential(nn.Linear(2000, 3000), nn.Linear(3000, 7), nn.Linear(7, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(5, 2000, device=device)).sum().backward()
    optimizer.step()
    state = save_load.local_tensors(save_load.flat_state(model, optimizer))
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    saver = Saver(
        tmp_path,
        model,
        optimizer,
        retention=Retention(),
        background=True,
        group=gloo_group(),
        warn=lambda text: pytest.fail(text),
    )
    with saver:
        saver.prepare()
        assert all(b.is_pinned() for n, b in saver._staging._buffers.items() if state[n].is_cuda and b.numel())
        for step in (1, 2):  # the second through the same buffers
            saver.save(RunState(step, 0, {}, {}, {}))
            with torch.no_grad():
                for tensor in state.values():
                    tensor.add_(1)
            saver.finish()
            found = read_tensors(tmp_path / f"step-0000000{step}")
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), (step, name)
                tensor.add_(1)
