"""The whole YAML of a run. Sections are in the files beside this one; rules that span sections are here. No torch here."""

import math
import os.path
from collections.abc import Iterator
from fnmatch import fnmatchcase

from llmtrain.config.addresses import local_folder
from llmtrain.config.base import Problem, Section, Seed, free
from llmtrain.config.texts import LocalPath, RunName
from llmtrain.errors import UserError
from llmtrain.kernels.experts.spec import refuse_float8
from llmtrain.models.config import ModelConfig
from llmtrain.models.sections.float8 import MULTIPLE, Float8Config
from llmtrain.objectives.sections import NextTokenSection, ObjectiveConfig
from llmtrain.schema.adapt import AdaptConfig
from llmtrain.schema.data import DataConfig
from llmtrain.schema.evaluation import EvalConfig
from llmtrain.schema.init_from import InitialWeights
from llmtrain.schema.optimizers import OptimizerConfig
from llmtrain.schema.pipeline import pipeline_problems
from llmtrain.schema.schedule import schedule_problems
from llmtrain.schema.training import (
    CheckpointConfig,
    LoggingConfig,
    ScheduleConfig,
    TrainConfig,
)


class Config(Section):
    """Settings of one run: the model, its data, and how it is trained."""

    name: RunName = free()
    """Name of the run: letters, digits, '.', '_' and '-'."""
    run_dir: LocalPath = free("runs/${name}")
    """Folder of checkpoints, logs and plots."""
    seed: Seed = 17
    """Seed of the initial weights, of dropout, and (with data.shuffle_seed) of the sample order."""
    init_from: InitialWeights | None = None
    """Weights to start from, as a path or a mapping: a run's folder, a checkpoint, or what `llmtrain import` wrote; also in a
    store, s3://bucket/prefix. Optimizer, schedule and data begin anew. Not read once the run has a checkpoint of its own; a
    changed value is then refused as another run."""
    model: ModelConfig
    adapt: AdaptConfig | None = None
    """Changes to the model, such as adapters; the weights of init_from are those of the model without them."""
    objective: ObjectiveConfig = NextTokenSection()
    """The loss that is minimised: `next_token`, or a mapping with a type and its settings."""
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    eval: EvalConfig = free(EvalConfig())
    checkpoint: CheckpointConfig = free(CheckpointConfig())
    logging: LoggingConfig = free(LoggingConfig())

    def problems(self) -> Iterator[Problem]:
        if self.data.seq_len > self.model.max_seq_len:
            yield self.problem_at("data.seq_len", f"must not exceed model.max_seq_len ({self.model.max_seq_len})")
        prepare = self.data.prepare
        if prepare and prepare.vocab_size and prepare.vocab_size > self.model.vocab_size:
            yield self.problem_at(
                "data.prepare.vocab_size", f"must not exceed model.vocab_size ({self.model.vocab_size})"
            )
        remote = self.checkpoint.remote
        if remote is not None and (folder := local_folder(remote)) and _within(folder, self.run_dir):
            yield self.problem_at(
                "checkpoint.remote",
                f"is in run_dir ({self.run_dir}), whose checkpoints are to be copied; choose a place apart from it",
            )
        if self.adapt is not None and not (self.adapt.sections() or self.adapt.train):
            yield Problem("adapt", {}, "names no change to the model; leave it out")
        yield from self._nf4_problems()
        yield from self._folder_problems()
        yield from self._objective_problems()
        yield from self._context_problems()
        yield from self._float8_problems()
        if self.train.cuda_graphs == "on" and (reason := self.train.cuda_graphs_refusal(1, self.draws_in_training)):
            yield self.problem_at("train.cuda_graphs", f"there can be none, as {reason}; use auto or off")
        yield from self._tensor_problems()
        yield from self._expert_problems()
        yield from pipeline_problems(self)
        yield from self._checkpointing_problems()
        yield from self._profile_problems()
        yield from schedule_problems(self)

    def _folder_problems(self) -> Iterator[Problem]:
        """A run among its shards: `prepare` takes a folder that holds other files for somebody else's."""
        folders = {"data.prepare.out": self.data.prepare.out} if self.data.prepare else {}
        for split in ("train", "validation"):
            for name, stream in getattr(self.data, split).streams.items() if getattr(self.data, split) else ():
                folders[f"data.{split}.streams.{name}.local"] = os.path.normpath(
                    f"{stream.local}/{stream.split or '.'}"
                )
        for path, folder in folders.items():
            if _within(self.run_dir, folder):
                yield self.problem_at("run_dir", f"is in a folder of shards ({path}: {folder}); choose a place apart")
                return

    def _objective_problems(self) -> Iterator[Problem]:
        """Forms of training that the objective does not have."""
        train, objective = self.train, self.objective
        if train.cuda_graphs == "on" and (reason := objective.cuda_graphs_refusal):
            yield self.problem_at("train.cuda_graphs", f"there can be none, as {reason}; use auto or off")
        for key, reason in objective.parallel_refusals.items():
            if getattr(train.parallel, key) > 1:
                yield self.problem_at(f"train.parallel.{key}", f"{reason}; use 1")
        for problem in objective.problems_beside(
            self.data.seq_len, self.init_from is not None or (self.adapt is not None and self.adapt.adds_alone)
        ):
            yield Problem(f"objective.{problem.path}", problem.found, problem.message)
        if train.float8 is not None and objective.own_rollout and objective.own_rollout.weights == "copied":
            text = "copies of weights are not in float8, as those of train.float8 are; use auto or gathered"
            yield self.problem_at("objective.rollout.weights", text)
        prepare = self.data.prepare
        if prepare is not None and objective.packing not in (None, prepare.packing):
            text = f"makes samples of several prompts or of parts; objective: {objective.type_name} needs {objective.packing}"
            yield self.problem_at("data.prepare.packing", text)
        if train.global_batch_size % (per := objective.trained_per_sample):
            text = f"must be a multiple of {per}, the answers that a step trains to each prompt (group_size x epochs)"
            yield self.problem_at("train.global_batch_size", text)
        if train.loss.z_loss and not objective.has_z_loss:
            text = f"has no effect on objective: {objective.type}; use 0"
            yield self.problem_at("train.loss.z_loss", text)
        if objective.needs_documents and not self.data.mask_documents:
            text = f"objective: {objective.type_name} has samples of several answers, which must not see each other; use true"
            yield self.problem_at("data.mask_documents", text)

    def _context_problems(self) -> Iterator[Problem]:
        """Settings under which ranks cannot share sequences."""
        context = self.train.parallel.context
        if context == 1:
            return
        key, shard_size = "train.parallel.context", self.train.sharding.shard_size
        if self.data.seq_len < 2 * context:
            yield self.problem_at(
                key, f"cuts data.seq_len = {self.data.seq_len} into {2 * context} parts; use fewer ranks"
            )
        if shard_size is not None and shard_size % context:
            yield self.problem_at(key, f"must divide train.sharding.shard_size ({shard_size})")
        for name, block in self.model.blocks.items():
            if any(block.width_problems(self.model.d_model)):
                continue  # reported by themselves
            if reason := block.segments_refusal(self.model.d_model, self.data.mask_documents):
                yield self.problem_at(key, f"block {name}: {reason}")

    def _checkpointing_problems(self) -> Iterator[Problem]:
        """Fewer layers than k, and feed-forward layers that cannot read a part of the tokens at a time."""
        checkpointing, layers = self.train.activation_checkpointing, len(self.model.layer_list())
        if checkpointing.type == "every_k" and checkpointing.k is not None and checkpointing.k > layers:
            text = f"of {layers} layers one in so many is the first alone, as with k: {layers}; use at most {layers}"
            yield self.problem_at("train.activation_checkpointing.k", text)
        key, tokens = "train.activation_checkpointing.mlp_tokens", checkpointing.mlp_tokens
        for name, block in self.model.blocks.items():
            if tokens is not None and block.mlp is not None and not block.mlp.chunkable:
                yield Problem(
                    key, tokens, f"block {name}: an mlp of type {block.mlp.type} reads whole sequences; use null"
                )

    def _nf4_problems(self) -> Iterator[Problem]:
        if self.adapt is None or self.adapt.base != "nf4":
            return
        if self.train.float8 is not None:
            yield self.problem_at(
                "adapt.base", "widens weights to bf16 for each product; use bf16, or train.float8: null"
            )
        if self.train.microbatch_size == "auto":
            yield self.problem_at(
                "train.microbatch_size", "tries sizes before there are weights; with adapt.base: nf4 use a number"
            )
        if self.init_from is None:
            yield self.problem_at("adapt.base", "is of trained weights; name their checkpoint in init_from")

    def _float8_problems(self) -> Iterator[Problem]:
        """A product for the gradient of a weight sums over the tokens of a microbatch on one rank. `auto` has sizes that do."""
        if self.train.float8 is None:
            return
        if self.train.float8.experts:
            yield from self._float8_expert_problems(self.train.float8)
        if self.train.microbatch_size == "auto":
            return
        tokens = self.microbatch_tokens(self.train.microbatch_size)
        if tokens % MULTIPLE:
            yield Problem(
                "train.float8",
                None,
                f"needs microbatches whose tokens are a multiple of {MULTIPLE}; "
                f"train.microbatch_size x data.seq_len is {tokens} on one rank",
            )

    def _float8_expert_problems(self, float8: Float8Config) -> Iterator[Problem]:
        """Experts that cannot be in float8, and are not left out."""
        key, model = "train.float8.experts", self.model
        experts, layers = model.experts(), model.layer_list()
        if not experts:
            yield Problem(key, True, "is of experts, and no block has an mlp of type experts; use false")
        for name, mlp in experts.items():
            names = [f"blocks.{i}.mlp.experts" for i, layer in enumerate(layers) if layer.block == name]
            if all(any(fnmatchcase(one, pattern) for pattern in float8.exclude) for one in names):
                continue
            reason = refuse_float8(mlp.spec(model.d_model))
            if reason is None and mlp.backend not in ("auto", "triton") and not float8.emulate:
                reason = f"its backend {mlp.backend} has no float8, and triton has"
            if reason is not None:
                yield Problem(
                    key, True, f"block {name}: {reason}; use false, or leave them out by train.float8.exclude"
                )

    def _profile_problems(self) -> Iterator[Problem]:
        """A profile that begins after the last step. A run that resumes may have more steps before it: this is the least."""
        profile, duration = self.train.profile, self.train.duration
        if profile is None or duration.unit == "epochs":
            return
        steps = duration.steps(tokens_per_step=self.tokens_per_step, steps_per_epoch=None, total_steps=None)
        if profile.after + profile.steps > steps:
            last = f"step {profile.after + profile.steps} would be the last of the {profile.steps} steps to profile"
            yield self.problem_at("train.profile.after", f"{last}, and the run has {steps}; use fewer")

    def _tensor_problems(self) -> Iterator[Problem]:
        """Settings under which ranks cannot divide layers."""
        parallel, shard_size, key = self.train.parallel, self.train.sharding.shard_size, "train.parallel.tensor"
        tensor, model = parallel.tensor, self.model
        if tensor == 1 or any(next(block.width_problems(model.d_model), None) for block in model.blocks.values()):
            return
        for name, block in model.blocks.items():
            if isinstance(reason := block.divided_by_layer(model.d_model), str):
                yield Problem(key, tensor, f"block {name}: {reason}; use 1")
        divided = list(model.divided())
        if misfits := [f"{one.name} = {one.count}" for one in divided if not one.fits(tensor)]:
            fitting = [str(n) for n in range(1, 65) if all(one.fits(n) for one in divided)]
            yield Problem(
                key, tensor, f"cannot divide {'; '.join(misfits)}. This model is divided by {', '.join(fitting)}"
            )
        if shard_size is not None and shard_size % parallel.of_stage:
            text = (
                f"makes groups of {parallel.of_stage} ranks, which must divide train.sharding.shard_size ({shard_size})"
            )
            yield Problem(key, tensor, text)
        of_whole = {"muon": "orthogonalises whole matrices", "adamw_8bit": "makes scales of whole rows"}
        if (kind := self.optimizer.type) in of_whole:
            text = f"{of_whole[kind]}, of which tensor-parallel ranks hold parts; use adamw, or {key}: 1"
            yield self.problem_at("optimizer.type", text)
        if self.train.float8 is not None:
            text = (
                "makes scales of whole matrices, of which tensor-parallel ranks hold parts; use null, or " + key + ": 1"
            )
            yield Problem("train.float8", None, text)

    def _expert_problems(self) -> Iterator[Problem]:
        """Settings under which ranks cannot divide or balance experts."""
        parallel, key, seq_len = self.train.parallel, "train.parallel.expert", self.data.seq_len
        expert, experts = parallel.expert, self.model.experts()
        if expert > 1 and not experts:
            yield Problem(key, expert, "divides experts, and no block has an mlp of type experts; use 1")
        for name, mlp in experts.items():
            if mlp.n_experts % expert:
                yield Problem(key, expert, f"does not divide n_experts of block {name} ({mlp.n_experts})")
            counted = mlp.balance.weight > 0 or mlp.z_loss > 0 or mlp.router.bias_rate > 0
            unit = (2 * parallel.context if parallel.context > 1 else 1) * parallel.tensor
            if counted and seq_len % unit:
                text = f"must be a multiple of {unit} (train.parallel.{parallel.describe()}), or the tokens that fill up sequences "
                text += f"would count in the balance of block {name}'s experts; use {seq_len // unit * unit or unit}"
                yield self.problem_at("data.seq_len", text)
        if experts and expert % parallel.tensor:
            text = f"must be a multiple of train.parallel.tensor ({parallel.tensor}), whose ranks send experts their own tokens"
            yield Problem(key, expert, f"{text}; use {math.lcm(expert, parallel.tensor)}")
        shard_size = self.train.sharding.shard_size
        if shard_size is not None and shard_size % expert:
            yield Problem(key, expert, f"must divide train.sharding.shard_size ({shard_size})")
        if expert > 1 and self.train.microbatch_size == "auto":
            text = f"tries sizes before there are weights, with which all tokens meet the same experts; use a number, or {key}: 1"
            yield self.problem_at("train.microbatch_size", text)

    def microbatch_tokens(self, size: int) -> int:
        """Tokens of so many sequences on one rank, with those that fill up sequences which ranks share (models/segments.py)."""
        context = self.train.parallel.context
        return size * (self.data.seq_len + -self.data.seq_len % (2 * context)) // context

    @property
    def draws_in_training(self) -> bool:
        """True if layers draw random numbers."""
        return self.model.draws_in_training or (self.adapt is not None and self.adapt.draws_in_training)

    @property
    def samples_per_step(self) -> int:
        """Samples of the data that a step reads, over all ranks."""
        return self.train.global_batch_size // self.objective.trained_per_sample

    @property
    def global_groups(self) -> int:
        """Groups of answers that a step trains, over all ranks: as many as samples that it reads, times epochs."""
        return self.samples_per_step * getattr(self.objective, "epochs", 1)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.data.seq_len

    def grad_accum(self, world_size: int) -> int:
        """Microbatches per step and rank; with microbatch_size: auto the most that they may become. Raises UserError if the batch
        cannot be split so."""
        parallel = self.train.parallel
        groups, left = divmod(world_size, parallel.ranks)
        if left:
            raise UserError(f"train.parallel.{parallel.describe()} does not divide the {world_size} ranks")
        per_rank, rest = divmod(self.train.global_batch_size, groups)
        if rest or per_rank % self.train.least_microbatch:
            sharers = f"{world_size} ranks" if parallel.ranks == 1 else f"{groups} groups of {parallel.ranks} ranks"
            raise UserError(
                f"train.global_batch_size = {self.train.global_batch_size} cannot be split over {sharers} "
                f"in microbatches of train.microbatch_size = {self.train.microbatch_size}; "
                f"it must be a multiple of {groups * self.train.least_microbatch}; {self.batch_remedy(groups)}"
            )
        return per_rank // self.train.least_microbatch

    def batch_remedy(self, groups: int) -> str:
        """Settings for a batch that so many groups of ranks cannot split: batches nearest to it, and where microbatches may be
        smaller, the largest with which it stays as it is, or the batches nearest to it with the smallest."""
        batch, given = self.train.global_batch_size, self.train.least_microbatch
        multiple = MULTIPLE if self.train.float8 is not None else 1
        smaller = [size for size in range(given - 1, 0, -1) if self.microbatch_tokens(size) % multiple == 0]
        kept = next((size for size in smaller if batch % (groups * size) == 0), None)

        def nearest(size: int) -> str:
            unit = groups * size
            below = batch // unit * unit
            return f"{below} or {below + unit}" if below else f"{unit}"

        found = f"use {nearest(given)}"
        if kept is not None:
            return f"{found}, or train.microbatch_size={kept}, which keeps it"
        return f"{found}, or {nearest(smaller[-1])} with train.microbatch_size={smaller[-1]}" if smaller else found


def _within(folder: str, other: str) -> bool:
    path, other = (os.path.realpath(os.path.expanduser(one)) for one in (folder, other))
    return os.path.commonpath((path, other)) == other
