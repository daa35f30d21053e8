"""Checkpoints over HTTP to an S3 server and back, through a proxy that fails."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from llmtrain.checkpoint import upload as uploads
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.stored import StoredCheckpoint, list_stored
from llmtrain.checkpoint.stores import s3 as s3_module
from llmtrain.checkpoint.stores.base import StoreError
from llmtrain.checkpoint.stores.s3 import RetryPolicy, S3Store
from llmtrain.checkpoint.upload import upload
from tests.support.faulty_proxy import FaultyProxy
from tests.support.http_server import HttpServer, ResettingHandler
from tests.support.stores import BUCKET, QUICK, S3, flip, make_checkpoint, same_files

PART = 100_000


def test_there_and_back(s3: S3, prefix, tmp_path):
    folder = make_checkpoint(tmp_path / "here", 7)
    bucket = s3.bucket(prefix)
    done = upload(bucket, folder)
    assert done.url == f"s3://{BUCKET}/{prefix}/step-00000007" and done.sent > 5 * 20_000
    [found] = list_stored(bucket)
    assert found.require() == manifests.read(folder)
    again = found.download(tmp_path / "there")
    assert same_files(folder, again)
    assert upload(bucket, folder).sent == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_third_of_the_requests_fail_and_everything_arrives(s3: S3, prefix, tmp_path, seed):
    folder = make_checkpoint(tmp_path / "here", 7, files=6, nbytes=3 * PART)
    with FaultyProxy(s3.port, rate=0.3, seed=seed) as proxy:
        bucket = s3.bucket(prefix, proxy.url, PART)
        upload(bucket, folder)
        assert proxy.faults > 10
        [found] = list_stored(bucket)
        found.verify()
        assert same_files(folder, found.download(tmp_path / "there"))
        assert proxy.faults > 20
    assert sorted(s3.names(prefix)) == sorted(f"step-00000007/{path.name}" for path in folder.iterdir())
    assert "Uploads" not in s3.client.list_multipart_uploads(Bucket=BUCKET)


def test_a_store_that_does_not_answer_is_named_while_it_is_waited_for(s3, monkeypatch, caplog):
    caplog.set_level("INFO", "llmtrain")
    monkeypatch.setattr(s3_module, "_READ_SECONDS", 0.3)
    monkeypatch.setattr(s3_module, "_SILENT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and reads nothing
        monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = S3Store(BUCKET, "run", RetryPolicy(attempts=1000, first=0.01, patience=1.0))
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"s3://checkpoints/run: Read timeout .* \(tried several times\)"):
            store.sizes()
    assert 1.0 < time.monotonic() - began < 100  # a limit of time, not of attempts
    assert "s3://checkpoints/run has not answered for 0 s" in caplog.text


@pytest.mark.parametrize("after", [50_000, 350_000, 1_000_000])
def test_a_connection_dropped_in_mid_upload_is_taken_up(s3: S3, prefix, tmp_path, after):
    folder = make_checkpoint(tmp_path / "here", 7, files=3, nbytes=4 * PART)
    with FaultyProxy(s3.port) as proxy:
        proxy.drop_after = after
        bucket = s3.bucket(prefix, proxy.url, PART)
        done = upload(bucket, folder)
        assert proxy.faults == 1
        # What was cut is sent again: one part of each thread that was sending, at most.
        assert done.nbytes < proxy.received < done.nbytes + PART + 5_000
        list_stored(bucket)[0].verify()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 0.999])
def test_nothing_is_visible_before_all_of_it_is_there(s3: S3, prefix, tmp_path, share):
    """The store goes away for good in the middle of an upload."""
    folder = make_checkpoint(tmp_path / "here", 7, files=6, nbytes=3 * PART)
    with FaultyProxy(s3.port) as proxy:
        proxy.closes_after = int(share * manifests.read(folder).nbytes)
        with pytest.raises(StoreError):
            upload(s3.bucket(prefix, proxy.url, PART), folder)
    assert all(found.partial for found in list_stored(s3.bucket(prefix)))
    assert "step-00000007/manifest.json" not in s3.names(prefix)


def test_a_killed_uploader_goes_on_where_it_was(s3: S3, prefix, tmp_path):
    """kill -9, from outside, of a process that uploads; the next one sends only what is missing."""
    folder = make_checkpoint(tmp_path / "here", 7, files=2, nbytes=40 * PART)
    nbytes = manifests.read(folder).nbytes
    program = (
        "import sys; from pathlib import Path; from llmtrain.checkpoint.stores.s3 import S3Store; "
        "from llmtrain.checkpoint.upload import upload; "
        f"upload(S3Store({BUCKET!r}, {prefix!r}, part_bytes={PART}), Path({str(folder)!r}))"
    )
    with FaultyProxy(s3.port) as proxy:
        proxy.stalls_after = nbytes // 2
        environment = os.environ | {"S3_ENDPOINT_URL": proxy.url}
        process = subprocess.Popen([sys.executable, "-c", program], env=environment)
        try:
            while not proxy.stalled and process.poll() is None:
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        deadline = time.monotonic() + 100
        while proxy.received <= nbytes // 2 - PART and time.monotonic() < deadline:  # what was on the way arrives
            time.sleep(0.01)
        before = proxy.received
        assert nbytes // 2 - PART < before <= nbytes // 2
        assert list_stored(s3.bucket(prefix)) == [] or list_stored(s3.bucket(prefix))[0].partial
        proxy.stalls_after = -1
        done = upload(s3.bucket(prefix, proxy.url, PART), folder)
    # Each of the two threads may have been in the middle of a part, which counts as received but has not arrived.
    assert done.sent <= nbytes - before + 2 * PART + 5_000
    list_stored(s3.bucket(prefix))[0].verify()


def test_files_that_are_there_are_not_sent_again(s3: S3, prefix, tmp_path):
    folder = make_checkpoint(tmp_path / "here", 7)
    records = manifests.read(folder).files
    bucket = s3.bucket(prefix)
    with contextlib.ExitStack() as stack:
        files = {f"__0_{i}.distcp": stack.enter_context((folder / f"__0_{i}.distcp").open("rb")) for i in range(3)}
        uploads.send(bucket, f"{folder.name}/", files, records, lambda size: None)
    rest = sum(records[f"__0_{i}.distcp"]["bytes"] for i in (3, 4)) + (folder / "manifest.json").stat().st_size
    assert upload(bucket, folder).sent == rest


def test_parts_of_another_save_are_not_taken(s3: S3, prefix, tmp_path):
    """A killed upload left parts of a file of the same step, name and size, and with them that file's hash."""
    one, other = (make_checkpoint(tmp_path / name, 8, files=3, nbytes=2 * PART) for name in ("a", "b"))
    with FaultyProxy(s3.port) as proxy:
        proxy.closes_after = 3 * PART
        with pytest.raises(StoreError):
            upload(s3.bucket(prefix, proxy.url, PART), one)
    assert s3.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    bucket = s3.bucket(prefix, part_bytes=PART)
    upload(bucket, other)
    [found] = list_stored(bucket)
    found.verify()
    for name, record in manifests.read(other).files.items():
        assert bucket.holds(f"{found.prefix}{name}", record["bytes"], record["xxh3_128"])


