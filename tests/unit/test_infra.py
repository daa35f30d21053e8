"""The scripts around the package: the ROCm image's overrides, the SLURM job, and what CI is built from."""

import os
import runpy
import stat
import subprocess
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


def write_stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def cluster(tmp_path):
    """A SLURM of one node, made of stand-ins: srun runs its command here, torchrun writes down how it was called."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    calls = tmp_path / "calls"
    write_stub(bin_folder, "scontrol", f'echo "scontrol $*" >> {calls}; [[ $1 != show ]] || printf "n1\\nn2\\n"')
    write_stub(bin_folder, "srun", 'shift; SLURM_NODEID=1 "$@"')
    write_stub(bin_folder, "torchrun", f'echo "NODE_RANK=$NODE_RANK torchrun $*" >> {calls}; exit ${{EXIT:-0}}')
    environment = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_GPUS_ON_NODE": "8",
    }

    def submit(*arguments: str, **extra: str) -> tuple[int, str]:
        script = ROOT / "scripts" / "slurm" / "pretrain.sbatch"
        done = subprocess.run(["bash", script, *arguments], env=environment | extra, timeout=30, check=False)
        return done.returncode, calls.read_text() if calls.exists() else ""

    return submit


def test_the_slurm_job_starts_torchrun_on_each_node(cluster):
    status, calls = cluster("run.yaml", "train.microbatch_size=4")
    assert status == 0
    assert "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 4711 --rdzv-endpoint n1:24711" in calls
    assert calls.rstrip().endswith("scripts/train.py run.yaml train.microbatch_size=4")
    assert "NODE_RANK=1 " in calls
    assert (ROOT / "scripts" / "train.py").exists()


def test_a_failed_run_fails_the_job_and_is_not_put_back(cluster):
    status, calls = cluster("run.yaml", EXIT="3")
    assert status == 3
    assert "requeue" not in calls


def test_the_slurm_job_without_a_yaml_says_how_it_is_used(cluster):
    status, calls = cluster()
    assert (status, calls) == (2, "")


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
