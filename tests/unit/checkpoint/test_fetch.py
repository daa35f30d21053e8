"""The newest checkpoint of a store before a run starts: what is there and not good ends the start."""

import contextlib
import functools
import os
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from llmtrain.checkpoint import fetch as fetch_module
from llmtrain.checkpoint.fetch import fetch_newest
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.stored import list_stored
from llmtrain.checkpoint.stores.base import StoreError
from llmtrain.checkpoint.stores.mounted import MountedStore
from llmtrain.checkpoint.stores.open import open_store
from llmtrain.checkpoint.stores.s3 import RetryPolicy
from llmtrain.checkpoint.upload import upload
from tests.support.http_server import HttpServer, ResettingHandler
from tests.support.stores import QUICK, flip, make_checkpoint


def fetch(address: str, root: Path) -> list[str]:
    said: list[str] = []
    fetch_newest(address, root, launch=None, verify=True, notify=said.append)
    return said


@pytest.fixture
def store(tmp_path) -> MountedStore:
    """A store with the checkpoints of steps 2 and 4."""
    store = MountedStore(tmp_path / "store")
    for step in (2, 4):
        upload(store, make_checkpoint(tmp_path / "made", step))
    return store


def test_a_file_that_an_earlier_download_left_is_taken_only_if_it_is_the_stored_one(store, tmp_path):
    stored = tmp_path / "store" / "step-00000004"
    aside = tmp_path / "here" / "step-00000004.downloading"
    aside.mkdir(parents=True)
    for name in ("__0_0.distcp", "__0_1.distcp"):
        (aside / name).write_bytes((stored / name).read_bytes())
    flip(aside / "__0_1.distcp")
    fetch(store.url, tmp_path / "here")
    found = tmp_path / "here" / "step-00000004"
    manifests.verify(found, manifests.read(found))


def test_what_is_incomplete_here_does_not_reach_the_store(tmp_path):
    store, folder = MountedStore(tmp_path / "empty"), make_checkpoint(tmp_path / "made", 2)
    (folder / "__0_1.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: __0_1\.distcp is missing"):
        upload(store, folder)
    assert store.sizes("") == {}


@pytest.mark.parametrize("damage", ["file", "manifest", "empty manifest", "missing file", "no manifest"])
def test_damaged_checkpoints_alone_end_the_start(store, tmp_path, damage):
    for folder in (tmp_path / "store").glob("step-*"):
        name = "manifest.json" if "manifest" in damage else "__0_1.distcp"
        if damage in ("missing file", "no manifest"):
            (folder / name).unlink()
        elif damage == "empty manifest":
            (folder / name).write_text("")
        else:
            flip(folder / name)
    with pytest.raises(
        CheckpointError, match=r"none of its 2 checkpoint.*llmtrain checkpoint rm file://.* --before 5 --force"
    ):
        fetch(store.url, tmp_path / "here")
    make_checkpoint(tmp_path / "here", 1)
    assert (
        len(fetch(store.url, tmp_path / "here")) >= 2
    )  # this machine has a good one: theirs are named and passed over


@pytest.mark.parametrize("damage", ["file", "no manifest"])
def test_an_older_good_one_is_taken(store, tmp_path, damage):
    newest = tmp_path / "store" / "step-00000004"
    flip(newest / "__0_1.distcp") if damage == "file" else (newest / "manifest.json").unlink()
    assert any("step-00000004" in text and "WARNING" in text for text in fetch(store.url, tmp_path / "here"))
    assert (tmp_path / "here" / "step-00000002" / "manifest.json").is_file()


