"""torch._dynamo on a start that compiles nothing."""

import subprocess
import sys

PROGRAM = """
import os, sys
import torch
from llmtrain.train.absent_dynamo import defer_dynamo

def compiler_is_there():
    return "torch._dynamo.symbolic_convert" in sys.modules

defer_dynamo()
defer_dynamo()
seen = []

@torch.compiler.disable
def disabled(x):
    seen.append(torch.compiler.is_compiling())
    return x + 1

weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.AdamW([weight], lr=1.0)
weight.grad = torch.ones(3)
optimizer.step()
assert weight[0] != 0 and disabled(1) == 2
torch._dynamo.config.recompile_limit = 77
assert not torch._dynamo.config.verbose and not torch._dynamo.is_compiling()
import importlib.metadata
importlib.metadata.entry_points(group="none")
importlib.invalidate_caches()
assert not compiler_is_there()

for use in (
    "import torch._dynamo.utils; assert torch._dynamo.utils is sys.modules['torch._dynamo.utils']",
    "torch._dynamo.reset()",
    "torch._dynamo.compiled_autograd.reset()",
    "from torch._dynamo.eval_frame import OptimizedModule; assert isinstance(torch.compile(torch.nn.ReLU()), OptimizedModule)",
):
    if os.fork():
        assert os.wait()[1] == 0, use
        continue
    exec(use)
    assert compiler_is_there() and torch._dynamo is sys.modules["torch._dynamo"]
    utils = sys.modules["torch._dynamo.utils"]
    assert utils.__spec__.origin == utils.__file__ and torch._dynamo.config.recompile_limit == 77
    compiled = torch.compile(lambda x: disabled(x) * (2 if torch.compiler.is_compiling() else 3), backend="eager")
    assert compiled(torch.ones(2)).tolist() == [4, 4] and seen[-1] is False
    optimizer.step()
    sys.stdout.flush()
    os._exit(0)
"""


def test_the_compiler_is_imported_at_its_first_use_and_what_was_disabled_stays_so():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)
