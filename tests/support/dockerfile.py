"""What the Dockerfile's targets copy from the checkout."""

import fnmatch
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Stage:
    """A stage: what it is built from (its base, and stages it copies from), and its instructions, each on one line."""

    name: str
    uses: set[str]
    lines: list[str] = field(default_factory=list)


def stages() -> dict[str, Stage]:
    """Stages by name, in order."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)
    made: dict[str, Stage] = {}
    stage = None
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if found := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            stage = made[found[2]] = Stage(found[2], {found[1]})
        elif line and not (stage is None and line.startswith("ARG ")):
            assert stage is not None, line
            stage.lines.append(line)
            if found := re.match(r"COPY --from=(\S+) ", line):
                stage.uses.add(found[1])
    return made


def stages_of(target: str) -> list[Stage]:
    """The target's own stage and all that it is built from."""
    known = stages()
    wanted = {target}
    while more := {name for stage in wanted for name in known[stage].uses if name in known} - wanted:
        wanted |= more
    return [stage for name, stage in known.items() if name in wanted]


def copy_context(stage: Stage, folder: Path) -> None:
    """Copy from the checkout into a folder, the stage's work folder, what the stage copies, and nothing that
    .dockerignore keeps from it. Fails, as docker does, for a source that is not there."""
    for line in stage.lines:
        words = line.split()
        if words[0] != "COPY" or words[1].startswith("--from="):
            continue
        *sources, target = words[1:]
        for source in sources:
            assert _in_context(source), f"{stage.name}: .dockerignore keeps out what is copied: {line}"
            into = folder / target / Path(source).name if target.endswith("/") else folder / target
            into.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, into)


def _in_context(source: str) -> bool:
    """Whether .dockerignore lets a path through: the last pattern that matches it, or a folder above it, decides."""
    above = [Path(source).as_posix(), *(parent.as_posix() for parent in Path(source).parents)]
    kept = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and any(fnmatch.fnmatch(path, pattern) for path in above):
            kept = line.startswith("!")
    return kept
