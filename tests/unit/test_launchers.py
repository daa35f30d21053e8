"""Job files for clusters: `llmtrain launchers` writes them, and Kubernetes' starts torchrun on each node."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from llmtrain.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def job():
    """(the headless service, the job)."""
    return list(yaml.safe_load_all((ROOT / "scripts/kubernetes/pretrain.yaml").read_text()))


def test_launchers_are_written_and_never_replaced(tmp_path, capsys):
    assert main(["launchers", str(tmp_path)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.read_bytes() for path in written] == [
        (ROOT / "scripts" / path.relative_to(tmp_path)).read_bytes() for path in written
    ]
    written[0].unlink()
    written[1].write_text("mine")
    assert main(["launchers", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert written[1].read_text() == "mine" and not written[0].exists()


def test_launchers_cannot_be_written_below_a_file(tmp_path, capsys):
    (tmp_path / "slurm").write_text("mine")
    assert main(["launchers", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err and (tmp_path / "slurm").read_text() == "mine"


def test_kubernetes_starts_a_rank_for_each_gpu_of_each_node(job, tmp_path):
    service, spec = job[0], job[1]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert int(given["NODES"]) == spec["completions"] == spec["parallelism"]
    assert int(given["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]} and "/dev/shm" in mounted.values()
    # Kubernetes names the pods of an indexed job JOB-INDEX, and a headless service gives them addresses in its name.
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODES": given["NODES"], "GPUS": given["GPUS"]}
    for node in range(2):
        done = subprocess.run(
            [*container["command"], *container["args"], "train.duration=3 steps"],
            env=environment | {"JOB_COMPLETION_INDEX": str(node)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        words = done.stdout.splitlines()
        assert words[-5:] == ["-m", "llmtrain", "train", "run.yaml", "train.duration=3 steps"]
        options = dict(zip(words[:-5:2], words[1:-5:2], strict=True))
        assert (options["--nnodes"], options["--nproc-per-node"]) == ("2", "8")
        assert options["--rdzv-endpoint"] == f"{job[1]['metadata']['name']}-0.{pod['subdomain']}:29500"
        assert f"is_host={node == 0:d}," in options["--rdzv-conf"]
