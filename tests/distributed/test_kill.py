"""kill -9 at any moment of a save: the next start continues from the last complete checkpoint."""

import multiprocessing
import random
import time
from pathlib import Path

from llmtrain.checkpoint import local
from llmtrain.checkpoint.format import manifest as manifests
from tests.support.saving import victim

KILLS = 20


def test_kill_9_at_twenty_random_moments_loses_nothing_that_was_saved(tmp_path: Path):
    """Each process saves on from where the one before was killed, every step twice: half of the saves replace one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["llmtrain.train.run", "tests.support.saving"])
    moments = random.Random(0)
    saved, interrupted = 0, set()
    for _ in range(KILLS):
        ours, theirs = context.Pipe()
        process = context.Process(target=victim, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        assert ours.poll(300)
        step, exact, warnings = ours.recv()
        # One more than reported: killed between the save and its report.
        assert step in (saved, saved + 1) and exact and warnings == []
        saved = step
        for _ in range(moments.randrange(1, 4)):
            saved = ours.recv()
        time.sleep(moments.uniform(0, 0.04))
        process.kill()
        process.join()
        while ours.poll():  # reported before it died
            try:
                saved = ours.recv()
            except EOFError:
                break
        interrupted |= {path.suffix for path in tmp_path.iterdir()} - {""}
        for folder in local.folders(tmp_path):  # half a checkpoint never looks whole
            manifests.verify(folder, manifests.read(folder))
    assert saved >= KILLS
    assert ".partial" in interrupted, "no kill came in the middle of a save"
