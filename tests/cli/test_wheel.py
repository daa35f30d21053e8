"""llmtrain as a user gets it: wheels built from the files that the Dockerfile copies, in an environment of their own."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from llmtrain.versions import versions
from scripts.build_wheels import POST, main, repack, repacked_packages
from tests.support.dockerfile import copy_context, stages, stages_of
from tests.support.package_index import PackageIndex

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = "RUN python scripts/build_wheels.py /wheels"
METADATA = """\
Metadata-Version: 2.4
Name: mosaic-x
Version: 1.2
Requires-Dist: torch<2.7.1,>=2.6.0
Requires-Dist: torch_optimizer<0.4
Requires-Dist: torch; extra == "dev"

All about it.
"""


@pytest.fixture
def upstream(tmp_path) -> Path:
    """A wheel that requires an old torch."""
    path = tmp_path / "mosaic_x-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("x/__init__.py", "y = 1\n")
        wheel.writestr("mosaic_x-1.2.dist-info/METADATA", METADATA)
        wheel.writestr("mosaic_x-1.2.dist-info/licenses/LICENSE", "Apache\n")
        wheel.writestr("mosaic_x-1.2.dist-info/RECORD", "")
    return path


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as opened:
        return opened.read(name).decode()


def test_without_pip_the_script_explains_how_to_get_it_and_makes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["build_wheels.py", str(tmp_path / "dist")])
    assert main() == 2 and "-m ensurepip" in capsys.readouterr().err and not (tmp_path / "dist").exists()


def test_a_repacked_wheel_has_the_same_code_and_explains_what_was_changed(upstream, tmp_path):
    (tmp_path / "out").mkdir()
    made = repack(upstream, tmp_path / "out", {"torch": "torch==2.11.*", "numpy": "numpy>=2"})
    assert made.name == "llmtrain_mosaic_x-1.2.post1-py3-none-any.whl"
    assert read(made, "x/__init__.py") == "y = 1\n"
    assert read(made, "llmtrain_mosaic_x-1.2.post1.dist-info/licenses/LICENSE") == "Apache\n"
    metadata = email.message_from_string(read(made, "llmtrain_mosaic_x-1.2.post1.dist-info/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("llmtrain-mosaic-x", "1.2.post1")
    assert metadata.get_all("Requires-Dist") == ["torch==2.11.*", "torch_optimizer<0.4", 'torch; extra == "dev"']
    note, _, description = str(metadata.get_payload()).partition("The authors' description follows.\n\n")
    assert "    torch==2.11.*  (was torch<2.7.1,>=2.6.0)\n" in note and "numpy" not in note
    assert description == "All about it.\n"


def test_a_repacked_wheel_is_the_same_each_time_and_installs(upstream, tmp_path):
    wheels = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        wheels.append(repack(upstream, tmp_path / name, {"torch": "torch>=2"}))
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    record = [line.split(",") for line in read(wheels[0], "llmtrain_mosaic_x-1.2.post1.dist-info/RECORD").splitlines()]
    with zipfile.ZipFile(wheels[0]) as opened:
        assert [row[0] for row in record] == opened.namelist()
    # sha256 of "y = 1\n" in RECORD's form, as `pip wheel` writes it
    assert record[0][1:] == ["sha256=X1RaJADDdbPmRZ1aaJBqYzYrUjwkZzK5nSwAwVqihlE", "6"]


def test_a_checkout_takes_the_authors_wheels_of_the_repacked_versions():
    packages = repacked_packages(PYPROJECT["project"]["dependencies"])
    assert list(packages) == ["mosaicml", "mosaicml-streaming"]
    for name, version in packages.items():
        folder = ROOT / PYPROJECT["tool"]["uv"]["sources"][f"llmtrain-{name}"]["path"]
        stand_in = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert (stand_in["name"], stand_in["version"]) == (f"llmtrain-{name}", f"{version}{POST}")
        assert stand_in["dependencies"] == [f"{name}=={version}"]


def test_versions_are_the_authors_for_repacked_packages(tmp_path, monkeypatch):
    for folder, version in (("llmtrain_mosaic_x-1.2.post1", "1.2.post1"), ("mosaic_y-2.0+cu", "2.0+cu")):
        name = folder.partition("-")[0].replace("_", "-")
        (tmp_path / f"{folder}.dist-info").mkdir()
        (tmp_path / f"{folder}.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    assert versions("mosaic-x", "mosaic-y") == {"mosaic-x": "1.2", "mosaic-y": "2.0"}
    with pytest.raises(PackageNotFoundError, match=r"for mosaic-z$"):
        versions("mosaic-z")


@pytest.mark.parametrize("target", ["cuda", "rocm"])
def test_a_target_installs_the_wheels_of_a_stage_that_copies_what_they_are_built_of(target, tmp_path):
    used = stages_of(target)
    assert [stage.name for stage in used if BUILD in stage.lines] == ["wheels"]
    for stage in used:
        copy_context(stage, tmp_path)
    project = PYPROJECT["project"]
    inside = [*PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"], project["name"]]
    for name in ("pyproject.toml", project["readme"], *project["license-files"], *inside):
        assert (tmp_path / name).exists(), f"{name} is not copied"
    lines = "\n".join(stages()[target].lines)
    assert re.search(
        r"uv pip install [^&\n]* wheels/llmtrain\S*\.whl|uv pip install [^&\n]* wheels/\*\.whl(\s|$)", lines
    )
    extras = ",".join(sorted(PYPROJECT["project"]["optional-dependencies"]))
    assert "-r pyproject.toml --all-extras" in lines or f"[{extras}]" in lines
    assert "libibverbs1 ibverbs-providers" in lines  # NCCL loads them by name, and falls back to sockets without
    assert "packages.txt" in lines
    assert f"UV_NO_CONFIG=1 UV_EXCLUDE_NEWER={PYPROJECT['tool']['uv']['exclude-newer']}" in " ".join(lines.split())


# Built, installed and run: a minute or two, which .ci/run takes.


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that sees neither the checkout nor this environment. Fails with what it printed."""
    hidden = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    words = [str(word) for word in command]
    ended = subprocess.run(words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stdout}"
    return ended.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[list[Path], Path]:
    """(wheels built from what the Dockerfile copies, a fresh environment with pip that holds nothing else)."""
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "start this with uv run"
    folder = tmp_path_factory.mktemp("wheel")
    run(uv, "venv", "--quiet", "--no-config", "--seed", folder / "venv", cwd=folder)
    (folder / "src").mkdir()
    copy_context(stages()["wheels"], folder / "src")
    command = BUILD.removeprefix("RUN python ").replace("/wheels", str(folder / "wheels")).split(" ")
    run(folder / "venv/bin/python", *command, cwd=folder / "src")
    return sorted((folder / "wheels").glob("*.whl")), folder / "venv"


