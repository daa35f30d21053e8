"""One rank: how it ends."""

import contextlib
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.data.sources.files import PrepareError
from llmtrain.distributed.processes import LAUNCHER
from llmtrain.distributed.world import World
from llmtrain.schema.data import PrepareConfig
from llmtrain.train import worker

PROGRAM = """
import signal
from llmtrain.train.worker import run_rank
run_rank(lambda ranks: signal.raise_signal(signal.SIGBUS), "run.yaml", [], fresh=False)
"""


def test_a_fault_in_c_code_is_reported(tmp_path):
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGBUS
    assert ended.stderr.startswith("Fatal Python error: Bus error")


@pytest.mark.parametrize("streams", [False, True])
def test_a_restart_in_place_reads_no_sources(tmp_path, monkeypatch, streams):
    """They may be many files, and were compared when the run began."""
    gone = [str(tmp_path / "gone.txt")]
    what: dict[str, Any] = {"streams": {"some": gone}} if streams else {"sources": gone}
    prepare = PrepareConfig(out=str(tmp_path / "out"), vocab_size=300, seq_len=8, **what)
    config: Any = SimpleNamespace(data=SimpleNamespace(prepare=prepare))
    monkeypatch.setenv(LAUNCHER, "1")
    for count, prepared in (("1", False), ("0", True), ("1", True)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        if prepared:
            folder = tmp_path / "out" / ("some" if streams else "")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "manifest.json").write_text('{"splits": {}}')
        expected = contextlib.nullcontext() if (count, prepared) == ("1", True) else pytest.raises(PrepareError)
        with expected:
            worker._prepare_data(config, World(0, 1, 0, 1))
