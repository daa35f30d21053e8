"""Programs beside each other, each on a GPU of its own.

    python scripts/gpu/side_by_side.py FOLDER NAME -- COMMAND… -- NAME -- COMMAND… …

The n-th program sees the n-th GPU alone (of those in CUDA_VISIBLE_DEVICES, where that is set); its output goes to
FOLDER/NAME.log, whose last lines are printed at the end. The exit status is 0 where every program's is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path


def main() -> int:
    folder, *rest = sys.argv[1:]
    parts = [list(part) for is_border, part in groupby(rest, lambda word: word == "--") if not is_border]
    programs = list(zip((name for (name,) in parts[::2]), parts[1::2], strict=True))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(len(programs))]
    running = []
    for gpu, (name, command) in zip(gpus, programs, strict=False):
        log = Path(folder) / f"{name}.log"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        running.append(
            (name, log, subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment))
        )
    failed = 0
    for name, log, program in running:
        status = program.wait()
        failed |= status != 0
        print(f"{name}: status {status}", *log.read_text().splitlines()[-8:], sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
