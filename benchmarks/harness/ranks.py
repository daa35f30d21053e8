"""Programs of several ranks on this machine, and steps of training on them, without trainer and loader."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from llmtrain.distributed.world import free_port, gloo_group, initialize, rank_environment, world_from_environment
from llmtrain.schema.config import Config


def on_ranks(nproc: int, program: str, *arguments: str, log: Path | None = None) -> dict[str, Any]:
    """JSON object, of at most some kB, that rank 0 of `python -m benchmarks PROGRAM --rank ARGUMENTS` prints last; `failed` with
    the last line of an error where a rank fails.

    log: file for rank 0's errors and warnings meanwhile.
    """
    command, port = [sys.executable, "-m", "benchmarks", program, "--rank", *arguments], free_port()
    threads = str(max((os.cpu_count() or 1) // nproc, 1))
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder) / f"{rank}.txt" for rank in range(nproc)]
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            errors[0] = log
        ranks = [
            subprocess.Popen(
                command,
                env={"OMP_NUM_THREADS": threads, **os.environ, **rank_environment(rank, nproc, port)},
                stdout=subprocess.PIPE,
                stderr=error.open("w"),
                text=True,
            )
            for rank, error in enumerate(errors)
        ]
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.5)
        if failed := [error for rank, error in zip(ranks, errors, strict=True) if rank.poll()]:
            for rank in ranks:  # the others would wait for it
                rank.kill()
            lines = failed[0].read_text().strip().splitlines() or ["no message"]
            return {"failed": next((line for line in reversed(lines) if "Error" in line), lines[-1])[:300]}
    return json.loads(ranks[0].communicate()[0].splitlines()[-1])


def in_process(program: str, *arguments: str) -> dict[str, Any]:
    """JSON object that `python -m benchmarks PROGRAM --in-process ARGUMENTS` prints last; `failed` where it fails."""
    command = [sys.executable, "-m", "benchmarks", program, "--in-process", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return {"failed": f"status {done.returncode}"} if done.returncode else json.loads(done.stdout.splitlines()[-1])


class Training:
    """A model as train.parallel, train.sharding and the rest say, by the model, the sharding and the clipping of `llmtrain train`.

    Every rank makes one and calls its methods, in the same order. graphs: by which `accumulate` launches microbatches from the step
    after the first on, as train.cuda_graphs says; None without.
    """

    def __init__(self, config: Config):
        import torch

        from llmtrain.models.causal_lm import CausalLM
        from llmtrain.models.hybrid import HybridLM
        from llmtrain.objectives.next_token import NextToken
        from llmtrain.plan.parameters import parameter_sizes
        from llmtrain.train.build import resolved_config
        from llmtrain.train.graphs.cuda_graphs import graphed_loss
        from llmtrain.train.optim import build_optimizer
        from llmtrain.train.parallel import parallelize
        from llmtrain.train.pipeline.schedule import PipelineStep
        from llmtrain.train.pipeline.stages import StagedLM, shared_gradients
        from llmtrain.train.step import GradientSync, Step

        self.device, parallel = initialize(), config.train.parallel
        self.world = world_from_environment().split(parallel.context, parallel.tensor, parallel.pipeline)
        self.config = resolved_config(config, parameter_sizes(config), self.world, self.device)
        train, copies = self.config.train, parallel.pipeline * parallel.tensor
        with torch.device("meta"):
            model = HybridLM(config.model, dtype=getattr(torch, train.dtype))
        lm, step = (CausalLM, Step) if parallel.pipeline == 1 else (StagedLM, PipelineStep)
        self.causal_lm = lm(model, train.loss)
        self.segments = parallelize(self.causal_lm, train, self.world, self.device, seq_len=config.data.seq_len)
        self.model = self.causal_lm.hybrid
        self.model.init_weights(config.seed)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.divided = shared_gradients(self.causal_lm)
        sync, size = GradientSync(self.causal_lm, train.sharding), train.least_microbatch
        self.graphs = graphed_loss(self.config, self.causal_lm, NextToken(), self.world)
        self.passes = step(self.causal_lm, NextToken(), size, sync, gloo_group(), self.segments, self.graphs, copies)
        self.most = train.clip_grad_norm or math.inf

    def own(self, ids: Any, labels: Any) -> dict[str, Any]:
        """This rank's part of [batch, T] tokens and labels, on its device."""
        import torch

        from llmtrain.train.batches import own_part

        batch = {"input_ids": ids, "labels": labels, "text_bytes": torch.zeros(len(ids))}
        return {name: t.to(self.device) for name, t in own_part(batch, self.segments, self.model.ranks).items()}

    def loss(self, part: dict[str, Any]) -> Any:
        """Loss over the labels of this rank."""
        return self.causal_lm.loss(part["input_ids"], part["labels"], None, self.segments)

    def step(self, part: dict[str, Any], factor: float = 1.0) -> Any:
        """Optimizer step of one microbatch -> its loss. factor: of the loss of this rank."""
        loss = self.loss(part).loss
        (loss * factor).backward()
        self.update()
        return loss.detach()

    def accumulate(self, ids: Any) -> Any:
        """Gradients of a batch of tokens [batch, T], in microbatches -> this rank's part of the loss."""
        import torch

        batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "text_bytes": torch.zeros(len(ids))}
        batch["sample_ids"] = torch.arange(len(ids))
        return self.passes.forward_backward(batch, lambda *_: None).losses["total"]

    def update(self) -> Any:
        """Clipping and the optimizer's step -> the norm of the gradients."""
        from llmtrain.train.ranks.tensor_gradients import clip_shards

        if self.divided is None:
            norm = clip_shards(list(self.model.parameters()), self.most)
        else:
            self.divided.add_up()
            norm = self.divided.clip(self.most)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm
