"""The hash of what a task asks Triton to compile."""

from dataclasses import replace

from llmtrain.bench.tune.compiling import Task
from tests.support.compile_requests import hashes

LAUNCH = {"block_tokens": 32, "block_heads": 8, "num_warps": 4}
ROTARY = Task("rotary", {"head_dim": 64, "dtype": "bfloat16"}, "every", LAUNCH)


def test_it_depends_on_the_launch_the_case_and_the_architecture_alone():
    others = [
        replace(ROTARY, launch={**LAUNCH, "num_warps": 8}),
        replace(ROTARY, case={**ROTARY.case, "dtype": "float16"}),
        replace(ROTARY, arch="sm80"),
        replace(ROTARY, environment={"AMDGCN_USE_BUFFER_OPS": "0"}),
    ]
    first, *found, again = hashes([ROTARY, *others, replace(ROTARY)])
    assert again == first
    assert len({first, *found}) == 1 + len(others)
