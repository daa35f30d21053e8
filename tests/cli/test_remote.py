"""A run whose checkpoints go to a store that fails now and then, and that comes back from there."""

import contextlib
import io
import shutil
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from llmtrain.checkpoint.initial_weights import initial_checkpoint
from llmtrain.checkpoint.stored import list_stored
from llmtrain.checkpoint.stores.mounted import MountedStore
from llmtrain.checkpoint.upload import upload
from llmtrain.cli import main
from llmtrain.eval.scoring.load import find_model, find_tokenizer, load_scorer
from llmtrain.eval.scoring.scorer import HybridScorer
from llmtrain.schema.load import load_config
from tests.support.faulty_proxy import FaultyProxy
from tests.support.stores import S3, serving


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving() as server:
        yield server


def command(url: str, *arguments: str) -> tuple[int, str]:
    """A job: `llmtrain ...` as a rank, with the store at `url`; (exit status, what it printed)."""
    variables = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    printed = io.StringIO()
    with (
        patch.dict("os.environ", variables | {"S3_ENDPOINT_URL": url}),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        status = main(arguments)
    return status, printed.getvalue()


@pytest.mark.ci
def test_a_run_comes_back_from_its_store(ranks, s3, project):
    project.write(
        {"checkpoint.interval": "2 steps", "checkpoint.keep_last": 2, "checkpoint.remote": "s3://checkpoints/tiny"}
    )
    with FaultyProxy(s3.port, rate=0.1, seed=1) as proxy:
        train = ["train", str(project.folder / "run.yaml")]
        [(status, text), _] = ranks(2).run(command, proxy.url, *train)
        assert status == 0, text
        assert "uploaded step-00000006 to s3://checkpoints/tiny/step-00000006" in text
        assert proxy.faults > 0
        found = list_stored(s3.bucket("tiny"))
        assert [checkpoint.step for checkpoint in found] == [4, 6]
        for checkpoint in found:
            checkpoint.verify()

        shutil.rmtree(project.run_dir)
        [(status, text)] = ranks(1).run(command, proxy.url, *train, "train.duration=8 steps")
        assert status == 0, text
        assert text.count("downloading s3://checkpoints/tiny/step-00000006") == 1
        assert "(step 6 of 8)" in text and "step 8/8" in text
        assert [checkpoint.step for checkpoint in list_stored(s3.bucket("tiny"))] == [6, 8]

        [(status, text)] = ranks(1).run(command, proxy.url, *train, "--fresh")
        assert status == 2 and "llmtrain checkpoint rm s3://checkpoints/tiny --before 9 --force" in text
        assert project.run_dir.exists()


def test_weights_to_start_from_may_be_in_a_store(finished, project, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    bucket = MountedStore(tmp_path / "mounted")
    upload(bucket, finished[0].run_dir / "checkpoints" / "step-00000006")
    file = str(project.folder / "run.yaml")
    project.write({"init_from": bucket.url})
    assert main(["check", file]) == 0
    assert not (tmp_path / "cache").exists()  # its manifest says enough
    assert main(["check", file, "model.d_model=64"]) == 2
    assert f"must be 32, as in the checkpoint of init_from ({bucket.url})" in capsys.readouterr().err
    assert main(["check", file, "init_from=s3://bucket"]) == 2
    assert "must name a bucket and a prefix" in capsys.readouterr().err
    config = load_config(file)
    found = initial_checkpoint(config)
    assert found.require().step == 6 and found.fetch().is_relative_to(tmp_path / "cache")


@pytest.mark.ci
def test_a_run_starts_from_weights_in_a_store(ranks, s3, finished, project, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    upload(s3.bucket("initial"), finished[0].run_dir / "checkpoints" / "step-00000006")
    project.write({"init_from": "s3://checkpoints/initial"})
    with FaultyProxy(s3.port, rate=0.2, seed=2) as proxy:
        job = (command, proxy.url, "train", str(project.folder / "run.yaml"), "train.duration=4 steps")
        for status, text in ranks(2).run(command_with, {"LLMTRAIN_CACHE": str(tmp_path / "cache")}, *job):
            assert status == 0, text
    assert list((tmp_path / "cache").rglob("step-00000006/manifest.json"))
    assert project.checkpoints() == ["step-00000004"]


def command_with(variables: dict[str, str], job, *arguments: str) -> tuple[int, str]:
    with patch.dict("os.environ", variables):
        return job(*arguments)


def test_a_model_in_a_store_can_be_evaluated(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    bucket = MountedStore(tmp_path / "mounted")
    upload(bucket, finished[0].run_dir / "checkpoints" / "step-00000006")
    found = find_model(bucket.url)
    assert found.is_checkpoint and found.native and found.folder.is_relative_to(tmp_path / "cache")
    scorer = load_scorer(found, find_tokenizer(found))
    assert isinstance(scorer, HybridScorer) and scorer.model.config.vocab_size == 300


def test_an_address_that_is_none_is_refused(project, capsys):
    assert main(["check", str(project.folder / "run.yaml"), "checkpoint.remote=gs://bucket/run"]) == 2
    assert "checkpoint.remote" in (said := capsys.readouterr().err) and "must be s3://bucket/prefix" in said
