"""Uploading beside training: newest first, never in its way, and what the store keeps."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from llmtrain.checkpoint import local
from llmtrain.checkpoint.fetch import fetch_newest, refuse_used
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.repository import Repository
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.stored import list_stored
from llmtrain.checkpoint.stores.base import ObjectStore, StoreError
from llmtrain.checkpoint.stores.mounted import MountedStore
from llmtrain.checkpoint.stores.open import open_store
from llmtrain.checkpoint.stores.s3 import RetryPolicy
from llmtrain.checkpoint.upload import GoneError, upload
from llmtrain.checkpoint.uploader import Uploader
from llmtrain.config.addresses import address_problem
from tests.support.faulty_proxy import FaultyProxy
from tests.support.stores import S3, flip, make_checkpoint, same_files

ALL = Retention()


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def bucket(tmp_path) -> MountedStore:
    return MountedStore(tmp_path / "mounted")


def steps(bucket: ObjectStore) -> list[int]:
    return [found.step for found in list_stored(bucket) if found.manifest]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def started(bucket: ObjectStore, root: Path, retention: Retention = ALL, **options) -> tuple[Uploader, list[str]]:
    said: list[str] = []
    return Uploader(bucket, root, retention, notify=said.append, look_seconds=0.01, **options), said


def test_what_appears_is_uploaded_and_what_an_earlier_run_left(root, bucket):
    make_checkpoint(root, 1)
    uploader, said = started(bucket, root)
    wait_for(lambda: steps(bucket) == [1])
    half = make_checkpoint(root.parent / "elsewhere", 3).rename(root / "step-00000003.partial")
    make_checkpoint(root, 2)
    wait_for(lambda: steps(bucket) == [1, 2])
    half.rename(root / "step-00000003")
    assert uploader.close()
    assert steps(bucket) == [1, 2, 3]
    assert len(said) == 3 and "uploaded step-00000003 to file://" in said[-1]
    assert started(bucket, root)[0].close()  # which has nothing left to say, or to send
    for found in list_stored(bucket):
        found.verify()


def test_the_store_keeps_what_keep_states(root, bucket):
    keep = Retention(last=2, every=4)
    for step in range(1, 8):
        make_checkpoint(root, step)
        upload(bucket, root / local.folder_name(step))
    bucket.delete("step-00000001/manifest.json")  # a deletion that was cut off
    s8 = make_checkpoint(root, 8)
    bucket.delete("step-00000007/__0_0.distcp")  # damaged there: it does not count as kept
    shutil.rmtree(root / "step-00000007")
    uploader, _ = started(bucket, root, keep)
    assert uploader.close()
    assert steps(bucket) == [4, 6, 8]
    assert [found.step for found in list_stored(bucket)] == [4, 6, 8]
    assert s8.exists()


def test_a_deletion_that_is_cut_off_leaves_nothing_that_looks_whole(root, bucket, monkeypatch):
    upload(bucket, make_checkpoint(root, 1))
    [found] = list_stored(bucket)
    for cut in range(1, 6):
        left = [cut]

        def stop(name: str, left=left, real=bucket.delete) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            real(name)

        with monkeypatch.context() as patch:
            patch.setattr(bucket, "delete", stop)
            with pytest.raises(KeyboardInterrupt):
                found.delete()
        assert list_stored(bucket)[0].partial


def test_a_deletion_leaves_what_others_put_beside_a_checkpoint(root, bucket):
    for step in (1, 2, 3):
        upload(bucket, make_checkpoint(root, step))
    notes = root.parent / "notes.txt"
    notes.write_text("thesis")
    for name in ("step-00000001/notes.txt", "step-00000001/hf/config.json"):
        with notes.open("rb") as file:
            bucket.put(name, file, 6, xxhash.xxh3_128(b"thesis").hexdigest(), lambda sent: None)
    list_stored(bucket)[0].delete()
    assert {name for name in bucket.sizes() if "00000001" in name} == {
        "step-00000001/notes.txt",
        "step-00000001/hf/config.json",
    }
    uploader, _ = started(bucket, root, Retention(last=1, every=None))
    assert uploader.close()
    assert steps(bucket) == [3] and "step-00000001/notes.txt" in bucket.sizes()


def test_a_store_that_fails_is_reported_and_training_goes_on(s3: S3, prefix, root):
    with FaultyProxy(s3.port) as proxy:
        proxy.closed = True
        uploader, said = started(s3.bucket(prefix, proxy.url), root, again_seconds=0.05)
        make_checkpoint(root, 1)
        wait_for(lambda: len(said) >= 2)  # it tries again
        assert said[0].startswith("WARNING: step-00000001 was not uploaded to s3://") and "again in" in said[0]
        proxy.closed = False
        wait_for(lambda: steps(s3.bucket(prefix)) == [1])
        proxy.closed = True
        make_checkpoint(root, 2)
        assert not uploader.close()
        assert "the upload of step-00000002" in said[-1] and "the same command again" in said[-1]
    assert steps(s3.bucket(prefix)) == [1]


def test_a_close_with_a_limit_does_not_wait_longer(root, bucket, monkeypatch):
    release = threading.Event()
    real = bucket.put
    monkeypatch.setattr(bucket, "put", lambda *arguments: (release.wait(60), real(*arguments)))
    make_checkpoint(root, 1)
    uploader, said = started(bucket, root)
    began = time.monotonic()
    assert not uploader.close(0.2)
    assert time.monotonic() - began < 50
    assert "is not finished" in said[-1]
    release.set()


def test_a_checkpoint_that_the_run_deletes_meanwhile_arrives_all_the_same(root, bucket, monkeypatch):
    folder = make_checkpoint(root, 1)
    kept = shutil.copytree(folder, root.parent / "kept")
    real = bucket.holds

    def holds(*arguments):
        shutil.rmtree(folder, ignore_errors=True)
        return real(*arguments)

    monkeypatch.setattr(bucket, "holds", holds)
    upload(bucket, folder)
    assert not folder.exists()
    assert same_files(kept, root.parent / "mounted" / folder.name)
    with pytest.raises(GoneError):
        upload(bucket, folder)


def bring(address: str, root: Path, launch: str | None = None, verify: bool = True) -> tuple[Path | None, list[str]]:
    said: list[str] = []
    return fetch_newest(address, root, launch=launch, verify=verify, notify=said.append).folder, said


def test_what_was_hashed_on_the_way_is_reported_to_every_rank_of_the_start(root, bucket):
    """So that the run does not hash it again."""

    def verified(launch: str | None, verify: bool = True) -> str | None:
        return fetch_newest(bucket.url, root, launch=launch, verify=verify, notify=lambda text: None).verified

    assert verified("a") is None
    here = manifests.read(make_checkpoint(root, 1)).save_id
    assert verified("a") is None  # asked before
    assert [verified(launch) for launch in ("b", "b", None)] == [here] * 3
    assert verified("c", verify=False) is None
    newer = make_checkpoint(root.parent / "elsewhere", 2)
    upload(bucket, newer)
    assert verified("d") == verified("d") == manifests.read(newer).save_id  # compared while it came


def test_the_newest_of_both_wins(root, bucket, tmp_path):
    assert bring(bucket.url, root) == (None, [])  # nothing anywhere
    folder = make_checkpoint(tmp_path / "elsewhere", 5)
    upload(bucket, folder)
    make_checkpoint(root, 3)
    found, said = bring(bucket.url, root)
    assert found is not None and found == root / "step-00000005" and same_files(found, folder)
    assert "downloading" in said[0] and "has step 3" in said[0]
    make_checkpoint(root, 7)
    assert bring(bucket.url, root) == (None, [])


def test_what_is_damaged_here_is_fetched_again(root, bucket):
    folder = make_checkpoint(root, 5)
    upload(bucket, folder)
    flip(folder / "__0_1.distcp")
    assert bring(bucket.url, root, verify=False) == (None, [])
    found, said = bring(bucket.url, root)
    assert found == folder and "__0_1.distcp is not what was written" in said[0]
    manifests.verify(folder, manifests.read(folder))
    assert (root / "step-00000005.damaged").is_dir()
    flip(folder / "__0_1.distcp")
    assert bring(bucket.url, root)[0] == folder and (root / "step-00000005.damaged-2").is_dir()
    assert [path.name for path in local.folders(root)] == ["step-00000005"]


def test_what_is_damaged_there_is_named_and_the_one_before_is_taken(s3: S3, prefix, root, tmp_path):
    for step in (1, 2, 3):
        upload(s3.bucket(prefix), make_checkpoint(tmp_path / "elsewhere", step))
    s3.flip(f"{prefix}/step-00000003/__0_2.distcp")
    s3.client.delete_object(Bucket="checkpoints", Key=f"{prefix}/step-00000002/__0_0.distcp")
    url = s3.bucket(prefix).url
    found, said = bring(url, root, launch="a")
    assert found == root / "step-00000001"
    assert "step-00000003 is damaged: __0_2.distcp is not what was written" in " ".join(said)
    assert "step-00000002 is incomplete: __0_0.distcp is missing" in " ".join(said)
    assert bring(url, root, launch="a") == (None, [])  # another rank of this start
    assert bring(url, root, launch="b")[0] is None  # another start looks again
    with pytest.raises(StoreError, match=r"checkpoint\.remote=null"):
        bring("s3://absent/run", root)


def test_a_run_that_starts_anew_must_not_take_over_anothers_place(root, bucket):
    refuse_used(bucket.url)
    upload(bucket, make_checkpoint(root, 5))
    with pytest.raises(ValueError, match=r"up to step 5.*--before 6 --force"):
        refuse_used(bucket.url)


def test_a_copy_of_what_a_user_names_is_made_once(s3: S3, prefix, root, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    for step in (1, 2):
        upload(s3.bucket(prefix), make_checkpoint(root, step))
    url = s3.bucket(prefix).url
    for address, step in ((url, 2), (f"{url}/step-00000001/", 1), (f"{url}/step-00000002", 2)):
        assert same_files(Repository(address).open()[0], root / local.folder_name(step))
    assert capsys.readouterr().err.count("downloading") == 2
    Repository(url).open()
    assert "downloading" not in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds no checkpoint"):
        Repository(f"{url}/nothing").find()


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("s3://bucket/run", True),
        ("file:///mnt/run", True),
        ("/mnt/run", True),
        ("gs://bucket/run", False),
        ("s3://bucket", False),
        ("s3://bucket/", False),
        ("s3:///run", False),
        ("file://mnt/run", False),
        ("s3:/bucket/run", False),
    ],
)
def test_addresses(address, fine):
    assert (address_problem(address) is None) == fine
    if not fine:
        with pytest.raises(StoreError, match="must"):
            open_store(address)


def test_patience_is_bounded():
    pauses = [list(RetryPolicy().pauses()) for _ in range(100)]
    assert all(len(found) == 7 and sum(found) <= 52 for found in pauses)
    assert len({tuple(found) for found in pauses}) == 100
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise OSError

    with pytest.raises(OSError):
        RetryPolicy(5, 0.001).call(fail, lambda error: True)
    assert len(calls) == 5
    with pytest.raises(OSError):
        RetryPolicy(5, 0.001).call(fail, lambda error: False)
    assert len(calls) == 6
