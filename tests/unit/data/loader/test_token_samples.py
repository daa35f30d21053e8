"""Shards that are damaged, missing, foreign, cached, or removed again while they are read."""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.data.loader import token_samples
from llmtrain.data.loader.loaders import build_train_loader, build_validation_loader
from llmtrain.data.shards.checks import check_streams
from llmtrain.data.shards.index import ShardError
from llmtrain.errors import UserError
from llmtrain.schema.data import DataConfig
from tests.support.prepared import edit_index
from tests.support.stores import flip


def validation(config: DataConfig) -> None:
    """Read all validation samples."""
    loader = build_validation_loader(config, global_batch_size=8)
    assert loader is not None
    list(loader)


def test_ids_beyond_the_samples_are_refused(data):
    samples = build_train_loader(data({"a": 16}), global_batch_size=4).dataset
    assert samples.place(15)[1] <= 15 and samples.num_samples == 16
    for number in (-1, 16):
        with pytest.raises(IndexError, match=f"there is no sample {number}"):
            samples.place(number)


def test_a_cache_limit_bounds_what_a_remote_leaves_on_the_disk(data, tmp_path, write_shards):
    """The data of a raw remote in shards of 600 bytes, through a cache of 5 % of it."""
    remote = write_shards(tmp_path / "far", 8000, compression=None)
    total = sum(file.stat().st_size for file in remote.glob("*.mds"))
    index = (remote / "index.json").stat().st_size
    cache = tmp_path / "cache"
    config = data(
        {},
        train={"streams": {"a": {"remote": str(remote), "local": str(cache)}}},
        cache_limit=index + total // 20,
        num_canonical_nodes=1,
        order="seekable",
        shuffle_block_size=100,
    )
    seen, most = [], 0
    for batch in build_train_loader(config, global_batch_size=40):
        seen += batch["sample_ids"].tolist()
        with contextlib.suppress(FileNotFoundError):  # one is deleted at this moment
            most = max(most, sum(file.stat().st_size for file in cache.glob("*.mds")))
    assert sorted(seen) == list(range(8000))
    assert total // 40 < most <= total // 20 + 2 * 600  # two threads may fetch a shard at a time


@pytest.mark.parametrize("enough", [False, True])
def test_a_cache_without_room_for_a_few_shards_is_the_users_to_change(data, tmp_path, write_shards, enough):
    remote = write_shards(tmp_path / "far", 200, compression=None)
    largest = max(file.stat().st_size for file in remote.glob("*.mds"))
    index = (remote / "index.json").stat().st_size
    limit = index + 4 * largest - (not enough)
    streams = {"a": {"remote": str(remote), "local": str(tmp_path / "cache")}}
    config = data({}, train={"streams": streams}, cache_limit=limit)
    if not enough:
        with pytest.raises(UserError, match=rf"data.cache_limit = {limit}: .* give at least {limit + 1:,}"):
            build_train_loader(config, global_batch_size=4)
        [problem] = check_streams(config, 4)  # the index is in the cache now
        assert problem.path == "data.cache_limit" and f"give at least {limit + 1:,}" in problem.message
    else:
        build_train_loader(config, global_batch_size=4)


def test_samples_of_another_length_are_an_error(data):
    loader = build_train_loader(data({"a": 16}, seq_len=9), global_batch_size=4)
    with pytest.raises(ShardError, match=r"has 8 tokens, data.seq_len is 9"):
        next(iter(loader))


def test_a_token_beyond_the_vocabulary_is_an_error(data):
    """In the embedding it would be an IndexError, or on a GPU an assertion that names nothing."""
    assert len(list(build_train_loader(data({"a": 16}), global_batch_size=4, vocab_size=16))) == 4
    with pytest.raises(ShardError, match=r"sample \d+ has token 15, but model.vocab_size is 15"):
        list(build_train_loader(data({"a": 16}), global_batch_size=4, vocab_size=15))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_flipped_bit_in_a_shard_stops_the_run(data, tmp_path, workers):
    config = data({"a": 64}, num_workers=workers)
    shard = sorted((tmp_path / "a").glob("*.zstd"))[1]
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    loader = build_train_loader(config, global_batch_size=4)
    try:
        with pytest.raises(
            ShardError, match=f"^the shard .* of the stream 'a' cannot be had: Checksum failure: {shard}"
        ):
            list(loader)
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue] left to the garbage collector, it waits 5 s per worker


