"""Build what pip needs to install llmtrain: `python scripts/build_wheels.py dist`, then `pip install dist/*.whl`.

Or copy `dist` into a package index, beside which `pip install llmtrain` finds the rest in the public one.

Composer 0.32.1 and streaming 0.13.0 run with newer torch, transformers and numpy than their metadata allow, and neither
has a later release. uv can override requirements, pip cannot: it would find no set of versions. So beside llmtrain's own
wheel this writes theirs once more, from the package index, with the same code and [tool.uv] override-dependencies of
pyproject.toml in place of their own requirements. Each says so in its metadata and has a name of its own
(llmtrain-mosaicml 0.32.1.post1), which llmtrain's wheel requires: indexes refuse a second file of one name and version, and
local versions (0.32.1+x).

Needs pip and a package index, no packages.
"""

import base64
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PREFIX = "llmtrain-"
"""What a repacked wheel has before its name."""
POST = ".post1"
"""What a repacked wheel has behind its version. Count up when the override-dependencies change."""

NOTE = """\
This wheel is {name} {version} with the same code, repacked by llmtrain's scripts/build_wheels.py, not by its authors. It was
changed in three places: its name is {prefix}{name}, its version {version}{post}, and these requirements stand in place of its
authors'. It has the same files as {name}: install one of the two.

{requirements}

The authors' description follows.

"""


def build(out: Path) -> list[Path]:
    """Write llmtrain's wheel and those of `repacked_packages` to `out`, in place of earlier ones; returns their paths."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    overrides = {package(line): line for line in project["tool"]["uv"]["override-dependencies"]}
    out.mkdir(parents=True, exist_ok=True)
    packages = repacked_packages(project["project"]["dependencies"])
    for name in (project["project"]["name"], *(PREFIX + name for name in packages)):
        for earlier in out.glob(f"{name.replace('-', '_')}-*.whl"):
            earlier.unlink()
    pip("wheel", "--no-deps", "--wheel-dir", str(out), str(ROOT))
    wheels = sorted(out.glob(f"{project['project']['name']}-*.whl"))
    with tempfile.TemporaryDirectory() as folder:
        upstream = [f"{name}=={version}" for name, version in packages.items()]
        pip("download", "--no-deps", "--only-binary", ":all:", "--dest", folder, *upstream)
        wheels += [repack(wheel, out, overrides) for wheel in sorted(Path(folder).glob("*.whl"))]
    return wheels


def repacked_packages(dependencies: list[str]) -> dict[str, str]:
    """The authors' version of each package that is required under a name of ours, by the authors' name."""
    pattern = re.compile(rf"{PREFIX}([\w.-]+)==([\w.]+){re.escape(POST)}")
    return {found[1]: found[2] for line in dependencies if (found := pattern.fullmatch(line))}


def package(requirement: str) -> str:
    """The normalized name in a requirement: `torch_optimizer<0.4` -> `torch-optimizer`."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def repack(wheel: Path, out: Path, overrides: Mapping[str, str]) -> Path:
    """Write a wheel anew with our name and other requirements. overrides: requirement by name of the package. Returns its path.

    The same wheel and overrides give the same bytes.
    """
    name, version, tags = wheel.name.split("-", 2)
    ours = f"{PREFIX.replace('-', '_')}{name}-{version}{POST}"
    before, after = f"{name}-{version}.dist-info/", f"{ours}.dist-info/"
    target = out / f"{ours}-{tags}"
    record = []
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename == f"{before}RECORD":
                continue
            if entry.filename == f"{before}METADATA":
                content = relaxed(content.decode(), overrides).encode()
            info = zipfile.ZipInfo(entry.filename.replace(before, after), entry.date_time)
            info.external_attr, info.compress_type = entry.external_attr, zipfile.ZIP_DEFLATED
            new.writestr(info, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{info.filename},sha256={digest},{len(content)}\n")
        info = zipfile.ZipInfo(f"{after}RECORD", old.getinfo(f"{before}RECORD").date_time)
        info.external_attr, info.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
        new.writestr(info, "".join([*record, f"{info.filename},,\n"]))
    return target


def relaxed(metadata: str, overrides: Mapping[str, str]) -> str:
    """Wheel metadata with our name and version, the overridden requirements, and the note of it. Extras stay as they are."""
    head, _, description = metadata.partition("\n\n")
    lines, changed = [], []
    name = version = ""
    for line in head.splitlines():
        key, _, value = line.partition(": ")
        if key == "Name":
            name, line = value, f"{key}: {PREFIX}{value}"
        elif key == "Version":
            version, line = value, line + POST
        elif key == "Requires-Dist" and "extra ==" not in value and package(value) in overrides:
            line = f"Requires-Dist: {overrides[package(value)]}"
            changed.append(f"    {overrides[package(value)]}  (was {value})")
        lines.append(line)
    assert name and version and changed, f"{name}: nothing to override; require the authors' own wheel"
    note = NOTE.format(name=name, version=version, prefix=PREFIX, post=POST, requirements="\n".join(changed))
    return "\n".join(lines) + "\n\n" + note + description


def pip(*arguments: str) -> None:
    """Run pip. Ends this program if pip fails, which says why."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    if status := subprocess.run(command).returncode:
        sys.exit(status)


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(f"usage: {sys.argv[0]} FOLDER", file=sys.stderr)
        return 2
    if importlib.util.find_spec("pip") is None:  # as in an environment that uv made
        print(f"{sys.executable} has no pip; give it one: {sys.executable} -m ensurepip", file=sys.stderr)
        return 2
    for wheel in build(Path(sys.argv[1]).resolve()):
        print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
