"""What is written on this machine has no scheme, in a YAML and on the command line."""

import pytest

from llmtrain import cli
from llmtrain.config.addresses import local_problem

TEXT = """
name: run
run_dir: {run_dir}
model: {{vocab_size: 300, d_model: 16, max_seq_len: 32, layers: x, blocks: {{x: {{type: mamba2, headdim: 8, d_state: 8}}}}}}
data:
  seq_len: 32
  prepare: {{sources: [stdlib], out: {out}, vocab_size: 300, seq_len: 32}}
  train: {{streams: {{web: {{local: {local}}}}}}}
train: {{duration: 4 steps, global_batch_size: 4, microbatch_size: 2}}
optimizer: {{lr: 1e-3}}
"""


@pytest.mark.parametrize("path", ["runs/a", "/data/a", "~/a", "./s3/a", "a:b", "C:/x", "2026-01-01T10:00/x", "../a//b"])
def test_paths(path):
    assert local_problem(path) is None


@pytest.mark.parametrize(
    "path", ["s3://b/x", "s3:/b/x", "s3:b", "gs://b", "hf://a/b", "file:///x", "dbfs:/x", "S3://b/x"]
)
def test_addresses(path):
    assert "checkpoint.remote" in str(local_problem(path))


def test_every_such_setting_of_a_run_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(TEXT.format(run_dir="s3://b/run", out="gs://b/data", local="s3://b/web"))
    for command in ("check", "train"):
        assert cli.main([command, "run.yaml"]) == 2
        said = capsys.readouterr().err
        for key in ("run_dir", "data.prepare.out", "data.train.streams.web.local"):
            assert key in said, said
        assert "checkpoint.remote" in said and "give it as `remote`" in said
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    "command",
    [
        ["export", "run"],
        ["import", "folder"],
        ["checkpoint", "convert", "run", "--to", "hf"],
        ["decontaminate", "eval.yaml", "data", "--out"],
        ["eval", "eval.yaml", "model=run", "--out"],
        ["bench", "kernels", "--out"],
        ["bench", "tune", "--out"],
        ["schema", "--out"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_every_command_that_writes_refuses_an_address(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval.yaml").write_text("tasks: [task.yaml]\n")
    try:
        status = cli.main([*command, "s3://bucket/x"])
    except SystemExit as error:  # argparse's
        status = error.code
    assert status == 2
    assert "checkpoint.remote" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["eval.yaml"]
