"""A task: its documents, their requests, and metrics from the responses.

    task = load_task("arc_challenge", "lm-eval")
    documents = task.documents()
    requests = task.requests(documents, tokenizer, shots=5)
    metrics = task.metrics(documents, requests, results)      # results[i] is the response to requests[i]

Imports no torch: models are in scoring/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from llmtrain.data.tokenizer import TextTokenizer
from llmtrain.eval.errors import BadDocuments, EvalError
from llmtrain.eval.instructions import check_libraries
from llmtrain.eval.prompts import foundry, lm_eval
from llmtrain.eval.prompts.chat import PLAIN, PromptStyle
from llmtrain.eval.prompts.encode import encode, shortened
from llmtrain.eval.prompts.few_shot import check_pool
from llmtrain.eval.prompts.foundry import FoundryWriter
from llmtrain.eval.prompts.lm_eval import LmEvalWriter
from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest, Request, Response
from llmtrain.eval.prompts.rolling_loglikelihood import rolling_requests
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.report.metrics import Metrics, aggregate
from llmtrain.eval.report.process_results import process_results
from llmtrain.eval.scoring.overlap import Steps, run_steps
from llmtrain.eval.tasks.config import CONVENTIONS, WITHOUT_EXAMPLES, Convention, TaskConfig, TaskType
from llmtrain.eval.tasks.documents import (
    Document,
    DocumentTemplates,
    Instructed,
    group_by_category,
    without_reasoning,
)
from llmtrain.eval.tasks.load import check_known, find_yaml, read_section
from llmtrain.eval.tasks.sections import ConventionSettings, LmEvalPrompting, Source
from llmtrain.eval.tasks.sources import read_records

D = TypeVar("D")


@dataclass(frozen=True)
class Documents(Generic[D]):
    """Documents of a task.

    evaluated: those to be scored. everything: all of the source; foundry draws examples from them and derives limits of generated
    answers. examples: those of source.few_shot, if examples come from there. skipped: reasons of records that were left out, by
    location.
    """

    evaluated: list[D]
    everything: list[D]
    examples: list[D] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.evaluated)


class Task(ABC):
    """All that an evaluation asks of a task. A document has `index` (its number in requests), `where` (file and line) and `text`
    (it with its right answer, for decontamination)."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in results."""

    @property
    @abstractmethod
    def shots(self) -> list[int]:
        """Numbers of few-shot examples with which the task is to run."""

    @property
    @abstractmethod
    def without_examples(self) -> str | None:
        """Words for the task, if it has no few-shot examples; otherwise None."""

    @property
    @abstractmethod
    def rolling(self) -> bool:
        """True if whole texts are scored, in windows; no chat template frames them."""

    @abstractmethod
    def measured(self, pmi: bool = True) -> list[str]:
        """Names of the metrics, the headline first. pmi: False leaves out those of PMI scores."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Settings for results.json on which prompts and scores depend, but for data and shots: comparisons name what differs."""

    @abstractmethod
    def window(self, max_seq_len: int) -> int:
        """Most tokens of context and continuation together, for a model that reads max_seq_len."""

    @abstractmethod
    def documents(self, limit: int | None = None) -> Documents[Any]:
        """Read the source. limit: number of documents to evaluate (of each category), the first ones.

        Raises BadDocuments, with the other documents, for records of which the task can make none; EvalError for a source that
        cannot be read.
        """

    @abstractmethod
    def check_shots(self, documents: Documents[Any], shots: int) -> None:
        """Check the number of few-shot examples; raises EvalError where there are fewer."""

    @abstractmethod
    def _batches(
        self,
        documents: Documents[Any],
        shots: int,
        tokenizer: PromptTokenizer,
        pmi: bool,
        style: PromptStyle,
        bad: dict[int, str],
        whole: bool = True,
    ) -> Iterator[list[Request]]:
        """Requests, some hundred at a time. bad: takes the reasons of documents without some. whole: False cuts prompts short.
        Not called for tasks with `rolling`."""

    @abstractmethod
    def metrics(self, documents: Documents[Any], requests: Sequence[Request], results: Sequence[Response]) -> Metrics:
        """Metrics of the task. results[i] is the response to requests[i]; every document counts once."""

    @property
    def metric(self) -> str:
        """Name of the headline metric."""
        return self.measured()[0]

    def requests(
        self,
        documents: Documents[Any],
        tokenizer: TextTokenizer,
        shots: int | None = None,
        *,
        max_seq_len: int | None = None,
        pmi: bool = True,
        style: PromptStyle = PLAIN,
    ) -> list[Request]:
        """Requests to a model, document by document.

        shots: few-shot examples (default: the first of the task's). max_seq_len: tokens that the model reads, needed for
        perplexities of whole texts only. pmi: False leaves out the requests of PMI scores. style: plain text or a chat template.
        Raises EvalError for too few examples; BadDocuments, with the requests of the others, for documents with an empty prompt
        or a continuation without tokens.
        """
        return run_steps(self.request_steps(documents, tokenizer, shots, max_seq_len=max_seq_len, pmi=pmi, style=style))

    def request_steps(
        self,
        documents: Documents[Any],
        tokenizer: TextTokenizer,
        shots: int | None = None,
        *,
        max_seq_len: int | None = None,
        pmi: bool = True,
        style: PromptStyle = PLAIN,
    ) -> Steps[list[Request]]:
        """Computation of `requests` in steps of some hundred prompts."""
        shots = self.shots[0] if shots is None else shots
        self.check_shots(documents, shots)
        encoder = PromptTokenizer(tokenizer)
        made: list[Request] = []
        bad: dict[int, str] = {}
        if self.rolling:
            if max_seq_len is None:
                raise EvalError(f"task {self.name}: the perplexity of a text needs the model's max_seq_len")
            made = list(rolling_requests(documents.evaluated, encoder, max_seq_len, bad))
            return self._usable(documents, made, bad)
        for some in self._named_batches(documents, shots, encoder, pmi, style, bad):
            made += some
            yield
        return self._usable(documents, made, bad)

    def check(
        self,
        documents: Documents[Any],
        tokenizer: TextTokenizer,
        shots: int,
        *,
        max_seq_len: int,
        pmi: bool = True,
        style: PromptStyle = PLAIN,
    ) -> None:
        """Check of all prompts, of which only the ends are tokenised. max_seq_len: tokens that the model reads.

        Raises what `requests` and `check_lengths` would, but for prompts whose whole text changes the tokens of their ends.
        """
        self.check_shots(documents, shots)
        bad: dict[int, str] = {}
        if not self.rolling:
            encoder = PromptTokenizer(tokenizer)
            for some in self._named_batches(documents, shots, encoder, pmi, style, bad, whole=False):
                self._check_lengths(some, max_seq_len, bad)
        self._usable(documents, [], bad)

    def _named_batches(self, *given: Any, **options: Any) -> Iterator[list[Request]]:
        """`_batches`, of which errors name the task."""
        try:
            yield from self._batches(*given, **options)
        except EvalError as error:
            raise EvalError(f"task {self.name}: {error}") from None

    def _usable(self, documents: Documents[Any], requests: list[Request], bad: Mapping[int, str]) -> list[Request]:
        """Requests, if no document is bad. bad: reasons by index. Raises BadDocuments with the requests of the other documents."""
        if not bad:
            return requests
        reasons = {one.where: bad[one.index] for one in documents.evaluated if one.index in bad}
        raise BadDocuments(self.name, reasons, [one for one in requests if one.document not in bad])

    def check_lengths(self, documents: Documents[Any], requests: list[Request], max_seq_len: int) -> None:
        """Check that every continuation leaves room for some context.

        max_seq_len: tokens that the model reads. Raises BadDocuments, with the requests of the others, for documents with a longer
        continuation; EvalError for answers that may be longer.
        """
        bad: dict[int, str] = {}
        self._check_lengths(requests, max_seq_len, bad)
        self._usable(documents, requests, bad)

    def _check_lengths(self, requests: Sequence[Request], max_seq_len: int, bad: dict[int, str]) -> None:
        most = self.window(max_seq_len) - 1
        reads = f"the model reads {max_seq_len} tokens, and"
        advice = "raise max_length if the model can read more"
        for request in requests:
            if isinstance(request, LoglikelihoodRequest) and len(request.continuation) > most:
                what = f"a continuation of {len(request.continuation)} tokens does not fit (at most {most} of them)"
                bad[request.document] = f"{reads} {what}; leave the document out, or {advice}"
            elif isinstance(request, GenerateUntilRequest) and request.max_new_tokens >= max_seq_len:
                what = f"an answer of up to {request.max_new_tokens} tokens does not fit (at most {max_seq_len - 1} of them"
                raise EvalError(f"task {self.name}: {reads} {what} after a context); lower max_new_tokens, or {advice}")