@pytest.mark.wheel
def test_the_wheel_holds_the_package_the_yamls_and_the_tasks(made):
    (wheel,) = [path for path in made[0] if path.name.startswith("llmtrain-")]
    with zipfile.ZipFile(wheel) as opened:
        inside = {name for name in opened.namelist() if ".dist-info/" not in name}
    expected = {"llmtrain_lm_eval.py"}
    shipped = ("eval", "scripts/kubernetes", "scripts/slurm", "yamls")
    for top, place in (("llmtrain", ""), *((top, "llmtrain/shipped/") for top in shipped)):
        files = [file for file in (ROOT / top).rglob("*") if file.is_file() and "__pycache__" not in file.parts]
        expected |= {place + file.relative_to(ROOT).as_posix() for file in files}
    assert inside == expected


@pytest.mark.wheel
def test_the_quickstart_trains_in_an_empty_folder(made, tmp_path):
    wheels, venv = made
    uv = os.environ.get("UV") or "uv"
    # By name, from an index beside the public one, without the overrides of pyproject.toml: so the wheels' own requirements must
    # do, as for pip.
    newest = PYPROJECT["tool"]["uv"]["exclude-newer"]
    with PackageIndex(wheels, upload_time=newest.replace("15T", "14T")) as index:
        run(
            *(uv, "pip", "install", "--quiet", "--no-config", "--python", venv / "bin/python"),
            *("--index", f"{index.url}/simple/", "--exclude-newer", newest, "llmtrain"),
            cwd=tmp_path,
        )
    run(venv / "bin/pip", "check", cwd=tmp_path)
    llmtrain = venv / "bin/llmtrain"
    said = run(llmtrain, "check", "quickstart", "eval.icl={file: quick, interval: 100 steps}", cwd=tmp_path)
    assert f"quickstart ({venv.resolve()}/lib/" in said
    assert "kubernetes/pretrain.yaml" in run(llmtrain, "launchers", "jobs", cwd=tmp_path)
    assert (tmp_path / "jobs/slurm/pretrain.sbatch").read_text() == (ROOT / "scripts/slurm/pretrain.sbatch").read_text()
    library = sysconfig.get_path("stdlib")
    said = run(
        *(llmtrain, "train", "quickstart", f"data.prepare.sources=[{library}/asyncio, {library}/email]"),
        *("train.duration=3 steps", "schedule.warmup=1 steps", "eval.interval=3 steps", "eval.max_samples=8"),
        cwd=tmp_path,
    )
    assert "step 3/3" in said and "bits per byte" in said
    assert (tmp_path / "runs/quickstart/loss.png").is_file()
