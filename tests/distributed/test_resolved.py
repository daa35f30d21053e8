"""RUN/resolved.json: all that a run decided."""

from llmtrain.train.resolved import read_resolved
from tests.support.runs import train
from tests.support.tiny import tiny_config


def test_a_run_writes_what_it_decided(ranks, shards, tmp_path):
    changes = {
        "train.duration": "4 steps",
        "train.microbatch_size": "auto",
        "train.compile": "auto",
        "train.activation_checkpointing": {"type": "auto"},
        "schedule": {"type": "wsd", "warmup": "2 steps", "decay": "50 %"},
    }
    ranks(2).run(train, tiny_config(shards, tmp_path, changes))
    found = read_resolved(tmp_path)
    assert found["microbatch_size"] == 4 and found["activation_checkpointing"]["type"] == "none"
    assert found["sharding"]["strategy"] == "full"
    assert found["ranks"] == {"data": 2, "context": 1, "tensor": 1, "pipeline": 1}
    assert found["schedule"] == {"total": 4, "warmup": 2, "decay": 2}
    assert found["decided"] == {
        "train.microbatch_size": 4,
        "train.sharding.strategy": "full",
        "train.sharding.shard_size": 2,
        "train.sharding.sync_every_microbatch": True,
        "train.activation_checkpointing.type": "none",
        "train.loss.type": "plain",
        "train.compile": "off",
        "train.cuda_graphs": "off",
        "eval.microbatch_size": 4,
        "data.order": "seekable",
    } | {name: value for name, value in found["decided"].items() if name.startswith("model.")}
    backends = {name for name in found["decided"] if name.endswith("backend")}
    assert backends == {f"model.{where}.backend" for where in ("norm", "blocks.m", "blocks.s.norm", "blocks.s")}
    assert found["decided"]["model.blocks.s.backend"] == "sdpa:cpu"
