"""Shards are brought into a folder whole and as their index says, whatever the store does on the way."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from llmtrain.data.shards import fetch as shard_fetch
from llmtrain.data.shards.fetch import Fetcher
from llmtrain.data.shards.index import ShardError, hash_of

RAW = bytes(range(256)) * 20
PACKED = zstandard.ZstdCompressor().compress(RAW)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(shard_fetch, "_FIRST_WAIT", 0.0)


def part(name: str, content: bytes) -> dict[str, Any]:
    return {"basename": name, "bytes": len(content), "hashes": {"xxh64": hash_of("xxh64", content)}}


def entry(packed: bool) -> dict[str, Any]:
    zipped = part("0.mds.zstd", PACKED) if packed else None
    return {"raw_data": part("0.mds", RAW), "zip_data": zipped, "compression": "zstd" if packed else None}


class Store:
    """A remote whose answers are given: content, or an error to raise; the last again and again."""

    def __init__(self, *answers: bytes | Exception):
        self.answers, self.asked = list(answers), 0

    def __call__(self, name: str, path: str) -> None:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        Path(path).write_bytes(answer)


def fetcher(folder: Path, download: Callable[[str, str], None] | None, keep: bool = False) -> Fetcher:
    return Fetcher(folder, download, "xxh64", retries=3, keep_packed=keep)


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name != ".llmtrain-lock")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        (),
        (b"", b"x"),
        (RAW[:-1], PACKED[:-1], RAW[:-1] + b"!"),
        (PACKED[:-1] + b"!", ConnectionResetError(), TimeoutError(errno.ETIMEDOUT, "")),
        (RuntimeError("503"),),
    ],
)
def test_what_is_not_as_the_index_states_is_fetched_anew(tmp_path, packed, bad):
    store = Store(*bad, PACKED if packed else RAW)
    fetcher(tmp_path, store).prepare(0, entry(packed))
    assert files(tmp_path) == ["0.mds"] and (tmp_path / "0.mds").read_bytes() == RAW
    assert store.asked == len(bad) + 1
    fetcher(tmp_path, store).prepare(0, entry(packed))
    assert store.asked == len(bad) + 1


@pytest.mark.parametrize("answer", [RAW[:-1], b"", RuntimeError("no such key")])
def test_it_gives_up_after_the_retries_and_leaves_nothing(tmp_path, answer):
    store = Store(answer)
    with pytest.raises(
        ShardError, match=r"0\.mds could not be downloaded in 4 attempts: (it has|RuntimeError: no such key)"
    ):
        fetcher(tmp_path, store).prepare(0, entry(False))
    assert store.asked == 4 and files(tmp_path) == []


def test_a_client_that_is_not_installed_is_reported_at_once(tmp_path):
    store = Store(ModuleNotFoundError("No module named 'boto3'"))
    said = r"0\.mds cannot be downloaded: the store's client is not installed \(No module named 'boto3'\)"
    with pytest.raises(ShardError, match=said):
        fetcher(tmp_path, store).prepare(0, entry(False))
    assert store.asked == 1 and files(tmp_path) == []


def test_a_full_disk_is_reported_at_once(tmp_path):
    store = Store(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        fetcher(tmp_path, store).prepare(0, entry(False))
    assert store.asked == 1


def test_a_damaged_packed_file_is_fetched_anew_where_it_came_from_somewhere(tmp_path, capsys):
    (tmp_path / "0.mds.zstd").write_bytes(PACKED[:-1] + b"!")
    with pytest.raises(ShardError, match=r"Checksum failure: .*0\.mds\.zstd .* copy it anew"):
        fetcher(tmp_path, None, keep=True).prepare(0, entry(True))
    fetcher(tmp_path, Store(PACKED), keep=True).prepare(0, entry(True))
    assert files(tmp_path) == ["0.mds", "0.mds.zstd"]
    assert (tmp_path / "0.mds").read_bytes() == RAW and (tmp_path / "0.mds.zstd").read_bytes() == PACKED
    assert "it is fetched anew" in capsys.readouterr().out


def test_those_that_want_a_shard_at_the_same_time_fetch_it_once(tmp_path):
    store = Store(RAW)

    def slow(name: str, path: str) -> None:
        time.sleep(0.05)
        store(name, path)

    jobs = [threading.Thread(target=fetcher(tmp_path, slow).prepare, args=(0, entry(False))) for _ in range(6)]
    for one in jobs:
        one.start()
    for one in jobs:
        one.join()
    assert store.asked == 1 and (tmp_path / "0.mds").read_bytes() == RAW


def test_an_index_that_is_cut_off_is_fetched_anew(tmp_path):
    fetcher(tmp_path, Store(b'{"version": 2, "sha', b"", b'{"version": 2, "shards": []}')).fetch_index("s3://far")
    assert files(tmp_path) == [".llmtrain-remote", "index.json"]
    with pytest.raises(ShardError, match=r"index\.json could not be downloaded in 4 attempts"):
        fetcher(tmp_path / "other", Store(b"<html>")).fetch_index("s3://far")
    assert files(tmp_path / "other") == []
