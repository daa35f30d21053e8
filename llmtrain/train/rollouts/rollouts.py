"""Rollouts of a run whose objective is a policy: prompts of the loader become answers with rewards, and these the batch of a step.

prompts of the next steps -> answers of each rank to its own -> rewards -> all ranks' answers, in one order, to all ranks ->
advantages -> RUN/rollouts -> each rank's part of the answers that a step trains. Steps within one rollout take theirs from
it in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from llmtrain.data.chat.questions import Question, question_of
from llmtrain.data.loader.loaders import TrainLoader
from llmtrain.data.shards.packing import ENDS, TRAINED
from llmtrain.data.tokenize.stored_tokenizer import load_run_tokenizer, run_tokenizers
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.distributed.world import World
from llmtrain.errors import RunError
from llmtrain.logs import run_log
from llmtrain.models.causal_lm import CausalLM
from llmtrain.objectives.base import Batch
from llmtrain.objectives.policy.losses import advantages
from llmtrain.objectives.policy.objective import OLD, REFERENCE, Policy
from llmtrain.objectives.policy.rewards import RewardProcess
from llmtrain.objectives.policy.sections import PolicySection
from llmtrain.schema.training import Sharding
from llmtrain.train.build import Training
from llmtrain.train.rollouts.answers import Answer, answers_batch
from llmtrain.train.rollouts.engine import EngineSource
from llmtrain.train.rollouts.figures import Figures
from llmtrain.train.rollouts.reference import log_p_of, reference_log_p
from llmtrain.train.rollouts.store import RolloutFiles

Groups = list[list[Answer]]
MOST_REASONS = 20
"""Reasons for which groups were set aside that are named: a reward may raise another text for each answer."""


def rollouts_of(
    training: Training, loader: TrainLoader, world: World, group: dist.ProcessGroup, clock: Callable[[], int]
) -> Rollouts | None:
    """The rollouts of a run, where its objective is a policy. group: of all ranks, for messages in host memory. clock: steps taken.
    Raises UserError for rewards and references that cannot be made."""
    return Rollouts(training, loader, world, group, clock) if isinstance(training.objective, Policy) else None


class Rollouts(contextlib.ExitStack):
    """See the module. `with` ends the processes of its rewards."""

    def __init__(
        self,
        training: Training,
        loader: TrainLoader,
        world: World,
        group: dist.ProcessGroup,
        clock: Callable[[], int],
    ):
        super().__init__()
        assert isinstance(training.objective, Policy)
        self.training, self.objective, self.section = training, training.objective, training.objective.section
        self.samples, self.world, self.group, self.clock = loader.dataset, world, group, clock
        config, section, data = training.config, self.section, training.config.data.model_dump(mode="json")
        self.tokenizer = load_run_tokenizer(data)
        self.ends = frozenset(self.tokenizer.end_ids)
        self.rewarder = self.enter_context(Rewarder(section, self.tokenizer))
        tokenizers, seq_len = run_tokenizers(data), config.data.seq_len
        self.files = RolloutFiles(
            Path(config.run_dir),
            config.model.vocab_size,
            seq_len,
            tokenizers[0] if tokenizers else None,
            section.keep_rollouts,
        )
        model, self.room = training.model, seq_len - section.max_new_tokens
        prompts = config.samples_per_step // world.data_size
        if section.own_rollout is not None:
            self.source = EngineSource(config, model, self.ends, answers=section.answers_drawn(prompts))
        else:
            from llmtrain.train.rollouts.server import ServerSource

            self.source = ServerSource(section, self.ends, config.seed)
        self.own_log_p = log_p_of(self.objective, model)
        self.reference = None
        if section.kl:
            began_from = config.init_from and config.init_from.path
            adapted = config.adapt is not None and config.adapt.adds_alone
            self.reference = reference_log_p(self.objective, model, self.tokenizer, began_from, adapted)
        self.figures = Figures(section, world.size)
        self.coming: list[list[int]] = []
        """Sample ids of this rank for the next steps."""
        self.groups: Groups = []
        """Of all ranks, of the rollout that the last step was of."""
        self.last = -1
        """The last step that was taken."""
        self.named: set[str] = set()
        self.empty_steps = 0

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of the loader, each yielded when those of the next steps of its rollout are known."""
        held: deque[Batch] = deque()
        while True:
            held.extend(itertools.islice(batches, self.section.steps_per_rollout - len(held)))
            if not held:
                return
            self.coming = [one["sample_ids"].tolist() for one in held]
            yield held.popleft()

    def take(self) -> tuple[dict[str, Any], dict[str, float]]:
        """The batch of the next step on this rank, and metrics of all ranks. Every rank calls this. Raises RunError where a rollout
        cannot be written, and where no answer has had a reward for train.max_skipped_steps steps."""
        step, section = self.clock(), self.section
        self.figures.begin_step()
        metrics: dict[str, float] = {}
        if step <= self.last:  # the run went back to a checkpoint, and reads other data from there
            self.groups = []
        self.last = step
        if not any(one.step == step for group in self.groups for one in group[:1]):
            restored = self._restored(step)
            self.groups = restored or self._made(step)
            metrics = self.figures.of_rollout(self.groups) if restored is None else {}
        begin = self.groups[0][0].step
        own = self.training.config.global_groups // self.world.data_size
        first = (step - begin) * self.training.config.global_groups + self.world.data_rank * own
        chosen = [self.groups[at % len(self.groups)] for at in range(first, first + own)]
        answers = [one for group in chosen for one in group]
        self._count_empty(step)
        batch = answers_batch(answers, self.files.seq_len, section.over_long == "mask")
        if self.reference is not None:
            with self.figures.timed("reference"), self._gathered():
                batch[REFERENCE] = self._in_parts(batch, self.reference)
        return batch, metrics | self.figures.end_rollout(answers)

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        return gathered(self.training.model, self.training.config.train.sharding)

    def _made(self, step: int) -> Groups:
        """The rollout that begins with a step."""
        section = self.section
        steps = section.steps_per_rollout - step % section.steps_per_rollout
        groups, questions = [], []
        for number, ids in enumerate(self.coming[:steps], step):
            for sample in ids:
                question = self._question(sample)
                prompt = [] if question is None else question.ids
                groups.append([Answer(sample, number, prompt) for _ in range(section.group_size)])
                questions.append(question)
        asked = [at for at, one in enumerate(questions) if one is not None and len(one.ids) <= self.room]
        failures = Counter(
            {
                "the prompt is empty, or the answer of the data": sum(one is None for one in questions),
                f"the prompt is longer than {self.room} tokens, data.seq_len without max_new_tokens": sum(
                    one is not None and len(one.ids) > self.room for one in questions
                ),
            }
        )
        for at in set(range(len(groups))) - set(asked):
            for answer in groups[at]:
                answer.prompt = []
        with self.figures.timed("draw"), self._gathered() if self.source.gathers else contextlib.nullcontext():
            self.source.draw([groups[at] for at in asked])
        if OLD in self.objective.columns:
            with self.figures.timed("reference"), self._gathered():
                self._add_old([one for at in asked for one in groups[at]])
        with self.figures.timed("reward"):
            for at in asked:
                question = questions[at]
                assert question is not None
                self.rewarder.reward(groups[at], self.tokenizer.decode(question.answer))
        failures += self.rewarder.failures
        self.rewarder.failures.clear()
        found = self._of_all((groups, +failures, self.figures.own_seconds()))
        groups = sorted((one for some, _, _ in found for one in some), key=lambda one: (one[0].step, one[0].sample))
        self.figures.seconds_of_all([seconds for _, _, seconds in found])
        self._report(step, sum((some for _, some, _ in found), Counter()))
        for _, some in itertools.groupby(groups, key=lambda one: one[0].step):
            set_advantages(list(some), section)
        self._write(step, groups)
        return groups

    def _restored(self, step: int) -> Groups | None:
        """The rollout of a step within it, where the run goes on there and its file is whole."""
        if self.section.steps_per_rollout == 1 or step % self.section.steps_per_rollout == 0:
            return None
        read = self._of_all((self.files.read(step) if self.world.is_main else None, self.coming[0]))
        answers, size = read[0][0], self.section.group_size
        if answers is None or len(answers) % size:
            return None
        groups = [answers[at : at + size] for at in range(0, len(answers), size)]
        wanted = sorted(sample for _, ids in read[:: self.world.replication] for sample in ids)
        if [group[0].sample for group in groups if group[0].step == step] != wanted:
            return None
        return groups

    def _of_all(self, own: Any) -> list[Any]:
        """Values of all ranks."""
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, own, group=self.group)
        return found

    def _question(self, sample: int) -> Question | None:
        found = self.samples.get_item(sample)
        flags, ids = found["flags"], found["tokens"].tolist()
        end = next((at + 1 for at, flag in enumerate(flags.tolist()) if flag & ENDS), len(ids))
        return question_of(ids[:end], (flags[:end] & TRAINED) != 0, self.ends)

    def _add_old(self, answers: Sequence[Answer]) -> None:
        batch = answers_batch(answers, self.files.seq_len, False, masked=False)
        found = self._in_parts(batch, self.own_log_p)
        for row, one in enumerate(answers):
            one.old = found[row, len(one.prompt) - 1 : len(one.prompt) + len(one.ids) - 1].tolist()

    def _in_parts(self, batch: dict[str, Any], compute: Callable[[dict[str, Any]], torch.Tensor]) -> torch.Tensor:
        """Results of microbatches, one after another: [n, T]."""
        size, count = self.training.config.train.least_microbatch, len(batch["sample_ids"])
        if not count:
            return torch.zeros(batch["labels"].shape)
        parts = ({name: value[at : at + size] for name, value in batch.items()} for at in range(0, count, size))
        return torch.cat([compute(part) for part in parts])

    def _report(self, step: int, failures: Counter[str]) -> None:
        for reason, count in failures.items():
            if reason in self.named or len(self.named) > MOST_REASONS:
                continue
            self.named.add(reason)
            if self.world.is_main and len(self.named) <= MOST_REASONS:
                run_log.warning(f"WARNING: step {step + 1}: groups set aside, {count}: {reason}")
            elif self.world.is_main:
                run_log.warning(
                    f"WARNING: step {step + 1}: further reasons are not named; rollout/set_aside counts them"
                )

    def _count_empty(self, step: int) -> None:
        valid = any(one.valid for group in self.groups for one in group)
        self.empty_steps = 0 if valid else self.empty_steps + 1
        if self.empty_steps > self.training.config.train.max_skipped_steps:
            reasons = "; ".join(sorted(self.named)[:3])
            raise RunError(
                f"step {step + 1}: no answer of {self.empty_steps} steps has a reward ({reasons}); mend the rewards or the data, "
                "and start again: the run goes on from its last checkpoint"
            )

    def _write(self, step: int, groups: Groups) -> None:
        error = None
        if self.world.is_main:
            try:
                self.files.write(step, [one for group in groups for one in group])
            except OSError as caught:
                error = f"{caught.strerror or caught}"
        error = self._of_all(error)[0]
        if error is not None:
            raise RunError(
                f"{self.files.root}: the answers of step {step + 1} cannot be written: {error}. Make room there and start again: "
                "the run goes on from its last checkpoint, and draws them again"
            )


