"""The scripts around the package: the ROCm image's overrides, and what CI is built from."""

import os
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_rocm_image_requires_torch_nowhere_and_keeps_every_other_override():
    given = PYPROJECT["tool"]["uv"]["override-dependencies"]
    lines = runpy.run_path(str(ROOT / "scripts" / "keep_torch.py"))["overrides"](given)
    switched_off = [line for line in lines if line.endswith("; sys_platform == 'never'")]
    assert [line.split(";")[0] for line in switched_off] == ["torch", "torchvision", "triton"]
    kept = [line for line in given if not line.startswith("torch")]
    assert kept
    assert lines == switched_off + kept


def test_pre_commit_uses_local_hooks_only():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {repo["repo"] for repo in repos} == {"local"}


def test_ci_runs_the_readmes_test_command():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    command = "uv run pytest -n 2 --dist loadfile"
    assert command in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("target", ["cuda", "rocm"])
def test_the_images_do_not_run_as_root(target):
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    (stage,) = [stage for stage in stages if stage.splitlines()[0].endswith(f"AS {target}")]
    users = [line.split()[1] for line in stage.splitlines() if line.startswith("USER ")]
    assert users[-1] != "0"
