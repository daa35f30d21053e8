"""What a config asks for and a machine does not have is found before data are prepared."""

import re

import pytest

from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform
from llmtrain.schema.load import load_config
from llmtrain.train.machine import refuse_what_is_missing

CPU = Platform("cpu", "cpu", "a CPU", 8 << 30)
A100 = Platform("nvidia", "sm80", "NVIDIA A100", 80 << 30)
H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)


def refuse(settings, where):
    config = load_config("zamba2-1.2b", settings)
    refuse_what_is_missing(config.model, config.train, False, where)


@pytest.mark.parametrize(
    ("settings", "where", "said"),
    [
        (
            ["model.blocks.s.backend=triton"],
            CPU,
            "model.blocks.s.backend = triton: attention backend 'triton' cannot serve here",
        ),
        (
            ["model.blocks.m.backend=triton"],
            CPU,
            "model.blocks.m.backend = triton: ssd backend 'triton' cannot serve here",
        ),
        (["model.norm.backend=triton"], CPU, "model.norm.backend = triton: norm backend 'triton' cannot serve here"),
        (["train.float8={}"], CPU, "train.float8: a CPU has no float8 units"),
        (["train.float8={}"], A100, "train.float8: NVIDIA A100 (sm80) has no float8 units"),
        (["train.cuda_graphs=on"], CPU, "train.cuda_graphs = on: there can be no CUDA graphs here, as they need a GPU"),
    ],
)
def test_the_setting_is_named(settings, where, said):
    with pytest.raises(UserError, match=re.escape(said)):
        refuse(settings, where)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ([], CPU),
        (["train.float8={emulate: true}"], CPU),
        (["train.float8={}", "train.cuda_graphs=auto", "model.blocks.s.backend=triton"], H200),
        (["train.cuda_graphs=on", "train.sharding.strategy=auto"], H200),
    ],
)
def test_what_is_there_is_not_refused(settings, where):
    refuse(settings, where)
