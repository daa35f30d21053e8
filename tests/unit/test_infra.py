"""The scripts around the package: the ROCm image's overrides, and what CI is built from."""

import os
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def test_the_rocm_image_requires_torch_nowhere():
    lines = runpy.run_path(str(ROOT / "scripts" / "keep_torch.py"))["overrides"]()
    assert lines == [f"{name}; sys_platform == 'never'" for name in ("torch", "torchvision", "triton")]


def test_pre_commit_uses_local_hooks_only():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {repo["repo"] for repo in repos} == {"local"}


def test_ci_runs_the_readmes_test_command():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    command = "uv run pytest -n 3 --dist loadfile"
    assert command in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("target", ["cuda", "rocm"])
def test_the_images_do_not_run_as_root(target):
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    (stage,) = [stage for stage in stages if stage.splitlines()[0].endswith(f"AS {target}")]
    users = [line.split()[1] for line in stage.splitlines() if line.startswith("USER ")]
    assert users[-1] != "0"
