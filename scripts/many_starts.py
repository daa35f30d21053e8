"""Groups of ranks that are started in the same second on one machine, by the launcher of `llmtrain train`: none may fail.

    python scripts/many_starts.py [--groups 100] [--ranks 2] [--seconds 600]

Each group is a launcher of its own with so many ranks, which meet, make the process group that a run makes, and sum a number.
`--groups 30 --ranks 8` is the other case of a node that several users share. Exit status 0 if every group succeeded.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmtrain.distributed.processes import exit_on_sigterm

GROUP = """
import sys
from llmtrain.distributed.launch import launch
sys.exit(launch([sys.executable, "-c", sys.argv[3]], int(sys.argv[1]), sys.argv[2]))
"""
RANK = """
import torch, torch.distributed as dist
from llmtrain.distributed.world import initialize, world_from_environment
device, world = initialize(), world_from_environment()
found = torch.ones(1, device=device)
dist.all_reduce(found)
assert found.item() == world.size
dist.destroy_process_group()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2, help="of each group (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of a group that hangs")
    args = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{number}.txt" for number in range(args.groups)]
        began = time.monotonic()
        groups: list[subprocess.Popen] = []
        failed = []
        try:
            for number, log in enumerate(logs):
                command = [sys.executable, "-c", GROUP, str(args.ranks), f"{folder}/{number}", RANK]
                with log.open("w") as output:
                    groups.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
            for number, group in enumerate(groups):
                try:
                    status: int | str = group.wait(max(began + args.seconds - time.monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    status = "hung"
                if status:
                    failed.append(number)
                    print(f"group {number}: {status}\n{logs[number].read_text()}")
        finally:
            for group in groups:
                group.terminate()
            for group in groups:
                group.wait()
        seconds = time.monotonic() - began
        print(f"{args.groups} groups of {args.ranks} ranks: {len(failed)} failed, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