def cut(store: MountedStore, changes: int, action: Callable[[], object]) -> bool:
    """Runs an action up to its `changes`-th change of the store; whether it was ended there, as by a kill."""
    left, kept = [changes], {name: getattr(store, name) for name in ("put", "delete")}

    def change(name: str, *arguments: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        kept[name](*arguments)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        for name in kept:
            patch.setattr(store, name, functools.partial(change, name))
        action()
    return left[0] < 0


def test_first_uploads_that_were_cut_short_at_any_moment_never_block_a_start(tmp_path):
    """Of one step, then of a later one too, then of their deletion: nothing here was ever whole."""
    store, ends = MountedStore(tmp_path / "store"), 0
    folders = [make_checkpoint(tmp_path / "made", step, files=2, more=["tokenizer.json"]) for step in (2, 4)]
    for moment in range(5):  # the mark, three files and the manifest; then the mark goes
        assert cut(store, moment, lambda: upload(store, folders[0]))
        for later in range(5):
            assert cut(store, later, lambda: upload(store, folders[1]))
            while there := [found for found in list_stored(store) if found.step == 4]:
                warnings = fetch(store.url, tmp_path / "here")
                assert len(warnings) == len(list_stored(store)) and all("cut short" in text for text in warnings)
                cut(store, 1, there[0].delete)
                ends += 1
    assert ends >= 20
    for folder in folders:
        upload(store, folder)
    assert store.sizes().keys() == {f"{folder.name}/{path.name}" for folder in folders for path in folder.iterdir()}
    assert fetch(store.url, tmp_path / "here")[0].startswith("downloading")


def test_a_store_that_lists_nothing_once_is_asked_again(store, tmp_path, monkeypatch):
    answers = iter([[], list_stored(store)])
    monkeypatch.setattr(fetch_module, "list_stored", lambda _: next(answers))
    with pytest.raises(StoreError, match="lists its objects otherwise each time"):
        fetch(store.url, tmp_path / "here")


ANSWERS = {
    "HTML": b"<!doctype html><html><body>Sign in</body></html>",
    "XHTML": b"<?xml version='1.0'?><html><body><p>Sign in</p></body></html>",
    "empty": b"",
    "another XML": b"<?xml version='1.0'?><Error><Code>x</Code></Error>",
    "text": b"ok",
}


class Page(ResettingHandler):
    def do_GET(self) -> None:
        content = self.owner.content
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_HEAD = BaseHTTPRequestHandler.send_error


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_server_that_is_no_store_is_an_error(tmp_path, monkeypatch, answer):
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(RetryPolicy, "pauses", QUICK.pauses)
    with HttpServer(Page) as server:
        server.content = ANSWERS[answer]  # type: ignore[attr-defined]
        monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        with pytest.raises(StoreError, match=r"checkpoint\.remote cannot be asked"):
            fetch("s3://bucket/run", tmp_path / "here")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_restart_in_place_asks_no_store_if_the_newest_is_here_and_good(tmp_path, monkeypatch, damaged):
    """--max-restarts while the store answers nothing, or after minutes: what is newest there was saved here first."""
    monkeypatch.setenv("S3_ENDPOINT_URL", "localhost")
    for step in (2, 4):
        folder = make_checkpoint(tmp_path / "here", step)
    if damaged:
        flip(folder / "__0_1.distcp")
    said: list[str] = []
    asked = functools.partial(fetch_newest, "s3://bucket/run", tmp_path / "here", launch=None, verify=True)
    with pytest.raises(StoreError, match=r"checkpoint\.remote cannot be asked"):
        asked(notify=said.append)
    if damaged:
        with pytest.raises(StoreError, match=r"checkpoint\.remote cannot be asked"):
            asked(notify=said.append, in_place=True)
    else:
        assert asked(notify=said.append, in_place=True).verified == manifests.read(folder).save_id
        assert said == []


def test_an_endpoint_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv("S3_ENDPOINT_URL", "localhost")
    with pytest.raises(StoreError, match=r"S3_ENDPOINT_URL is localhost; expected http"):
        open_store("s3://bucket/run")


OTHER_KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("not-here"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_manifest_of_a_store_that_is_no_file_is_named(store, tmp_path, kind):
    """Its checkpoint would count as half sent, and an earlier one be trained on, or none."""
    manifest = tmp_path / "store" / "step-00000004" / "manifest.json"
    manifest.unlink()
    OTHER_KINDS[kind](manifest)
    with pytest.raises(StoreError, match=r"step-00000004/manifest\.json is not a regular file; move it away"):
        fetch(store.url, tmp_path / "here")


def test_what_is_not_ours_and_has_the_name_of_a_download_is_moved_aside(store, tmp_path):
    notes = tmp_path / "here" / "step-00000004.downloading" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    fetch(store.url, tmp_path / "here")
    found = tmp_path / "here" / "step-00000004"
    manifests.verify(found, manifests.read(found))
    assert (tmp_path / "here" / "step-00000004.file" / "notes.txt").read_text() == "mine"


def test_another_save_of_a_step_leaves_nothing_of_the_earlier_one_and_all_that_is_not_ours(store, tmp_path):
    upload(store, make_checkpoint(tmp_path / "earlier", 6, more=["vocabulary.txt"]))
    stored = tmp_path / "store" / "step-00000006"
    (stored / "notes.txt").write_text("mine")
    upload(store, again := make_checkpoint(tmp_path / "again", 6))
    assert {path.name for path in stored.iterdir()} == {"notes.txt", *(path.name for path in again.iterdir())}


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (["manifest.json", "notes.txt"], True),
        (["manifest.json.tmp", "__0_0.distcp"], True),
        (["__0_0.distcp", "notes.txt"], False),
    ],
)
def test_what_is_stored_is_own_by_its_manifest_or_by_all_its_names(tmp_path, names, own):
    for name in names:
        (tmp_path / "store" / "step-00000002" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / "step-00000002" / name).touch()
    [found] = list_stored(MountedStore(tmp_path / "store"))
    assert found.own == own