@dataclass(frozen=True)
class NativeTask(Task):
    """Task of llmtrain's own YAML under one convention. base: folder to which the source's paths are relative."""

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
    def without_examples(self) -> str | None:
        return WITHOUT_EXAMPLES.get(self.type)

    @property
    def rolling(self) -> bool:
        return self.type == "perplexity"

    def measured(self, pmi: bool = True) -> list[str]:
        return [name for name in self.config.metrics(self.convention) if pmi or name != "acc_pmi"]

    def described(self) -> dict[str, Any]:
        other = {"name", "about", "source", "local", "shots", "conventions", *CONVENTIONS, "lm_eval"}
        own = self.settings.model_dump(mode="json", exclude={"shots"})
        return self.config.model_dump(mode="json", exclude=other) | {
            f"{self.convention}.{k}": v for k, v in own.items()
        }

    @property
    def shots(self) -> list[int]:
        return self.settings.shots or self.config.shots

    @cached_property
    def settings(self) -> ConventionSettings:
        return self.config.section(self.convention)

    @property
    def _plain_continuation(self) -> bool:
        """True if the task has no template for the continuation."""
        return self.settings.continuation is None and self.config.continuation is None

    def window(self, max_seq_len: int) -> int:
        """Most tokens of context and continuation together.

        The last token of a continuation is predicted but not read, so lm-evaluation-harness has one token more than LLM Foundry.
        """
        return max_seq_len + (self.convention == "lm-eval")

    def documents(self, limit: int | None = None) -> Documents[Document]:
        bad: dict[str, str] = {}
        everything = self._read(bad)
        examples = self._read(bad, few_shot=True) if self._has_own_examples() else None
        if not everything and not bad:
            raise EvalError(f"task {self.name}: its source holds no documents")
        evaluated = [one for group in group_by_category(everything).values() for one in group[:limit]]
        documents = Documents(evaluated, everything, examples, bad)
        if bad:
            raise BadDocuments(self.name, bad, documents)
        return documents

    def _read(self, bad: dict[str, str], few_shot: bool = False) -> list[Document]:
        """Documents of the source, or its examples. bad: takes the reasons of records that make none, by location."""
        templates = DocumentTemplates(self.config, self.source, self.convention)
        made: list[Document] = []
        try:
            for record in read_records(self.source, self.base, few_shot=few_shot, bad=bad):
                try:
                    made.append(templates.document(record, len(made)))
                except EvalError as error:
                    bad[record.where] = str(error)
        except EvalError as error:
            raise EvalError(f"task {self.name}: {error}") from None
        missing = without_reasoning(made)
        bad.update(missing)
        return [one for one in made if one.where not in missing]

    def _has_own_examples(self) -> bool:
        wanted = self.settings.few_shot_from or ("documents" if self.convention == "foundry" else "few_shot")
        return wanted == "few_shot" and self.source.few_shot is not None

    def check_shots(self, documents: Documents[Document], shots: int) -> None:
        contents = [document.content for document in documents.evaluated]
        try:
            check_libraries(
                one for content in contents if isinstance(content, Instructed) for one in content.instructions
            )
        except EvalError as error:
            raise EvalError(f"task {self.name}: {error}") from None
        if shots and self.without_examples:
            raise EvalError(f"task {self.name}: {self.without_examples} has no few-shot examples")
        in_pool = documents.examples is None
        one_more = (
            LmEvalWriter(self.settings).excludes_document(in_pool)
            if isinstance(self.settings, LmEvalPrompting)
            else in_pool
        )
        for category, _, pool in self._example_pools(documents) if shots else ():
            check_pool(self.name, len(pool), shots, one_more, category)

    def _example_pools(
        self, documents: Documents[Document]
    ) -> Iterator[tuple[str | None, list[Document], list[Document]]]:
        """(category, its evaluated documents, the documents to draw its examples from)."""
        pools = group_by_category(documents.everything if documents.examples is None else documents.examples)
        for category, group in group_by_category(documents.evaluated).items():
            yield category, group, pools.get(category, [])

    def _batches(
        self,
        documents: Documents[Document],
        shots: int,
        tokenizer: PromptTokenizer,
        pmi: bool,
        style: PromptStyle,
        bad: dict[int, str],
        whole: bool = True,
    ) -> Iterator[list[Request]]:
        in_pool, everything = documents.examples is None, group_by_category(documents.everything)
        for category, group, pool in self._example_pools(documents):
            if isinstance(self.settings, LmEvalPrompting):
                writer = LmEvalWriter(self.settings, self._plain_continuation, style, bad)
                encoding = lm_eval.ENCODING
            else:
                writer, encoding = FoundryWriter(self.settings, tokenizer), foundry.ENCODING
            limits = writer.generation_limits(everything[category], tokenizer) if self.config.generates else None
            prompts = (one for one in writer.prompts(group, pool, shots, in_pool) if pmi or not one.premise)
            yield from encode(prompts if whole else map(shortened, prompts), encoding, tokenizer, limits, bad)

    def metrics(
        self,
        documents: Documents[Document],
        requests: Sequence[Request],
        results: Sequence[Response],
    ) -> Metrics:
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
        names = [name for name in self.measured() if all(name in one.values for one in per_document)]
        values, categories = aggregate(per_document, names, macro=self.convention == "foundry")
        truncated = sum(one.truncated for one in per_document)
        return Metrics(self.metric, values, len(per_document), len(requests), truncated, categories, per_document)


def load_task(name: str | Path, convention: str, data_dir: str | Path | None = None) -> NativeTask:
    """Load a task from its YAML (a path, or the name of a shipped one) under a convention, `foundry` or `lm-eval`.

    data_dir: folder of local files, used in place of the task's source (its `local`). Raises ConfigError that lists all errors of
    the YAML, or EvalError.
    """
    check_known(convention, CONVENTIONS, "convention")
    file = find_yaml(name, "tasks")
    config = read_section(file, TaskConfig)
    if convention not in config.conventions:
        known = " or ".join(config.conventions)
        raise EvalError(f"{file}: the task has no prompts of convention {convention}; run it with convention: {known}")
    if data_dir is None:
        return NativeTask(config, convention, config.source, file.parent)
    if config.local is None:
        own = next((key for key in ("path", "mds", "text") if getattr(config.source, key) is not None), None)
        advice = "" if own is None else f"; `local: {{{own}: {getattr(config.source, own)}}}` reads that name there"
        raise EvalError(
            f"{file}: the data folder {data_dir} is given, but the task has no `local` that says what to look for "
            f"there{advice}"
        )
    return NativeTask(config, convention, config.local, Path(data_dir).expanduser())
