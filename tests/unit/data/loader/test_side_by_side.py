"""Jobs and ranks of one machine read side by side, started at once, killed, resumed: none fails, hangs or leaves anything."""

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.data.inspect.seen import RunOrder
from llmtrain.data.loader.loaders import build_train_loader
from llmtrain.data.shards.index import read_index
from llmtrain.schema.data import DataConfig
from tests.support.tiny import tiny_settings

FORK = multiprocessing.get_context("fork")
JOBS, SAMPLES, BATCH = 8, 200, 8
_SEGMENT = re.compile(r"/dev/shm/(?!.*\(deleted\)$)(\S+)", re.MULTILINE)


def settings(streams: dict[str, Any], **options: Any) -> DataConfig:
    values = {"seq_len": 8, "train": {"streams": streams}, "num_canonical_nodes": 1, "num_workers": 0}
    return DataConfig.model_validate(values | options)


def expected_ids(config: DataConfig, remote: Path, steps: int) -> list[list[int]]:
    """The sample ids of each step, sorted."""
    index = read_index(remote)
    assert index is not None
    return np.sort(RunOrder(config, BATCH, [index]).ids(range(steps)), axis=1).tolist()


def read_all(config: DataConfig, temporary: Path, started: Any, out: Path) -> None:
    """A job: an epoch of all samples, written to a file whole."""
    os.environ["TMPDIR"], tempfile.tempdir = str(temporary), None
    torch.set_num_threads(1)
    started.wait()
    batches = list(build_train_loader(config, global_batch_size=BATCH))
    assert all((batch["input_ids"] == batch["sample_ids"][:, None]).all() for batch in batches)
    out.write_text(json.dumps([sorted(batch["sample_ids"].tolist()) for batch in batches]))


def named_segments(roots: Iterable[int]) -> set[str]:
    """Names in /dev/shm that these processes and their children have mapped."""
    parents, maps = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            maps[int(folder.name)] = (folder / "maps").read_text()
    family = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return {name for pid in family for name in _SEGMENT.findall(maps.get(pid, ""))}


@contextmanager
def full_load(processes: int) -> Iterator[None]:
    """So many processes that compute without end."""
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


