"""All-reduces in every node, and between neighbours of the ring of nodes, whose speed and sums are checked."""

import time
from datetime import timedelta

from llmtrain.distributed.world import World
from llmtrain.doctor.cluster_judge import Link
from llmtrain.kernels.platform import Platform

_LIMIT = timedelta(minutes=10)
"""Time limit of the group: beyond the preflight's own, since NCCL's ends the process without the name of a rank."""


def pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """Neighbours in a ring of nodes, in rounds in which no node is in two pairs."""
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else nodes - 1)]
    last = [ring.pop()] if nodes % 2 and nodes > 2 else []
    return [one for one in (ring[::2], ring[1::2], last) if one]


def measure_links(store, world: World, here: Platform) -> list[Link]:
    """Links of which this rank is the first. store: a torch.distributed.Store. Every rank calls this. Raises what the backend
    raises, and hangs where a rank does not come."""
    import torch
    import torch.distributed as dist

    own, gpu = not dist.is_initialized(), here.vendor != "cpu"
    if gpu:
        torch.cuda.set_device(world.local_rank)  # of this thread
    if own:
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=_LIMIT,
            device_id=torch.device("cuda", world.local_rank) if gpu else None,
        )
    found = []
    nodes = world.size // world.local_size
    for one_round in [[(node,) for node in range(nodes)], *pairs(nodes)]:
        for members in one_round:
            ranks = [node * world.local_size + rank for node in members for rank in range(world.local_size)]
            if len(ranks) == 1:
                continue
            group = dist.new_group(ranks)  # by all ranks, in the same order
            if world.rank in ranks:
                gbs, right = _all_reduce(group, len(ranks), here)
                if world.rank == ranks[0]:
                    found.append(Link(members, len(ranks), gbs, right))
    if own:
        dist.destroy_process_group()
    return found


def _all_reduce(group, size: int, here: Platform) -> tuple[float, bool]:
    """(bus bandwidth of the fastest of ten in GB/s, whether the sums were right): each rank sends and receives 2 (n-1) / n of the
    bytes."""
    import torch
    import torch.distributed as dist

    gpu = here.vendor != "cpu"
    values = torch.ones((128 << 20) if gpu else (1 << 20), device=here.device_type)
    dist.all_reduce(values, group=group)  # makes the connections
    right, seconds = bool((values == size).all()), []
    values.fill_(0)
    for _ in range(10):
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * (size - 1) / size * values.nbytes / min(seconds) / 1e9, right
