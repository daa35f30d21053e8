"""The `train`, `schedule`, `checkpoint` and `logging` sections of the YAML. No torch here."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from llmtrain.config.addresses import address_problem
from llmtrain.config.base import (
    Duration,
    DurationField,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    UnitInterval,
    free,
    setting_error,
)
from llmtrain.config.texts import PathText
from llmtrain.models.config import LossConfig
from llmtrain.models.sections.float8 import Float8Config
from llmtrain.schema.environment import Environment
from llmtrain.schema.wandb import WandbConfig


def _parse_microbatch(value: Any) -> Any:
    """`auto` or a number of sequences."""
    if value == "auto" or (type(value) is int and 0 < value <= 2**24):
        return value
    raise setting_error("expected a whole number above 0, or auto")


Microbatch = Annotated[
    int | Literal["auto"],
    BeforeValidator(_parse_microbatch),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**24}, {"const": "auto"}]}),
]


class ActivationCheckpointing(Section):
    """Recompute activations in the backward pass rather than keep them."""

    type: Literal["none", "full", "every_k", "kernels", "selective", "budget", "auto"] = free("none")
    """full: every layer. every_k: one layer in k. kernels: every layer, but keep the outputs of attention and of the gated
    delta rule, which cost the more the longer sequences are. selective: every layer, but keep those and the outputs of the
    matmuls through which the input enters a mixer or an MLP. budget: the compiler chooses what to recompute, the cheapest first,
    within a share of the memory. auto: none, selective or full, the least that fits by the estimate of `llmtrain describe`."""
    k: PositiveInt | None = free(None)
    """With every_k: recompute one layer in so many."""
    fraction: UnitInterval | None = free(None)
    """With budget: the share of a compiled layer's activations that may be kept; 0 recomputes like full, 1 nothing."""
    mlp_tokens: PositiveInt | None = free(None)
    """An MLP reads so many tokens of a sequence (on one rank) at a time, and each part is computed once more in the backward pass:
    what a layer holds at work then grows less with the sequence. null: all at once."""
    offload: bool = free(False)
    """With full, every_k or kernels: what is kept of a recomputed layer, its input, waits in host memory for the backward pass."""

    def recomputes(self, layer: int) -> bool:
        """True if the layer of this number, from 0, is computed again in the backward pass by a wrapper around it."""
        return self.type not in ("none", "auto", "budget") and layer % (self.k or 1) == 0

    def problems(self) -> Iterator[Problem]:
        if (self.type == "budget") != (self.fraction is not None):
            yield self.problem_at("fraction", "must be given with type: budget, and only then")
        if (self.type == "every_k") != (self.k is not None):
            yield self.problem_at("k", "must be given with type: every_k, and only then")
        if self.offload and self.type not in ("full", "every_k", "kernels"):
            yield self.problem_at(
                "offload", "is of the inputs of recomputed layers; use type: full, every_k or kernels"
            )
        if self.mlp_tokens is not None and self.type not in ("none", "full", "every_k", "kernels"):
            text = f"computes again what type: {self.type} may keep; use none, full, every_k or kernels, or null"
            yield self.problem_at("mlp_tokens", text)


class Sharding(Section):
    """FSDP2 over the data-parallel ranks."""

    strategy: Literal["auto", "full", "grad_op", "hybrid"] = free("auto")
    """full: parameters, gradients and optimizer state, gathered again in the backward pass. grad_op: parameters stay gathered
    between forward and backward. hybrid: shard within groups of `shard_size` ranks, replicate between them. auto: the fastest of
    them that fits, by the estimate of `llmtrain describe`; a run says which, and why."""
    shard_size: PositiveInt | None = free(None)
    """For hybrid: ranks per sharding group. Default: the ranks of one node."""
    sync_every_microbatch: bool | None = free(None)
    """true reduces gradients after every microbatch (least memory); false once a step, at the cost of unsharded weights
    and gradients in between. Default: with auto, false where it fits; else false where a sharding group has a single rank, true
    elsewhere."""
    reduce_dtype: Literal["fp32", "bf16"] = free("fp32")
    """Format in which ranks sum gradients. bf16, with precision: amp_bf16, halves that communication and rounds each sum."""

    def problems(self) -> Iterator[Problem]:
        if self.shard_size is not None and self.strategy != "hybrid":
            yield self.problem_at("shard_size", "has no effect unless strategy: hybrid")


