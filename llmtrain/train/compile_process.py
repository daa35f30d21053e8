"""Process that compiles a run's Triton kernels in parallel: see compile_ahead.py, whose request it reads.

    python -m llmtrain.train.compile_process

A pass forward and backward over one layer or two of each kind, with tensors that have the run's formats but no memory, calls the
operators that a step calls. Where one would launch a kernel, a fork of this process compiles it for the arguments' kinds.
"""

import os
import pickle
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.runtime import driver

from llmtrain.adapt.base import adaptations
from llmtrain.adapt.float8 import Float8
from llmtrain.distributed.processes import end_with_parent
from llmtrain.kernels import launch, operators
from llmtrain.kernels.platform import ASSUMED, Platform, build_vendor, detect, triton_target
from llmtrain.kernels.stand_in import StandIn
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.objectives.base import build_objective, compute_loss
from llmtrain.plan.automatic import resolve_auto
from llmtrain.plan.parameters import parameter_sizes
from llmtrain.schema.config import Config
from llmtrain.train.compile_ahead import BEGUN, COMPILED, FAILED, FOUND_ALL, kernel_name, write_compiled
from llmtrain.train.environment import apply_environment

_LAYERS_OF_A_KIND = 2  # the second may read what the first hands on


def main() -> int:
    parent, config, ranks, local_ranks, place = pickle.load(sys.stdin.buffer)
    end_with_parent(parent)
    apply_environment(config.train.environment, build_vendor(), config.run_dir)
    platform = detect()
    if platform.vendor == "cpu":
        return 0
    return compile_kernels(config, platform, ranks, local_ranks, place)


def compile_kernels(config: Config, platform: Platform, ranks: int, local_ranks: int, place: Path) -> int:
    """Compile what a step of the config launches on a GPU that need not be here. Reports on the standard output, place.log.
    Returns the exit status."""
    forks = Forks(len(os.sched_getaffinity(0)))
    status = 0
    try:
        pass_over(config, platform, ranks, local_ranks, forks)
    except Exception:  # the same at the next start: then the kernels of the layers before are all that there are
        traceback.print_exc()
        status = 1
    print(FOUND_ALL, flush=True)
    forks.wait()
    write_compiled(place)
    return status


def pass_over(
    config: Config,
    platform: Platform,
    ranks: int,
    local_ranks: int,
    compile_by: Callable[[str, Callable[[], Any]], Any],
) -> None:
    """A pass over the layers of a rank without memory. compile_by: launch.COMPILE. Only for a process that launches no kernel."""
    driver.set_active(StandIn(triton_target(platform)))  # type: ignore[arg-type]
    launch.COMPILE[:], ASSUMED[:] = [compile_by], [platform]
    operators.LAUNCHED_ON.add(torch._C.DispatchKey.Meta)
    config = resolve_auto(config, parameter_sizes(config), ranks, local_ranks, platform.memory_bytes).config
    train, dtype = config.train, getattr(torch, config.train.dtype)
    with torch.device("meta"):
        hybrid = HybridLM(few_layers(config.model), platform, dtype, config.data.mask_documents)
        for converter in [*([Float8(train.float8, shards=ranks)] if train.float8 else []), *adaptations(config.adapt)]:
            converter.convert(hybrid, platform)
        if train.dtype != "float32":
            hybrid.cast(dtype)  # as FSDP2 does for a layer
        objective = build_objective(config.objective)
        size, length = train.least_microbatch, config.data.seq_len
        tokens = torch.empty(size, length, dtype=torch.int64)
        batch = {"input_ids": tokens, **objective.example(tokens)}
        if config.data.mask_documents:
            batch["document_ids"] = torch.empty(size, length, dtype=torch.int64)
        compute_loss(CausalLM(hybrid, train.loss), objective, batch).loss.backward()
        add_gradients(hybrid)


def add_gradients(model: torch.nn.Module) -> None:
    """The sums of further microbatches' gradients: see train/graphs/persistent_weights.sum_by_our_kernel."""
    from llmtrain.kernels.accumulate import launch_accumulate

    for gradient in (parameter.grad for parameter in model.parameters()):
        if gradient is not None and gradient.dtype in (torch.bfloat16, torch.float16) and gradient.is_contiguous():
            launch_accumulate(torch.empty_like(gradient, dtype=torch.float32), gradient)


def few_layers(model: ModelConfig) -> ModelConfig:
    """The model with the first layers of each kind alone."""
    kept, seen = list[str](), Counter[str]()
    for layer in model.layer_list():
        name = f"{layer.shared}+{layer.block}" if layer.shared else layer.block
        seen[name] += 1
        if seen[name] <= _LAYERS_OF_A_KIND:
            kept.append(name)
    return model.model_copy(update={"layers": " ".join(kept)})


class Forks:
    """Compiles each kernel once, in a fork of this process, `most` at a time. Reports on the standard output."""

    def __init__(self, most: int):
        self.most, self.running, self.known = most, set[int](), set[str]()

    def __call__(self, text: str, compile_kernel: Callable[[], Any]) -> None:
        name = kernel_name(text)
        if name in self.known:
            return
        self.known.add(name)
        while len(self.running) >= self.most:
            self._wait_for_one()
        print(BEGUN, name, flush=True)
        parent = os.getpid()
        child = os.fork()
        if child:
            self.running.add(child)
            return
        status = 1
        try:
            end_with_parent(parent)
            began = time.perf_counter()
            launch.COMPILE.clear()
            found = compile_kernel()
            seconds = f"{time.perf_counter() - began:.1f}"
            # Triton names folders of its cache by the key in base32, without the padding.
            folder = Path(next(iter(found.metadata_group.values()))).parent.name
            print(COMPILED, name, folder, seconds, "s", text.split()[0], flush=True)
            status = 0
        except BaseException as error:
            print(FAILED, name, text.split()[0], repr(error)[:300].replace("\n", " "), flush=True)
        finally:
            os._exit(status)

    def wait(self) -> None:
        while self.running:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        child, status = os.wait()
        self.running.discard(child)
        if status > 255 or status & 127:
            print(FAILED, "a compiler:", status, flush=True)


if __name__ == "__main__":
    sys.exit(main())
