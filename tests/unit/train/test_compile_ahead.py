"""Kernels compiled beside a run's start: those that its first step needs, once, and no others."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.kernels import launch
from llmtrain.kernels.tuning import own_file
from llmtrain.schema.config import Config
from llmtrain.train import compile_ahead
from llmtrain.train.compile_ahead import (
    BEGUN,
    COMPILED,
    FAILED,
    FOUND_ALL,
    HOW,
    Awaited,
    await_compiled,
    begin_compiling,
    kernel_name,
    write_compiled,
)
from llmtrain.train.compile_process import few_layers

MAMBA = {"type": "mamba2", "n_groups": 2, "chunk_size": 64, "d_state": 64, "head_dim": 64}
ATTENTION = {"type": "attention", "n_heads": 2, "n_kv_heads": 1, "backend": "triton", "position": {"type": "rotary"}}
SHARED = {
    "type": "shared_attention",
    "n_heads": 4,
    "backend": "triton",
    "position": {"type": "rotary"},
    "adapter_rank": 16,
}
GLU, RELU2 = {"type": "geglu", "d_ff": 256}, {"type": "relu2", "d_ff": 256}


def config(**train: Any) -> Config:
    """A hybrid with layers as Zamba2's and Nemotron-H's."""
    blocks = {"m": MAMBA, "mm": {**MAMBA, "mlp": RELU2}, "a": {**ATTENTION, "mlp": GLU}, "s": {**SHARED, "mlp": GLU}}
    model = {"vocab_size": 256, "d_model": 128, "max_seq_len": 256, "norm": {"type": "rmsnorm"}, "blocks": blocks}
    settings = {
        "name": "hybrid",
        "model": {**model, "layers": "m*2 mm a s+m m*2 s+m mm"},
        "data": {"seq_len": 256, "train": {"streams": {"text": {"local": "data"}}}},
        # A loss whose products a CPU can compute.
        "train": {"duration": "4 steps", "global_batch_size": 4, "microbatch_size": 2, "loss": {"type": "plain"}}
        | {"precision": "amp_bf16", "compile": "off"}
        | train,
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup": "1 steps"},
    }
    return Config.model_validate_json(json.dumps(settings))


def keys(config: Config, platform: str, folder: Path) -> tuple[set[str], set[str]]:
    """Kernels found before a step, and those that it needs."""
    file = folder / "config.json"
    file.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "tests.support.compile_keys", str(file), platform]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 0, ended.stderr[-3000:]
    answer = json.loads(ended.stdout.splitlines()[-1])
    return set(answer["found"]), set(answer["needed"])


@pytest.mark.parametrize(
    ("platform", "compiled"),
    [
        pytest.param("h200", "off", marks=pytest.mark.ci),
        pytest.param("mi300x", "off", marks=pytest.mark.ci),
        pytest.param("h200", "on", marks=pytest.mark.slow),
    ],
)
def test_finds_the_kernels_that_a_step_needs(platform: str, compiled: str, tmp_path: Path):
    found, needed = keys(config(compile=compiled), platform, tmp_path)
    assert len(needed) >= 20
    assert needed <= found
    # A CPU's gradients are added up by PyTorch.
    assert {name.split()[0] for name in found - needed} == {"llmtrain.kernels.accumulate._accumulate"}


def test_takes_two_layers_of_each_kind():
    assert few_layers(config().model).layers == "m m mm a s+m s+m mm"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CACHE/llmtrain/KEY of `config()` on a machine with a GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(HOW, raising=False)
    monkeypatch.setattr(compile_ahead, "gpus_here", lambda: ["Model: a GPU"])
    monkeypatch.setattr(launch, "COMPILE", [])
    found = compile_ahead._place(config(), 1, 1)
    assert found is not None
    return found


@pytest.fixture
def requests(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Processes that begin to compile: each ends at once."""
    begun, popen = list[Any](), subprocess.Popen

    def begin(command: list[str], **options: Any) -> Any:
        begun.append(command)
        return popen([sys.executable, "-c", "import sys; sys.stdin.buffer.read()"], **options)

    monkeypatch.setattr(compile_ahead.subprocess, "Popen", begin)
    return begun


def test_compiles_what_is_not_in_the_cache(place: Path, requests: list[Any]):
    begin_compiling(config(), 1, 1)
    assert [command[-1] for command in requests] == ["llmtrain.train.compile_process"]
    (place.parent.parent / "KERNEL").mkdir()
    compile_ahead._begun[-1].wait()
    place.with_suffix(".log").write_text(f"{BEGUN} a\n{COMPILED} a KERNEL 1.0 s\n{FOUND_ALL}\n")
    write_compiled(place)
    begin_compiling(config(), 1, 1)
    assert len(requests) == 1  # all there
    (place.parent.parent / "KERNEL").rmdir()
    begin_compiling(config(), 1, 1)
    assert len(requests) == 2


def test_keeps_no_list_of_kernels_of_which_one_failed(place: Path):
    place.with_suffix(".log").write_text(f"{COMPILED} a KERNEL 1.0 s\n{FAILED} b\n")
    write_compiled(place)
    assert not place.with_suffix(".json").exists()