class Parallel(Section):
    """Ranks that share sequences and layers. What is left of the ranks is data-parallel."""

    context: PositiveInt = free(1)
    """Context parallelism: so many consecutive ranks share every sequence, and with it the memory of its activations. They read
    the same samples and keep a part of the tokens each; results are those of one rank."""
    tensor: PositiveInt = free(1)
    """Tensor parallelism: so many consecutive ranks, best of one node, share every layer: each has some of its heads and channels,
    and between layers some of the tokens. They read the same samples; results are those of one rank."""
    expert: PositiveInt = free(1)
    """Expert parallelism: so many consecutive ranks, best of one node, divide every layer's experts, and send each other the tokens
    that meet them. They are data-parallel ranks as well, or share sequences or layers; results are those of one rank."""
    pipeline: PositiveInt = free(1)
    """Pipeline parallelism: so many stages, equal parts of the ranks one after the other, hold consecutive layers of about the same
    FLOPs each, and hand the activations of microbatches on (1F1B, arXiv:2104.04473). Ranks of a stage share sequences and layers as
    above, and are data-parallel otherwise. Results are those of one rank."""
    virtual_stages: PositiveInt = free(1)
    """Parts of the model that each of the pipeline's stages holds (interleaved 1F1B, arXiv:2104.04473): of N stages with V of them,
    stage i has the parts i, N + i, 2 N + i, ... of N V. A stage waits a V-th of the time for others, activations are handed on V
    times as often, and more of them are kept."""
    schedule: Literal["1f1b", "zero_bubble"] = free("1f1b")
    """Order of a pipeline's forward and backward passes. zero_bubble is refused: see docs/parallelism.md."""
    async_tensor: Literal["auto", "on", "off"] = free("auto")
    """Compute the exchanges of tensor-parallel ranks piecewise beside the matrix products that they feed or follow, through
    PyTorch's symmetric memory. auto: where layers are compiled, on NVIDIA GPUs of one node that read each other's memory; a line
    of the run says so. on: end the run where it cannot be."""

    def problems(self) -> Iterator[Problem]:
        if self.async_tensor == "on" and self.tensor == 1:
            yield self.problem_at("async_tensor", "has no effect with tensor: 1; use auto")

    @property
    def ranks(self) -> int:
        """Ranks that read the same samples."""
        return self.pipeline * self.of_stage

    @property
    def of_stage(self) -> int:
        """Ranks of one stage that read the same samples."""
        return self.context * self.tensor

    @property
    def unit(self) -> int:
        """Ranks of which those that hold one copy of the model are a multiple."""
        return self.pipeline * math.lcm(self.of_stage, self.expert)

    def describe(self) -> str:
        """The settings that are not 1, as in `context = 2 x tensor = 4`."""
        names = ("pipeline", "context", "tensor", "expert")
        return " x ".join(f"{name} = {n}" for name in names if (n := getattr(self, name)) > 1)


class SpikeConfig(Section):
    """Skip the update of a step whose loss or gradient norm lies far above those of the steps before it (OLMo-core's SkipStep), or
    go back to the last checkpoint and on from there without the data that led to it (as PaLM's training did, arXiv:2204.02311)."""

    window: Annotated[int, Field(ge=4, le=10_000)] = 128
    """Steps to compare with: the last so many, skipped ones too. The guard begins once half of them are there."""
    deviations: PositiveFloat = 6.0
    """Standard deviations above the window's mean from which a step is a spike."""
    action: Literal["skip", "rewind"] = free("skip")
    """skip: leave that step out. rewind: also load the last checkpoint, and train on from its step with the data behind the spike;
    what lies between is passed over. Before the first checkpoint a spike is skipped."""
    max_rewinds: PositiveInt = free(3)
    """With action: rewind, give up at a further spike after going back to one checkpoint so often."""


