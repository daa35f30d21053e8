"""Damage to every kind of file that a command reads: it is named, or does no harm; nothing hangs, nothing is a fault.

`pytest -m campaign tests/campaigns`; LLMTRAIN_CAMPAIGN: number of damages; LLMTRAIN_TEST_SEED: others.
"""

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaigns.expected import Expected, outcome
from tests.campaigns.findings import Findings
from tests.campaigns.scene import READERS, Reader, command

SEED = int(os.environ.get("LLMTRAIN_TEST_SEED", "40"))
COUNT = int(os.environ.get("LLMTRAIN_CAMPAIGN", "500"))
LIMIT = 10.0
"""Seconds beyond those that the undamaged command may take on a loaded machine."""


Damage = Callable[[Path, random.Random], Path | None]
"""Changes a file; the other file that it changed, if any."""


def _edit(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    def damage(file: Path, rng: random.Random) -> None:
        content = change(file.read_bytes(), rng)
        file.unlink()
        file.write_bytes(content)

    return damage


def _flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _set_value(content: bytes, rng: random.Random) -> bytes:
    """Another value at a place of a JSON file; of others, a bit."""
    try:
        inside = found = json.loads(content)
    except ValueError:
        return _flip(content, rng)
    while isinstance(inside, dict | list) and inside:
        key = rng.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        if not isinstance(inside[key], dict | list) or rng.random() < 0.3:
            inside[key] = rng.choice([None, True, -1, 0, 3, 10**9, 1e30, -0.5, "x", "", [], [1], ["a"], {}, {"a": 1}])
            break
        inside = inside[key]
    return json.dumps(found).encode()


def _replace(make: Callable[[Path], object]) -> Damage:
    def damage(file: Path, rng: random.Random) -> None:
        file.unlink()
        make(file)

    return damage


def _fill_folder(file: Path) -> None:
    file.mkdir()
    (file / "thesis").write_text("years of work")


def _swap(file: Path, rng: random.Random) -> Path | None:
    others = [other for other in sorted(file.parent.rglob("*")) if other.is_file() and other != file]
    if not others:
        file.write_bytes(b"something else")
        return None
    other = rng.choice(others)
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return other


DAMAGES: dict[str, Damage] = {
    "flip": _edit(_flip),
    "cut": _edit(lambda content, rng: content[: rng.randrange(len(content) + 1)]),
    "cut front": _edit(lambda content, rng: content[rng.randrange(len(content) + 1) :]),
    "empty": _edit(lambda content, rng: b""),
    "zeros": _edit(lambda content, rng: bytes(len(content))),
    "random": _edit(lambda content, rng: rng.randbytes(len(content))),
    "longer": _edit(lambda content, rng: content + content),
    "brackets": _edit(lambda content, rng: b"[" * 300_000),
    "value": _edit(_set_value),
    "number": _edit(lambda content, rng: b"7\n"),
    "list": _edit(lambda content, rng: b"[1, {}, null]\n"),
    "mapping": _edit(lambda content, rng: b'{"a": 1}\n'),
    "swap": _swap,
    "folder": _replace(_fill_folder),
    "pipe": _replace(lambda file: os.mkfifo(file)),
    "loop": _replace(lambda file: file.symlink_to(file.name)),
    "nowhere": _replace(lambda file: file.symlink_to("not-here")),
    "zero device": _replace(lambda file: file.symlink_to("/dev/zero")),
    "gone": _replace(lambda file: None),
}


def judge(reader: Reader, files: list[Path], status: int | None, text: str, differences: list[str], free: bool) -> str:
    """One of: named, harmless; hang, fault, unnamed, silent."""
    if status is None:
        return "hang"
    if "Traceback (most recent call last)" in text or status not in (0, 1, 2):
        return "fault"
    sure = [*reader.words, *(path.name for path in files)]
    vague = [part for path in files for part in (path.stem, str(path.parent), path.parent.name)] if status else []
    named = any(len(part) > 1 and part in text for part in (*sure, *vague))
    if status:
        return "named" if named else "unnamed"
    return "harmless" if free or not differences else "named" if named else "silent"


def cases(scene: Path) -> list[tuple[str, str, bool]]:
    """(command, file it reads, whether its content is free) of every pair."""
    found = {}
    for name, reader in READERS.items():
        for free, patterns in ((True, reader.free), (False, reader.reads)):
            for pattern in patterns:
                for file in scene.glob(pattern + "/*" if pattern.endswith("**") else pattern):
                    if file.is_file() and not file.name.endswith((".lock", ".png")):
                        found[name, str(file.relative_to(scene))] = free
    return [(name, file, free) for (name, file), free in sorted(found.items())]


def draw(scene: Path, place: Path, count: int) -> Counter[str]:
    """Try `count` damages, of every file first; fails with all that are neither named nor harmless."""
    rng = random.Random(SEED)
    every = cases(scene)
    chosen = [case for _ in range(count // len(every) + 1) for case in rng.sample(every, len(every))][:count]
    expected: dict[str, Expected] = {}
    found = Findings("named", "harmless")
    for name, file, free in chosen:
        argv = READERS[name].argv
        if name not in expected:
            expected[name] = Expected(scene, place, argv)
        shutil.copytree(scene, place)
        kind = rng.choice(list(DAMAGES))
        other = DAMAGES[kind](place / file, rng)
        files = [Path(file), *([other.relative_to(place)] if other else [])]
        before = outcome(place)
        status, text = command(place, argv, LIMIT + 3 * expected[name].seconds)
        changed = expected[name].differences(before, outcome(place), text)
        differences = [what for what in changed if Path(what) not in files]
        verdict = judge(READERS[name], files, status, text, differences, free)
        found.add(verdict, f"{name}, {file}, {kind}: {status} {differences[:5]}\n{text[-1500:]}")
        shutil.rmtree(place)
    return found.passed()


@pytest.mark.campaign
def test_damages_are_named_or_harmless(scene, tmp_path):
    found = draw(scene, tmp_path / "copy", COUNT)
    assert found["named"] > COUNT // 4, "the damages are no test of the commands"
