"""Text that the model writes while it is trained, and how many of the held-out questions it answers exactly."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from composer.core import Callback, State
from composer.loggers import Logger

from llmtrain.config.base import Duration
from llmtrain.data.chat.questions import Question, question_of
from llmtrain.data.loader.cached_stream import CachedStream
from llmtrain.data.loader.token_samples import TokenSamples
from llmtrain.data.shards.packing import ENDS, TRAINED, UNDESIRABLE
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.errors import UserError
from llmtrain.generate.decoding import decode
from llmtrain.generate.options import Sampling
from llmtrain.logs import run_log
from llmtrain.models.causal_lm import CausalLM
from llmtrain.objectives.sections import PreferenceSection
from llmtrain.schema.config import Config
from llmtrain.schema.data import DataConfig
from llmtrain.schema.evaluation import SamplesConfig
from llmtrain.train.composer_model import evaluating

EXACT_MATCH = "samples/exact_match"
FILE = "samples.jsonl"
_SHOWN = 3


class Samples(Callback):
    """Callback that continues prompts and held-out questions before the first step, every `interval` steps and after the last one:
    to the terminal, to RUN/samples.jsonl and to loggers, with the metric `samples/exact_match` of the questions.

    Every rank decodes all of them, as sharded weights take all ranks. writes: true on the rank that writes the file. of_pairs:
    as of held_out_questions. Raises UserError for prompts that are too long, and where fewer conversations are held out than are
    asked for.
    """

    def __init__(
        self,
        config: SamplesConfig,
        data: DataConfig,
        model: CausalLM,
        tokenizer: TextTokenizer,
        interval: int,
        folder: Path,
        writes: bool,
        of_pairs: bool = False,
    ) -> None:
        self.config, self.model, self.tokenizer, self.interval = config, model, tokenizer, interval
        self.file, self.writes = folder / FILE, writes
        prompts = [Question(tokenizer.prompt_ids(text), None) for text in config.prompts]
        room = model.config.max_seq_len - config.max_new_tokens
        if long := next((text for text, one in zip(config.prompts, prompts, strict=True) if len(one.ids) > room), None):
            raise UserError(f"eval.samples.prompts: {long[:40]!r}... leaves no room for {config.max_new_tokens} tokens")
        questions = held_out_questions(data, config.questions, tokenizer, room, of_pairs) if config.questions else []
        if len(questions) < config.questions:
            raise UserError(
                f"eval.samples.questions: {config.questions} are asked for, {len(questions)} conversations of at most {room} "
                "tokens are held out; ask for fewer, or hold out more (data.prepare.validation_fraction)"
            )
        self.asked = prompts + questions

    def fit_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 0:
            self._write(state, logger)

    def batch_end(self, state: State, logger: Logger) -> None:
        last = state.max_duration is not None and state.timestamp >= state.max_duration
        if state.timestamp.batch.value % self.interval == 0 or last:
            self._write(state, logger)

    def _write(self, state: State, logger: Logger) -> None:
        step = state.timestamp.batch.value
        rows = [
            {"step": step, "prompt": self.tokenizer.decode(one.ids), "text": self.tokenizer.decode(ids)}
            | ({} if one.answer is None else {"answer": self.tokenizer.decode(one.answer), "right": ids == one.answer})
            for one, ids in zip(self.asked, self._continued(), strict=True)
        ]
        right = [row["right"] for row in rows if "right" in row]
        if right:
            logger.log_metrics({EXACT_MATCH: sum(right) / len(right)})
        columns = ["step", "prompt", "text"]
        logger.log_table(
            columns, [[row[name] for name in columns] for row in rows[: len(self.config.prompts) + _SHOWN]], "samples"
        )
        if not self.writes:
            return
        shown = rows[: max(len(self.config.prompts), _SHOWN)]
        lines = [f"step {step}  {row['prompt']!r} → {row['text']!r}" for row in shown]
        run_log.info(
            "\n".join([*lines, *([f"step {step}  exact match {sum(right)} of {len(right)}"] if right else [])])
        )
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except OSError as error:  # a full disk
            run_log.warning(
                f"WARNING: {self.file} cannot be written: {error.strerror or error}. Training goes on without it"
            )

    def _continued(self) -> list[list[int]]:
        """New tokens of each, up to one that ends texts."""
        ends, size = set(self.tokenizer.end_ids), self.config.max_new_tokens
        options = Sampling(temperature=self.config.temperature)
        with evaluating(self.model):
            # No stop token: every rank must take every step.
            steps = list(decode(self.model, [one.ids for one in self.asked], options, max_new_tokens=size))
        found = []
        for row in zip(*steps, strict=True):
            ids = [token for token in row if token is not None]
            found.append(ids[: next((at for at, token in enumerate(ids) if token in ends), len(ids))])
        return found


def held_out_questions(
    data: DataConfig, count: int, tokenizer: TextTokenizer, room: int, of_pairs: bool = False
) -> list[Question]:
    """At most `count` conversations of the validation data with a question of at most `room` tokens, the same in every run, drawn
    from samples all over it, as packing puts conversations of like length side by side. of_pairs: every second one is a rejected or
    mismatched answer (objectives/preference.py), which counts as little as one that is labelled undesirable."""
    cached = [CachedStream.of(name, stream, data) for name, stream in data.validation_streams().items()]
    if not cached:
        return []
    samples, rng = TokenSamples(cached, seq_len=data.seq_len), np.random.default_rng(0)
    found = list[Question]()
    for read, number in enumerate(rng.permutation(samples.num_samples)):
        if min(read, len(found)) >= count:
            break
        sample = samples.get_item(int(number))
        if "flags" not in sample:
            raise UserError("eval.samples.questions are of conversations; the validation data holds texts")
        borders = np.flatnonzero(sample["flags"] & ENDS) + 1
        parts = zip(np.split(sample["tokens"], borders), np.split(sample["flags"], borders), strict=True)
        for tokens, flags in list(parts)[:: 2 if of_pairs else 1]:
            if (flags & UNDESIRABLE).any():
                continue
            one = question_of(tokens.tolist(), (flags & TRAINED) != 0, tokenizer.end_ids)
            if one and len(one.ids) <= room:
                found.append(one)
    return [found[number] for number in sorted(rng.permutation(len(found))[:count])]


def samples_callbacks(
    config: Config, model: CausalLM, steps: Callable[[Duration], int], writes: bool
) -> list[Callback]:
    """The callback of eval.samples, if there is one. steps: a length of the run in steps."""
    samples, data = config.eval.samples, config.data
    if samples is None:
        return []
    from llmtrain.data.tokenize.stored_tokenizer import load_run_tokenizer

    tokenizer, folder = load_run_tokenizer(data.model_dump(mode="json")), Path(config.run_dir)
    of_pairs = isinstance(config.objective, PreferenceSection)
    return [Samples(samples, data, model, tokenizer, steps(samples.interval), folder, writes, of_pairs)]
