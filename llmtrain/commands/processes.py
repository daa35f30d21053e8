"""The number of processes that `train` and `eval` run on this machine."""

import os
from glob import glob

from llmtrain.errors import UserError

_MOST_PER_CORE, _MOST = 4, 64


def joins_a_launcher(nproc: int | None) -> bool:
    """True for a rank that a launcher started; it then ends with its launcher.

    nproc: of --nproc. Raises UserError for a number below 1 or far above the cores, and in a rank, which starts no processes.
    """
    from llmtrain.distributed.processes import end_with_launcher
    from llmtrain.distributed.world import launched_by_a_launcher

    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: expected at least 1")
    most = max(_MOST, _MOST_PER_CORE * (os.cpu_count() or 1))
    if nproc is not None and nproc > most:
        raise UserError(f"--nproc {nproc}: expected at most {most} processes on this machine, of one GPU or core each")
    if not launched_by_a_launcher():
        return False
    end_with_launcher()
    if nproc is not None:
        raise UserError(
            "--nproc starts processes, but a launcher already started this one; drop --nproc or the launcher"
        )
    return True


def chosen_processes(nproc: int | None) -> int:
    """--nproc, by default one process per GPU, or one."""
    if nproc is not None:
        return nproc
    return count_gpus() or 1


def probable_processes(nproc: int | None) -> int:
    """`chosen_processes` as the devices' files tell, at once; 0 where they do not."""
    if nproc is not None:
        return nproc
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(glob("/dev/nvidia[0-9]*") if visible is None else visible.split(","))


def count_gpus() -> int:
    """GPUs of this machine now."""
    from llmtrain.start import start_phase

    with start_phase("import of PyTorch"):
        import torch
    return torch.cuda.device_count()
