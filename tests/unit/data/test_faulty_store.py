"""A run reads on, and nothing wrong, while its store is slow, fails, cuts answers off and serves a corrupt shard."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.data.loader.loaders import build_train_loader
from llmtrain.data.shards import fetch as shard_fetch
from llmtrain.data.shards.index import ShardError
from llmtrain.schema.data import DataConfig
from tests.support.folder_store import FolderStore


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setattr(shard_fetch, "_FIRST_WAIT", 0.01)


def read(store: FolderStore, cache: Path, monkeypatch, **options: Any) -> list[int]:
    """The sample ids of an epoch from BUCKET/data; every token is compared."""
    monkeypatch.setenv("S3_ENDPOINT_URL", store.url)
    streams = {"a": {"remote": "s3://bucket/data", "local": str(cache)}}
    values = {"seq_len": 8, "train": {"streams": streams}, "num_workers": 0, "download_retries": 8}
    loader = build_train_loader(DataConfig.model_validate(values | options), global_batch_size=8)
    ids = []
    for batch in loader:
        assert (batch["input_ids"] == batch["sample_ids"][:, None] % 65_536).all()
        ids += batch["sample_ids"].tolist()
    return ids


@pytest.mark.parametrize("compression", ["zstd", pytest.param(None, marks=pytest.mark.slow)])
def test_nothing_wrong_is_read_of_a_store_that_fails(tmp_path, write_shards, monkeypatch, compression):
    folder = write_shards(tmp_path / "bucket/data", 320, compression=compression)
    corrupt = sorted(file.name for file in folder.glob("shard*"))[3]
    with FolderStore(tmp_path, failures=0.2, truncations=0.2, corrupt={f"bucket/data/{corrupt}": 2}) as store:
        found = read(store, tmp_path / "cache", monkeypatch)
        assert store.faults["corrupt"] == 2 and store.faults.total() > 4
    assert sorted(found) == list(range(320))
    with FolderStore(tmp_path) as store:
        assert read(store, tmp_path / "other", monkeypatch) == found


def test_a_store_that_does_not_answer_is_asked_so_often_as_was_said_and_each_attempt_is_named(
    tmp_path, write_shards, monkeypatch, caplog
):
    monkeypatch.setattr(shard_fetch, "_LONG_ATTEMPT", 0.1)
    caplog.set_level("INFO", "llmtrain.run")
    write_shards(tmp_path / "bucket/data", 8)
    options = {"download_retries": 2, "download_timeout": 0.3}
    with FolderStore(tmp_path, delay=1.5) as store, pytest.raises(ShardError, match="in 3 attempts: "):
        read(store, tmp_path / "cache", monkeypatch, **options)
    assert store.requests.total() == 3
    assert "s3://bucket/data/index.json: attempt 2 of 3 failed (ReadTimeoutError: Read timeout" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_large_run_reads_on_through_a_cache_of_a_part_of_the_data(tmp_path, write_shards, monkeypatch, workers):
    """20 % failures, 100 ms delay, truncated bodies, a corrupt shard: 60,000 samples of 60 shards, a tenth of them on the disk."""
    folder = write_shards(tmp_path / "bucket/data", 60_000, compression=None, size_limit=20_000)
    shards = sorted(file.name for file in folder.glob("shard*"))
    limit = (folder / "index.json").stat().st_size + sum((folder / name).stat().st_size for name in shards) // 10
    options = {"num_workers": workers, "cache_limit": limit, "num_canonical_nodes": 1, "shuffle_block_size": 2000}
    corrupt = {f"bucket/data/{shards[5]}": 3}
    with FolderStore(tmp_path, delay=0.1, failures=0.2, truncations=0.1, corrupt=corrupt, seed=7) as store:
        found = read(store, tmp_path / "cache", monkeypatch, **options)
        assert {"500", "503", "reset", "short", "cut", "corrupt"} <= set(store.faults)
    assert np.array_equal(np.sort(found), np.arange(60_000))