@pytest.mark.parametrize("users", [1, 2])
@pytest.mark.parametrize(("rounds", "load"), [(2, 0), pytest.param(50, 4, marks=pytest.mark.slow)])
def test_jobs_that_start_at_once_on_one_machine_all_read_on_when_some_are_killed(
    tmp_path, write_shards, users, rounds, load
):
    """Of eight, half share a cache, of which some limit it; the others read in place, packed and unpacked. Some have a process of
    the loader."""
    packings = {"raw": None, "zstd": "zstd"}
    remotes = {name: write_shards(tmp_path / name, SAMPLES, compression=packing) for name, packing in packings.items()}
    limit = sum(file.stat().st_size for file in remotes["raw"].iterdir())
    kinds = []
    for number in range(JOBS):
        remote = remotes[("raw", "zstd")[number % 2]]
        options: dict[str, Any] = {"num_workers": int(number in (0, 3, 4, 7))}
        stream = {"local": str(remote)}
        if number < JOBS // 2:
            stream = {"local": str(tmp_path / f"cache-{remote.name}"), "remote": str(remote)}
            options |= {"cache_limit": limit} if number < 2 else {}
        kinds.append((settings({"a": stream}, **options), remote))
    whole = {remote: expected_ids(kinds[0][0], remote, SAMPLES // BATCH) for remote in remotes.values()}
    temporary = [tmp_path / f"tmp{user}" for user in range(users)]
    for folder in temporary:
        folder.mkdir()
    rng, segments, outs = random.Random(rounds * users), set(), [tmp_path / f"out{number}" for number in range(JOBS)]
    with full_load(load):
        for _ in range(rounds):
            started = FORK.Event()
            jobs = [
                FORK.Process(target=read_all, args=(config, temporary[number % users], started, outs[number]))
                for number, (config, _) in enumerate(kinds)
            ]
            for one in jobs:
                one.start()
            started.set()
            victims, deadline = rng.sample(range(JOBS), 3), time.monotonic() + 240
            pids = [one.pid for one in jobs if one.pid]
            for number in victims:
                time.sleep(rng.uniform(0, 0.15))
                segments |= named_segments(pids)
                jobs[number].kill()
            for number, one in enumerate(jobs):
                one.join(max(deadline - time.monotonic(), 0))
                assert one.exitcode is not None, f"job {number} hangs"
                if number not in victims:
                    assert one.exitcode == 0 and json.loads(outs[number].read_text()) == whole[kinds[number][1]]
                outs[number].unlink(missing_ok=True)
    assert segments == set()
    left = [file.name for folder in temporary for file in folder.iterdir()]
    assert [name for name in left if not name.startswith("pymp-")] == []  # multiprocessing's own, of processes killed
    for config, remote in kinds[: JOBS // 2]:
        build_train_loader(config, global_batch_size=BATCH)  # removes what killed ones left
        names = {file.name for file in Path(config.train_streams()["a"].local).iterdir()}
        allowed = {file.name.removesuffix(".zstd") for file in remote.iterdir()} | {
            file.name for file in remote.iterdir()
        }
        assert names - allowed <= {".llmtrain-lock", ".llmtrain-remote"}


def read_resumed(config: DataConfig, rank: int, ranks: int, steps: list[int], together: Any, results: Any) -> None:
    """A rank: two batches from each of these steps, begun by all ranks at once."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    found = []
    for step in steps:
        together.wait(300)
        loader = build_train_loader(config, global_batch_size=BATCH)
        epoch, done = divmod(step, len(loader))
        loader.dataset.load_state_dict(loader.dataset.state_dict(done * BATCH, True) | {"epoch": epoch})
        found.append([batch["sample_ids"].tolist() for batch in islice(loader, 2)])
    results.put((rank, found))


@pytest.mark.parametrize(
    ("ranks", "resumes"), [(4, 12), (8, 6), *(pytest.param(ranks, 200, marks=pytest.mark.slow) for ranks in (4, 8))]
)
def test_ranks_that_resume_together_never_wait_for_one_another(tmp_path, write_shards, ranks, resumes):
    folder = write_shards(tmp_path / "a", SAMPLES)
    config = settings({"a": {"local": str(folder)}})
    per_epoch = SAMPLES // BATCH
    rng = random.Random(ranks)
    steps = [rng.randrange(per_epoch - 1) + per_epoch * rng.randrange(3) for _ in range(resumes)]
    together, results = FORK.Barrier(ranks), FORK.Queue()
    jobs = [
        FORK.Process(target=read_resumed, args=(config, rank, ranks, steps, together, results)) for rank in range(ranks)
    ]
    for one in jobs:
        one.start()
    try:
        found = dict(results.get(timeout=600) for _ in jobs)
    finally:
        for one in jobs:
            one.join(5)
            one.kill()
    whole = expected_ids(config, folder, 3 * per_epoch)
    for number, step in enumerate(steps):
        batches = [sorted(id for rank in range(ranks) for id in found[rank][number][turn]) for turn in range(2)]
        assert batches == whole[step : step + 2]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_or_stops_while_it_fetches_is_not_waited_for_for_ever(tmp_path, write_shards, how):
    remote = write_shards(tmp_path / "far", 64, compression=None)
    streams = {"a": {"remote": str(remote), "local": str(tmp_path / "cache")}}
    config = settings(streams, shuffle=False, download_timeout=0.3, download_retries=0)
    dataset = build_train_loader(config, global_batch_size=BATCH).dataset
    fetching = tmp_path / "fetching"

    def fetch_for_ever() -> None:
        def download(name: str, path: str) -> None:
            Path(path).write_bytes(b"half")
            fetching.touch()
            time.sleep(600)

        dataset.streams[0].fetcher = replace(dataset.streams[0].fetcher, download=download)
        dataset.prepare(0)

    other = FORK.Process(target=fetch_for_ever)
    other.start()
    assert wait_for(fetching.exists)
    assert other.pid
    try:
        assert dataset.prepare_ahead(0) and not dataset.streams[0].file(0).exists()  # another process is at it
        assert [file.name[:11] for file in remains(tmp_path)] == [".download-0"]
        build_train_loader(config, global_batch_size=BATCH)
        assert remains(tmp_path)  # it may go on
        os.kill(other.pid, how)
        assert dataset.get_item(0)["sample_id"] == 0
    finally:
        other.kill()
        other.join()
    build_train_loader(config, global_batch_size=BATCH)
    assert remains(tmp_path) == []


def wait_for(true: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def remains(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").glob(".download-*"))


@pytest.mark.slow
def test_two_runs_of_training_start_at_once(tmp_path, shards):
    """`llmtrain train` itself, one of two ranks, one of one with loader processes."""
    before = set(Path("/dev/shm").iterdir())
    runs = []
    for name, ranks, workers in (("one", 1, 2), ("two", 2, 1)):
        file = tmp_path / f"{name}.yaml"
        changes = {"data.num_workers": workers, "checkpoint.interval": "10 steps"}
        file.write_text(json.dumps(tiny_settings(shards, tmp_path / name, changes)))
        (tmp_path / f"tmp-{name}").mkdir()
        command = [sys.executable, "-m", "llmtrain.cli", "train", str(file), "--nproc", str(ranks)]
        runs.append(subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path / f"tmp-{name}")}))
    segments: set[str] = set()
    while any(run.poll() is None for run in runs):
        segments |= named_segments([run.pid for run in runs])
        time.sleep(0.2)
    assert [run.returncode for run in runs] == [0, 0]
    assert {name for name in segments if Path("/dev/shm", name) not in before and re.match(r"\d{6}_", name)} == set()