@pytest.mark.parametrize("reason", ["switched off", "no GPU", "ranks share layers", "another process"])
def test_begins_nothing(reason: str, place: Path, requests: list[Any], monkeypatch: pytest.MonkeyPatch):
    if reason == "switched off":
        monkeypatch.setenv(HOW, "off")
    if reason == "no GPU":
        monkeypatch.setattr(compile_ahead, "gpus_here", list)
    ranks = config(parallel={"tensor": 2}) if reason == "ranks share layers" else config()
    with place.with_suffix(".log").open("w") as other:
        if reason == "another process":
            fcntl.flock(other, fcntl.LOCK_EX)
        begin_compiling(ranks, 2 if reason == "ranks share layers" else 1, 1)
    assert not requests


def test_another_kernel_is_another_key():
    def key(ranks: int = 1, **train: Any) -> str:
        return compile_ahead._key(config(**train), ranks, 1, ["a GPU"])

    assert key() == key(duration="8 steps")
    assert len({key(), key(microbatch_size=4), key(2), key(precision="fp32")}) == 4


@pytest.mark.parametrize("home", ["HOME", "XDG_CONFIG_HOME"])
def test_rows_of_the_user_s_own_are_in_the_key(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LLMTRAIN_TUNING", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv(home, str(tmp_path))
    before = compile_ahead._key(config(), 1, 1, ["a GPU"])
    file = own_file("sm90")
    file.parent.mkdir(parents=True)
    file.write_text("rows: []")
    assert compile_ahead._key(config(), 1, 1, ["a GPU"]) != before


def test_waits_for_a_kernel_that_is_being_compiled(place: Path):
    log = place.with_suffix(".log")
    first, second, third = map(kernel_name, ("first", "second", "third"))
    with log.open("w") as compilers:
        fcntl.flock(compilers, fcntl.LOCK_EX)
        await_compiled(config(), 1, 1)
        [awaited] = launch.COMPILE
        assert isinstance(awaited, Awaited)
        ended: dict[str, float] = {}

        def need(name: str) -> threading.Thread:
            def wait() -> None:
                awaited(name, lambda: None)
                ended[name] = time.monotonic()

            thread = threading.Thread(target=wait)
            thread.start()
            return thread

        def report(line: str) -> float:
            print(line, file=compilers, flush=True)
            return time.monotonic()

        report(f"{BEGUN} {first}\n{BEGUN} {second}")
        threads = [need(name) for name in ("first", "second", "third")]
        time.sleep(0.1)
        assert not ended  # the third may still be found
        times = {}
        for name, line in (
            ("first", f"{COMPILED} {first} FOLDER"),
            ("third", FOUND_ALL),
            ("second", f"{FAILED} {second}"),
        ):
            times[name] = report(line)
            threads[("first", "second", "third").index(name)].join(5)
            assert set(ended) == set(times)
            assert all(ended[one] >= times[one] for one in ended)
        report(f"{BEGUN} {third}")
        waiting = need("third")
        time.sleep(0.1)
        assert waiting.is_alive()
    waiting.join(5)  # those that compiled have ended
    assert not waiting.is_alive()


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda file: os.symlink(file, file), lambda file: None])
def test_a_log_that_is_gone_or_no_file_holds_no_rank(put, place: Path):
    """As where Triton's cache is removed while kernels are being compiled."""
    put(place.with_suffix(".log"))
    await_compiled(config(), 1, 1)
    assert not launch.COMPILE
    assert Awaited(place.with_suffix(".log"))("a", lambda: "compiled") == "compiled"


@pytest.mark.parametrize(
    "content", ["", "half a fi", "7", "[7]", '["\\u0000"]', '["' + "x" * 5000 + '"]', "[" * 300_000]
)
def test_a_damaged_list_of_kernels_is_made_anew(content, place: Path, requests: list[Any]):
    place.with_suffix(".json").write_text(content)
    begin_compiling(config(), 1, 1)
    assert len(requests) == 1


def test_waits_for_nothing_where_nothing_is_compiled(place: Path):
    await_compiled(config(), 1, 1)
    assert not launch.COMPILE


PROGRAM = """
import os, sys
from pathlib import Path
from llmtrain.schema.config import Config
from llmtrain.train.compile_process import compile_kernels
from tests.support.compile_keys import PLATFORMS
config = Config.model_validate_json(Path(sys.argv[1]).read_text())
sys.exit(compile_kernels(config, PLATFORMS["h200"], 1, 1, Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_compiles_into_tritons_cache(place: Path, tmp_path: Path):
    one = json.loads(config().model_dump_json())
    one["model"] |= {"layers": "m", "blocks": {"m": one["model"]["blocks"]["m"]}}
    file, cache = tmp_path / "config.json", place.parent.parent
    file.write_text(json.dumps(one))

    def compiled() -> list[str]:
        with place.with_suffix(".log").open("w") as log:
            subprocess.run([sys.executable, "-c", PROGRAM, str(file), str(place)], check=True, stdout=log)
        return sorted(path.parent.name for path in cache.glob("*/*.cubin"))

    kernels = compiled()
    assert len(kernels) > 10
    assert json.loads(place.with_suffix(".json").read_text()) == kernels
    written = {path: path.stat().st_mtime_ns for path in cache.glob("*/*.cubin")}
    assert compiled() == kernels
    assert {path: path.stat().st_mtime_ns for path in written} == written  # read, not compiled again