def test_another_save_of_a_step_replaces_it(s3: S3, prefix, tmp_path):
    """While it does, nothing is visible: the files are some of the one, some of the other."""
    bucket = s3.bucket(prefix)
    one, other = make_checkpoint(tmp_path / "a", 7, files=7), make_checkpoint(tmp_path / "b", 7)
    upload(bucket, one)
    with FaultyProxy(s3.port) as proxy:
        proxy.closes_after = 50_000
        with pytest.raises(StoreError):
            upload(s3.bucket(prefix, proxy.url), other)
    assert list_stored(bucket)[0].partial
    upload(bucket, other)
    [found] = list_stored(bucket)
    found.verify()
    assert same_files(other, found.download(tmp_path / "there"))
    assert sorted(found.sizes) == sorted(path.name for path in other.iterdir())


def test_a_file_damaged_on_this_disk_is_not_uploaded(s3: S3, prefix, tmp_path):
    for nbytes in (1000, 3 * PART):
        folder = make_checkpoint(tmp_path / str(nbytes), 7, nbytes=nbytes)
        flip(folder / "__0_2.distcp")
        with pytest.raises(CheckpointError, match=r"__0_2.distcp is damaged on this disk"):
            upload(s3.bucket(prefix, part_bytes=PART), folder)
        assert all(found.partial for found in list_stored(s3.bucket(prefix)))


