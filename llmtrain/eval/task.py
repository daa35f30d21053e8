"""A task under one convention: its documents, their requests, and metrics from the responses.

    task = load_task("arc_challenge", "lm-eval")
    documents = task.documents()
    requests = task.requests(documents, tokenizer, shots=5)
    metrics = task.metrics(documents, requests, results)      # results[i] is the response to requests[i]

Imports no torch: models are in scoring/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmtrain.data.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts import foundry, lm_eval
from llmtrain.eval.prompts.encode import encode
from llmtrain.eval.prompts.few_shot import check_pool
from llmtrain.eval.prompts.foundry import FoundryWriter
from llmtrain.eval.prompts.lm_eval import LmEvalWriter
from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest, Request, Response
from llmtrain.eval.prompts.rolling_loglikelihood import rolling_requests
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.report.metrics import Metrics, aggregate
from llmtrain.eval.report.process_results import process_results
from llmtrain.eval.scoring.overlap import Steps, run_steps
from llmtrain.eval.tasks.config import CONVENTIONS, Convention, TaskConfig, TaskType
from llmtrain.eval.tasks.documents import Document, DocumentTemplates, group_by_category
from llmtrain.eval.tasks.load import check_known, find_yaml, read_section
from llmtrain.eval.tasks.sections import ConventionSettings, LmEvalPrompting, Source
from llmtrain.eval.tasks.sources import Record, read_records


@dataclass(frozen=True)
class Documents:
    """Documents of a task.

    evaluated: those to be scored. everything: all of the source; foundry draws examples from them and derives limits of generated
    answers. examples: those of source.few_shot, if examples come from there.
    """

    evaluated: list[Document]
    everything: list[Document]
    examples: list[Document] | None = None

    def __len__(self) -> int:
        return len(self.evaluated)


@dataclass(frozen=True)
class Task:
    """Task under one convention. base: folder to which the source's paths are relative."""

    config: TaskConfig
    convention: Convention
    source: Source
    base: Path

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def type(self) -> TaskType:
        return self.config.type

    @property
    def metric(self) -> str:
        """Name of the headline metric."""
        return self.config.metrics(self.convention)[0]

    @property
    def shots(self) -> list[int]:
        """Numbers of few-shot examples with which the task is to run."""
        return self.settings.shots or self.config.shots

    @cached_property
    def settings(self) -> ConventionSettings:
        return self.config.section(self.convention)

    @property
    def _plain_continuation(self) -> bool:
        """True if the task has no template for the continuation."""
        return self.settings.continuation is None and self.config.continuation is None

    def window(self, max_seq_len: int) -> int:
        """Most tokens of context and continuation together, for a model that reads max_seq_len.

        The last token of a continuation is predicted but not read, so lm-evaluation-harness has one token more than LLM Foundry.
        """
        return max_seq_len + (self.convention == "lm-eval")

    def documents(self, limit: int | None = None) -> Documents:
        """Read the source. limit: number of documents to evaluate (of each category), the first ones.

        Raises EvalError with file and line for a record from which the task's templates cannot make a document.
        """
        templates = DocumentTemplates(self.config, self.source, self.convention)
        everything = [templates.document(record, index) for index, record in enumerate(self._records())]
        if not everything:
            raise EvalError(f"task {self.name}: its source holds no documents")
        examples = None
        if self._has_own_examples():
            examples = [templates.document(record, index) for index, record in enumerate(self._records(few_shot=True))]
        evaluated = [one for group in group_by_category(everything).values() for one in group[:limit]]
        return Documents(evaluated, everything, examples)

    def _records(self, few_shot: bool = False) -> Iterator[Record]:
        try:
            yield from read_records(self.source, self.base, few_shot=few_shot)
        except EvalError as error:
            raise EvalError(f"task {self.name}: {error}") from None

    def _has_own_examples(self) -> bool:
        wanted = self.settings.few_shot_from or ("documents" if self.convention == "foundry" else "few_shot")
        return wanted == "few_shot" and self.source.few_shot is not None

    def requests(
        self,
        documents: Documents,
        tokenizer: TextTokenizer,
        shots: int | None = None,
        *,
        max_seq_len: int | None = None,
        pmi: bool = True,
    ) -> list[Request]:
        """Requests to a model, document by document.

        shots: few-shot examples (default: the first of the task's). max_seq_len: tokens that the model reads, needed for type
        perplexity only. pmi: False leaves out the requests of PMI scores. Raises EvalError for too few examples, an empty
        prompt or a continuation without tokens.
        """
        return run_steps(self.request_steps(documents, tokenizer, shots, max_seq_len=max_seq_len, pmi=pmi))

    def request_steps(
        self,
        documents: Documents,
        tokenizer: TextTokenizer,
        shots: int | None = None,
        *,
        max_seq_len: int | None = None,
        pmi: bool = True,
    ) -> Steps[list[Request]]:
        """Computation of `requests` in steps of some hundred prompts."""
        shots = self.shots[0] if shots is None else shots
        self.check_shots(documents, shots)
        encoder = PromptTokenizer(tokenizer)
        if self.type == "perplexity":
            if max_seq_len is None:
                raise EvalError(f"task {self.name}: the perplexity of a text needs the model's max_seq_len")
            return list(rolling_requests(documents.evaluated, encoder, max_seq_len))
        made: list[Request] = []
        in_pool, everything = documents.examples is None, group_by_category(documents.everything)
        for category, group, pool in self._example_pools(documents):
            for some in self._category(group, everything[category], pool, in_pool, shots, encoder, pmi):
                made += some
                yield
        return made

    def check_shots(self, documents: Documents, shots: int) -> None:
        """Check the number of few-shot examples; raises EvalError where there are fewer."""
        if shots and self.type == "perplexity":
            raise EvalError(f"task {self.name}: the perplexity of a text has no few-shot examples")
        in_pool = documents.examples is None
        one_more = (
            LmEvalWriter(self.settings).excludes_document(in_pool)
            if isinstance(self.settings, LmEvalPrompting)
            else in_pool
        )
        for category, _, pool in self._example_pools(documents) if shots else ():
            check_pool(self.name, len(pool), shots, one_more, category)

    def _example_pools(self, documents: Documents) -> Iterator[tuple[str | None, list[Document], list[Document]]]:
        """(category, its evaluated documents, the documents to draw its examples from)."""
        pools = group_by_category(documents.everything if documents.examples is None else documents.examples)
        for category, group in group_by_category(documents.evaluated).items():
            yield category, group, pools.get(category, [])

    def _category(
        self,
        group: list[Document],
        everything: list[Document],
        pool: list[Document],
        in_pool: bool,
        shots: int,
        tokenizer: PromptTokenizer,
        pmi: bool,
    ) -> Iterator[list[Request]]:
        if isinstance(self.settings, LmEvalPrompting):
            writer, encoding = LmEvalWriter(self.settings, self._plain_continuation), lm_eval.ENCODING
        else:
            writer, encoding = FoundryWriter(self.settings, tokenizer), foundry.ENCODING
        limits = writer.generation_limits(everything, tokenizer) if self.type == "generation" else None
        prompts = (one for one in writer.prompts(group, pool, shots, in_pool) if pmi or not one.premise)
        return encode(prompts, encoding, tokenizer, limits)

    def check_lengths(self, documents: Documents, requests: Sequence[Request], max_seq_len: int) -> None:
        """Check that every continuation leaves room for some context; raises EvalError with file and line.

        max_seq_len: tokens that the model reads.
        """
        most = self.window(max_seq_len) - 1
        for request in requests:
            if isinstance(request, LoglikelihoodRequest) and len(request.continuation) > most:
                what = f"a continuation of {len(request.continuation)} tokens"
                room, advice = f"{most} of them", "leave the document out"
            elif isinstance(request, GenerateUntilRequest) and request.max_new_tokens >= max_seq_len:
                what = f"an answer of up to {request.max_new_tokens} tokens"
                room, advice = f"{max_seq_len - 1} of them after a context", "lower max_new_tokens"
            else:
                continue
            where = next(one.where for one in documents.evaluated if one.index == request.document)
            raise EvalError(
                f"task {self.name}: {where}: the model reads {max_seq_len} tokens, and {what} does not fit (at most {room}); "
                f"{advice}, or raise max_length if the model can read more"
            )

    def metrics(
        self,
        documents: Documents,
        requests: Sequence[Request],
        results: Sequence[Response],
    ) -> Metrics:
        """Metrics of the task. results[i] is the response to requests[i]; every document counts once."""
        answers: dict[int, list[tuple[int, Response]]] = {one.index: [] for one in documents.evaluated}
        for request, result in zip(requests, results, strict=True):
            answers[request.document].append(
                (request.option if isinstance(request, LoglikelihoodRequest) else 0, result)
            )
        per_document = []
        for document in documents.evaluated:
            options = sorted(answers[document.index], key=lambda pair: pair[0])
            assert [option for option, _ in options] == list(range(len(options))), f"{document.where}: {options}"
            per_document.append(process_results(document, [result for _, result in options], self.settings))  # type: ignore[arg-type]
        names = [
            name for name in self.config.metrics(self.convention) if all(name in one.values for one in per_document)
        ]
        values, categories = aggregate(per_document, names, macro=self.convention == "foundry")
        truncated = sum(one.truncated for one in per_document)
        return Metrics(self.metric, values, len(per_document), len(requests), truncated, categories, per_document)


def load_task(name: str | Path, convention: str, data_dir: str | Path | None = None) -> Task:
    """Load a task from its YAML (a path, or the name of a shipped one) under a convention, `foundry` or `lm-eval`.

    data_dir: folder of local files, used in place of the task's source (its `local`). Raises ConfigError that lists all errors of
    the YAML, or EvalError.
    """
    check_known(convention, CONVENTIONS, "convention")
    file = find_yaml(name, "tasks")
    config = read_section(file, TaskConfig)
    if data_dir is None:
        return Task(config, convention, config.source, file.parent)  # type: ignore[arg-type]
    if config.local is None:
        if config.source.hub is not None:
            raise EvalError(
                f"{file}: a data folder is given, but the task has no `local` that says what to look for there"
            )
        return Task(config, convention, config.source, file.parent)  # type: ignore[arg-type]
    return Task(config, convention, config.local, Path(data_dir).expanduser())  # type: ignore[arg-type]