class Rewarder(contextlib.ExitStack):
    """The rewards of a run, each with a process. `failures`: numbers of answers that have none, by reason. Raises UserError for a
    reward that cannot be made."""

    def __init__(self, section: PolicySection, tokenizer: TextTokenizer):
        super().__init__()
        self.section, self.tokenizer, self.ends = section, tokenizer, frozenset(tokenizer.end_ids)
        self.failures: Counter[str] = Counter()
        self.processes = [(one, self.enter_context(RewardProcess(one))) for one in section.rewards]

    def reward(self, group: Sequence[Answer], reference: str) -> None:
        """Set the rewards of a group; it is set aside where one of its answers has none. reference: the data's own answer."""
        prompt = self.tokenizer.decode(group[0].prompt)
        record = {"prompt": prompt, "answer": reference, "sample": group[0].sample}
        for answer in group:
            answer.reward = self._reward(self.text(answer), record) + self._punishment(answer)
            if math.isnan(answer.reward):
                for one in group:
                    one.reward = math.nan
                return

    def text(self, answer: Answer) -> str:
        ids = answer.ids[:-1] if answer.ids and answer.ids[-1] in self.ends else answer.ids
        return self.tokenizer.decode(ids)

    def _reward(self, text: str, record: dict[str, object]) -> float:
        total = 0.0
        for section, process in self.processes:
            [found] = process.score([(text, record)])
            if math.isnan(found):
                self.failures.update({f"{section.name}: {reason}": n for reason, n in process.failures.items()})
                process.failures.clear()
                return math.nan
            total += section.weight * found
        return total

    def _punishment(self, answer: Answer) -> float:
        """DAPO's (arXiv:2503.14476, equation 13): 0 up to max_new_tokens - margin, then down to -1."""
        margin = self.section.over_long_margin
        if margin is None:
            return 0.0
        return -max(0, len(answer.ids) - (self.section.max_new_tokens - margin)) / margin


def set_advantages(groups: Sequence[Sequence[Answer]], section: PolicySection) -> None:
    """Advantages of rewarded groups, of all ranks where `scale` is batch."""
    rewards = torch.tensor([[answer.reward for answer in group] for group in groups], dtype=torch.float64)
    found, _ = advantages(rewards, section.scale)
    for group, row in zip(groups, found.tolist(), strict=True):
        for answer, advantage in zip(group, row, strict=True):
            answer.advantage = advantage


@contextmanager
def gathered(model: CausalLM, sharding: Sharding) -> Iterator[None]:
    """Context with the model in eval mode and without gradients, whose weights FSDP2 gathers once: ranks call it as often as each
    needs. Afterwards its mode is restored, and the weights are sharded. sharding: without `auto`. Every rank enters it."""
    was_training = model.training
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    blocks = [one for one in model.hybrid.blocks if isinstance(one, FSDPModule)]
    model.eval()
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in blocks:  # others stay gathered after a forward pass (train/parallel.py)
            module.set_reshard_after_forward(sharding.strategy != "grad_op", recurse=False)
        for module in sharded:
            module.reshard()
        model.train(was_training)
