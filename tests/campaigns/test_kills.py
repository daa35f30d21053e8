"""Commands that are killed at any moment: nothing that was there is lost, nothing half-written is taken for whole, and the same
command does the rest.

`pytest -m campaign tests/campaigns`; LLMTRAIN_CAMPAIGN: number of kills; LLMTRAIN_TEST_SEED: others.
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.campaigns.expected import Expected, outcome
from tests.campaigns.findings import Findings
from tests.campaigns.scene import READERS, command

SEED = int(os.environ.get("LLMTRAIN_TEST_SEED", "40"))
COUNT = int(os.environ.get("LLMTRAIN_CAMPAIGN", "300"))
NAMES = [
    "train",
    "train from weights",
    "train from store",
    "prepare",
    "prepare tokens",
    "prepare again",
    "export",
    "import",
]
NAMES += ["convert", "convert file", "convert folder", "eval", "eval again", "compare", "decontaminate", "rm"]
OWN = {
    "train": "run/",
    "prepare again": "again/",
    "eval again": "before/",
    "rm": "run/checkpoints/",
    "train from store": "store/",
}
"""What lies in these folders a command may change; of the scene's other files it changes none."""
REMOVED = 5.0
"""Seconds for the processes of a killed command to end."""


def faults(name: str, scene: dict[str, str], after: dict[str, str]) -> list[str]:
    """Files of the scene that a command has lost or changed, though they are not its own."""
    own = OWN.get(name)
    return [file for file, digest in scene.items() if after.get(file) != digest and not (own and file.startswith(own))]


def half_written(place: Path) -> str:
    """What is found wrong with checkpoints and shards that have their final names."""
    for made in ("run", "new", "stored", "out"):
        if list(place.glob(f"{made}/checkpoints/step-????????")) or (place / made / "manifest.json").exists():
            verb = "data" if (place / made / "train").exists() else "checkpoint"
            status, text = command(place, [verb, "verify", made])
            if status != 0:
                return text or "no answer"
    return ""


def rerun(place: Path, name: str, whole: bool) -> tuple[int | None, str]:
    """The same command again; it may wait a little for the processes of the killed one."""
    argv = READERS[name].argv
    until = time.monotonic() + REMOVED
    while True:
        status, text = command(place, argv)
        if status == 0 or (whole and "exist" in text) or time.monotonic() > until:
            return status, text
        time.sleep(0.5)


def draw(scene: Path, place: Path, count: int) -> Counter[str]:
    """Try `count` kills; fails with all that lost something, left something half-written, or could not be mended by a rerun."""
    rng = random.Random(SEED)
    before = outcome(scene)
    expected: dict[str, Expected] = {}
    found = Findings("mended", "done")
    for number in range(count):
        name = NAMES[number % len(NAMES)] if number >= len(NAMES) else rng.choice(NAMES)
        if name not in expected:
            expected[name] = Expected(scene, place, READERS[name].argv)
        shutil.copytree(scene, place)
        sent = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        after_seconds = rng.uniform(0.02, 1.1) * expected[name].seconds
        status, text = command(place, READERS[name].argv, stop=(after_seconds, sent))
        killed = outcome(place)
        lost = faults(name, before, killed)
        made = expected[name].names - before.keys()
        whole = status == 0 or (
            bool(made)
            and all(file in killed and expected[name].files.get(file) in (None, killed[file]) for file in made)
        )
        half = "" if lost else half_written(place)
        again, said = rerun(place, name, whole)
        missing = expected[name].differences(killed, outcome(place), said) if again == 0 else []
        missing = [file for file in missing if file in expected[name].files]
        verdict = (
            "hang"
            if status is None or again is None
            else "lost"
            if lost
            else "half"
            if half
            else "traceback"
            if sent != signal.SIGKILL and "Traceback (most recent" in text
            else "stuck"
            if again != 0 and not whole
            else "other"
            if missing
            else "mended"
            if status != 0
            else "done"
        )
        about = f"{sent.name} after {after_seconds:.2f} s: {status}, {again}: {lost[:4]} {missing[:4]} {half[-400:]}"
        found.add(verdict, f"{name}, {about}\n{text[-800:]}\n-- {said[-1000:]}")
        shutil.rmtree(place)
    return found.passed()


@pytest.mark.campaign
def test_killed_commands_lose_nothing(scene, tmp_path):
    found = draw(scene, tmp_path / "copy", COUNT)
    assert found["mended"] > COUNT // 4, "the kills came too late"