def test_a_damaged_object_is_named_and_refused(s3: S3, prefix, tmp_path):
    bucket = s3.bucket(prefix)
    upload(bucket, make_checkpoint(tmp_path / "here", 7))
    s3.flip(f"{prefix}/step-00000007/__0_3.distcp")
    [found] = list_stored(bucket)
    assert found.manifest is not None  # its size is right
    for look in (StoredCheckpoint.verify, lambda checkpoint: checkpoint.download(tmp_path / "there")):
        with pytest.raises(CheckpointError, match=r"step-00000007 is damaged: __0_3.distcp is not what was written"):
            look(found)
    assert not (tmp_path / "there" / "step-00000007").exists()
    s3.flip(f"{prefix}/step-00000007/manifest.json")
    [found] = list_stored(bucket)
    assert found.manifest is None and "damaged" in str(found.problem)


def test_answers_that_are_cut_are_taken_up(s3: S3, prefix, tmp_path):
    """Inside one file: only what is missing is asked for again."""
    folder = make_checkpoint(tmp_path / "here", 7, files=1, nbytes=5_000_000)
    upload(s3.bucket(prefix), folder)
    with FaultyProxy(s3.port) as proxy:
        [found] = list_stored(s3.bucket(prefix, proxy.url))
        proxy.cut_answers = [1_500_000, 3]
        sizes: list[int] = []
        assert same_files(folder, found.download(tmp_path / "there", sizes.append))
        assert proxy.faults == 3
    assert sum(sizes) == 5_000_000


def test_a_download_that_was_cut_off_keeps_the_files_it_has(s3: S3, prefix, tmp_path):
    folder = make_checkpoint(tmp_path / "here", 7)
    upload(s3.bucket(prefix), folder)
    with FaultyProxy(s3.port) as proxy:
        [found] = list_stored(s3.bucket(prefix, proxy.url))
        there = tmp_path / "there" / "step-00000007.downloading"
        there.mkdir(parents=True)
        for i in range(4):
            (there / f"__0_{i}.distcp").write_bytes((folder / f"__0_{i}.distcp").read_bytes())
        flip(there / "__0_1.distcp")
        (there / "tensors-00009.safetensors").touch()
        before = proxy.requests
        assert same_files(folder, found.download(tmp_path / "there"))
        assert proxy.requests - before <= 3  # two files, and the manifest


@pytest.mark.parametrize(
    ("closed", "bucket", "message"), [(False, "absent", "NoSuchBucket"), (True, BUCKET, "tried several times")]
)
def test_a_store_that_refuses_is_reported(s3: S3, prefix, monkeypatch, closed, bucket, message):
    with FaultyProxy(s3.port) as proxy:
        proxy.closed = closed
        monkeypatch.setenv("S3_ENDPOINT_URL", proxy.url)
        with pytest.raises(StoreError, match=message):
            S3Store(bucket, prefix, QUICK).sizes()
        assert proxy.requests == (QUICK.attempts if closed else 1)


class Redirects(ResettingHandler):
    def do_GET(self) -> None:
        self.send_response(307)
        self.send_header("Location", self.owner.url + self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # botocore asks so for the bucket's region, and again for every answer


def test_a_server_that_redirects_for_ever_is_no_store(monkeypatch, prefix):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with HttpServer(Redirects) as server:
        monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        with pytest.raises(StoreError, match="redirects that do not end, so it is no S3 store; see S3_ENDPOINT_URL"):
            S3Store(BUCKET, prefix, QUICK).sizes()


@pytest.mark.parametrize("token", ["same", None])
def test_a_listing_that_does_not_go_on_is_no_store(s3: S3, prefix, monkeypatch, token):
    store = s3.bucket(prefix)
    page = {"IsTruncated": True, "Contents": [], "NextContinuationToken": token}
    monkeypatch.setattr(store, "_request", lambda *args, **options: page)
    with pytest.raises(StoreError, match="does not go on"):
        store.sizes()
