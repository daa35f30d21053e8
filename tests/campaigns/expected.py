"""What commands print and write, and how that differs."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from pathlib import Path

from tests.campaigns.scene import command


def outcome(folder: Path) -> dict[str, str]:
    """Digest of each file of a folder."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size < 10**8]
    return {str(file.relative_to(folder)): hashlib.sha1(file.read_bytes()).hexdigest() for file in files}


def lines(text: str) -> list[str]:
    """Lines without durations, and without those of a start that took long."""
    found = re.sub(r" +[\d.:]+ (m?s|min|h|left|[kMG]?B/s|tokens/s)", " TIME", text).splitlines()
    return [line for line in found if not line.startswith("start: ")]


class Expected:
    """What an undamaged command prints and writes, as far as it does so twice, and the seconds that it takes at most."""

    def __init__(self, scene: Path, place: Path, argv: list[str]):
        found = []
        self.seconds = 0.0
        for _ in range(2):
            shutil.copytree(scene, place)
            began = time.monotonic()
            status, text = command(place, argv)
            self.seconds = max(self.seconds, time.monotonic() - began)
            assert status == 0, text
            found.append((outcome(place), lines(text)))
            shutil.rmtree(place)
        self.files = {name: digest for name, digest in found[0][0].items() if found[1][0].get(name) == digest}
        self.names = found[0][0].keys() & found[1][0].keys()
        self.lines = set(found[0][1]) & set(found[1][1])

    def differences(self, before: dict[str, str], after: dict[str, str], text: str) -> list[str]:
        """Names of files and lines that differ. before, after: outcome of the folder before and after the command; a file that
        the command did not touch does not count."""
        changed = [
            name
            for name, digest in self.files.items()
            if after.get(name) != digest and before.get(name) != after.get(name)
        ]
        missing = [name for name in self.files if name not in after and name in before]
        unmade = [name for name in self.files if name not in after and name not in before]
        return [*changed, *missing, *unmade, *sorted(self.lines - set(lines(text)))]