class AverageConfig(Section):
    """Keep an exponential moving average (EMA) of the weights, in fp32, sharded as they are: 4 bytes per parameter. It is part of
    checkpoints, and read by choice: `llmtrain generate --ema`, `llmtrain export --ema`, `ema: true` of a model to evaluate."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    """Share of the average that a step keeps. After step t it is (1 + t) / (10 + t) where that is less, so that the initial weights
    are soon forgotten."""

    def decay_of(self, step: int) -> float:
        """step: steps taken."""
        return min(self.decay, (1 + step) / (10 + step))


class Profile(Section):
    """Look into a few steps: a trace, and where their time goes, in RUN/profile. Every start of the run makes one."""

    steps: PositiveInt = free(3)
    """Steps to profile; each may add tens of megabytes to the trace."""
    after: PositiveInt = free(10)
    """Steps before, counted from the start or resumption: compilation and warm-up are no part of it."""
    memory: bool = free(False)
    """Also write a snapshot of the GPU's memory, with what allocated it."""


class TrainConfig(Section):
    """Length, batch, precision and parallelism."""

    duration: DurationField = free()
    """Length of the run: `300 steps`, `26e9 tokens` or `2 epochs`."""
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all ranks."""
    microbatch_size: Microbatch = free()
    """Sequences per forward pass on one rank. auto: the fastest of a few that are tried when the run starts, from the estimate of
    `llmtrain describe` on; remembered in RUN/microbatch.json."""
    precision: Literal["fp32", "amp_bf16"] = "fp32"
    """amp_bf16: parameters, optimizer state and gradient reduction in fp32, computation in bf16; Mamba-2's A_log, D and
    dt_bias stay fp32."""
    float8: Float8Config | None = free(None)
    """Matrix products in float8, `{}` for the usual recipe, with precision: amp_bf16; null: in bf16. MFU stays a share of the bf16
    peak."""
    loss: LossConfig = LossConfig()
    clip_grad_norm: PositiveFloat | None = 1.0
    """Scale gradients down to this norm, over all parameters together; null: never."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """When the loss or a gradient is not finite: end the run, or drop that step. Either way the step and its samples are named."""
    spike: SpikeConfig | None = None
    """Skip steps that are spikes of the loss or of the gradient norm, on all ranks alike, or go back before them; `{}` for the
    usual guard, null: none. Each is named with its samples, and counted in train/spikes."""
    max_skipped_steps: PositiveInt = free(10)
    """With nonfinite: skip or spike, give up after this many skipped steps in a row."""
    ema: AverageConfig | None = None
    """Keep a moving average of the weights too; null: none."""
    activation_checkpointing: ActivationCheckpointing = free(ActivationCheckpointing())
    compile: Literal["auto", "on", "off", "max_autotune"] = free("auto")
    """torch.compile(fullgraph=True) of every block. auto: on GPUs. max_autotune: the same, with its matrix products and reductions
    timed against each other, for minutes."""
    cuda_graphs: Literal["auto", "on", "off"] = free("auto")
    """Launch the forward and the backward pass of a microbatch as one CUDA graph each, from the second step on: what a small model
    gains is the time in which its GPU waits for the host. auto: on one NVIDIA GPU, where nothing speaks against it (a line of the
    run says what does), and on several where that is more than they lose. on: end the run where it cannot be."""
    environment: Environment = free(Environment())
    preflight: Literal["on", "off"] = free("off")
    """on: before a run of several nodes, examine them as `llmtrain doctor --cluster` does, and end where something is wrong."""
    compare_ranks: PositiveInt | None = free(None)
    """Before every so many steps, compare the forward pass of the same sequences on all ranks, bit by bit, and end the run where
    one differs: a GPU that errs without a report. It takes two forward passes of a microbatch. null: never."""
    sharding: Sharding = free(Sharding())
    parallel: Parallel = free(Parallel())
    deterministic: bool = free(False)
    """Ask PyTorch for deterministic kernels; slower."""
    profile: Profile | None = free(None)
    peak_tflops: Annotated[PositiveFloat, Field(le=100_000)] | None = free(None)
    """Dense peak of one GPU at train.precision, in TFLOP/s (989.5 for bf16 on an H200, 67 for fp32): the base of MFU. Default:
    from the table of known GPUs; a device that is not there has no MFU without it."""

    @property
    def least_microbatch(self) -> int:
        """microbatch_size; with auto the smallest that it may become."""
        return 1 if self.microbatch_size == "auto" else self.microbatch_size

    def cuda_graphs_refusal(self, ranks: int, draws: bool) -> str | None:
        """Reason for which microbatches can be no CUDA graphs on so many GPUs. draws: layers draw random numbers in training."""
        if self.parallel.expert > 1:
            return "the host waits for the numbers of tokens that ranks with different experts send each other"
        if ranks > 1 and (reason := self._exchanged_within_step(ranks)):
            return reason
        if draws and self.activation_checkpointing.type != "none":
            return "dropout in recomputed layers asks the random generator for its state"
        if self.activation_checkpointing.offload:
            return "inputs of recomputed layers wait in host memory"
        if self.float8 is not None and self.float8.gathers:
            return "train.float8 keeps the scales of its weights in new memory after every step"
        return None

    def _exchanged_within_step(self, ranks: int) -> str | None:
        """Reason for which ranks exchange more than weights before and gradients after all microbatches of a step."""
        sharding, microbatches = self.sharding, -(-self.global_batch_size // (self.least_microbatch * ranks))
        if self.parallel.ranks > 1:
            return "ranks that share sequences, layers or the model exchange tensors within a microbatch"
        if sharding.strategy != "grad_op" or (microbatches > 1 and sharding.sync_every_microbatch is not False):
            return (
                f"{ranks} ranks gather weights or reduce gradients in every microbatch (not so with train.sharding: "
                "{strategy: grad_op, sync_every_microbatch: false})"
            )
        if sharding.reduce_dtype == "bf16":
            return "sums of gradients are reduced in fp32"
        return None

    def compiles(self, device: str) -> bool:
        """True if layers are compiled on a device of this type, such as `cuda`."""
        return self.compile in ("on", "max_autotune") or (self.compile == "auto" and device == "cuda")

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """The format in which layers compute."""
        return "bfloat16" if self.precision == "amp_bf16" else "float32"

    @property
    def width(self) -> int:
        """Bytes of a number in this format."""
        return 2 if self.precision == "amp_bf16" else 4

    def problems(self) -> Iterator[Problem]:
        if self.float8 is not None and self.precision != "amp_bf16":
            yield self.problem_at("precision", "must be amp_bf16 for train.float8")
        if self.sharding.reduce_dtype == "bf16" and self.precision != "amp_bf16":
            yield self.problem_at("precision", "must be amp_bf16 for train.sharding.reduce_dtype: bf16")
        if self.activation_checkpointing.type == "budget" and self.compile == "off":
            yield self.problem_at(
                "activation_checkpointing.type", "is the compiler's; it needs train.compile: auto or on"
            )
        if self.parallel.async_tensor == "on" and self.compile == "off":
            yield self.problem_at("parallel.async_tensor", "is the compiler's; it needs train.compile: auto or on")
        if self.duration.unit == "fraction" or self.duration.value <= 0:
            yield self.problem_at("duration", "must be a positive number of steps, tokens or epochs")
        if self.microbatch_size != "auto" and self.global_batch_size % self.microbatch_size:
            yield self.problem_at("microbatch_size", f"must divide global_batch_size ({self.global_batch_size})")


class ScheduleConfig(Section):
    """Learning rate over the run: linear warmup from 0, then the named shape down to final_lr_fraction * lr."""

    type: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = "cosine"
    """Shape after the warmup."""
    warmup: DurationField = Duration(0, "steps")
    """Length of the rise from 0 to the peak."""
    decay: DurationField | None = None
    """For wsd (warmup, stable, decay): length of the final linear decay."""
    final_lr_fraction: UnitInterval | None = None
    """Default: 0.1 for cosine and linear, 0 for wsd. Constant and inverse_sqrt take none."""

    def problems(self) -> Iterator[Problem]:
        if (self.type == "wsd") != (self.decay is not None):
            yield Problem("decay", self.decay and str(self.decay), "must be given with type: wsd, and only then")
        if self.type in ("constant", "inverse_sqrt") and self.final_lr_fraction is not None:
            yield self.problem_at("final_lr_fraction", f"has no effect with type: {self.type}")
        if self.type == "inverse_sqrt" and self.warmup.value == 0:
            yield self.problem_at("warmup", "inverse_sqrt needs a warmup: the rate is lr * sqrt(warmup / step)")


class CheckpointConfig(Section):
    """Saving: how often, how many are kept, and where. The last step is always saved. With schedule.type: wsd, so is the last
    step before the decay, and kept for good: a longer run goes on from there."""

    interval: DurationField = free(Duration(1000, "steps"))
    """Time from one checkpoint to the next."""
    keep_last: PositiveInt | None = free(3)
    """Delete older checkpoints beyond this many; null keeps all."""
    keep_every: DurationField | None = free(None)
    """Keep, for good, the first checkpoint of every so many steps (or tokens, epochs) too."""
    background: bool = free(True)
    """true: training waits until the state is copied to host memory (which takes as many bytes as this machine writes of a
    checkpoint), and goes on while it is written. false: training waits until it is written."""
    verify: bool = free(True)
    """Compare the hash of every file before a checkpoint is loaded."""
    remote: PathText | None = free(None)
    """Store to which every checkpoint is also uploaded, in the background: `s3://bucket/prefix`, or a mounted folder. A start
    takes the newest from there when it is newer than what is here. It must hold this run's checkpoints alone:
    `s3://bucket/runs/${name}`."""
    grace_seconds: PositiveFloat = free(120.0)
    """Seconds after SIGTERM or Ctrl-C within which a run saves and ends (status 143, 130); what takes longer is not saved."""

    def problems(self) -> Iterator[Problem]:
        if self.interval.value <= 0:
            yield self.problem_at("interval", "must be positive")
        if self.keep_every is not None and self.keep_every.value <= 0:
            yield self.problem_at("keep_every", "must be positive")
        if self.keep_every is not None and self.keep_last is None:
            yield self.problem_at("keep_every", "has no effect with keep_last: null, which keeps all")
        if self.remote is not None and (problem := address_problem(self.remote)):
            yield self.problem_at("remote", problem)


class LoggingConfig(Section):
    """Metrics of training. They always go to RUN/metrics.jsonl and the terminal."""

    interval: PositiveInt = free(1)
    """Steps between two lines of metrics. Steps that were skipped or looked into have a line too."""
    step_times: PositiveInt | None = free(None)
    """Look into one step in so many, as train.profile does, for metrics of it: shares of rank 0's time in which the GPU computes,
    waits for other ranks, for data, or for the host; and the rank that computes longest. Such a step takes some seconds longer.
    null: none."""
    tensorboard: bool = free(True)
    """Also write TensorBoard's files, to RUN/tensorboard."""
    wandb: WandbConfig | None = free(None)
    """Also log to Weights & Biases; offline, into the run's folder, when there is no API key."""
    progress_bar: bool = free(True)
    """A bar on a terminal; plain lines otherwise."""
