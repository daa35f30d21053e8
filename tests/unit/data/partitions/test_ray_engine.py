"""`engine: ray`: the folder that processes of one machine make, also where a worker of the cluster is killed."""

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.partitions import cutting as partitions
from llmtrain.data.partitions import ray_engine
from llmtrain.data.prepare import PrepareError, prepare
from tests.support.prepared import digests
from tests.unit.data.conftest import some_text

SETTINGS: dict[str, Any] = {"vocab_size": None, "engine": "ray", "workers": None}


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """Records of about 100 partitions."""
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 20_000)
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps({"text": some_text(i, 60)}) + "\n" for i in range(6000)))
    return file


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Any]:
    """A Ray cluster of three nodes on this machine, with one CPU each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        found.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    ray.shutdown()
    found.shutdown()


def kill_a_worker(reports: Path, killed: list[int]) -> None:
    """SIGKILL a Ray process that is making a partition, once ten are made."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                busy = (process / "cmdline").read_bytes().startswith(b"ray::_make")
                if busy and len(list(reports.glob("*.json"))) >= 10:
                    os.kill(int(process.name), signal.SIGKILL)
                    killed.append(int(process.name))
                    return


@pytest.mark.slow
def test_a_worker_of_the_cluster_killed_in_the_middle(source, settings, tmp_path, cluster):
    whole = prepare(settings(source), progress=False)
    tokenizer = {"tokenizer": str(whole.out / "tokenizer")}
    expected = prepare(settings(source, out=str(tmp_path / "processes"), vocab_size=None, **tokenizer), progress=False)
    config, killed = settings(source, out=str(tmp_path / "ray"), **SETTINGS, **tokenizer), []
    reports = tmp_path / "ray.partial" / "partitions"
    killer = threading.Thread(target=kill_a_worker, args=(reports, killed))
    killer.start()
    found = prepare(config, progress=False)
    killer.join()
    assert len(killed) == 1
    assert digests(found.out) == digests(expected.out)


@pytest.mark.slow
def test_faults_of_a_partition_and_duplicates_on_a_cluster(source, settings, tmp_path, cluster):
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join([*lines, *lines[:50]]))
    whole = prepare(settings(source, dedup=True), progress=False)
    assert whole.manifest["duplicates"]["count"] == 50
    options = {"dedup": True, "tokenizer": str(whole.out / "tokenizer")}
    of_processes = settings(source, out=str(tmp_path / "processes"), vocab_size=None, **options)
    of_ray = settings(source, out=str(tmp_path / "ray"), **SETTINGS, **options)
    assert digests(prepare(of_ray, progress=False).out) == digests(prepare(of_processes, progress=False).out)
    source.write_text("".join([*lines, "oops\n"]))
    with pytest.raises(PrepareError, match=r"records.jsonl:6001: not JSON"):
        prepare(of_ray, progress=False, overwrite=True)


class NoSharedFolder:
    """A cluster of one CPU whose nodes write into folders of their own."""

    class exceptions:
        class RayTaskError(Exception):
            pass

        class RayError(Exception):
            pass

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def put(self, settings: Any) -> Any:
        return type(settings)(**(vars(settings) | {"folder": self.folder}))

    def remote(self, **options: Any) -> Any:
        class Remote:
            def __init__(self, function) -> None:
                self.remote = lambda *given: functools.partial(function, *given)

        return Remote

    def wait(self, running: list[Any]) -> Any:
        return running[:1], running[1:]

    def get(self, one: Any) -> Any:
        return one()

    def cancel(self, one: Any, force: bool) -> None:
        pass


def test_a_node_that_does_not_share_the_folder_or_the_sources(records, settings, tmp_path, monkeypatch):
    ray = NoSharedFolder(tmp_path / "elsewhere")
    monkeypatch.setattr(ray_engine, "_connected", lambda: ray)
    config = settings(records, engine="ray")
    with pytest.raises(
        PrepareError, match="is not the folder of that name on this machine; give --out a folder that all"
    ):
        prepare(config, progress=False)
    ray.folder = tmp_path / "out.partial"
    assert prepare(config, progress=False).split("train")["samples"]
    get, overwritten = ray.get, settings(records, engine="ray", seq_len=16)
    monkeypatch.setattr(ray, "get", lambda one: [records.rename(tmp_path / "gone"), get(one)])
    with pytest.raises(
        PrepareError, match=r"records.jsonl is not on .*, a node of the Ray cluster; the sources must be on"
    ):
        prepare(overwritten, progress=False, overwrite=True)


def test_without_ray_the_extra_is_named(records, settings, monkeypatch):
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(ray_engine.importlib, "import_module", absent)
    with pytest.raises(PrepareError, match=r"engine: ray is not installed \(`pip install 'llmtrain\[ray\]'`\)"):
        prepare(settings(records, engine="ray"), progress=False)