def test_a_flipped_bit_in_a_validation_shard_stops_the_run(data, tmp_path, write_shards):
    folder = write_shards(tmp_path / "held", 16)
    config = data({"a": 8}, validation={"streams": {"held": {"local": str(folder)}}})
    shard = next(folder.glob("*.zstd"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(ShardError, match="Checksum failure"):
        validation(config)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_flipped_bit_in_a_raw_shard_stops_the_run(data, tmp_path, write_shards, workers):
    """StreamingDataset itself does not look at such a shard."""
    write_shards(tmp_path / "raw", 64, compression=None)
    config = data({"a": 8}, num_workers=workers, train={"streams": {"raw": {"local": str(tmp_path / "raw")}}})
    assert len(list(build_train_loader(config.model_copy(update={"num_workers": 0}), global_batch_size=4))) == 16
    shard = sorted((tmp_path / "raw").glob("*.mds"))[1]
    flip(shard)
    loader = build_train_loader(config, global_batch_size=4)
    try:
        with pytest.raises(
            ShardError,
            match=f"^the shard {shard} of the stream 'raw' is not what its index says: its xxh64 is not the one in the index; ",
        ):
            list(loader)
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("hashes", [None, ["xxh64"]])
def test_samples_that_were_lowered_in_the_index_stop_the_run(data, tmp_path, write_shards, hashes):
    folder = write_shards(tmp_path / "raw", 64, compression=None, hashes=hashes)
    edit_index(folder, lambda shard: shard.update(samples=shard["samples"] - 1))
    config = data({"a": 8}, validation={"streams": {"raw": {"local": str(folder)}}})
    with pytest.raises(ShardError, match=r"holds (\d+) samples; the index says (?!\1)\d+; copy it anew"):
        validation(config)


def test_a_shard_cut_short_without_hashes_stops_the_run(data, tmp_path, write_shards, capsys):
    folder = write_shards(tmp_path / "raw", 64, compression=None, hashes=None)
    shard = min(folder.glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1])
    config = data({"a": 8}, train={"streams": {"raw": {"local": str(folder)}}})
    with pytest.raises(ShardError, match=r"has [\d,]+ bytes; the index says"):
        list(build_train_loader(config, global_batch_size=1))
    assert f"{folder}: the index holds no hashes" in capsys.readouterr().out


def test_a_pipe_in_the_place_of_a_shard_does_not_hang(data, tmp_path, write_shards):
    folder = write_shards(tmp_path / "raw", 8, compression=None)
    shard = min(folder.glob("*.mds"))
    shard.unlink()
    os.mkfifo(shard)
    config = data({"a": 8}, validation={"streams": {"raw": {"local": str(folder)}}})
    with pytest.raises(ShardError):
        validation(config)


def test_each_shard_is_hashed_once_by_a_rank(data, monkeypatch):
    seen = []
    monkeypatch.setattr(
        token_samples, "verify_shard", lambda file, shard, algorithm: seen.append(shard["raw_data"]["basename"])
    )
    loader = build_train_loader(data({"a": 64}), global_batch_size=4)
    assert len(list(loader)) == len(list(loader)) == 16
    assert len(seen) == len(set(seen)) > 1


def far_away(data: Callable[..., DataConfig], tmp_path: Path) -> DataConfig:
    """Settings of a remote without a cached index."""
    data({"a": 64})
    streams = {"a": {"remote": str(tmp_path / "a"), "local": str(tmp_path / "cache")}}
    return data({}, train={"streams": streams})


@pytest.mark.ci
@pytest.mark.parametrize("wrong", [{"column_encodings": ["pkl"]}, {"raw_data": {"basename": "../../x"}}])
def test_an_index_from_a_remote_is_checked_before_it_is_used(data, tmp_path, wrong):
    config = far_away(data, tmp_path)
    edit_index(tmp_path / "a", lambda shard: shard.update(wrong))
    with pytest.raises(ShardError, match="is not the index of MDS shards"):
        build_train_loader(config, global_batch_size=4)
    assert not (tmp_path.parent / "x").exists()


def test_a_shard_from_a_remote_without_a_cached_index_is_hashed(data, tmp_path):
    config = far_away(data, tmp_path)
    flip(max((tmp_path / "a").glob("*.zstd")))
    config = config.model_copy(update={"download_retries": 0})
    with pytest.raises(
        ShardError, match="could not be downloaded in 1 attempts: its xxh64 is not the one in the index"
    ):
        list(build_train_loader(config, global_batch_size=4))


@pytest.mark.parametrize("source", ["packed", "remote"])
def test_a_damaged_shard_is_made_again_from_a_good_copy(data, tmp_path, write_shards, capsys, source):
    """Unpacked by an earlier run, beside its packed file; or cached, of a remote."""
    folder = write_shards(tmp_path / "raw", 64, compression="zstd" if source == "packed" else None)
    stream = {"local": str(folder)} if source == "packed" else {"local": str(tmp_path / "cache"), "remote": str(folder)}
    config = data({"a": 8}, train={"streams": {"raw": stream}})
    list(build_train_loader(config, global_batch_size=4))
    shards = sorted(Path(stream["local"]).glob("*.mds"))
    flip(shards[1])
    shards[2].write_bytes(shards[2].read_bytes()[:-1])
    batches = list(build_train_loader(config, global_batch_size=4))
    assert all((batch["input_ids"] == batch["sample_ids"][:, None]).all() for batch in batches)
    assert f"{shards[1]} of the stream 'raw' is not what its index says" in (said := capsys.readouterr().out)
    assert f"{shards[2]} of the stream 'raw' is not what its index says" in said


def test_a_folder_that_caches_another_remote_is_refused(data, tmp_path, write_shards):
    config = far_away(data, tmp_path)
    build_train_loader(config, global_batch_size=4)
    other = str(write_shards(tmp_path / "other", 64))
    streams = {"a": {"remote": other, "local": str(tmp_path / "cache")}}
    with pytest.raises(ShardError, match=f"caches {tmp_path / 'a'}, not {other}: give another folder as local"):
        build_train_loader(data({}, train={"streams": streams}), global_batch_size=4)


def job(config: DataConfig, results) -> None:
    """A job's reading of all samples; puts what went wrong, or the samples."""
    try:
        batches = list(build_train_loader(config, global_batch_size=8))
        assert all((batch["input_ids"] == batch["sample_ids"][:, None]).all() for batch in batches)
        results.put([sorted(id for batch in batches for id in batch["sample_ids"].tolist())])
    except BaseException as error:
        results.put(repr(error))


@pytest.mark.parametrize("order", ["seekable", "streaming"])
def test_a_cache_without_room_for_what_is_fetched_ahead_is_slow_and_reads_on(tmp_path, write_shards, data, order):
    """Of what is fetched ahead most is removed again before it is read."""
    remote = write_shards(tmp_path / "far", 400, compression=None)
    largest = max(file.stat().st_size for file in remote.glob("*.mds"))
    limit = (remote / "index.json").stat().st_size + 4 * largest
    streams = {"a": {"remote": str(remote), "local": str(tmp_path / "cache")}}
    config = data(
        {}, train={"streams": streams}, cache_limit=limit, shuffle_block_size=200, num_canonical_nodes=1, order=order
    )
    results = multiprocessing.get_context("fork").Queue()
    one = multiprocessing.get_context("fork").Process(target=job, args=(config, results))
    one.start()
    try:
        assert results.get(timeout=600) == [list(range(400))]
    finally:
        one.kill()
        one.join()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_two_jobs_share_a_cache_of_a_part_of_the_data(tmp_path, write_shards, data, compression):
    remote = write_shards(tmp_path / "far", 800, compression=compression)
    size = sum(file.stat().st_size for file in remote.glob("*.mds*"))
    limit = (remote / "index.json").stat().st_size + max(size // 3, 4 * 1300)
    streams = {"a": {"remote": str(remote), "local": str(tmp_path / "cache")}}
    config = data({}, train={"streams": streams}, cache_limit=limit, shuffle_block_size=50, num_canonical_nodes=1)
    results = multiprocessing.get_context("fork").Queue()
    jobs = [multiprocessing.get_context("fork").Process(target=job, args=(config, results)) for _ in range(2)]
    for one in jobs:
        one.start()
    try:
        assert [results.get(timeout=600) for _ in jobs] == [[list(range(800))]] * 2
    finally:
        for one in jobs:
            one.join(timeout=10)
            one.kill()
    kept = sum(file.stat().st_size for file in (tmp_path / "cache").glob("*.mds*"))
    assert kept <= 2 * limit


def test_a_shard_that_cannot_be_removed_ends_the_run_rather_than_have_others_wait(
    tmp_path, write_shards, data, monkeypatch
):
    remote = write_shards(tmp_path / "far", 200, compression=None)
    streams = {"a": {"remote": str(remote), "local": str(tmp_path / "cache")}}
    limit = (remote / "index.json").stat().st_size + 4 * 1300
    config = data({}, train={"streams": streams}, cache_limit=limit, shuffle_block_size=50, num_canonical_nodes=1)
    tried = []

    def refuses(file: Path, missing_ok: bool = False) -> None:
        tried.append(file)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(token_samples.Path, "unlink", refuses)
    with pytest.raises(ShardError, match="Permission denied"):
        list(build_train_loader(config, global_batch_size=8))
    assert tried


def test_nothing_is_written_through_a_link_out_of_the_folder(data, tmp_path):
    config = data({"a": 64})
    outside = tmp_path / "outside"
    (tmp_path / "a" / "shard.00000.mds").symlink_to(outside)
    with pytest.raises(ShardError, match="is a link that leads out of"):
        list(build_train_loader(config, global_batch_size=4))
    assert not outside.exists()


def test_shards_may_be_links_to_files_elsewhere(data, tmp_path, write_shards):
    """As in the cache of the Hugging Face hub."""
    folder = write_shards(tmp_path / "raw", 16, compression=None)
    for shard in sorted(folder.glob("*.mds")):
        shard.rename(tmp_path / shard.name)
        shard.symlink_to(tmp_path / shard.name)
    config = data({"a": 8}, train={"streams": {"raw": {"local": str(folder)}}})
    assert len(list(build_train_loader(config, global_batch_size=4))) == 4


def test_a_shard_that_cannot_be_fetched_ahead_ends_the_run_where_it_is_read(data, tmp_path, write_shards):
    """The batch before waits for it; there is no other round of attempts."""
    config = far_away(data, tmp_path)
    shards = sorted((tmp_path / "a").glob("*.zstd"))
    config = config.model_copy(update={"download_retries": 0, "shuffle": False, "num_canonical_nodes": 1})
    flip(shards[1])
    loader = build_train_loader(config, global_batch_size=4)
    [stream], asked = loader.dataset.streams, []
    download = stream.fetcher.download
    assert download is not None

    def counted(name: str, path: str) -> None:
        asked.append(name)
        download(name, path)

    stream.fetcher = replace(stream.fetcher, download=counted)
    batches, found = iter(loader), []

    def read() -> None:
        for batch in batches:
            found.extend(batch["sample_ids"].tolist())
            assert wait_for(lambda: len(asked) == 2)

    with pytest.raises(
        ShardError, match=r"^the shard .* of the stream 'a' cannot be had: .* in 1 attempts: its xxh64 is not"
    ):
        read()
    first = int(loader.dataset.samples_per_shard[0])
    assert found == list(range((first // 4 - 1) * 4)) and sorted(asked) == [one.name for one in shards[:2]]


def wait_for(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 600
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_the_shards_read_longest_ago_are_removed(data, tmp_path, write_shards, monkeypatch):
    monkeypatch.setattr("llmtrain.data.loader.token_samples._TOUCH_INTERVAL", 0.0)
    remote = write_shards(tmp_path / "far", 160, compression=None)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/mine.mds").write_text("not of the index")
    streams = {"a": {"remote": str(remote), "local": str(tmp_path / "cache")}}
    sizes = [file.stat().st_size for file in sorted(remote.glob("*.mds"))]
    limit = (remote / "index.json").stat().st_size + sum(sizes[:5])
    dataset = build_train_loader(data({}, train={"streams": streams}, cache_limit=limit), global_batch_size=4).dataset
    for shard in (0, 1, 2, 3, 4):
        dataset.prepare(shard)
        os.utime(dataset.streams[0].file(shard), (shard, shard))
    assert dataset.get_item(0)["sample_id"] == 0  # reads shard 0 again
    dataset.prepare(5)
    dataset.prepare(6)
    here = sorted(file.name for file in (tmp_path / "cache").glob("*.mds"))
    assert here == ["mine.mds", *(f"shard.{number:05}.mds" for number in (0, 3, 4, 5, 6))]
