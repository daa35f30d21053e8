"""Ranks, devices and process groups, as torchrun, the Composer launcher and `llmtrain train` set them up."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from llmtrain.distributed.run_lock import release_all
from llmtrain.errors import UserError, exit_status

LISTENER = "LLMTRAIN_LISTENER"
"""Environment variable of the ranks of our launcher: the descriptor, in rank 0, of the socket that listens at MASTER_PORT."""
ENDED = "LLMTRAIN_ENDED"
"""Environment variable of the ranks of our launcher: the descriptor of a pipe, to which a rank that is done writes its number."""


_TIMEOUT = timedelta(minutes=10)
_LOOKUP_SECONDS = 45.0
"""Time for the name of rank 0's node to have an address."""


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks of the run.

    tensor: consecutive ranks that share every layer's work. context: consecutive groups of them that share every sequence. The
    tensor * context ranks of such a group read the same samples; the groups are data-parallel. pipeline: equal parts of the ranks,
    one after the other, that hold a stage of the model each; the n-th ranks of all stages read the same samples.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Number of this rank's group, whose ranks read the same samples."""
        return self._rank_of_stage // self.replication

    @property
    def data_size(self) -> int:
        """Number of such groups."""
        return self.size // self.pipeline // self.replication

    @property
    def _rank_of_stage(self) -> int:
        return self.rank % (self.size // self.pipeline)

    @property
    def replication(self) -> int:
        """Consecutive ranks, of one stage, that read the same samples."""
        return self.context * self.tensor

    @property
    def is_first_reader(self) -> bool:
        """True for one of the ranks that read the same samples."""
        return self.rank == self._rank_of_stage and self.rank % self.replication == 0

    @property
    def reader(self) -> int:
        """Number of this rank's tensor-parallel group, whose ranks, of all stages, read every text together."""
        return self._rank_of_stage // self.tensor

    @property
    def readers(self) -> int:
        """Number of such groups."""
        return self.size // self.pipeline // self.tensor

    def split(self, context: int = 1, tensor: int = 1, pipeline: int = 1) -> World:
        """The same place where so many ranks, whose product divides the run's, share sequences, layers and the model."""
        return replace(self, context=context, tensor=tensor, pipeline=pipeline)


def world_from_environment() -> World:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a lone process is rank 0 of 1. Raises UserError for others."""
    size = _number("WORLD_SIZE", 1, range(1, sys.maxsize))
    local_size = _number("LOCAL_WORLD_SIZE", size, range(1, size + 1))
    if size > 1 and not launched_by_a_launcher():
        raise UserError(
            f"the environment has WORLD_SIZE={size}, but not RANK: a launcher sets both; unset it for one process"
        )
    return World(
        rank=_number("RANK", 0, range(size)),
        size=size,
        local_rank=_number("LOCAL_RANK", 0, range(local_size)),
        local_size=local_size,
    )


def _number(variable: str, default: int, allowed: range) -> int:
    text = os.environ.get(variable, str(default))
    if not (text.isascii() and text.isdigit() and int(text) in allowed):
        most = f"{allowed.start} to {allowed.stop - 1}" if allowed.stop < sys.maxsize else f"{allowed.start} or more"
        raise UserError(f"the environment has {variable}={text}: expected a number, {most}, which a launcher sets")
    return int(text)


def host_name() -> str:
    """The node's name for SLURM's --exclude, else the machine's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def launched_by_a_launcher() -> bool:
    """True inside a rank that torchrun, the Composer launcher or our own launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch_id() -> str:
    """A name for one start of a run, the same on all its ranks and different at the next start; usable in file names."""
    ours = os.environ.get("LLMTRAIN_LAUNCH_ID")
    launch = ours or os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ["MASTER_PORT"]
    return f"{launch}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Environment variables of one rank of a single-node run; Composer needs NODE_RANK as well."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def require_loopback() -> None:
    """Check that processes can meet at 127.0.0.1: gloo and torch's store would wait for minutes. Raises UserError."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as error:
        raise UserError(
            f"127.0.0.1 cannot be reached ({error.strerror or error}), where the processes of a run meet: this machine "
            "or container needs its loopback interface, with IPv4 (`ip link set lo up`)"
        ) from None


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def exit_status_of_rank(command: Callable[[], int], report: Callable[[BaseException], None]) -> int:
    """Like errors.exit_status, but a rank of several that fails ends here: a normal exit waits for all ranks' collectives. Our
    launcher hears of one that is done."""
    status = 1
    try:
        status = exit_status(command, report)
        if status == 0 and ENDED in os.environ:
            os.write(int(os.environ[ENDED]), f"{world_from_environment().rank}\n".encode())
        return status
    finally:
        if status and world_from_environment().size > 1:
            sys.stderr.flush()
            release_all()
            os._exit(status)


def gloo_group():
    """Return a new torch.distributed.ProcessGroup of all ranks for messages in host memory, apart from all other messages.

    Every rank calls this, in the same order."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def initialize():
    """Creates the process group (NCCL/RCCL with a GPU, gloo without) and returns this rank's torch.device.

    A lone process gets a group of one, because FSDP2 shards over a device mesh at any world size.
    """
    import torch
    import torch.distributed as dist

    world = world_from_environment()
    alone = not launched_by_a_launcher()
    if alone:
        os.environ.update(rank_environment(0, 1, free_port()))
    # Composer derives this from LOCAL_WORLD_SIZE elsewhere and fails without it under torchrun.
    os.environ.setdefault("NODE_RANK", str(world.rank // world.local_size))
    device, backend, device_id = torch.device("cpu"), "gloo", None
    if torch.cuda.is_available():
        device = device_id = torch.device("cuda", world.local_rank)
        backend = "nccl"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        options = {"store": _store(world, alone), "rank": world.rank, "world_size": world.size}
        if options["store"] is None:
            options = {}
            _require_meeting_place()
        try:
            # Composer would do this without device_id, and NCCL would guess (and warn) at every barrier.
            dist.init_process_group(backend, device_id=device_id, timeout=_TIMEOUT, **options)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise UserError(
                f"MASTER_PORT={os.environ['MASTER_PORT']}: another process listens there on this machine; set another port"
            ) from error
    return device


def _require_meeting_place() -> None:
    """Check the address that another launcher gave its ranks; torch would look up a wrong name for minutes. Raises UserError."""
    address, deadline = os.environ.get("MASTER_ADDR"), time.monotonic() + _LOOKUP_SECONDS
    if not address or "MASTER_PORT" not in os.environ:
        raise UserError("the environment has RANK and WORLD_SIZE, but not MASTER_ADDR and MASTER_PORT: use a launcher")
    port = _number("MASTER_PORT", 0, range(1, 65536))
    while True:
        try:
            socket.getaddrinfo(address, port)
            return
        except socket.gaierror as error:  # of a pod that begins, say
            if time.monotonic() > deadline:
                raise UserError(
                    f"MASTER_ADDR={address}: {host_name()} finds no address of that name ({error.strerror})"
                ) from None
        time.sleep(0.5)


def _store(world: World, alone: bool):
    """The store at which the ranks meet, a torch.distributed.Store; None for ranks of other launchers: MASTER_ADDR and
    MASTER_PORT lead to theirs. torch's own would listen on every interface of the machine."""
    import torch.distributed as dist

    if alone:
        return dist.HashStore()
    if LISTENER in os.environ:
        handle, port = int(os.environ.pop(LISTENER)), int(os.environ["MASTER_PORT"])
        listening = {"is_master": True, "master_listen_fd": handle} if world.is_main else {}
        return dist.TCPStore("127.0.0.1", port, world.size, timeout=_TIMEOUT, **listening)
    return None
