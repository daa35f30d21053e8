"""A SLURM of one node, or of nodes in network namespaces, made of stand-ins for its commands."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "pretrain.sbatch"

# The step is a task of its own, as under SLURM: signals to the job's script do not reach it.
SRUN = """\
nodes=()
while [[ $1 == --* ]]; do
    if [[ $1 == --nodelist=* ]]; then IFS=, read -ra nodes <<<"${1#*=}"; fi
    shift
done
if [[ $1 == llmtrain ]]; then SLURM_STEP_NODELIST="${nodes[*]}" exec "$@"; fi
setsid env SLURM_NODEID=1 "$@" &
echo $! > step
wait $!"""
SRUN_ON_NODES = """\
while [[ $1 == --* ]]; do
    if [[ $1 == --nodelist=* ]]; then IFS=, read -ra nodes <<<"${1#*=}"; fi
    shift
done
for id in "${!nodes[@]}"; do
    node=${nodes[id]}
    SLURM_NODEID=$id setsid ip netns exec "$NAMESPACE${node#node}" unshare --uts --mount bash -c \
        'hostname "$1" && mount --bind "$HOSTS" /etc/hosts && shift && exec "$@"' bash "$node" "$@" &
    pids+=($!)
    echo $! > "step-$node"
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status"""
# Signals the task only, as proctrack/cgroup does.
SCANCEL = """\
echo "scancel $*" >> calls
kill -TERM $(cat step)"""
TORCHRUN = f"""\
echo "NODE_RANK=$NODE_RANK torchrun $*" >> calls
[[ -n ${{RANKS_RUN:-}} ]] || exit "${{EXIT:-0}}"
{sys.executable} rank.py &
wait $! || exit 1"""
# `doctor --cluster` fails for the nodes BAD, and `check` for numbers of ranks that are not DIVIDES.
LLMTRAIN = """\
echo "llmtrain $* ${SLURM_STEP_NODELIST:-}" >> calls
if [[ $1 == check ]]; then [[ " ${DIVIDES:-} " == *" ${@: -1} "* ]]; exit; fi
if [[ -n ${UNNAMED:-} ]]; then echo "preflight: a fault of no node"; exit 1; fi
for node in ${BAD:-}; do if [[ " $SLURM_STEP_NODELIST " == *" $node "* ]]; then echo "--exclude=$node"; exit 1; fi; done"""
RANK = """\
import pathlib, signal, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
pathlib.Path("ranks-run").touch()
while not heard:
    time.sleep(0.02)
time.sleep(1)  # it saves
with open("calls", "a") as calls:
    print(*heard, "saved", file=calls)
raise SystemExit(143)
"""


class Cluster:
    """`calls` is what was called, and what the ranks heard. With real_torchrun, `llmtrain train` runs on two ranks: of one node, or
    of on_nodes, names of nodes (the environment has their NAMESPACE without a number, and HOSTS for /etc/hosts)."""

    def __init__(self, folder: Path, real_torchrun: bool = False, nodes: int = 2, on_nodes: tuple[str, ...] = ()):
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        names = list(on_nodes) or ["localhost"] if real_torchrun else [f"n{node + 1}" for node in range(nodes)]
        scontrol = f"""case "$*" in
"show hostnames "*) printf "%s\\n" {" ".join(names)};;
"show node "*) [[ " ${{DOWN:-}} " == *" $3 "* ]] && echo "NodeName=$3 State=DOWN*+DRAIN" || echo "NodeName=$3 State=MIXED";;
*) echo "scontrol $*" >> calls;;
esac"""
        stubs = {
            "scontrol": scontrol,
            "srun": SRUN_ON_NODES if on_nodes else SRUN,
            "scancel": SCANCEL,
            "torchrun": TORCHRUN,
        }
        if real_torchrun:
            stubs["torchrun"] = f'exec {sys.executable} -m torch.distributed.run "$@"'
        stubs["llmtrain"] = LLMTRAIN
        stubs["squeue"] = 'echo "${STATE:-RUNNING}"'
        (folder / "rank.py").write_text(RANK)
        for name, body in stubs.items():
            path = bin_folder / name
            path.write_text(f"#!/bin/bash\n{body}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NUM_NODES": str(len(names)),
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_GPUS_ON_NODE": ("1" if on_nodes else "2") if real_torchrun else "8",
        }

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", SCRIPT, *arguments],
            env=self.environment | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def submit(self, *arguments: str, **extra: str) -> int:
        process = self.start(*arguments, **extra)
        process.communicate(timeout=120)
        return process.returncode

    @property
    def calls(self) -> str:
        file = self.folder / "calls"
        return file.read_text() if file.exists() else ""

    def wait_for_ranks(self) -> None:
        deadline = time.monotonic() + 120
        while not (self.folder / "ranks-run").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
