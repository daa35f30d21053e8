"""A task of lm-evaluation-harness, run as its YAML says: the same prompts, token ids, metrics and their names.

    task = make_task(read_task_file(path), path, data_dir=None, allow_code=[])

Metrics have the harness's names, so that results compare with its results.json: `acc`, `exact_match,strict-match` (with the
filter's name, but for the filter `none`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval_tasks.aggregation import aggregate, weighted_sum
from llmtrain.eval.lm_eval_tasks.code import load_function
from llmtrain.eval.lm_eval_tasks.config import Settings, described, read_settings
from llmtrain.eval.lm_eval_tasks.documents import (
    DataSet,
    LmEvalDocument,
    check_templates,
    evaluated_documents,
    example_documents,
)
from llmtrain.eval.lm_eval_tasks.few_shot import PromptWriter, check_examples
from llmtrain.eval.lm_eval_tasks.metrics import (
    MetricSettings,
    choice_values,
    likelihood_values,
    right_choice,
    text_values,
)
from llmtrain.eval.prompts.chat import PromptStyle
from llmtrain.eval.prompts.encode import Prompt, encode, shortened
from llmtrain.eval.prompts.lm_eval import ENCODING
from llmtrain.eval.prompts.requests import (
    GeneratedText,
    GenerateUntilRequest,
    Loglikelihood,
    LoglikelihoodRequest,
    Request,
    Response,
)
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.report.document_scores import describe
from llmtrain.eval.report.metrics import DocumentMetrics, Metrics, WeightedSum, is_perplexity
from llmtrain.eval.task import Documents, Task
from llmtrain.eval.tasks.config import WITHOUT_EXAMPLES


def make_task(
    data: Mapping[str, Any], file: Path, *, data_dir: Path | None = None, allow_code: Sequence[Path] = ()
) -> LmEvalTask:
    """Task from the content of its file (`read_task_file`); reads no data and imports no code.

    data_dir: folder of local files in place of the data set: NAME/SPLIT.jsonl or DATASET/[CONFIG/]SPLIT.jsonl. allow_code:
    folders whose Python files may be imported. Raises EvalError that names the task, the keys and what is wrong with them.
    """
    settings = read_settings(data, file, allow_code)
    check_templates(settings)
    return LmEvalTask(settings, data_dir)


@dataclass(frozen=True)
class LmEvalTask(Task):
    """Task of lm-evaluation-harness. data_dir: as in `make_task`."""

    settings: Settings
    data_dir: Path | None = None
    _pool: list[LmEvalDocument] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.settings.task

    @property
    def shots(self) -> list[int]:
        return [0 if self.rolling else self.settings.num_fewshot]

    @property
    def without_examples(self) -> str | None:
        return WITHOUT_EXAMPLES["perplexity"] if self.rolling else None

    @property
    def rolling(self) -> bool:
        return self.settings.output_type == "loglikelihood_rolling"

    def measured(self, pmi: bool = True) -> list[str]:
        names = [one.name for one in self.settings.metrics if pmi or one.name != "acc_mutual_info"]
        return [_title(name, chain.name) for chain in self.settings.filters for name in names]

    def described(self) -> dict[str, Any]:
        return described(self.settings)

    def window(self, max_seq_len: int) -> int:
        return max_seq_len + 1  # the last token of a continuation is predicted but not read

    @cached_property
    def _data(self) -> DataSet:
        return DataSet(self.settings, self.data_dir)

    def documents(self, limit: int | None = None) -> Documents[LmEvalDocument]:
        try:
            found = evaluated_documents(self._data, limit)
        except EvalError as error:
            raise EvalError(f"task {self.name}: {error}") from None
        return Documents(found, found)

    def _examples(self, documents: Documents[LmEvalDocument]) -> list[LmEvalDocument]:
        """Documents that examples are drawn from, read once."""
        if not self._pool:
            try:
                self._pool.extend(example_documents(self._data, documents.evaluated[0].fields))
            except EvalError as error:
                raise EvalError(f"task {self.name}: {error}") from None
        return self._pool

    def check_shots(self, documents: Documents[LmEvalDocument], shots: int) -> None:
        if shots and self.without_examples:
            raise EvalError(f"task {self.name}: {self.without_examples} has no few-shot examples")
        if shots:
            check_examples(self.settings, self._examples(documents), shots)

    def _batches(
        self,
        documents: Documents[LmEvalDocument],
        shots: int,
        tokenizer: PromptTokenizer,
        pmi: bool,
        style: PromptStyle,
        bad: dict[int, str],
        whole: bool = True,
    ) -> Iterator[list[Request]]:
        writer = PromptWriter(self.settings, self._examples(documents) if shots else [], shots, style)
        prompts = (
            one
            for document in documents.evaluated
            for one in self._prompts(writer, document, style, bad)
            if pmi or not one.premise
        )
        cut = prompts if whole else map(shortened, prompts)
        for some in encode(cut, ENCODING, tokenizer, self.settings.generation, bad):
            yield [one for request in some for one in self._repeated(request)]

    def _repeated(self, request: Request) -> list[Request]:
        """The requests for a document's `repeats`; one alone where all answers are the same."""
        if not isinstance(request, GenerateUntilRequest) or not (request.sampling and request.sampling.temperature):
            return [request]
        return [replace(request, repeat=number) for number in range(self.settings.repeats)]

    def _prompts(
        self, writer: PromptWriter, document: LmEvalDocument, style: PromptStyle, bad: dict[int, str]
    ) -> list[Prompt]:
        """Prompts of a document, none if it is bad."""
        try:
            return list(self._written(writer, document, style))
        except Exception as error:  # also of a task's own code
            bad[document.index] = _reason(error)
            return []

    def _written(self, writer: PromptWriter, document: LmEvalDocument, style: PromptStyle) -> Iterator[Prompt]:
        settings, fields, record = self.settings, document.fields, document.record
        contexts = writer.contexts(document)
        self._check_answer(document)
        if settings.output_type == "generate_until":
            yield Prompt(document, 0, contexts[0], None)
        elif settings.output_type == "loglikelihood":
            yield Prompt(document, 0, contexts[0], str(fields.target(record)))
        else:
            choices, delimiter = fields.choices(record), style.delimiter(settings.target_delimiter, settings.gen_prefix)
            answers = [fields.target(record)] if fields.several_contexts else choices
            pairs = [(context, answer) for context in contexts for answer in answers]
            for option, (context, answer) in enumerate(pairs):
                yield Prompt(document, option, context, f"{delimiter}{answer}")
            if any(metric.name == "acc_mutual_info" for metric in settings.metrics):
                for option, choice in enumerate(choices, len(pairs)):
                    yield Prompt(document, option, "", f"{delimiter}{choice}", premise=True)

    def _check_answer(self, document: LmEvalDocument) -> None:
        """Check what is compared with the model's answer, before it is asked. Raises EvalError."""
        settings, fields, record = self.settings, document.fields, document.record
        functions = [one.function for chain in settings.filters for one in chain.filters]
        if "multi_choice_regex" in functions and not _are_texts(record.get("choices")):
            raise EvalError(
                f"the filter multi_choice_regex needs a column `choices` of texts; there are {', '.join(record)}"
            )
        if settings.process_results is not None:
            return
        if settings.output_type == "multiple_choice":
            gold = fields.text(record) if fields.several_contexts else fields.target(record)
            right_choice(gold, fields.choices(record), fields.several_right)
        elif settings.output_type == "generate_until":
            self._right_answer(document, "")

    def metrics(
        self, documents: Documents[LmEvalDocument], requests: Sequence[Request], results: Sequence[Response]
    ) -> Metrics:
        answers: dict[int, list[tuple[int, Response]]] = {one.index: [] for one in documents.evaluated}
        for request, result in zip(requests, results, strict=True):
            option = request.option if isinstance(request, LoglikelihoodRequest) else 0
            answers[request.document].append((option, result))
        responses = [
            [result for _, result in sorted(answers[one.index], key=lambda pair: pair[0])]
            for one in documents.evaluated
        ]
        try:
            return self._metrics(documents.evaluated, responses, len(requests))
        except EvalError as error:
            raise EvalError(f"task {self.name}: {error}") from None

    def _metrics(
        self, documents: Sequence[LmEvalDocument], responses: Sequence[list[Response]], requests: int
    ) -> Metrics:
        known = {one.name: one for one in self.settings.metrics}
        values: dict[str, list[Any]] = {}
        hits: list[dict[str, WeightedSum]] = [{} for _ in documents]
        details: list[dict[str, Any]] = []
        for document, some in zip(documents, responses, strict=True):
            with _failures_of(document):
                details.append(_details(document, some))
        for chain, filtered in self._filtered(documents, responses):
            for number, document in enumerate(documents):
                with _failures_of(document):
                    for name, value in self._values(document, filtered[number], known).items():
                        title = _title(name, chain)
                        values.setdefault(title, []).append(value)
                        settings = known.setdefault(name, MetricSettings(name, "mean", higher_is_better=True))
                        share = weighted_sum(settings.aggregation, value)
                        if share is not None:
                            hits[number][title] = share
            if self.settings.generation is not None:
                for detail, answer in zip(details, filtered, strict=True):
                    kept = answer[0] if isinstance(answer[0], str | int | float | None) else str(answer[0])
                    detail.setdefault("filtered", {})[chain] = kept
        for detail, hit in zip(details, hits, strict=True):
            detail["metrics"] = {title: value for title, (value, _) in hit.items()}
        of_title = {title: known[title.partition(",")[0]] for title in values}
        metrics = {title: aggregate(title, of_title[title].aggregation, items) for title, items in values.items()}
        headline = next((title for title in self.measured() if title in metrics), next(iter(metrics), None))
        if headline is None:
            raise EvalError("process_results gave no metric for any document")
        per_document = [
            DocumentMetrics(document.index, None, hit, detail, sum(one.truncated > 0 for one in some))
            for document, hit, detail, some in zip(documents, hits, details, responses, strict=True)
        ]
        truncated = sum(one.truncated for one in per_document)
        falling = [title for title, one in of_title.items() if not (one.higher_is_better or is_perplexity(title))]
        return Metrics(
            headline,
            metrics,
            len(documents),
            requests,
            truncated,
            per_document=per_document,
            lower_is_better=falling,
        )

    def _filtered(
        self, documents: Sequence[LmEvalDocument], responses: Sequence[list[Response]]
    ) -> Iterator[tuple[str, list[Any]]]:
        """(filter's name, what process_results gets for each document)."""
        if self.settings.generation is None:
            pairs = [[(one.log_likelihood, one.greedy) for one in some] for some in responses]  # type: ignore[union-attr]
            rolling = [[sum(likelihood for likelihood, _ in some)] for some in pairs]
            for chain in self.settings.filters:
                yield chain.name, rolling if self.rolling else pairs
            return
        stops, repeats = self.settings.generation.stops, self.settings.repeats
        texts = [[_until_stop(one.text, stops) for one in some] for some in responses]  # type: ignore[union-attr]
        texts = [some * (repeats // len(some)) for some in texts]
        for chain in self.settings.filters:
            yield chain.name, [[one] for one in chain.apply(texts, [document.record for document in documents])]

    def _values(
        self, document: LmEvalDocument, results: list[Any], known: dict[str, MetricSettings]
    ) -> Mapping[str, Any]:
        """Values of a document by metric. known: gets the settings of metrics that one function returns together."""
        settings, fields, record = self.settings, document.fields, document.record
        if settings.process_results is not None:
            return load_function(settings.process_results)(record, results)
        names = [one.name for one in settings.metrics]
        if settings.output_type == "multiple_choice":
            gold = fields.text(record) if fields.several_contexts else fields.target(record)
            return choice_values(results, fields.choices(record), gold, fields.several_right, names)
        if settings.output_type == "generate_until":
            gold = self._right_answer(document, results[0])
            found = text_values(results[0], gold, fields.several_right, settings.metrics)
            for name, (_, metric) in found.items():
                known.setdefault(name, metric)
            return {name: value for name, (value, _) in found.items()}
        return likelihood_values(results[0], str(fields.target(record)), names)

    def _right_answer(self, document: LmEvalDocument, answer: Any) -> Any:
        """The right answer, or a list of them, in the type of the given one."""
        settings, fields, record = self.settings, document.fields, document.record
        gold = fields.target(record)
        if settings.doc_to_choice is not None:
            if not isinstance(gold, int):
                raise EvalError(f"`doc_to_target` gives {gold!r}; with doc_to_choice, expected the number of a choice")
            choices = fields.choices(record)
            if not -len(choices) <= gold < len(choices):
                raise EvalError(f"`doc_to_target` gives {gold}, but there are {len(choices)} choices")
            return choices[gold]
        if fields.several_right:
            return list(gold) if isinstance(gold, list | tuple) else [gold]
        if isinstance(answer, list) or any(one.name == "bypass" for one in settings.metrics):
            return gold
        return type(answer)(gold)


@contextmanager
def _failures_of(document: LmEvalDocument) -> Iterator[None]:
    """Context in which any exception, also of a task's own code, becomes an EvalError with the document's place."""
    try:
        yield
    except Exception as error:
        raise EvalError(f"{document.where}: {_reason(error)}") from None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, str) for one in value)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _title(name: str, chain: str) -> str:
    return name if chain == "none" else f"{name},{chain}"


def _until_stop(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.split(stop)[0]
    return text


def _details(document: LmEvalDocument, responses: Sequence[Response]) -> dict[str, Any]:
    details: dict[str, Any] = {"document": document.index, "where": document.where, **describe(document.texts)}
    likelihoods = [one for one in responses if isinstance(one, Loglikelihood)]
    if likelihoods:
        details["log_likelihoods"] = [one.log_likelihood for one in likelihoods]
        details["tokens"] = [one.tokens for one in likelihoods]
        details["greedy"] = [one.greedy for one in likelihoods]
    elif isinstance(responses[0], GeneratedText):
        details["text"] = responses[0].text
        if len(responses) > 1:
            details["texts"] = [one.text for one in responses if isinstance(one, GeneratedText)]
    return details
